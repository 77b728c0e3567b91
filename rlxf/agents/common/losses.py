"""Losses that both agents use: means over real steps, errors of actions, and distillation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.utils.checks import PythonNumbers, check_not_negative, check_positive


def masked_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Mean of x over the entries of weight 1; both have the same shape."""
    return (x * weight).sum() / weight.sum().clamp(min=1)


def squared_error(predicted: Tensor, target: Tensor) -> Tensor:
    """``|| predicted - target ||^2 / D``: (..., D) -> (...)."""
    return (predicted - target).square().mean(dim=-1)


def cross_entropies(logits: tuple[Tensor, ...], choices: Tensor) -> Tensor:
    """``-sum_i log p_i(choice_i)``: n tensors (..., N_i) and int64 (..., n) -> (...)."""
    parts = zip(logits, choices.unbind(-1), strict=True)
    each = [F.cross_entropy(x.flatten(0, -2), c.flatten(), reduction="none") for x, c in parts]
    return torch.stack(each).sum(0).view(choices.shape[:-1])


@dataclass(frozen=True)
class Distillation(PythonNumbers):
    r"""``T^2 KL(teacher || student) + hidden_coef (1 - cos(W h, h_teacher))``, mean over steps.

    The temperature T flattens both distributions, ``p^(1 / T)``: softmax of logits / T, or a Gaussian with
    sqrt(T) times the standard deviation. The factor T^2 keeps the scale of the gradients. If an agent
    predicts an action instead of a distribution, the squared error replaces the first term, independent of T.
    h are the outputs of the transformers. If their widths differ, W is a learned projection, else the
    identity.

    Sources: Hinton et al. 2015, arXiv:1503.02531, section 2; for hidden states Sanh et al. 2019,
    arXiv:1910.01108, section 2.

    Args:
        temperature: T, more than 0. At 1 the distributions are those of the agents.
        hidden_coef: weight of the hidden-state loss; 0 for none.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: unless temperature is finite and more than 0, and hidden_coef is finite and at least 0.
    """

    temperature: float = 2.0
    hidden_coef: float = 1.0

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        check_not_negative("hidden_coef", self.hidden_coef)


def check_distillation(student: Any, kind: type[Any], teacher: Any, distillation: Any) -> None:
    """Check the arguments of ``distill``.

    Args:
        student: the agent to train.
        kind: class of the agents that can be its teacher.
        teacher: the agent to imitate.
        distillation: the distillation loss.

    Raises:
        TypeError: if the teacher is not an agent of this class, or distillation not a `Distillation`.
        ValueError: if the teacher is the student.
    """
    if not isinstance(teacher, kind):
        raise TypeError(
            f"teacher must be a {kind.__name__}, got {teacher!r}; open a file with {kind.__name__}.load"
        )
    if teacher is student:
        raise ValueError("teacher and student are the same agent: pass another agent as the teacher")
    if not isinstance(distillation, Distillation):
        raise TypeError(
            f"distillation must be a Distillation, e.g. Distillation(temperature=2.0), or None, got "
            f"{distillation!r}"
        )


def categorical_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    r"""``T^2 sum_a p_a (log p_a - log q_a)``, p and q the softmax of logits / T: (..., A) -> (...).

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2.
    """
    log_q, log_p = (F.log_softmax(logits / temperature, dim=-1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)


def gaussian_kl(student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], temperature: float) -> Tensor:
    r"""``T^2 KL(N(m, T s^2) || N(n, T r^2))``, summed over components: (..., A) -> (...).

    In closed form each component adds ``log(r / s) + (s / r)^2 / 2 + (m - n)^2 / (2 T r^2) - 1 / 2``, times
    T^2. An invertible transformation of both samples, e.g. tanh, does not change the divergence.

    Args:
        student: mean n and log standard deviation log r.
        teacher: mean m and log standard deviation log s.
        temperature: T.
    """
    (n, log_r), (m, log_s) = student, teacher
    distance = (m - n).square() / (2 * temperature * (2 * log_r).exp())
    each = log_r - log_s + (2 * (log_s - log_r)).exp() / 2 + distance - 0.5
    return temperature**2 * each.sum(dim=-1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Cosine distance ``1 - cos``: (..., C) -> (...).

    Source: Sanh et al. 2019, arXiv:1910.01108, section 2.
    """
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


class HiddenStateDistance:
    """Distance between hidden states of student and teacher, with a learned projection if widths differ.

    The projection has its own optimizer, Adam with a learning rate of 1e-3. Neither is part of a checkpoint
    of the student.

    Args:
        student: width of the student.
        teacher: width of the teacher.
        generator: CPU generator for the initial projection.
        device: device of the projection.
    """

    def __init__(self, student: int, teacher: int, generator: torch.Generator, device: torch.device):
        self.projection: nn.Module = nn.Identity()
        if student != teacher:
            linear = nn.Linear(student, teacher, bias=False)
            nn.init.orthogonal_(linear.weight, generator=generator)
            self.projection = linear.to(device)
        self.optimizer = torch.optim.Adam([{"params": [*self.projection.parameters()]}], lr=1e-3)

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the cosine distance (...) of hidden states (..., C) and (..., C')."""
        return cosine_distance(self.projection(student), teacher)
