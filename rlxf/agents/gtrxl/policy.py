"""Actor and critic on one transformer."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    DiagGaussianDistribution,
    Distribution,
    make_proba_distribution,
)
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import is_image_space, preprocess_obs
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from rlxf.agents.arguments import explain_unknown
from rlxf.agents.gtrxl.acting import Acting, ActingAcrossEpisodes
from rlxf.agents.gtrxl.distributions import choices
from rlxf.agents.gtrxl.exits import check_exits, lead_of
from rlxf.agents.gtrxl.sb3_arguments import SB3_POLICY_ARGUMENTS
from rlxf.agents.gtrxl.value_head import PopArtHead
from rlxf.agents.remembering import Remembering, RememberingChoices
from rlxf.agents.stateless import StatelessCalls
from rlxf.attention import Cache, Index, State, TransformerSpec
from rlxf.attention.depth.exits import Exits
from rlxf.attention.linear import orthogonal_linear
from rlxf.envs.trajectories.flatten import first_choice


class GTrXLPolicy(BasePolicy):
    """``observation -> features -> token -> transformer -> (action distribution, value)``.

    Features of unit variance make tokens of unit variance. The action before starts small beside
    them: else a policy that learned to repeat itself in one place does so where it never was.
    Both heads are one linear layer on the transformer's output and start near 0: the first policy
    is near uniform, and the first advantages are not the noise of a random critic.

    Args:
        observation_space: vectors for Mlp, images for Cnn, Dict for MultiInput.
        action_space: Discrete, Box, MultiDiscrete or MultiBinary.
        lr_schedule: SB3's learning rate schedule; its value at 1 starts the optimiser.
        core: the transformer.
        previous_action: the action before is part of the token. What has happened so far is
            observations and actions; without the latter, a sampled action is forgotten at once.
        across_episodes: what is remembered outlasts the end of an episode.
        reconstruct: add a head that predicts the flattened observation from the output.
        log_std_init: start of the log standard deviation of Box actions.
        features_extractor_class: SB3's features extractor; None for the policy's own.
        features_extractor_kwargs: its arguments.
        normalize_images: divide images by 255.
        optimizer_class: torch's optimiser.
        optimizer_kwargs: its arguments but the learning rate; None for Adam's eps=1e-5, fused.

    Raises:
        ValueError: if the features extractor cannot be made for the observations: images are too small.
        TypeError: for other arguments, also those of SB3's policies; the message names the alternative.
    """

    extractor_class: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor
    remembering: Remembering | None = None
    """What `predict` chooses by if logged actions are remembered (`GTrXLPPO.remember`); None for `heads`."""

    @explain_unknown(SB3_POLICY_ARGUMENTS)
    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        core: TransformerSpec,
        previous_action: bool = True,
        across_episodes: bool = False,
        reconstruct: bool = False,
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
        self._stateless = StatelessCalls(stacklevel=7)
        self.core, self.across_episodes = core, across_episodes
        self.features_extractor = self.make_features_extractor()
        features = self.features_extractor.features_dim
        self.token = _scaled(orthogonal_linear(features, core.width), max(1, core.width / features) ** 0.5)
        actions = spaces.utils.flatdim(action_space)
        self.action_token = (
            _scaled(orthogonal_linear(actions, core.width, bias=False), 0.1) if previous_action else None
        )
        self.transformer = core.build()
        self._build_heads(log_std_init)
        flat = spaces.utils.flatdim(observation_space)
        self.reconstruction_net = nn.Linear(core.width, flat) if reconstruct else None
        self.optimizer = optimizer_class(self.parameters(), lr=lr_schedule(1), **optimizer_kwargs)  # type: ignore

    def make_features_extractor(self) -> BaseFeaturesExtractor:
        """SB3's; convolutions that do not fit into an image are told as what they are."""
        try:
            return super().make_features_extractor()
        except RuntimeError as error:
            raise ValueError(
                f"{self.features_extractor_class.__name__} cannot read {self.observation_space}: {error}. "
                "NatureCNN, which reads images unless you say otherwise, needs 36 x 36 pixels: enlarge them, "
                "flatten them, or give a features_extractor_class of your own in policy_kwargs"
            ) from error

    def _build_heads(self, log_std_init: float) -> None:
        self.action_dist = make_proba_distribution(self.action_space)
        if isinstance(self.action_dist, DiagGaussianDistribution):
            net, self.log_std = self.action_dist.proba_distribution_net(self.core.width, log_std_init)
            self.action_net: nn.Module = net
        else:
            self.action_net = self.action_dist.proba_distribution_net(self.core.width)  # type: ignore
        self.value_net = PopArtHead(self.core.width)
        self.action_net.apply(lambda module: self.init_weights(module, gain=0.01))
        self.init_weights(self.value_net, gain=0.01)

    def begin(self, batch: int) -> Acting:
        """Acting state of ``batch`` environments that have not begun an episode."""
        none = torch.full((batch,), -1, dtype=torch.long, device=self.device)
        action = torch.zeros(batch, self.encoded_action_width, device=self.device)
        kind = ActingAcrossEpisodes if self.across_episodes else Acting
        return kind(self.remember(self.transformer.initial_state(batch)), none, none, action)

    def remember(self, state: State) -> Cache:
        """Keys and values of what is remembered, projected with the present weights."""
        return self.transformer.cache(state, state.index.shape[1] + 1)

    @torch.no_grad()
    def act(self, obs: PyTorchObs, acting: Acting, index: Index) -> tuple[Tensor, Tensor]:
        """One step of E environments; the cache of ``acting`` is changed in place.

        Args:
            obs: a batch of E observations.
            acting: what is remembered of each, advanced to this step.
            index: (E, 1), where the step stands.

        Returns:
            The outputs (E, C) for `heads`, and what there is to remember of the step, (L, E, C).
        """
        return self.transformer.step(self.tokens(obs, acting.action), index, acting.cache)

    @torch.no_grad()
    def act_early(self, obs: PyTorchObs, acting: Acting, index: Index) -> Tensor:
        """`act` with as few passes as the depth lets a token take: the outputs (E, C) alone."""
        tokens = self.tokens(obs, acting.action)
        return self.transformer.early_step(tokens, index, acting.cache, partial(lead_of, self))

    def exits(self, obs: PyTorchObs, previous: Tensor, index: Index, state: State) -> Exits:
        """`read`, behind each pass from which a token may leave; outputs are (N, B, T, C)."""
        tokens = self.tokens(obs, previous).unflatten(0, tuple(index.shape))
        return self.transformer.exits(tokens, index, state)

    def read(self, obs: PyTorchObs, previous: Tensor, index: Index, state: State) -> Tensor:
        """A batch of segments, with gradient.

        Args:
            obs: B x T observations, a segment's one after the other.
            previous: (B T, A), the encoded actions before them.
            index: (B, T), where they stand.
            state: what was remembered before each segment.

        Returns:
            (B T, C), for `heads`.
        """
        tokens = self.tokens(obs, previous).unflatten(0, tuple(index.shape))
        return self.transformer.outputs(tokens, index, state).flatten(0, 1)

    def tokens(self, obs: PyTorchObs, previous: Tensor) -> Tensor:
        """N observations and the encoded actions before them, (N, A) -> (N, C)."""
        token: Tensor = self.token(self.extract_features(obs, self.features_extractor))
        return token if self.action_token is None else token + self.action_token(previous)

    @property
    def encoded_action_width(self) -> int:
        """Numbers A of an encoded action; 0 if actions are not part of the token."""
        return 0 if self.action_token is None else self.action_token.in_features

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Actions (N, ...) -> (N, A): one-hot where they are choices, flat where they are numbers."""
        encoded = preprocess_obs(actions, self.action_space)
        assert isinstance(encoded, Tensor)
        return encoded.flatten(1)[:, : self.encoded_action_width]

    def heads(self, latent: Tensor) -> tuple[Distribution, Tensor]:
        """Outputs (N, C) -> distribution over actions, values (N,)."""
        values = self.value_net(latent).squeeze(-1)
        parameters: tuple[Tensor, ...] = (self.action_net(latent),)
        if isinstance(self.action_dist, DiagGaussianDistribution):
            parameters += (self.log_std,)
        return self.action_dist.proba_distribution(*parameters), values

    def reconstruction_error(self, latent: Tensor, obs: PyTorchObs) -> Tensor:
        """``|| W y - o ||^2 / dim(o)`` for each of N rows: o is the flattened observation.

        Source: Pleines et al. 2023, arXiv:2309.17207, section 3.3 (there a binary cross-entropy).
        """
        assert self.reconstruction_net is not None
        wanted = preprocess_obs(obs, self.observation_space, self.normalize_images)
        parts = wanted.values() if isinstance(wanted, dict) else [wanted]
        flat = torch.cat([part.flatten(1) for part in parts], dim=1)
        return (self.reconstruction_net(latent) - flat).square().mean(dim=1)

    def predict(  # type: ignore[override]
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Acting | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, Acting]:
        """Choose actions, as in SB3; memory goes in and comes out as ``state``.

        Args:
            observation: one observation or a batch of them.
            state: what the last call gave; None to begin.
            episode_start: (E,) bool, which observations are the first of an episode. Memory of an
                episode never reaches the next one, unless the agent remembers across episodes: then
                this changes nothing. None: none of them, unless there is no state.
            deterministic: the most likely action instead of a sample.

        Returns:
            The actions, and the state for the next call. The one given stays as it was.

        Raises:
            ValueError: if the observation does not fit the space, or state or starts its batch size.

        Warns:
            UserWarning: once, if it gets neither state nor episode_start ten times in a row, or no state
                although episode_start marks an observation as not the first of its episode.
        """
        latent, acting, batched = self._consider(observation, state, episode_start)
        with torch.no_grad():
            actions = self._chosen(latent, deterministic)
            acting.action = self.encode_actions(actions)
        chosen = self.to_environment(actions)
        return (chosen if batched else chosen.squeeze(axis=0)), acting

    @torch.no_grad()
    def choices(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Acting | None = None,
        episode_start: np.ndarray | None = None,
    ) -> tuple[Tensor, Acting]:
        """Logits (E, A) that `predict` would choose from, and the state; arguments as there.

        Tell the state what was taken: `took`.

        Raises:
            TypeError: if actions are not Discrete.
        """
        if not isinstance(self.action_space, spaces.Discrete):
            raise TypeError(f"choices needs Discrete actions, got {self.action_space}")
        latent, acting, _ = self._consider(observation, state, episode_start)
        if self.remembering is None:
            return choices(self.heads(latent)[0])[0], acting
        assert isinstance(self.remembering, RememberingChoices)
        return self.remembering.logits(latent)[0], acting

    @torch.no_grad()
    def forward(
        self,
        obs: PyTorchObs,
        state: Acting | None = None,
        episode_starts: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Acting]:
        """Act and evaluate one step, as the policy of SB3's ``RecurrentPPO``: no gradient flows.

        Unlike `predict`, it takes tensors, does not clip Box actions, and uses all layers. It does not read
        trajectories that the agent remembers.

        Args:
            obs: a batch of E observations, as ``obs_to_tensor`` gives them.
            state: that of the previous call; None to start E episodes. It is not changed.
            episode_starts: (E,), nonzero where an observation is the first of an episode; None for none of
                them, if there is a state.
            deterministic: the most likely action instead of a sample.

        Returns:
            Actions (E, ...), values (E,), log probabilities of the actions (E,), and the next state.

        Raises:
            ValueError: if the state or episode_starts are of another number of environments.
        """
        distribution, values, state = self._evaluated(obs, state, episode_starts)
        actions = distribution.get_actions(deterministic=deterministic)
        state.action = self.encode_actions(actions)
        return actions.reshape(-1, *self.action_space.shape), values, distribution.log_prob(actions), state  # type: ignore[misc]

    @torch.no_grad()
    def get_distribution(
        self, obs: PyTorchObs, state: Acting | None = None, episode_starts: Tensor | None = None
    ) -> tuple[Distribution, Acting]:
        """Distribution over the actions of one step, and the next state; arguments as in `forward`.

        To continue from the state, pass it to `took` with the actions that were taken.
        """
        distribution, _, state = self._evaluated(obs, state, episode_starts)
        return distribution, state

    @torch.no_grad()
    def predict_values(
        self, obs: PyTorchObs, state: Acting | None = None, episode_starts: Tensor | None = None
    ) -> Tensor:
        """Values (E,) of one step; arguments as in `forward`."""
        return self._evaluated(obs, state, episode_starts)[1]

    def _evaluated(
        self, obs: PyTorchObs, state: Acting | None, episode_starts: Tensor | None
    ) -> tuple[Distribution, Tensor, Acting]:
        """Distribution, values (E,) and the state after a step with all layers."""
        acting, start = self._continue(state, episode_starts, _batch_size(obs))
        latent, _ = self.act(obs, acting, acting.advance(start))
        distribution, values = self.heads(latent)
        return distribution, values, acting

    def took(self, state: Acting, actions: Tensor) -> Acting:
        """The state after a step in which actions (E,) were taken."""
        return replace(state, action=self.encode_actions(actions))

    @torch.no_grad()
    def _consider(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Acting | None,
        episode_start: np.ndarray | None,
    ) -> tuple[Tensor, Acting, bool]:
        """Outputs (E, C) to choose by, the state, and whether there was an axis for environments."""
        if self.training:  # to look at each module takes time in every step
            self.set_training_mode(False)
        obs, batched = self.obs_to_tensor(observation)
        self._stateless.note(state, None if episode_start is None else bool(np.all(episode_start)))
        acting, start = self._continue(state, episode_start, _batch_size(obs))
        latent = self.act_early(obs, acting, acting.advance(start))
        return latent, acting, batched

    def _chosen(self, latent: Tensor, deterministic: bool) -> Tensor:
        """Actions (E, ...) for outputs (E, C)."""
        if self.remembering is not None:
            return self.remembering.choose(latent, deterministic)
        return self.heads(latent)[0].get_actions(deterministic=deterministic)

    def _continue(
        self, state: Acting | None, episode_start: np.ndarray | Tensor | None, batch: int
    ) -> tuple[Acting, Tensor]:
        """A copy of the state, and which environments begin an episode."""
        if state is None:
            return self.begin(batch), torch.ones(batch, dtype=torch.bool, device=self.device)
        if state.position.shape[0] != batch:
            raise ValueError(
                f"the state is of {state.position.shape[0]} environments, the observation of {batch}; "
                f"pass state=None to begin anew"
            )
        if episode_start is None:
            return state.copy(), torch.zeros(batch, dtype=torch.bool, device=self.device)
        start = torch.atleast_1d(torch.as_tensor(episode_start, dtype=torch.bool, device=self.device))
        if start.shape != (batch,):
            raise ValueError(f"episode_start is of shape {tuple(start.shape)}, the observation of {batch}")
        return state.copy(), start

    def to_environment(self, actions: Tensor) -> np.ndarray:
        """Actions (E, ...) as the environment takes them: shaped, in bounds, counted as its space counts."""
        array = actions.cpu().numpy().reshape(-1, *self.action_space.shape)  # type: ignore[misc]
        if isinstance(self.action_space, spaces.Box):
            return np.clip(array, self.action_space.low, self.action_space.high)
        return array + first_choice(self.action_space)

    def save(self, path: str) -> None:
        """Refused: SB3 would pickle it. `GTrXLPPO.save` writes a file that is safe to open."""
        raise TypeError(f"a policy by itself would be pickled; save the agent: agent.save({path!r})")

    @classmethod
    def load(cls, path: str, device: torch.device | str = "auto") -> "GTrXLPolicy":
        """Refused: SB3 would unpickle it. `GTrXLPPO.load` reads what an agent saved."""
        raise TypeError(f"a policy by itself would be unpickled; load the agent: GTrXLPPO.load({path!r})")

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        """Actions of first steps: without any memory."""
        acting = self.begin(_batch_size(observation))
        start = torch.ones_like(acting.episode, dtype=torch.bool)
        latent, _ = self.act(observation, acting, acting.advance(start))
        return self._chosen(latent, deterministic)


def _scaled(linear: nn.Linear, gain: float) -> nn.Linear:
    """``linear`` with its weight times ``gain``."""
    with torch.no_grad():
        linear.weight *= gain
    return linear


def _batch_size(obs: PyTorchObs) -> int:
    return len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)


class MlpGTrXLPolicy(GTrXLPolicy):
    """For vectors and numbers: the observation flattened, numbers one-hot."""


class CnnGTrXLPolicy(GTrXLPolicy):
    """For images: SB3's `NatureCNN`."""

    extractor_class = NatureCNN


class MultiInputGTrXLPolicy(GTrXLPolicy):
    """For Dict observations: SB3's `CombinedExtractor`, a NatureCNN for each image."""

    extractor_class = CombinedExtractor


POLICIES: dict[str, type[BasePolicy]] = {
    policy.__name__: policy for policy in (MlpGTrXLPolicy, CnnGTrXLPolicy, MultiInputGTrXLPolicy)
}
SB3_POLICIES: dict[str, type[BasePolicy]] = {
    name.replace("GTrXL", kind): policy for name, policy in POLICIES.items() for kind in ("", "Lstm")
}
"""Names that ``PPO`` and ``RecurrentPPO`` have for the same observations: "MlpPolicy", "MlpLstmPolicy" ..."""


def policy_for(observation_space: spaces.Space) -> str:
    """Name of the policy that suits the space."""
    if isinstance(observation_space, spaces.Dict):
        return MultiInputGTrXLPolicy.__name__
    image = is_image_space(observation_space)
    return CnnGTrXLPolicy.__name__ if image else MlpGTrXLPolicy.__name__
