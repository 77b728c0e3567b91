"""Gradient accumulation: the update of micro-batches is that of the whole batch, for all agents."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch

from rlxf import DecisionTransformer
from rlxf.agents.common.accumulation import accumulate_gradients
from rlxf.agents.common.losses import Distillation
from rlxf.agents.decision_transformer import MaximumEntropy, QRegularized
from rlxf.agents.decision_transformer.conditioning import MaxReturn
from rlxf.agents.decision_transformer.distillation import DistillationUpdate
from rlxf.agents.gtrxl.training_algorithm import PolicyUpdate
from rlxf.agents.offline.optimizer_step import OfflineUpdate
from rlxf.attention import (
    ACT,
    CALM,
    KNN,
    AdaptiveSpan,
    DepthAdaptive,
    DynamicSpan,
    Reversible,
    RoPE,
    Routing,
    Window,
)
from rlxf.envs.tensor_vec_env import as_vec_env
from rlxf.training.process_group import ProcessGroup
from tests.agents.decision_transformer.worlds import (
    ACTIONS,
    CORES,
    small_pretraining,
    some_trajectories,
)
from tests.agents.decision_transformer.worlds import small_agent as small_dt
from tests.agents.gtrxl.worlds import (
    DICT,
    RECURRENT_CORES,
    all_segments,
    next_step_scripts,
    rollouts,
    scripts,
    shifted,
    small_agent,
    small_core,
)
from tests.agents.mlp.worlds import small_mlp

UNLIMITED = 1e9
"""Gradient norm that clips nothing."""
TOLERANCE = 1e-6
"""Largest difference from the whole batch in float64, relative to the largest number of each tensor."""


def double(x):
    """Convert the floating-point tensors in dataclasses and dicts to float64."""
    if isinstance(x, torch.Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {name: double(part) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(map(double, x))
    if is_dataclass(x):
        return replace(x, **{field.name: double(getattr(x, field.name)) for field in fields(x)})
    return x


def assert_equal_updates(actual, expected):
    """Compare gradients and metrics, ``(dict, dict)``."""
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            tolerance = TOLERANCE * max(1.0, float(value.abs().max()))
            torch.testing.assert_close(one[name], value, rtol=0, atol=tolerance, msg=name)


def gradients(module):
    return {name: x.grad.clone() for name, x in module.named_parameters() if x.grad is not None}


def in_double(agent, buffer):
    """Convert the policy to float64, also its features, and return all segments of a rollout."""
    agent.policy.double().set_training_mode(True)
    agent.policy.optimizer.state.clear()
    agent.policy.extract_features = lambda obs, extractor: obs
    return double(all_segments(buffer))


def ppo_update(agent, batch, steps):
    """Return gradients and metrics of one update of a copy of the policy, and its buffers."""
    update = PolicyUpdate(agent.policy, agent.objective(), UNLIMITED, None, {}, steps)
    before = {name: x.clone() for name, x in agent.policy.state_dict().items()}
    assert update.epoch([batch])
    buffers = {name: x.clone() for name, x in agent.policy.named_buffers()}
    agent.policy.load_state_dict(before)
    return gradients(agent.policy), {n: torch.tensor(x) for n, x in update.metrics().items()}, buffers


CORES_OF_PPO = {
    "GTrXL": small_core(),
    "exits": replace(small_core(), layers=3, depth=CALM("classifier", 0.5)),
    "exits by oracle": replace(small_core(), layers=3, depth=DepthAdaptive("multinomial")),
    "ACT": replace(small_core(), layers=3, depth=ACT()),
    "penalty of weights": replace(small_core(), kernel=AdaptiveSpan(limit=8, ramp=3)),
    "penalty of tokens": replace(small_core(), kernel=DynamicSpan(limit=8, ramp=3)),
    "reversible": replace(small_core(), residual=Reversible()),
    "chunks": replace(small_core(), feed_forward_chunk=3),
    "neighbors": replace(small_core(), memory=KNN(8, far=24, top=4), pattern=Window(9)),
    **{name: RECURRENT_CORES[name] for name in ("GatedDeltaNet", "Mamba-2 below attention")},
}


@pytest.mark.parametrize("core", CORES_OF_PPO.values(), ids=CORES_OF_PPO)
def test_ppo_update_is_that_of_the_whole_minibatch(core):
    env = as_vec_env(next_step_scripts(shifted(3)))
    agent = small_agent(env, core=core, reconstruction_coef=0.3)
    *_, buffer = rollouts(agent, 2)
    batch = in_double(agent, buffer)
    counts = [int(part.weight.sum()) for part in batch.split(5)]
    assert len(counts) == 5
    assert len(set(counts)) > 1  # reset steps: the means of the micro-batches have unequal weights
    assert_equal_updates(ppo_update(agent, batch, 5), ppo_update(agent, batch, 1))


def test_unweighted_means_would_fail():
    env = as_vec_env(next_step_scripts(shifted(3)))
    agent = small_agent(env)
    *_, buffer = rollouts(agent, 2)
    batch, objective = in_double(agent, buffer), agent.objective()
    whole = objective(agent.policy, batch)["loss"]
    parts = [objective(agent.policy, part)["loss"] for part in batch.split(5)]
    assert (torch.stack(parts).mean() - whole).abs() > 1000 * TOLERANCE


def test_centroids_of_routing_see_all_micro_batches():
    core = replace(small_core(), kernel=Routing(2, decay=0.5), position=RoPE())
    agent = small_agent(scripts(shifted(3)), core=core)
    *_, buffer = rollouts(agent, 2)
    batch = in_double(agent, buffer)
    (_, _, one), (_, _, other) = (ppo_update(agent, batch, steps) for steps in (3, 1))
    name = next(name for name in one if name.endswith("centroids"))
    torch.testing.assert_close(one[name], other[name], rtol=0, atol=1e-9)


def test_segments_of_dict_observations_are_split():
    agent = small_agent(scripts(shifted(3), DICT), "MultiInputGTrXLPolicy")
    *_, buffer = rollouts(agent, 1)
    batch = all_segments(buffer)
    parts = batch.split(5)
    assert [len(part.index.position) for part in parts] == [3, 3, 2, 2, 2]
    for key, whole in batch.obs.items():
        assert torch.equal(torch.cat([part.obs[key] for part in parts]), whole)
    assert torch.equal(torch.cat([part.state.hidden for part in parts], dim=1), batch.state.hidden)
    assert len(batch.split(99)) == 12


def test_kl_limit_stops_before_the_step():
    agent = small_agent(scripts(shifted(3)))
    *_, buffer = rollouts(agent, 2)
    batch = all_segments(buffer)
    before = {name: x.clone() for name, x in agent.policy.named_parameters()}
    update = PolicyUpdate(agent.policy, agent.objective(), UNLIMITED, -1.0, {}, 3)
    assert not update.epoch([batch])
    for name, x in agent.policy.named_parameters():
        assert torch.equal(x, before[name])
        assert x.grad is None


def offline_update(agent, batch, steps):
    """Return gradients and metrics of one update, which changes the weights back."""
    model = agent._update.trained
    before = {name: x.clone() for name, x in model.state_dict().items()}
    update = OfflineUpdate(model, agent.optimizer, UNLIMITED, None, steps)
    update.begin()
    update(batch)
    model.load_state_dict(before)
    means = update.pop_metric_means()
    return gradients(model), {name: torch.tensor(x) for name, x in means.items()}


OFFLINE = {
    **{name: lambda core=core: small_dt(core=core) for name, core in CORES.items() if "dropout" not in name},
    "exits": lambda: small_dt(core=replace(CORES["published"], depth=CALM("classifier", 0.5))),
    "auxiliary losses": lambda: small_dt(state_loss_weight=0.5, return_loss_weight=0.3),
    "predicted return": lambda: small_dt(conditioning=MaxReturn()),
    "episode": lambda: small_dt(core=CORES["GTrXL"], context="episode"),
    "BehaviorCloning": lambda: small_mlp("BehaviorCloning"),
    "ReturnConditionedMLP": lambda: small_mlp("ReturnConditionedMLP", context_length=2),
}


@pytest.mark.parametrize("make", OFFLINE.values(), ids=OFFLINE)
def test_offline_update_is_that_of_the_whole_batch(make):
    agent = make()
    windows = agent._training_windows(agent.windows(agent._data()))
    batch = double(agent._batch(windows))
    agent.policy.double()
    assert_equal_updates(offline_update(agent, batch, 3), offline_update(agent, batch, 1))


def test_dual_variable_of_the_entropy():
    data = some_trajectories(action_space=ACTIONS["Discrete"])
    agent = small_dt(data, objective=MaximumEntropy())
    batch = agent._batch(agent._training_windows(agent.windows(data)))  # one-hot actions are float32
    (one, _), (other, _) = (offline_update(agent, batch, steps) for steps in (3, 1))
    name = "loss.log_temperature"
    torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("contexts", [(4, 3), (3, 4)])
def test_distillation_of_a_decision_transformer(contexts):
    student, teacher = (small_dt(context_length=length) for length in contexts)
    torch.manual_seed(0)

    def updated(steps):
        model = student._update.trained
        own = OfflineUpdate(model, student.optimizer, UNLIMITED, None, steps)
        update = DistillationUpdate(
            own, teacher.policy, contexts, Distillation(), torch.Generator().manual_seed(0)
        )
        batch = double(update.windows(student._data()).starting_at([0, 2, 9, 14, 20, 27]))
        before = {name: x.clone() for name, x in model.state_dict().items()}
        update.begin()
        update(batch)
        model.load_state_dict(before)
        return gradients(model), {n: torch.tensor(x) for n, x in update.pop_metric_means().items()}

    student.policy.double()
    teacher.policy.double()
    assert_equal_updates(updated(3), updated(1))


def test_micro_batches_without_steps_add_nothing():
    weight = torch.nn.Parameter(torch.tensor(2.0))

    def losses(part):
        return {"loss": weight * part.mean() if len(part) else weight * torch.tensor(100.0)}

    parts = [torch.tensor([1.0, 3.0]), torch.tensor([]), torch.tensor([5.0])]
    total = accumulate_gradients(losses, parts, lambda part: torch.tensor(float(len(part))), ProcessGroup())
    total["loss"].backward()
    assert total["loss"].item() == pytest.approx(6.0)
    assert weight.grad.item() == pytest.approx(3.0)


REFUSED = {
    "none": (0, ValueError, "gradient_accumulation_steps must be at least 1, got 0"),
    "half": (1.5, TypeError, "gradient_accumulation_steps must be a whole number, got 1.5"),
    "too many": (5, ValueError, "must be at most 4, the number of segments of a batch, got 5"),
}


@pytest.mark.parametrize(("steps", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_values_of_ppo_are_refused(steps, kind, message):
    with pytest.raises(kind, match=message):
        small_agent(scripts(shifted(3)), gradient_accumulation_steps=steps)


def test_bad_values_of_offline_agents_are_refused():
    with pytest.raises(ValueError, match="must be at most 8, the number of windows of a batch, got 9"):
        small_mlp(gradient_accumulation_steps=9)
    with pytest.raises(ValueError, match=r"QRegularized\(.* divides by the mean of \|Q\| .*steps=2; use 1"):
        small_dt(objective=QRegularized(hidden_sizes=(8,)), gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"MaskedPretraining replaces tokens .* got .*steps=2; use 1"):
        small_pretraining(gradient_accumulation_steps=2)


def test_steps_are_stored_and_can_be_replaced(tmp_path):
    small_dt(gradient_accumulation_steps=2).save(tmp_path / "dt.zip")
    assert DecisionTransformer.load(tmp_path / "dt.zip").gradient_accumulation_steps == 2
    loaded = DecisionTransformer.load(tmp_path / "dt.zip", gradient_accumulation_steps=4)
    assert loaded._new_update().accumulation_steps == 4


def test_learn_divides_each_batch():
    """The whole training uses the argument: it ends with other bits, near those of whole batches."""
    settings = {"learning_rate": 1e-3, "policy_kwargs": {"optimizer_kwargs": {"eps": 1e-3}}}
    trained = [
        small_agent(scripts(shifted(3)), gradient_accumulation_steps=steps, **settings).learn(2 * 3 * 16)
        for steps in (1, 3)
    ]
    pairs = [each.policy.named_parameters() for each in trained]
    differences = [(one - other).abs().max() for (_, one), (_, other) in zip(*pairs, strict=True)]
    assert 0 < max(differences) < 1e-4
