"""Attention and gates of an agent with a transformer, step by step over an episode."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlxf.agents.common.attention_figure import Segments, segment_weights
from rlxf.agents.common.parameter_groups import group_of
from rlxf.agents.decision_transformer import DecisionTransformer
from rlxf.agents.decision_transformer.elastic_history import ElasticContext
from rlxf.agents.decision_transformer.episode_context import EpisodeModel
from rlxf.agents.decision_transformer.model import DECISION_TOKENS, NEWEST_DECISION_TOKEN
from rlxf.agents.gtrxl import GTrXLPPO
from rlxf.agents.offline.context_window import ContextWindow
from rlxf.attention import State, TokenIndex, Transformer
from rlxf.attention.inspection import gate_activations
from rlxf.attention.token_index import EMPTY

STEP_TOKENS = ("step",)
TARGET_TOKENS = ("return", "state", "action")
PREDICTED_TOKENS = ("state", "return", "action")
"""Names of the tokens of a step: of a GTrXL, of a Decision Transformer with given or predicted returns."""


@dataclass(frozen=True, eq=False)
class EpisodeAttention:
    """Attention weights and gates at the T steps of an episode.

    All layers are used, also where the agent exits early.

    Args:
        layers: numbers of the L layers with attention, from 1.
        tokens: names of the K tokens of a step.
        weights: one array (L, H, t + 1, K) for each step t: the attention of the token whose output chooses
            the action, over the tokens of the steps from 0 to t. The sum is below 1 where a part of the
            attention is on other tokens, see `attention_weights`.
        gates: name of each gate, such as ``layer_1/attention_gate`` -> mean of its update gate over the
            features at each step, (T,); empty if the core has no update gates.
        returns_to_go: return-to-go at each step, (T,); None if the agent is not conditioned on a return.
    """

    layers: tuple[int, ...]
    tokens: tuple[str, ...]
    weights: tuple[NDArray[np.float32], ...]
    gates: dict[str, NDArray[np.float32]]
    returns_to_go: NDArray[np.float32] | None = None


@dataclass(frozen=True, eq=False)
class InspectedPass:
    """Pass of a transformer over one row of tokens, in which the outputs of some tokens choose actions.

    Args:
        transformer: the transformer.
        x: tokens, (1, N, C).
        index: their positions and episodes, (1, N). A step has K tokens with consecutive positions.
        state: memory of the tokens before them; None for none.
        queries: columns of the tokens that choose actions.
        first_step: number of the step whose first token has position 0.
    """

    transformer: Transformer
    x: Tensor
    index: TokenIndex
    state: State | None
    queries: range
    first_step: int

    def weights(self, tokens: int) -> dict[int, list[Tensor]]:
        """Return the weights of each query, (H, t + 1, K), by the number of the layer.

        Args:
            tokens: number of tokens K of a step.
        """
        return {
            layer: [self._by_step(weights[0, :, query], query, tokens) for query in self.queries]
            for layer, weights in segment_weights(self._segments).items()
        }

    @property
    def _segments(self) -> Segments:
        return self.transformer, self.x, self.index, self.state

    def _by_step(self, weights: Tensor, query: int, tokens: int) -> Tensor:
        """Sort the weights (H, keys) of a query by step and token, (H, t + 1, K)."""
        key = self.index if self.state is None else self.state.index.concatenate(self.index)
        weights = weights[:, weights.shape[1] - key.shape[1] :]  # global tokens come first
        used = (key.episode[0] == self.index.episode[0, query]) & (key.episode[0] != EMPTY)
        steps = self._step(query, tokens) + 1
        place = self.first_step * tokens + key.position[0, used]
        past = place < steps * tokens
        row = weights.new_zeros(len(weights), steps * tokens)
        return row.index_add(1, place[past], weights[:, used][:, past]).unflatten(1, (steps, tokens))

    def _step(self, query: int, tokens: int) -> int:
        return self.first_step + int(self.index.position[0, query]) // tokens

    def gates(self) -> dict[str, Tensor]:
        """Return the mean of each update gate over the features at the queries, (Q,)."""
        activations = gate_activations(*self._segments)
        columns = list(self.queries)
        return {group_of(name): z[0, columns].mean(dim=-1) for name, z in activations.items()}


class EpisodeInspector(ABC):
    """Agent that acts like a given one and keeps what is needed to inspect one episode of one environment.

    Args:
        agent: the agent.

    Raises:
        ValueError: if no layer of its transformer has attention, or its weights cannot be read.
    """

    tokens: tuple[str, ...]

    def __init__(self, agent: Any):
        check_readable(agent.policy.transformer)
        self._agent = agent
        self._policy = agent.policy

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[NDArray[Any], Any]:
        """Choose the action as the agent does; see its ``predict``."""
        actions, state = self._agent.predict(observation, state, episode_start, deterministic)
        self._record(observation, state)
        return actions, state

    @property
    def rows(self) -> int:
        """Number of weights of a step over one earlier step: layers times heads times tokens of a step."""
        transformer: Transformer = self._policy.transformer
        return len(transformer.attention_passes) * transformer.spec.heads * len(self.tokens)

    @abstractmethod
    def _record(self, observation: Any, state: Any) -> None:
        """Keep what `passes` needs of a step, from its observation and the state after it."""

    @abstractmethod
    def passes(self) -> Iterator[InspectedPass]:
        """Return passes whose queries are the steps so far, in order."""

    def returns_to_go(self) -> NDArray[np.float32] | None:
        """Return the return-to-go of each step; None, the default, without one."""
        return None

    @torch.no_grad()
    def attention(self) -> EpisodeAttention:
        """Compute attention and gates of the steps so far."""
        weights: dict[int, list[Tensor]] = defaultdict(list)
        gates: dict[str, list[Tensor]] = defaultdict(list)
        for each in self.passes():
            _extend(weights, each.weights(len(self.tokens)))
            _extend(gates, each.gates())
        rows = tuple(torch.stack(layers).cpu().numpy() for layers in zip(*weights.values(), strict=True))
        means = {name: torch.stack(values).cpu().numpy() for name, values in gates.items()}
        return EpisodeAttention(tuple(weights), self.tokens, rows, means, self.returns_to_go())


def _extend(lists: dict[Any, list[Tensor]], more: dict[Any, Any]) -> None:
    for name, values in more.items():
        lists[name].extend(values)


class GTrXLInspector(EpisodeInspector):
    """`EpisodeInspector` of a `GTrXLPPO`: all steps are the tokens of one pass."""

    tokens = STEP_TOKENS

    def __init__(self, agent: GTrXLPPO):
        super().__init__(agent)
        self._tokens: list[Tensor] = []
        self._action: Tensor | None = None

    @torch.no_grad()
    def _record(self, observation: Any, state: Any) -> None:
        before = torch.zeros_like(state.action) if self._action is None else self._action
        self._tokens.append(self._policy.tokens(self._policy.obs_to_tensor(observation)[0], before))
        self._action = state.action

    def passes(self) -> Iterator[InspectedPass]:
        x = torch.stack(self._tokens, dim=1)
        position = torch.arange(x.shape[1], device=x.device)[None]
        index = TokenIndex(position, torch.zeros_like(position))
        yield InspectedPass(self._policy.transformer, x, index, None, range(x.shape[1]), 0)


class DecisionTransformerInspector(EpisodeInspector):
    """`EpisodeInspector` of a `DecisionTransformer`: each step has a pass, over the context of its action."""

    def __init__(self, agent: DecisionTransformer):
        super().__init__(agent)
        self.tokens = TARGET_TOKENS if agent.conditioning.needs_target else PREDICTED_TOKENS
        self._states: list[Any] = []

    def _record(self, observation: Any, state: Any) -> None:
        self._states.append(state)

    def passes(self) -> Iterator[InspectedPass]:
        for step, state in enumerate(self._states):
            inputs = self._policy.decision_inputs(state)
            query = range(inputs["x"].shape[1])[NEWEST_DECISION_TOKEN]
            first = step - int(inputs["index"].position[0, query[0]]) // len(self.tokens)
            yield InspectedPass(self._policy.transformer, **inputs, queries=query, first_step=first)

    def returns_to_go(self) -> NDArray[np.float32]:
        returns = [float(_steps_of(state).return_to_go[0, -1]) for state in self._states]
        return np.array(returns, np.float32)


class EpisodeContextInspector(DecisionTransformerInspector):
    """`EpisodeInspector` of a `DecisionTransformer` with ``context="episode"``: one pass over all steps."""

    def passes(self) -> Iterator[InspectedPass]:
        steps = self._episode()
        x = self._policy.tokens(steps)
        index = steps.index
        queries = range(x.shape[1])[DECISION_TOKENS]
        yield InspectedPass(self._policy.transformer, x, index, None, queries, 0)

    def _episode(self) -> ContextWindow:
        """Return all steps. A state holds the previous step with its action, and the newest without one."""
        states = [state.steps for state in self._states]
        parts = [*(state.between(0, 1) for state in states[1:]), states[-1].between(1, 2)]
        columns = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in vars(parts[0])}
        return replace(parts[0], **columns)


def _steps_of(state: Any) -> ContextWindow:
    """Return the steps in a state of a `DecisionTransformer`."""
    window: ContextWindow = state
    if isinstance(state, ElasticContext):
        window = state.window
    elif not isinstance(state, ContextWindow):
        window = state.steps
    return window


def episode_inspector(agent: Any) -> EpisodeInspector:
    """Return the inspector of an agent, for one environment.

    Raises:
        TypeError: if the agent has no transformer that acts.
        ValueError: if the attention of its transformer cannot be read.
    """
    if isinstance(agent, GTrXLPPO):
        return GTrXLInspector(agent)
    if not isinstance(agent, DecisionTransformer):
        raise TypeError(
            f"attention is read from a GTrXLPPO or a DecisionTransformer, got {type(agent).__name__}"
        )
    if isinstance(agent.policy, EpisodeModel):
        return EpisodeContextInspector(agent)
    return DecisionTransformerInspector(agent)


@torch.no_grad()
def check_readable(transformer: Transformer) -> None:
    """Raise ValueError unless the attention weights of a transformer can be read.

    Techniques from outside of the package may lack what `attention_weights` needs, so a short pass is tried.
    """
    spec = transformer.spec
    device = next(transformer.parameters()).device
    if not spec.has_attention:
        raise ValueError(
            f"no layer of this agent has attention, only recurrence={spec.recurrence}: train one with "
            f"attention_layers"
        )
    x = torch.zeros(1, 2, spec.width, device=device)
    position = torch.arange(2, device=device)[None]
    was_training = transformer.training
    try:
        each: Iterable[Tensor] = transformer.eval().weights(
            x, TokenIndex(position, torch.zeros_like(position)), None, None
        )
        readable = all(weights.shape[:2] == (1, spec.heads) for weights in each)
    except (NotImplementedError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the attention of {spec.kernel} cannot be read: {error!r}") from error
    finally:
        transformer.train(was_training)
    if not readable:
        raise ValueError(f"the attention of {spec.kernel} cannot be read: it has no weights of each head")
