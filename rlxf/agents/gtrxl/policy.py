"""Actor-critic policy with a shared transformer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from rlxf.agents.common.arguments import reject_unknown_arguments
from rlxf.agents.common.numerics import OutputCheck, check_outputs, check_outputs_later
from rlxf.agents.common.precision import Precision, mixed_precision
from rlxf.agents.common.predict_state import MissingStateWarning
from rlxf.agents.gtrxl.action_heads import make_action_head
from rlxf.agents.gtrxl.core import check_exits
from rlxf.agents.gtrxl.network_step import CompiledStep
from rlxf.agents.gtrxl.recurrent_policy import PersistentPolicyState, RecurrentPolicy, RecurrentPolicyState
from rlxf.agents.gtrxl.sb3_arguments import SB3_POLICY_ARGUMENTS
from rlxf.agents.gtrxl.state_dependent_noise import check_sde
from rlxf.agents.gtrxl.value_head import PopArtHead
from rlxf.attention import KVCache, State, TokenIndex, TransformerSpec
from rlxf.attention.depth.base import ExitOutputs
from rlxf.attention.linear import orthogonal_linear
from rlxf.utils.matrix_products import float32_products


class GTrXLPolicy(RecurrentPolicy):
    """``observation -> features -> token -> transformer -> (action distribution, value)``.

    Features of unit variance give tokens of unit variance. The embedding of the previous action is initially
    small in comparison. Otherwise a policy that learned to repeat actions in one situation would also repeat
    them in situations that it never visited. Each head is a linear layer on the transformer's output,
    initialized near 0. The initial policy is therefore nearly uniform, and the initial advantages contain no
    noise of a random critic.

    Args:
        observation_space: vectors for Mlp, images for Cnn, Dict for MultiInput.
        action_space: Discrete, Box, MultiDiscrete or MultiBinary.
        lr_schedule: SB3's learning rate schedule; its value at progress 1 initializes the optimizer.
        core: specification of the transformer.
        previous_action: add the previous action to the token. Without it, the history in memory lacks the
            sampled actions.
        persist_memory_across_episodes: memory persists across episodes.
        reconstruct: add a head that predicts the flattened observation from the output.
        precision: precision of the transformer in updates, see `GTrXLPPO`.
        use_sde: explore with state-dependent noise, see `GTrXLPPO`.
        log_std_init: initial log standard deviation of Box actions.
        features_extractor_class: SB3's features extractor; None for the default of the policy.
        features_extractor_kwargs: arguments of the features extractor.
        normalize_images: divide images by 255.
        optimizer_class: a torch optimizer.
        optimizer_kwargs: arguments of the optimizer except the learning rate; None for eps=1e-5, fused=True
            with Adam.

    Raises:
        ValueError: if the features extractor does not support the observations, e.g. images are too small, or
            ``use_sde`` is True and the actions are not Box.
        TypeError: for unknown arguments. For those of SB3's policies the message names the alternative.
    """

    extractor_class: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor

    @reject_unknown_arguments(SB3_POLICY_ARGUMENTS)
    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        core: TransformerSpec,
        previous_action: bool = True,
        persist_memory_across_episodes: bool = False,
        reconstruct: bool = False,
        precision: Precision = "float32",
        use_sde: bool = False,
        log_std_init: float = 0.0,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
    ):
        if optimizer_kwargs is None:
            optimizer_kwargs = {"eps": 1e-5, "fused": True} if optimizer_class is torch.optim.Adam else {}
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class=features_extractor_class or self.extractor_class,
            features_extractor_kwargs=features_extractor_kwargs,
            normalize_images=normalize_images,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
        )
        check_exits(core, action_space)
        check_sde(use_sde, action_space)
        self.use_sde = use_sde
        self._missing_state_warning = MissingStateWarning()
        self.network_step: CompiledStep | None = None  # None: operation by operation, in `act_unchecked`
        self.precision = precision
        self.core, self.persist_memory_across_episodes = core, persist_memory_across_episodes
        self.features_extractor = self.make_features_extractor()
        features = self.features_extractor.features_dim
        self.token = _scaled(orthogonal_linear(features, core.width), max(1, core.width / features) ** 0.5)
        actions = spaces.utils.flatdim(action_space)
        self.action_token = (
            _scaled(orthogonal_linear(actions, core.width, bias=False), 0.1) if previous_action else None
        )
        self.transformer = core.build()
        self.build_heads(log_std_init)
        flat = spaces.utils.flatdim(observation_space)
        self.reconstruction_net = nn.Linear(core.width, flat) if reconstruct else None
        self.optimizer = optimizer_class(self.parameters(), lr=lr_schedule(1), **optimizer_kwargs)  # type: ignore

    @classmethod
    def supports(cls, observation_space: spaces.Space, normalize_images: bool = True) -> bool:
        """Return whether a policy of this class can read observations of a space: by default not Dict.

        Args:
            observation_space: the space.
            normalize_images: whether the policy divides images by 255, so that they must be uint8.
        """
        return not isinstance(observation_space, spaces.Dict)

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        """Return SB3's features extractor.

        Raises:
            ValueError: if it does not support the observation space, e.g. images are too small.
        """
        try:
            return super().make_features_extractor()
        except RuntimeError as error:
            raise ValueError(
                f"{self.features_extractor_class.__name__} cannot read {self.observation_space}: {error}. "
                f"{_image_advice(self.observation_space)}, or pass another features_extractor_class in "
                f"policy_kwargs"
            ) from error

    def build_heads(self, log_std_init: float) -> None:
        """Create the heads on the outputs (N, C) of the transformer; the constructor calls it.

        A subclass overrides it to replace a head:

        - ``action_net`` returns the parameters (N, P) of the action distribution.
        - ``log_std`` is the log standard deviation of Box actions, and None for discrete actions.
        - ``value_net`` returns the values (N, 1). It must be a `PopArtHead`, or derive from it.

        Args:
            log_std_init: initial log standard deviation of Box actions.
        """
        self.action_head = make_action_head(self.action_space, self.use_sde)
        self.action_net, log_std = self.action_head.build(self.core.width, log_std_init)
        self.register_parameter("log_std", log_std)
        self.value_net = PopArtHead(self.core.width)
        self.action_net.apply(lambda module: self.init_weights(module, gain=0.01))
        self.init_weights(self.value_net, gain=0.0)

    def reset_noise(self, n_envs: int = 1) -> None:
        """Draw the noise of `explore` in ``n_envs`` environments, as in SB3; nothing without ``use_sde``."""
        self.action_head.reset_noise(self.log_std, n_envs)

    def explore(self, distribution: Distribution) -> Tensor:
        """Sample the actions (E, ...) of a step of a rollout from a result of `action_distribution`.

        With ``use_sde``, they have the noise of `reset_noise`. Other samples, such as those of `predict`,
        have independent noise.
        """
        return self.action_head.explore(distribution)

    def mean_std(self) -> Tensor | None:
        """Return the mean standard deviation of Box actions, a scalar; None for discrete actions."""
        return self.action_head.mean_std(self.log_std)

    def initial_state(self, batch: int) -> RecurrentPolicyState:
        """Return the initial state for ``batch`` environments before their first episode."""
        none = torch.full((batch,), -1, dtype=torch.long, device=self.device)
        action = torch.zeros(batch, self.encoded_action_width, device=self.device)
        kind = PersistentPolicyState if self.persist_memory_across_episodes else RecurrentPolicyState
        return kind(self.build_cache(self.transformer.initial_state(batch)), none, none, action, self.core)

    def build_cache(self, state: State) -> KVCache:
        """Return the KV cache of a memory, projected with the current weights."""
        return self.transformer.cache(state, state.index.shape[1] + 1)

    @torch.no_grad()
    def act(self, obs: PyTorchObs, state: RecurrentPolicyState, index: TokenIndex) -> tuple[Tensor, Tensor]:
        """Run the transformer for one step of E environments; see `RecurrentPolicy.act`."""
        latent, hidden, check = self.act_unchecked(obs, state, index)
        check()
        return latent, hidden

    @torch.no_grad()
    def act_unchecked(
        self, obs: PyTorchObs, state: RecurrentPolicyState, index: TokenIndex
    ) -> tuple[Tensor, Tensor, OutputCheck]:
        """Run the transformer like `act`; also return the check of the outputs, for after the actions."""
        before = state.cache.recurrent
        with float32_products(self.product_size(len(index.position)), index.position.device):
            if self.network_step is None:
                tokens = self.tokens(obs, state.action)
                latent, hidden = self.transformer.step(tokens, index, state.cache)
            else:
                tokens, latent, hidden = self.network_step(self, obs, state.action, index, state.cache)
        latent, check = check_outputs_later(
            self, latent, index.episode[:, 0], tokens, before, lambda: state.cache.recurrent
        )
        return latent, hidden, check

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run steps operation by operation in this context, e.g. for numbers of environments that vary.

        A compiled step would be compiled again for each of them.
        """
        step, self.network_step = self.network_step, None
        try:
            yield
        finally:
            self.network_step = step

    @torch.no_grad()
    def act_early(self, obs: PyTorchObs, state: RecurrentPolicyState, index: TokenIndex) -> Tensor:
        """Run the transformer like `act`, but with early exits; return only the outputs (E, C)."""
        if not self.transformer.depth.has_early_exit:
            return self.act(obs, state, index)[0]
        tokens = self.tokens(obs, state.action)
        before = state.cache.recurrent
        with float32_products(self.product_size(len(index.position)), index.position.device):
            latent = self.transformer.early_step(tokens, index, state.cache, self._exit_margin)
        check_outputs(self, latent, index.episode[:, 0], tokens, before, lambda: state.cache.recurrent)
        return latent

    def _exit_margin(self, output: Tensor) -> Tensor:
        """Return the difference of the two largest action probabilities: outputs (B, 1, C) -> (B, 1)."""
        return self.action_head.probability_margins(self.heads(output[:, 0])[0])[:, None]

    def exit_outputs(self, obs: PyTorchObs, previous: Tensor, index: TokenIndex, state: State) -> ExitOutputs:
        """Run the transformer on a batch of segments, with gradient.

        Args:
            obs: B x T observations, segment by segment.
            previous: (B T, A), the encoded previous actions.
            index: (B, T), positions and episodes of the steps.
            state: memory before each segment.

        Returns:
            Outputs (N, B, T, C) for `heads` at all N exits; the last one is the output of all layers.

        Raises:
            NumericalError: if an output is not finite; the message names the cause.
        """
        tokens = self.tokens(obs, previous).unflatten(0, tuple(index.shape))
        with mixed_precision(self.precision, self.training):
            exits = self.transformer.exits(tokens, index, state)
        after = partial(self.transformer.next_state, tokens, index, state)
        outputs = exits.outputs[-1]
        before = state.recurrent
        check_outputs(self, outputs, index.episode, tokens, before, lambda: after().recurrent)
        return exits

    def tokens(self, obs: PyTorchObs, previous: Tensor) -> Tensor:
        """Return the tokens (N, C) of N observations and encoded previous actions (N, A)."""
        token: Tensor = self.token(self.extract_features(obs, self.features_extractor))
        return token if self.action_token is None else token + self.action_token(previous)

    @property
    def encoded_action_width(self) -> int:
        """Size A of an encoded action; 0 if actions are not part of the token."""
        return 0 if self.action_token is None else self.action_token.in_features

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Encode actions (N, ...) -> (N, A): discrete ones as one-hot vectors, Box actions flattened."""
        encoded = preprocess_obs(actions, self.action_space)
        assert isinstance(encoded, Tensor)
        return encoded.flatten(1)[:, : self.encoded_action_width]

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the parameters and buffers on which actions depend, by name: not those of other heads."""
        others = ("value_net.", "reconstruction_net.")
        return {name: x for name, x in self.state_dict().items() if not name.startswith(others)}

    def product_size(self, tokens: int) -> int:
        """Return the multiply-adds of a product of N tokens with a weight of the transformer."""
        return tokens * self.transformer.spec.width**2

    def heads(self, latent: Tensor) -> tuple[Distribution, Tensor]:
        """Return the action distribution and the values (N,) for outputs (N, C)."""
        values = self.value_net(latent).squeeze(-1)
        return self.action_distribution(latent), values

    def action_distribution(self, latent: Tensor) -> Distribution:
        """Return the action distribution for outputs (N, C), as a new object."""
        return self.action_head.distribution(self.action_net(latent), self.log_std, latent)

    def most_likely_actions(self, latent: Tensor) -> Tensor:
        """Return the mode (N, ...) of the action distribution for outputs (N, C).

        For categorical and Gaussian distributions, it is computed without the distribution, whose
        normalization takes longer than the head. If a subclass has another `action_distribution`, the mode is
        that of its result.
        """
        if type(self).action_distribution is not GTrXLPolicy.action_distribution:
            return self.action_distribution(latent).mode()
        return self.action_head.mode(latent, self.action_net, self.action_distribution)

    def reconstruction_error(self, latent: Tensor, obs: PyTorchObs) -> Tensor:
        """``|| W y - o ||^2 / dim(o)`` for each of N outputs y, with o the flattened observation: (N,).

        Source: Pleines et al. 2023, arXiv:2309.17207, section 3.3 (there a binary cross-entropy).
        """
        assert self.reconstruction_net is not None
        target = preprocess_obs(obs, self.observation_space, self.normalize_images)
        parts = target.values() if isinstance(target, dict) else [target]
        flat = torch.cat([part.flatten(1) for part in parts], dim=1)
        return (self.reconstruction_net(latent) - flat).square().mean(dim=1)

    def save(self, path: str) -> None:
        """Raise TypeError, since SB3 would pickle the policy; use `GTrXLPPO.save` instead."""
        raise TypeError(f"a policy alone would be saved as a pickle; save the agent: agent.save({path!r})")

    @classmethod
    def load(cls, path: str, device: torch.device | str = "auto") -> "GTrXLPolicy":
        """Raise TypeError, since SB3 would unpickle the file; use `GTrXLPPO.load` instead."""
        raise TypeError(f"a policy alone would be unpickled; load the agent: GTrXLPPO.load({path!r})")


def _image_advice(space: spaces.Space[Any]) -> str:
    """Return how to change observations that a features extractor cannot read."""
    shape = space.shape or ()
    if len(shape) == 3 and shape[2] < min(shape[:2]):
        return (
            f"Only uint8 images from 0 to 255 are transposed: return others with channels in the first axis, "
            f"{(shape[2], *shape[:2])}"
        )
    return "NatureCNN, the default for images, needs at least 36 x 36 pixels: resize or flatten the images"


def _scaled(linear: nn.Linear, gain: float) -> nn.Linear:
    """Multiply the weight of ``linear`` by ``gain`` in place."""
    with torch.no_grad():
        linear.weight *= gain
    return linear
