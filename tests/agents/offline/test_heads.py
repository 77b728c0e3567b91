"""Tests of the action heads, and of the objectives against torch.distributions."""

import math

import pytest
import torch
from gymnasium import spaces
from torch import distributions

from rlxf.agents.common.actions import BoxActions, DiscreteActions
from rlxf.agents.common.losses import cross_entropies, masked_mean
from rlxf.agents.offline.config import technique_converter
from rlxf.agents.offline.heads import (
    CategoricalHead,
    DeterministicHead,
    SquashedGaussianHead,
    categorical_entropy,
    clamped_atanh,
    log_tanh_derivative,
    normal_log_prob,
)
from rlxf.agents.offline.objectives import OBJECTIVES, Imitation, MaximumEntropy
from rlxf.agents.offline.optimizer_step import warmup_factor

BOX = spaces.Box(torch.tensor([-1.0, 0.0]).numpy(), torch.tensor([2.0, 10.0]).numpy())
CHOICES = spaces.MultiDiscrete([2, 5])


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_normal_log_prob_equals_torch():
    mean, log_std, x = draw(3, 50)
    expected = distributions.Normal(mean, log_std.exp()).log_prob(x)
    torch.testing.assert_close(normal_log_prob(mean, log_std, x), expected)


@pytest.mark.parametrize("u", [-40.0, -3.0, 0.0, 0.1, 40.0])
def test_log_slope_is_exact_for_large_inputs(u):
    exact = 2 * (math.log(2) - abs(u) - math.log1p(math.exp(-2 * abs(u))))  # even in u
    assert log_tanh_derivative(torch.tensor(u, dtype=torch.float64)).item() == pytest.approx(exact, rel=1e-12)


def test_unsquashed_inverts_tanh_and_is_finite_at_the_bounds():
    u = draw(100)
    torch.testing.assert_close(clamped_atanh(u.tanh()), u)
    assert clamped_atanh(torch.tensor([-1.0, 1.0, 1.5])).isfinite().all()


def test_cross_entropies_and_entropies_equal_torch():
    logits = (draw(4, 3, 2), draw(4, 3, 5))
    choices = torch.stack([torch.arange(12).view(4, 3) % 2, torch.arange(12).view(4, 3) % 5], dim=-1)
    parts = [distributions.Categorical(logits=part) for part in logits]
    error = -sum(part.log_prob(choices[..., i]) for i, part in enumerate(parts))
    torch.testing.assert_close(cross_entropies(logits, choices), error)
    torch.testing.assert_close(categorical_entropy(logits), sum(part.entropy() for part in parts))


def test_average_ignores_padding():
    x, weight = torch.tensor([[1.0, 2.0], [3.0, 1e30]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert masked_mean(x, weight) == 2
    assert masked_mean(x, torch.zeros_like(x)) == 0


def test_warm_up_is_linear():
    assert [warmup_factor(update, 4) for update in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert warmup_factor(0, 0) == 1


def gaussian():
    torch.manual_seed(0)
    return SquashedGaussianHead(6, BoxActions(BOX)).double()


def squashed(head, y):
    """Return the distribution of the head over actions in [-1, 1], built with torch.distributions."""
    mean, log_std = head._moments(y)
    normal = distributions.Normal(mean, log_std.exp())
    return distributions.TransformedDistribution(normal, distributions.TanhTransform(cache_size=1))


def test_the_error_of_the_gaussian_head_is_the_negative_log_likelihood():
    head, y = gaussian(), draw(7, 6)
    scaled = (draw(7, 2, seed=1)).tanh()
    expected = -squashed(head, y).log_prob(scaled).sum(-1)
    torch.testing.assert_close(head.error(y, head.actions.unscale(scaled)), expected, rtol=1e-6, atol=1e-6)


def test_the_entropy_of_a_squashed_gaussian_is_estimated_without_bias():
    head, y = gaussian().requires_grad_(False), draw(1, 6).expand(40_000, 6)
    torch.manual_seed(1)
    sample = squashed(head, y).sample()
    expected, spread = (f(-squashed(head, y).log_prob(sample).sum(-1)) for f in (torch.mean, torch.std))
    assert head.entropy(y).mean() == pytest.approx(expected.item(), abs=6 * spread.item() / 200)


@pytest.mark.parametrize(("raw", "expected"), [(-50.0, -5.0), (0.0, -1.5), (50.0, 2.0)])
def test_log_standard_deviations_are_within_their_range(raw, expected):
    """Zheng et al. 2022 squash them to the range from -5 to 2."""
    head = gaussian().requires_grad_(False)
    head.net.weight.zero_()
    head.net.bias[2:] = raw
    assert head._moments(draw(3, 6))[1].unique().tolist() == pytest.approx([expected])


def test_default_lower_bounds_of_the_entropy():
    """Minus the number of continuous actions, or a fifth of the largest entropy of discrete ones."""
    assert gaussian().default_target_entropy() == -2
    head = CategoricalHead(6, DiscreteActions(CHOICES))
    largest = categorical_entropy((torch.zeros(1, 2), torch.zeros(1, 5))).item()
    assert head.default_target_entropy() == pytest.approx(0.2 * largest)


def test_samples_are_within_the_bounds_with_the_mode_as_median():
    head, y = gaussian(), draw(1, 6).expand(5_000, 6)
    sample, mode = head.choose(y, deterministic=False), head.choose(y[:1], deterministic=True)
    low, high = torch.as_tensor(BOX.low), torch.as_tensor(BOX.high)
    assert ((sample >= low) & (sample <= high)).all()
    torch.testing.assert_close(sample.median(dim=0).values, mode[0], atol=0.2, rtol=0)  # tanh is monotone


def test_bounded_box_dimensions_are_scaled():
    space = spaces.Box(torch.tensor([-2.0, 0.0, -math.inf]).numpy(), torch.tensor([2.0, 10.0, 5.0]).numpy())
    form = BoxActions(space)
    actions = torch.tensor([[-2.0, 10.0, 7.0], [1.0, 5.0, -3.0]])
    torch.testing.assert_close(form(actions), torch.tensor([[-1.0, 1.0, 7.0], [0.5, 0.0, -3.0]]))
    torch.testing.assert_close(form.unscale(form(actions)), actions)


def test_box_dimensions_with_equal_bounds_are_not_scaled():
    form = BoxActions(spaces.Box(torch.tensor([-2.0, 3.0]).numpy(), torch.tensor([2.0, 3.0]).numpy()))
    actions = torch.tensor([[-1.0, 3.0]])
    torch.testing.assert_close(form(actions), torch.tensor([[-0.5, 3.0]]))
    torch.testing.assert_close(form.unscale(form(actions)), actions)


def test_discrete_components_are_concatenated_one_hot():
    form = DiscreteActions(CHOICES)
    assert form(torch.tensor([[1, 3]])).tolist() == [[0, 1, 0, 0, 0, 1, 0]]
    assert DiscreteActions(spaces.Discrete(3))(torch.tensor([2])).tolist() == [[0, 0, 1]]


def test_samples_follow_the_probabilities_of_the_head():
    torch.manual_seed(0)
    head = CategoricalHead(6, DiscreteActions(CHOICES)).double()
    y = draw(1, 6)
    chosen = head.choose(y.expand(20_000, 6), deterministic=False)
    expected = head.logits(y)[1].softmax(-1)[0]
    frequencies = torch.bincount(chosen[:, 1], minlength=5) / 20_000
    assert (frequencies - expected).abs().max() < 0.02


def test_the_deterministic_head_ignores_sampling():
    head, y = DeterministicHead(6, BoxActions(BOX)), draw(4, 6).float()
    assert torch.equal(head.choose(y, deterministic=True), head.choose(y, deterministic=False))


def test_noise_on_actions_of_targets_is_clipped_and_keeps_the_bounds():
    space = spaces.Box(torch.tensor([-2.0, -math.inf]).numpy(), torch.tensor([2.0, math.inf]).numpy())
    head, actions = DeterministicHead(6, BoxActions(space)), torch.tensor([0.9, 3.0]).expand(20_000, 2)
    torch.manual_seed(0)
    bounded, free = (head.add_target_noise(actions) - actions).unbind(-1)
    assert (bounded.min().item(), bounded.max().item()) == pytest.approx((-0.5, 0.1))
    assert (free.min().item(), free.max().item()) == pytest.approx((-0.5, 0.5))
    assert free.std().item() == pytest.approx(0.2, abs=0.01)
    choices = CategoricalHead(6, DiscreteActions(CHOICES))
    probabilities = choices.network_action(torch.zeros(3, 6))
    assert choices.add_target_noise(probabilities) is probabilities


@pytest.mark.parametrize(("target", "sign"), [(100.0, -1), (-100.0, 1)])
def test_the_temperature_follows_the_dual_gradient(target, sign):
    loss = MaximumEntropy(0.3, target_entropy=target).build(6, BoxActions(BOX), features=4)
    parts = loss(draw(4, 6).float(), torch.zeros(4, 2), torch.ones(4))
    parts["loss"].backward()
    gap = (parts["entropy"] - target).item()
    assert loss.log_temperature.grad.item() == pytest.approx(0.3 * gap, rel=1e-5)
    assert math.copysign(1, gap) == sign


def test_the_entropy_term_has_no_gradient_to_the_temperature():
    y, actions, weight = draw(4, 6).float(), torch.zeros(4, 2), torch.ones(4)
    gradients = []
    for temperature in (0.1, 0.4):
        torch.manual_seed(0)
        loss = MaximumEntropy(temperature).build(6, BoxActions(BOX), features=4)
        loss(y, actions, weight)["loss"].backward()
        error, entropy = (
            masked_mean(loss.head.error(y, actions), weight),
            masked_mean(loss.head.entropy(y), weight),
        )
        gradients.append(loss.head.net.weight.grad)
        torch.manual_seed(0)
        again = MaximumEntropy(temperature).build(6, BoxActions(BOX), features=4)
        parts = again(y, actions, weight)
        (parts["nll"] - temperature * parts["entropy"]).backward()
        torch.testing.assert_close(gradients[-1], again.head.net.weight.grad)
        assert error.isfinite()
        assert entropy.isfinite()
    assert not torch.equal(*gradients)


@pytest.mark.parametrize("objective", [Imitation(), MaximumEntropy(0.2), MaximumEntropy(0.1, -3.0)], ids=repr)
def test_objective_json_round_trip(objective):
    to_json, from_json = technique_converter("objective", OBJECTIVES)
    assert from_json(to_json(objective)) == objective


def test_an_unknown_objective_is_refused():
    _, from_json = technique_converter("objective", OBJECTIVES)
    with pytest.raises(ValueError, match="unknown objective 'Magic'; use one of Imitation, MaximumEntropy"):
        from_json({"name": "Magic"})


@pytest.mark.parametrize("head", [DeterministicHead, SquashedGaussianHead])
def test_heads_of_continuous_actions_have_no_logits(head):
    with pytest.raises(TypeError, match=f"{head.__name__} is for continuous actions and has no logits"):
        head(4, BoxActions(BOX)).logits(draw(2, 4))
