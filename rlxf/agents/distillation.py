"""What a small agent learns from a large one: pure functions of tensors, and their weights as plain data."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Distillation:
    r"""``T^2 KL(teacher || student) + hidden_coef (1 - cos(W h, h_teacher))``, mean over steps.

    The temperature T makes both distributions flatter, ``p^(1 / T)``: softmax of logits / T, or a Gaussian
    of sqrt(T) times the deviation. T^2 keeps gradients as large as they were. Where an agent has no
    distribution but an action, the squared error takes the place of the first term, whatever T is. h are the
    outputs that heads read; W is learned beside the student where the widths differ, else it is 1.

    Sources: Hinton et al. 2015, arXiv:1503.02531, section 2; for hidden states Sanh et al. 2019,
    arXiv:1910.01108, section 2.

    Args:
        temperature: T, more than 0. At 1 distributions are compared as they act.
        hidden_coef: weight of the hidden states; 0 for none.

    Raises:
        ValueError: if temperature is not finite and more than 0, or hidden_coef not finite and at least 0.
    """

    temperature: float = 2.0
    hidden_coef: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and more than 0, got {self.temperature}")
        if not 0 <= self.hidden_coef < math.inf:
            raise ValueError(f"hidden_coef must be finite and at least 0, got {self.hidden_coef}")


def softened_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    r"""``T^2 sum_a p_a (log p_a - log q_a)``, p and q the softmax of logits / T: (..., A) -> (...).

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2.
    """
    log_q, log_p = (F.log_softmax(logits / temperature, dim=-1) for logits in (student, teacher))
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)


def gaussian_kl(student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], temperature: float) -> Tensor:
    r"""``T^2 KL(N(m, T s^2) || N(n, T r^2))``, summed over numbers: (..., A) -> (...).

    In closed form each number adds ``log(r / s) + (s / r)^2 / 2 + (m - n)^2 / (2 T r^2) - 1 / 2``, times T^2.
    What squashes samples of both alike, as tanh does, changes nothing.

    Args:
        student: mean n and log deviation log r.
        teacher: mean m and log deviation log s.
        temperature: T.
    """
    (n, log_r), (m, log_s) = student, teacher
    apart = (m - n).square() / (2 * temperature * (2 * log_r).exp())
    each = log_r - log_s + (2 * (log_s - log_r)).exp() / 2 + apart - 0.5
    return temperature**2 * each.sum(dim=-1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """``1 - cos``: (..., C) -> (...).

    Source: Sanh et al. 2019, arXiv:1910.01108, section 2.
    """
    return 1 - F.cosine_similarity(student, teacher, dim=-1)


class HiddenStates:
    """Compares hidden states; where widths differ, by a projection that learns beside the student.

    Its optimiser, Adam with a rate of 1e-3, is its own: a file of the student knows nothing of it.

    Args:
        student: width of the student.
        teacher: width of the teacher.
        generator: of the projection at the start; of the CPU.
        device: where it is.
    """

    def __init__(self, student: int, teacher: int, generator: torch.Generator, device: torch.device):
        self.projection: nn.Module = nn.Identity()
        if student != teacher:
            linear = nn.Linear(student, teacher, bias=False)
            nn.init.orthogonal_(linear.weight, generator=generator)
            self.projection = linear.to(device)
        self.optimizer = torch.optim.Adam([{"params": [*self.projection.parameters()]}], lr=1e-3)

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Hidden states (..., C) and (..., C') -> (...)."""
        return cosine_distance(self.projection(student), teacher)
