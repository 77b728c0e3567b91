"""Callback that writes the attention of a Decision Transformer to TensorBoard."""

import torch
from matplotlib.figure import Figure
from stable_baselines3.common.logger import Figure as LoggedFigure

from rlxf.agents.common.attention_figure import attention_figure, segment_weights
from rlxf.agents.decision_transformer.learner import DecisionTransformer
from rlxf.agents.decision_transformer.model import DecisionTransformerModel
from rlxf.agents.offline.context_window import TOKENS_PER_STEP, ContextWindow
from rlxf.evaluation.periodic import PeriodicCallback
from rlxf.utils.tensorboard import writes_tensorboard


class ContextAttentionCallback(PeriodicCallback):
    """Write attention maps to TensorBoard's images every ``every_steps`` updates, tag ``attention/maps``.

    The plot shows the attention weights of each layer and head over one window of the data, which is read
    with its memory as in training. It is in the middle of the longest episode, and the same in all plots. A
    step has three tokens: return-to-go, observation and action, or, if the model predicts the return,
    observation, return and action.

    Args:
        every_steps: updates between two plots; in `learn_online`, environment steps. Drawing a plot takes
            about half a second.

    Raises:
        ValueError: if ``every_steps`` is less than 1 or has a fraction.
        TypeError: if ``every_steps`` is not a number; before training starts, if the agent is not a
            `DecisionTransformer`.
    """

    model: DecisionTransformer

    def _init_callback(self) -> None:
        if not isinstance(self.model, DecisionTransformer):
            raise TypeError(
                f"{type(self).__name__} needs a DecisionTransformer agent, got {type(self.model).__name__}"
            )

    def expected_steps(self) -> float:
        """Return 0, as no environment is used."""
        return 0.0

    def on_interval(self) -> int:
        """Record the plot, if the logger writes TensorBoard events and a layer has attention."""
        if writes_tensorboard(self.logger) and self.model.core.has_attention:
            self.write_picture("attention/maps", LoggedFigure(self._figure(), close=False))
        return 0

    def _figure(self) -> Figure:
        policy = self.model.policy
        data = self.model.trajectories
        assert data is not None  # the agent is being trained
        longest = data.lengths.argmax()
        length = data.lengths[longest]
        first = max(0, min(length // 2, length - self.model.context_length))
        batch = policy.windows(data).starting_at([data.offsets[longest] + first])
        training = policy.training
        try:
            policy.eval()  # without dropout
            return window_figure(policy, policy.steps(batch.to(self.model.device)))
        finally:
            policy.train(training)


@torch.no_grad()
def window_figure(policy: DecisionTransformerModel, steps: ContextWindow) -> Figure:
    """Plot the attention weights of each layer and head over the tokens of one window.

    Args:
        policy: model of the agent.
        steps: the window with its burn-in steps, (1, W).
    """
    transformer = policy.transformer
    inputs = policy.transformer_inputs(steps)
    index, state = inputs["index"], inputs["state"]
    key = index if state is None else state.index.concatenate(index)
    segments = transformer, inputs["x"], index, state
    keys = slice(-key.shape[1], None)  # global tokens come first
    shown = {layer: weights[0, :, :, keys] for layer, weights in segment_weights(segments).items()}
    allowed = transformer.attention_mask(index, key).allowed[0, :, keys]
    within = torch.zeros_like(key.episode[0], dtype=torch.bool)  # all steps are of one episode
    return attention_figure(shown, allowed, within, f"token ({TOKENS_PER_STEP} per step)")
