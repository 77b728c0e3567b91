"""Files with valid checksums and malicious values are rejected by name before allocation."""

import hashlib
import random
from pathlib import Path

import pytest

from rlxf import DecisionTransformer, GTrXLPPO
from rlxf.agents.common.checkpoint import checkpoint_path
from rlxf.agents.decision_transformer import decision_transformer
from rlxf.training import CheckpointError, read_archive, write_archive
from tests.agents.decision_transformer import worlds as offline
from tests.agents.gtrxl import worlds as online

AGENTS = {"GTrXLPPO": GTrXLPPO, "DecisionTransformer": DecisionTransformer}
VALUES = (
    None,
    -1,
    0,
    10**7,
    2**63,
    1e308,
    -0.5,
    "../x",
    "__import__('os')",
    [],
    {},
    [1, [2]],
    {"name": "os"},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a file of each type of agent."""
    folder = tmp_path_factory.mktemp("agents")
    core = decision_transformer(width=16, layers=2, heads=2)
    made = {
        "GTrXLPPO": online.small_agent(online.scripts(online.shifted(3))),
        "DecisionTransformer": offline.small_agent(core=core),
    }
    for name, agent in made.items():
        agent.save(folder / f"{name}.zip")
    return {name: folder / f"{name}.zip" for name in made}


def leaves(value, path=()):
    """Yield the paths of all values in a document."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from leaves(part, (*path, key))


def put(value, path, new):
    """Return the document with the value at a path replaced."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy


def hostile(file, target, path, value):
    """Return the file with a value in its description replaced and valid checksums."""
    archive = read_archive(file)
    documents = archive.documents | {"agent": put(archive.documents["agent"], path, value)}
    write_archive(target, documents, archive.tensors)
    return target


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("field", ["width", "feed_forward", "layers"])
def test_size_that_does_not_match_weights_is_rejected_before_allocation(tmp_path, files, name, field):
    file = hostile(files[name], tmp_path / "hostile.zip", ("settings", "core", field), 10**3)
    with pytest.raises(CheckpointError, match=r"shape|layers"):
        AGENTS[name].load(file, device="cpu")
    file = hostile(files[name], tmp_path / "huge.zip", ("settings", "core", field), 10**7)
    with pytest.raises(CheckpointError, match=r"shape|layers|overflow|requires"):
        AGENTS[name].load(file, device="cpu")


@pytest.mark.parametrize("field", ["n_envs", "n_steps"])
def test_acting_agent_does_not_allocate_rollout_buffer(tmp_path, files, field):
    steps = read_archive(files["GTrXLPPO"]).documents["agent"]["settings"]["segment_length"] * 10**9
    file = hostile(files["GTrXLPPO"], tmp_path / "hostile.zip", ("settings", field), steps)
    agent = GTrXLPPO.load(file, device="cpu")
    action, _ = agent.predict(agent.observation_space.sample())
    assert agent.action_space.contains(action)


SUBJECTS = {
    "name": ("contains no", "unknown"),
    "start": ("learning_rate", "ent_coef"),
    "reconstruction_coef": ("reconstruction_net",),
    "core": ("TransformerSpec",),
    "width": ("the core's memory", "context of an episode"),
    "observation_space": ("describe a space",),
    "action_space": ("describe a space",),
    "clip_range": ("describe a schedule",),
    "learning_rate": ("describe a schedule",),
    "ent_coef": ("describe a schedule",),
    "_n_updates": ("was trained for",),
}
"""Field -> what a message names in its place."""


def load_error(agent, file):
    """Return the message of the `CheckpointError` of a file, or "" if it can be loaded."""
    try:
        agent.load(file, device="cpu")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", AGENTS)
def test_any_value_in_any_field_is_accepted_or_rejected_by_name(tmp_path, files, name):
    chance, rejected = random.Random(0), 0
    everywhere = list(leaves(read_archive(files[name]).documents["agent"]))[1:]
    for _ in range(60):
        path, value = chance.choice(everywhere), chance.choice(VALUES)
        message = load_error(AGENTS[name], hostile(files[name], tmp_path / "hostile.zip", path, value))
        field = [key for key in path if isinstance(key, str)][-1]
        assert not message or any(text in message for text in (field, *SUBJECTS.get(field, ()))), path
        rejected += bool(message)
    assert rejected > 20


@pytest.mark.parametrize("field", ["objective", "conditioning"])
@pytest.mark.parametrize("value", [0, "../x", [], None, {"name": {}}, {"name": "os"}])
def test_objects_with_a_name_are_checked(tmp_path, files, field, value):
    file = hostile(files["DecisionTransformer"], tmp_path / "hostile.zip", ("settings", field), value)
    with pytest.raises(CheckpointError, match=f"{field} must be a JSON object|unknown {field}"):
        DecisionTransformer.load(file, device="cpu")


@pytest.mark.parametrize("value", [0, None, {}])
def test_policy_must_be_a_name(tmp_path, files, value):
    file = hostile(files["GTrXLPPO"], tmp_path / "hostile.zip", ("policy",), value)
    with pytest.raises(CheckpointError, match="policy must be the name of a class"):
        GTrXLPPO.load(file, device="cpu")


def test_errors_of_passed_arguments_do_not_blame_the_file(files):
    with pytest.raises(ValueError, match="gamma must be"):
        GTrXLPPO.load(files["GTrXLPPO"], device="cpu", gamma=7)
    with pytest.raises(ValueError, match="unknown environment id"):
        GTrXLPPO.load(files["GTrXLPPO"], "Nowhere-v0", device="cpu")


@pytest.mark.parametrize("name", AGENTS)
def test_wrong_sha256_is_rejected_before_parsing(files, name, tmp_path):
    right = hashlib.sha256(files[name].read_bytes()).hexdigest()
    for digits in (right, right.upper()):
        assert AGENTS[name].load(files[name], sha256=digits, device="cpu").num_timesteps == 0
    other = tmp_path / "other.zip"
    other.write_bytes(files[name].read_bytes() + b"0")  # the digest is checked before parsing
    with pytest.raises(CheckpointError, match=rf"other\.zip: its SHA-256 is .*, but {right} is expected"):
        AGENTS[name].load(other, sha256=right, device="cpu")


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("digits", ["", "0" * 63, "0" * 65, "g" * 64, f"{'0' * 64}\n"])
def test_invalid_sha256_is_rejected(files, name, digits):
    with pytest.raises(ValueError, match="sha256 must be 64 hexadecimal digits") as refusal:
        AGENTS[name].load(files[name], sha256=digits, device="cpu")
    assert not isinstance(refusal.value, CheckpointError)


@pytest.mark.parametrize("path", ["", ".", Path()])
def test_path_without_a_name_is_refused(path):
    with pytest.raises(ValueError, match=r"names no file: give a path such as 'agent.zip'"):
        checkpoint_path(path)
