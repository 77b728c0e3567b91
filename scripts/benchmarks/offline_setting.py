"""Sizes and learning rates of Decision Transformers for benchmarks."""

from dataclasses import dataclass, replace
from typing import Any

from rlxf.agents.decision_transformer import decision_transformer
from rlxf.training import linear


@dataclass(frozen=True)
class Setting:
    """Training settings of both programs.

    The optimizer is AdamW with weight decay 1e-4. Gradients are clipped at 0.25, dropout is 0.1, and the
    learning rate has a linear warm-up over the first tenth of the updates. Source: Chen et al. 2021,
    arXiv:2106.01345, appendix A, where the warm-up has 10,000 of 100,000 updates.

    Args:
        width: features of a token C.
        layers: number of layers L.
        heads: attention heads.
        context_length: steps K of the context, with three tokens each.
        batch_size: windows per update B.
        learning_rate: after the warm-up.
        decay: learning rate at the last update as a fraction of the initial one, linear; 1 for a constant.
        return_scale: divisor of returns.
        dropout: probability of dropping a feature or an attention weight.
    """

    width: int
    layers: int
    heads: int = 1
    context_length: int = 20
    batch_size: int = 64
    learning_rate: float = 1e-4
    decay: float = 1.0
    return_scale: float = 1000.0
    dropout: float = 0.1

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `DecisionTransformer`."""
        core = decision_transformer(
            width=self.width, layers=self.layers, heads=self.heads, dropout=self.dropout
        )
        return {
            "core": core,
            "context_length": self.context_length,
            "batch_size": self.batch_size,
            "learning_rate": linear(self.learning_rate, self.learning_rate * self.decay),
            "return_scale": self.return_scale,
        }

    def multiply_adds(self) -> float:
        r"""Return the multiply-adds of an update: ``9 K B L (12 C^2 + 3 K C)``.

        A batch has 3 K B tokens. In each layer, a token needs ``4 C^2`` for projections, ``8 C^2`` for the
        feed-forward sublayer, and on average ``3 K C`` for scores and weighted sum over the previous half of
        3 K tokens. The backward pass costs twice the forward pass. Other operations are not counted, so the
        result is a lower bound.
        """
        tokens = 3 * self.context_length
        layer = 12 * self.width**2 + tokens * self.width
        return 3.0 * tokens * self.batch_size * self.layers * layer


SETTINGS = {"small": Setting(width=64, layers=2), "published": Setting(width=128, layers=3)}
SHORT = {name: replace(each, learning_rate=1e-3, decay=0.1) for name, each in SETTINGS.items()}
"""Settings for about 10,000 updates; the published learning rate is for ten times as many."""
