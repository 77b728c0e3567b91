"""Distillation losses equal reference vectors, closed forms and slow sums."""

import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F

from rlxf.agents.common.losses import (
    Distillation,
    HiddenStateDistance,
    categorical_kl,
    cosine_distance,
    gaussian_kl,
)
from tests.attention.oracle import close, load

VECTOR = load("distillation")
TEMPERATURES = [0.5, 1.0, 2.0, 7.0]


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_logits_loss_equals_reference():
    loss = categorical_kl(VECTOR["in_student"], VECTOR["in_teacher"], VECTOR["cfg_T"].item())
    close(loss.mean(), VECTOR["out_kd"])  # over rows, not over rows and classes


def test_hidden_state_and_label_losses_equal_reference():
    close(cosine_distance(VECTOR["in_h_student"], VECTOR["in_h_teacher"]).mean(), VECTOR["out_cos"])
    close(F.cross_entropy(VECTOR["in_student"], VECTOR["in_labels"]), VECTOR["out_ce"])


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_categorical_kl_equals_torch(temperature):
    student, teacher = numbers(3, 4, 5), numbers(3, 4, 5, seed=1)
    softened = [Categorical(logits=logits / temperature) for logits in (teacher, student)]
    close(categorical_kl(student, teacher, temperature), temperature**2 * kl_divergence(*softened))


def gaussians(seed):
    return numbers(3, 4, 2, seed=seed), numbers(3, 4, 2, seed=seed + 10) / 2


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gaussian_kl_equals_torch(temperature):
    student, teacher = gaussians(0), gaussians(1)
    softened = [Normal(mean, temperature**0.5 * log_std.exp()) for mean, log_std in (teacher, student)]
    expected = temperature**2 * kl_divergence(*softened).sum(-1)
    close(gaussian_kl(student, teacher, temperature), expected)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gaussian_at_temperature_is_density_power(temperature):
    places = torch.linspace(-30, 30, 200_001, dtype=torch.float64)
    powers = []
    for mean, log_std in ((0.3, -0.2), (-0.5, 0.4)):
        log_density = Normal(torch.tensor(mean).double(), torch.tensor(log_std).double().exp()).log_prob(
            places
        )
        powers.append(log_density / temperature)
    student, teacher = (power - power.logsumexp(0) for power in powers)
    expected = temperature**2 * (teacher.exp() * (teacher - student)).sum()
    moments = [
        (torch.tensor([m]).double(), torch.tensor([s]).double()) for m, s in ((0.3, -0.2), (-0.5, 0.4))
    ]
    close(gaussian_kl(*moments, temperature), expected, 1e-6)


def test_equal_distributions_have_zero_loss():
    same = numbers(5, 3)
    moments = gaussians(2)
    for loss in (
        categorical_kl(same, same, 3.0),
        gaussian_kl(moments, moments, 3.0),
        cosine_distance(same, 2.5 * same),
    ):
        close(loss, torch.zeros_like(loss), 1e-12)


def test_equal_widths_have_no_projection():
    one, other = (torch.Generator().manual_seed(0) for _ in range(2))
    same = HiddenStateDistance(4, 4, one, torch.device("cpu"))
    assert not list(same.projection.parameters())
    assert torch.equal(one.get_state(), other.get_state())
    close(same.distance(numbers(3, 4), numbers(3, 4)), torch.zeros(3, dtype=torch.float64), 1e-12)


def test_projection_is_trained_if_widths_differ():
    hidden = HiddenStateDistance(3, 5, torch.Generator().manual_seed(0), torch.device("cpu"))
    student = numbers(64, 3).float()
    teacher = student @ numbers(3, 5, seed=1).float()
    before = hidden.distance(student, teacher).mean().item()
    for _ in range(300):
        hidden.optimizer.zero_grad()
        hidden.distance(student, teacher).mean().backward()
        hidden.optimizer.step()
    assert hidden.distance(student, teacher).mean().item() < 0.7 * before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "temperature must be above 0, got 0.0"),
        ({"temperature": float("inf")}, ValueError, "temperature must be finite"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite"),
        ({"temperature": "2"}, TypeError, "temperature must be a number, got '2'"),
        ({"hidden_coef": -1.0}, ValueError, "hidden_coef must not be negative, got -1.0"),
        ({"hidden_coef": float("nan")}, ValueError, "hidden_coef must be finite"),
        ({"hidden_coef": True}, TypeError, "hidden_coef must be a number, got True"),
    ],
)
def test_bad_numbers_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        Distillation(**options)
