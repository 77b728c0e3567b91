"""Decision Transformer whose context is the whole episode: the state of its core lasts from step to step."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from rlxf.agents.common.cores import check_state, check_state_core, check_token_by_token
from rlxf.agents.common.numerics import check_outputs, check_recurrent_state
from rlxf.agents.common.predict_state import check_state_layout, check_state_rows, check_state_type
from rlxf.agents.decision_transformer.config import DecisionTransformerConfig
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.context_window import TOKENS_PER_STEP, ContextWindow
from rlxf.agents.offline.dataset_info import DatasetInfo
from rlxf.agents.offline.observations import ConditionedObservation
from rlxf.attention import State, TransformerSpec
from rlxf.attention.cache import KVCache
from rlxf.attention.token_index import EMPTY, TokenIndex
from rlxf.data import EpisodeWindows, Trajectories, WindowBatch, Windows

AGENT = "DecisionTransformer with context='episode'"
WINDOW_ADVICE = "or context='window'"


@dataclass(frozen=True, eq=False)
class EpisodeContext:
    """State of E environments, whose size does not depend on the length of their episodes.

    `DecisionTransformer.predict` returns it as ``state`` and accepts it in the next call. Its contents are
    internal.

    Args:
        cache: KV cache of the core after the newest state token.
        steps: the previous step, if it is of the same episode, and the newest step, (E, 2).
        tokens: (E,) int64, number of tokens of the episode up to the newest state token.
        episode: (E,) int64, number of the episode.
        output: (E, C), output at the newest state token.
        core: spec of the transformer.
    """

    cache: KVCache
    steps: ContextWindow
    tokens: Tensor
    episode: Tensor
    output: Tensor
    core: TransformerSpec

    def rows(self, rows: Tensor) -> "EpisodeContext":
        """Return a copy of the chosen environments; ``rows`` is a bool (E,) or an int64 (N,) tensor."""
        return EpisodeContext(
            cache=self.cache.rows(rows),
            steps=self.steps.rows(rows),
            tokens=self.tokens[rows],
            episode=self.episode[rows],
            output=self.output[rows],
            core=self.core,
        )


class EpisodeModel(DecisionTransformerModel):
    """`DecisionTransformerModel` in which an action depends on all earlier steps of the episode.

    In training, windows of K steps begin at steps 0, K, 2 K ... of their episode (`EpisodeWindows`). The
    earlier steps of the episode are processed without gradient, so the state at the start of a window is that
    of acting, and positions count from the start of the episode. While acting, a step appends three tokens
    to the state: the previous action, the return-to-go and the observation. Its cost is constant. Only the
    observation exits early, and later steps attend to its state at the exit.

    Args:
        info: see `DecisionTransformerModel`.
        normalization: see `DecisionTransformerModel`.
        config: see `DecisionTransformerModel`.

    Raises:
        ValueError: if the core cannot act from a state of constant size with the same outputs as in training,
            e.g. because it has no memory.
    """

    def __init__(self, info: DatasetInfo, normalization: nn.Module, config: DecisionTransformerConfig):
        check_episode_core(config.core)
        super().__init__(info, normalization, config)

    def windows(self, trajectories: Trajectories) -> Windows:
        """Return the windows that divide the episodes."""
        return EpisodeWindows(trajectories, self.context_length)

    def window_start(self, batch: WindowBatch | ContextWindow) -> int:
        """Return the column of the last time step that is divisible by K; see `EpisodeWindows`."""
        starts = (batch.mask & (batch.time_steps % self.context_length == 0)).any(dim=0)
        return int(starts.nonzero()[-1])

    @torch.no_grad()
    def _burn_in(self, steps: ContextWindow) -> State | None:
        """Return the state after earlier steps, in parts: attention of a part stores all pairs of tokens."""
        index = steps.index
        state = None
        for first in range(0, steps.mask.shape[1], BURN_IN_STEPS):
            tokens = self.tokens(steps.between(first, first + BURN_IN_STEPS))
            here = index.at(slice(TOKENS_PER_STEP * first, TOKENS_PER_STEP * first + tokens.shape[1]))
            state = self.transformer.next_state(tokens, here, state)
        return state

    @torch.no_grad()
    def append_step(
        self, state: Any, encoded: ConditionedObservation, start: Tensor, deterministic: bool = True
    ) -> EpisodeContext:
        """Return the state after a step of E environments.

        Args:
            state: state after the previous step; None for none. It is not modified.
            encoded: the new step.
            start: (E,) bool, environments at the first step of an episode, whose state is cleared first.
            deterministic: see `DecisionTransformerModel.append_step`.

        Raises:
            TypeError: if the state is not an `EpisodeContext`.
            ValueError: if it is of another core, device or number of environments.
            NumericalError: if an output of the transformer is not finite; the message names the cause.
        """
        before, cache, tokens, episode = self._continue(state, encoded)
        steps = self._extend_window(before, encoded, start, 2)
        first = ~steps.mask[:, 0]
        index = next_index(torch.where(first, -1, tokens), episode + first.long())
        inputs = self.tokens(steps)[:, -1 - TOKENS_PER_STEP : -1]
        before_step = cache.recurrent
        output = self._step(inputs, index, cache)
        check_outputs(self, output, index.episode[:, -1], inputs, before_step, lambda: cache.recurrent)
        return EpisodeContext(
            cache=cache,
            steps=steps,
            tokens=index.position[:, -1] + 1,
            episode=index.episode[:, -1],
            output=output,
            core=self.transformer.spec,
        )

    def _continue(
        self, state: Any, encoded: ConditionedObservation
    ) -> tuple[ContextWindow | None, KVCache, Tensor, Tensor]:
        """Return the last two steps, a copy of the cache, and numbers of tokens and episodes, (E,) each.

        The steps are None before the first step.
        """
        if state is None:
            none = torch.full_like(encoded.time_steps, EMPTY)
            return None, self._initial_cache(len(none)), none, none
        self._check_state(state, len(encoded.time_steps))
        return state.steps, state.cache.copy(), state.tokens, state.episode

    def _step(self, tokens: Tensor, index: TokenIndex, cache: KVCache) -> Tensor:
        """Append tokens (E, 3, C) to the cache; return the output (E, C) of the last, with early exits."""
        *before, newest = (index.at(slice(n, n + 1)) for n in range(TOKENS_PER_STEP))
        for number, here in enumerate(before):
            self.transformer.step(tokens[:, number], here, cache)
        return self.transformer.early_step(tokens[:, -1], newest, cache, self.confidence_margin)

    def newest_output(self, steps: Any) -> Tensor:
        """Return the output at the newest state token of each environment, (E, C), to act by.

        Args:
            steps: result of `append_step`.
        """
        output: Tensor = steps.output
        return output

    @torch.no_grad()
    def encode_steps(self, windows: Windows, device: torch.device, progress_bar: bool = False) -> Tensor:
        """Return the output at the state token of each step of the data, (N, C)."""
        outputs = []
        batches = windows.iterate_once(ENCODED_WINDOWS)
        for batch in track(batches, "encode windows", disable=not progress_bar):
            steps = self.steps(batch.to(device))
            outputs.append(self.outputs(steps)[steps.mask[:, self.window_start(steps) :]])
        return torch.cat(outputs)

    def check_window(self, method: str) -> None:
        raise ValueError(
            f"{method} needs an agent that acts from a window of steps, got context='episode'; build it with "
            f"context='window'"
        )

    def _initial_cache(self, batch: int) -> KVCache:
        state = self.transformer.initial_state(batch)
        return self.transformer.cache(state, state.index.shape[1] + 1)

    @cached_property
    def _layout(self) -> dict[str, object]:
        """Layout of the caches of this model."""
        return self._initial_cache(1).layout

    def _check_state(self, state: Any, batch: int) -> None:
        """Raise an error unless a state is one of this model, on its device, for ``batch`` environments."""
        advice = "pass state=None to start new episodes"
        device = next(self.parameters()).device
        check_state_type(state, EpisodeContext, advice)
        check_state_rows(state.tokens, batch, device, advice)
        check_state_core(state.core, self.transformer.spec, advice)
        check_state_layout(state.cache.layout, self._layout, advice)
        check_recurrent_state(self.transformer, state.cache.recurrent)


BURN_IN_STEPS = 128
"""Number of steps before a window that are processed at once."""
ENCODED_WINDOWS = 64
"""Number of windows in one forward pass of `EpisodeModel.encode_steps`, each with all earlier steps."""


def next_index(tokens: Tensor, episode: Tensor) -> TokenIndex:
    """Return the index (E, 3) of the previous action, the return-to-go and the state of a step.

    Args:
        tokens: (E,) int64, number of tokens of the episode so far; -1 at its first step, which has no
            previous action: this slot is empty.
        episode: (E,) int64, number of the episode.
    """
    position = tokens[:, None] + torch.arange(TOKENS_PER_STEP, device=tokens.device)
    return TokenIndex(position.clamp(min=0), torch.where(position < 0, EMPTY, episode[:, None]))


def check_episode_core(core: TransformerSpec) -> None:
    """Raise ValueError unless the core can act on whole episodes token by token as it learns.

    Its state must have a constant size, its outputs must equal those in training, and its positions must have
    neither a limit nor a cost that grows with the episode: an episode may be longer than those of the data.
    Positions that count from the start of a segment, as those of `RMT`, may have a limit.
    """
    try:
        check_state(core, AGENT)
        check_token_by_token(core, AGENT)
    except ValueError as error:
        raise ValueError(f"{error}, {WINDOW_ADVICE}") from error
    if core.position is None or core.counts_positions_by_segment:
        return
    try:
        core.position.check_unlimited()
    except ValueError as error:
        raise ValueError(
            f"context='episode' counts positions from the start of the episode, but {error}; use a relative "
            f"position, e.g. position=XLRelative(), {WINDOW_ADVICE}"
        ) from error
