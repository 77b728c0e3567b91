"""Files with valid checksums and invalid values are rejected; the error names member and field."""

import pytest
import torch

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.training import CheckpointError, read_archive, write_archive
from tests.agents.common.test_checkpoint import put
from tests.agents.decision_transformer import worlds as offline
from tests.agents.gtrxl import worlds as online

pytestmark = pytest.mark.faults
AGENTS = {"GTrXLPPO": GTrXLPPO, "DecisionTransformer": DecisionTransformer}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """Return the contents of a file of each type of agent, after some updates."""
    folder = tmp_path_factory.mktemp("trained")
    core = decision_transformer(width=16, layers=1, heads=1)
    made = {
        "GTrXLPPO": online.small_agent(online.scripts(online.shifted(3))).learn(3 * 16),
        "DecisionTransformer": offline.small_agent(core=core).learn(2),
    }
    for name, agent in made.items():
        agent.save(folder / f"{name}.zip")
    return {name: read_archive(folder / f"{name}.zip") for name in made}


def refusal(name, archive, path, documents=None, tensors=None):
    """Return the error message for the contents with these members replaced."""
    write_archive(path, archive.documents | (documents or {}), archive.tensors | (tensors or {}))
    with pytest.raises(CheckpointError) as error:
        AGENTS[name].load(path, device="cpu")
    return str(error.value)


def spoiled(tensors, name, value):
    """Return the group with one number of a tensor replaced."""
    tensor = tensors[name].clone()
    tensor.view(-1)[0] = value
    return tensors | {name: tensor}


def named_like(tensors, part):
    return next(name for name in tensors if part in name and tensors[name].is_floating_point())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", AGENTS)
def test_nonfinite_weight_is_rejected(tmp_path, archives, name, value):
    policy = archives[name].tensors["policy"]
    weight = named_like(policy, "transformer")
    message = refusal(
        name, archives[name], tmp_path / "x.zip", tensors={"policy": spoiled(policy, weight, value)}
    )
    assert f"in policy, the tensor '{weight}' contains {value}" in message


@pytest.mark.parametrize("name", AGENTS)
def test_weight_of_another_dtype_is_rejected(tmp_path, archives, name):
    policy = archives[name].tensors["policy"]
    weight = named_like(policy, "transformer")
    changed = policy | {weight: policy[weight].long()}
    message = refusal(name, archives[name], tmp_path / "x.zip", tensors={"policy": changed})
    assert f"the tensor '{weight}' is of torch.int64, not torch.float32" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda group: {}, "optimizer has no tensors, but the agent was trained for"),
        (lambda group: {k: v for k, v in group.items() if k != "0.exp_avg"}, "lacks the tensor '0.exp_avg'"),
        (lambda group: {k: v for k, v in group.items() if k != "0.step"}, "lacks the tensor '0.step'"),
        (lambda group: group | {"0.exp_most": group["0.exp_avg"]}, "has a tensor '0.exp_most', which Adam"),
        (lambda group: spoiled(group, "0.exp_avg", float("nan")), "'0.exp_avg' contains nan"),
        (lambda group: spoiled(group, "0.exp_avg_sq", float("inf")), "'0.exp_avg_sq' contains inf"),
        (lambda group: spoiled(group, "0.exp_avg_sq", -1.0), "'0.exp_avg_sq' contains -1.0"),
        (lambda group: spoiled(group, "0.step", -3.0), "'0.step' contains -3.0"),
        (
            lambda group: group | {"0.exp_avg": group["0.exp_avg"].double()},
            "torch.float64, not torch.float32",
        ),
        (lambda group: group | {"0.exp_avg": torch.tensor(0.0)}, r"has shape \(\), not"),
        (lambda group: group | {"0.step": torch.zeros(2)}, r"has shape \(2,\), not \(\)"),
    ],
    ids=[
        "none",
        "no mean",
        "no step",
        "unknown",
        "nan",
        "inf",
        "negative",
        "step",
        "dtype",
        "shape",
        "steps",
    ],
)
@pytest.mark.parametrize("name", AGENTS)
def test_invalid_optimizer_state_is_rejected(tmp_path, archives, name, change, expected):
    changed = change(archives[name].tensors["optimizer"])
    message = refusal(name, archives[name], tmp_path / "x.zip", tensors={"optimizer": changed})
    assert "optimizer" in message
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(message)


SETTINGS = {
    "GTrXLPPO": {
        "n_steps": ["x", 0, 1.5],
        "n_epochs": [-1, True],
        "n_envs": [-3],
        "gamma": [-0.1, 2, "x", None],
        "critic_lambda": [7],
        "target_kl": [-1.0],
        "vf_coef": [-0.5, [1]],
        "learning_rate": ["x", [1], True],
        "previous_action": [1, None],
        "stats_window_size": [0, "x"],
        "policy_kwargs": [None, []],
        "verbose": ["x", -1],
        "seed": [-1, 1.5, 2**40],
    },
    "DecisionTransformer": {
        "context_length": [0, -1, "x", None],
        "context": ["all", None, 1, {}],
        "batch_size": [0, 2.5],
        "weight_decay": [-1],
        "warmup_updates": [-1],
        "return_scale": [0, None],
        "episode_length": [None, -4],
        "max_grad_norm": [0],
        "learning_rate": [False],
        "seed": ["x"],
    },
}
PROGRESS = {
    "num_timesteps": ["x", -1, 1.5, None],
    "_total_timesteps": ["x", -1],
    "_n_updates": [-2, True],
    "_current_progress_remaining": [1.5, "x"],
}
PARTS = {
    "GTrXLPPO": {"settings": SETTINGS["GTrXLPPO"], "progress": PROGRESS},
    "DecisionTransformer": {"settings": SETTINGS["DecisionTransformer"], "progress": PROGRESS},
}
FIELDS = [
    (name, part, field, value)
    for name, parts in PARTS.items()
    for part, fields in parts.items()
    for field, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("name", "part", "field", "value"), FIELDS)
def test_invalid_field_is_rejected(tmp_path, archives, name, part, field, value):
    agent = put(archives[name].documents["agent"], (part, field), value)
    message = refusal(name, archives[name], tmp_path / "x.zip", documents={"agent": agent})
    assert f"{part} has '{field}' = {value!r}, which must be" in message


@pytest.mark.parametrize("name", AGENTS)
def test_missing_field_is_rejected(tmp_path, archives, name):
    agent = archives[name].documents["agent"]
    for part in ("settings", "progress"):
        for field in agent[part]:
            less = {key: value for key, value in agent[part].items() if key != field}
            message = refusal(
                name, archives[name], tmp_path / "x.zip", documents={"agent": agent | {part: less}}
            )
            assert f"{part} lacks {field!r}" in message
        message = refusal(name, archives[name], tmp_path / "x.zip", {"agent": agent | {part: 7}})
        assert f"{part} is 7, not an object" in message


@pytest.mark.parametrize("name", AGENTS)
def test_valid_values_are_loaded(tmp_path, archives, name):
    """Check an unmodified file, and a file written before any update."""
    write_archive(tmp_path / "x.zip", archives[name].documents, archives[name].tensors)
    AGENTS[name].load(tmp_path / "x.zip", device="cpu")
    agent = put(archives[name].documents["agent"], ("progress", "_n_updates"), 0)
    write_archive(
        tmp_path / "y.zip",
        archives[name].documents | {"agent": agent},
        archives[name].tensors | {"optimizer": {}},
    )
    AGENTS[name].load(tmp_path / "y.zip", device="cpu")
