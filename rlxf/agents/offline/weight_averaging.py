"""Exponential moving average of the weights of a model, which acts in place of the newest weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlxf.agents.offline.model import OfflineModel
from rlxf.training import states

TRAINED_POLICY, AVERAGE = "trained_policy", "weight_average"
"""Names of the groups of a file with the newest weights, and with the number of averaged updates."""
UPDATES = "updates"
"""Name of the only tensor of the group `AVERAGE`."""


class WeightAverage:
    r"""Exponential moving average of the weights of a model, with bias correction.

    The average of the weights w_1 ... w_n after each of n updates is

    ``a_n = sum_(i=1)^n d^(n-i) w_i / sum_(i=1)^n d^(n-i)``, by ``a_n = a_(n-1) + g (w_n - a_(n-1))``

    with ``g = (1 - d) / (1 - d^n)``. The initial weights have no influence, because a_1 = w_1. After many
    updates, the average covers about the last ``1 / (1 - d)`` updates.

    Parameters that do not act, i.e. those of a critic and the dual variable of the entropy, are copied: a
    critic has target networks, which are averages already. Buffers are copied as well. They are statistics of
    the data, or states of techniques that follow the weights themselves.

    Source: Polyak and Juditsky 1992, SIAM J. Control Optim. 30(4); the bias correction is that of Adam
    (Kingma and Ba 2015, arXiv:1412.6980, section 3).

    Args:
        trained: model that the optimizer changes.
        acting: model of the same shape that receives the average.
        decay: d, above 0 and below 1.
        copied: beginnings of the names of parameters that are copied.

    Attributes:
        updates: number n of averaged updates.
    """

    def __init__(
        self, trained: OfflineModel, acting: OfflineModel, decay: float, copied: tuple[str, ...] = ()
    ):
        self.trained = trained
        self.acting = acting
        self.decay = decay
        self.updates = 0
        own, new = dict(acting.named_parameters()), dict(trained.named_parameters())
        names = [name for name in new if not name.startswith(copied)]
        self._averages: list[Tensor] = [own[name] for name in names]
        self._weights: list[Tensor] = [new[name] for name in names]
        self._copies = [(own[name], new[name]) for name in new if name.startswith(copied)]

    def begin(self) -> None:
        """Before the first averaged update, give the trained model the weights of the acting one.

        They may differ, because weights can be transferred to the acting model before the training.
        """
        if self.updates == 0:
            self.trained.load_state_dict(self.acting.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of the trained model to the average."""
        self.updates += 1
        gain = (1 - self.decay) / (1 - self.decay**self.updates)
        torch._foreach_lerp_(self._averages, self._weights, gain)
        buffers = zip(self.acting.buffers(), self.trained.buffers(), strict=True)
        for own, new in [*buffers, *self._copies]:
            own.copy_(new)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the groups of tensors that a file holds in addition to the acting model; no copies."""
        return {
            TRAINED_POLICY: self.trained.state_dict(),
            AVERAGE: {UPDATES: torch.tensor(self.updates)},
        }

    def load_state(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the result of `state`.

        Raises:
            CheckpointError: if a group is missing, or does not fit the model.
        """
        updates = groups.get(AVERAGE, {}).get(UPDATES)
        if TRAINED_POLICY not in groups or updates is None:
            raise states.state_mismatch(
                f"the agent averages its weights, but the groups {TRAINED_POLICY} and {AVERAGE} are missing"
            )
        if updates.shape != () or updates.dtype != torch.int64 or updates < 0:
            raise states.state_mismatch(
                f"in {AVERAGE}, {UPDATES!r} is {updates.tolist()}, not a count of updates"
            )
        weights = groups[TRAINED_POLICY]
        states.check_weights_fit(self.trained, weights, TRAINED_POLICY)
        self.trained.check_stored_parameters(weights)
        self.trained.load_state_dict(weights)
        self.updates = int(updates)
