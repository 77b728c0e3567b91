"""Small files with valid checksums that require much memory are rejected by name within 200 MB."""

import json
import subprocess
import sys

import numpy as np
import pytest

from rlxf import DecisionTransformer
from rlxf.agents.decision_transformer import (
    ElasticHistory,
    HighestValueReturn,
    QRegularized,
    decision_transformer,
)
from rlxf.training import CheckpointError, memory_budget, read_archive, write_archive
from tests.agents.common.test_checkpoint import put
from tests.agents.decision_transformer import worlds as offline
from tests.agents.gtrxl import worlds as online
from tests.training.samples import crafted

pytestmark = pytest.mark.faults
MOST_BYTES = 200 * 10**6
CHOICE = {"type": "Discrete", "n": 5 * 10**8, "start": 0, "dtype": "int64"}
BITS = {"type": "MultiBinary", "n": 5 * 10**8}
PICTURE = {"type": "Box", "shape": [4000, 4000], "dtype": "float64", "low": 0.0, "high": 1.0}
PARTS = {"type": "Dict", "spaces": {str(i): CHOICE | {"n": 2} for i in range(50_000)}}
ATTACKS = {
    "GTrXLPPO": {
        "one-hot observations": (("observation_space",), CHOICE),
        "one-hot actions": (("action_space",), CHOICE),
        "bits": (("action_space",), BITS),
        "bounds": (("observation_space",), PICTURE),
        "many spaces": (("observation_space",), PARTS),
        "width": (("settings", "core", "width"), 10**6),
        "memory": (("settings", "core", "memory", "length"), 10**7),
    },
    "DecisionTransformer": {
        "one-hot observations": (("dataset_info", "observation_space"), CHOICE),
        "one-hot actions": (("dataset_info", "action_space"), CHOICE),
        "choices": (
            ("dataset_info", "action_space"),
            {"type": "MultiDiscrete", "nvec": [5 * 10**8, 2], "start": [0, 0], "dtype": "int64"},
        ),
        "bits": (("dataset_info", "action_space"), BITS),
        "context": (("settings", "context_length"), 10**9),
        "long context": (("settings", "context_length"), 4 * 10**5),
        "time steps": (("settings", "episode_length"), 10**9),
    },
}
NESTED = b"[" + b"[[]]," * (7 * 2**20 // 5) + b"0]"
OBJECTS = b"[" + b'{"a":{}},' * (7 * 2**20 // 9) + b"0]"
EMPTY_TENSOR = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
LOAD = """
import json, sys
import rlxf
from rlxf.training import CheckpointError, read_archive

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

loads = {"GTrXLPPO": rlxf.GTrXLPPO.load, "DecisionTransformer": rlxf.DecisionTransformer.load}
results = {}
for name, kind, path in json.loads(sys.argv[1]):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    try:
        loads[kind](path, device="cpu") if kind in loads else read_archive(path)
        message = "loaded"
    except CheckpointError as error:
        message = str(error)
    results[name] = message, status("VmHWM") - before
print(json.dumps(results))
"""


def saved(kind, path):
    core = decision_transformer(width=16, layers=2, heads=2)
    made = {
        "GTrXLPPO": lambda: online.small_agent(online.scripts(online.shifted(3))),
        "DecisionTransformer": lambda: offline.small_agent(core=core),
    }
    made[kind]().save(path)
    return read_archive(path)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return message and memory use of each attack, run in a separate process."""
    folder = tmp_path_factory.mktemp("attacks")
    files = []
    for kind, attacks in ATTACKS.items():
        archive = saved(kind, folder / "whole.zip")
        files.append((f"{kind}: whole", kind, folder / f"{kind}-whole.zip"))
        write_archive(files[-1][2], archive.documents, archive.tensors)
        for name, (path, value) in attacks.items():
            files.append((f"{kind}: {name}", kind, folder / f"{len(files)}.zip"))
            documents = archive.documents | {"agent": put(archive.documents["agent"], path, value)}
            write_archive(files[-1][2], documents, archive.tensors)
    header = json.dumps({str(i): EMPTY_TENSOR for i in range(110_000)}).encode()
    tensors = len(header).to_bytes(8, "little") + header
    members = {
        "nested lists": {f"m{i}.json": NESTED for i in range(8)},
        "nested objects": {f"m{i}.json": OBJECTS for i in range(8)},
        "empty tensors": {f"m{i}.safetensors": tensors for i in range(4)},
    }
    for name, own in members.items():
        files.append((f"archive: {name}", "archive", folder / f"{len(files)}.zip"))
        files[-1][2].write_bytes(crafted(own))
    request = json.dumps([(name, kind, str(path)) for name, kind, path in files])
    done = subprocess.run([sys.executable, "-c", LOAD, request], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [f"{kind}: {name}" for kind, attacks in ATTACKS.items() for name in attacks])
def test_small_file_that_needs_much_memory_is_rejected_within_200_mb(outcomes, name):
    message, taken = outcomes[name]
    assert "requires" in message or "shape" in message or "overflow" in message
    assert taken < MOST_BYTES


@pytest.mark.parametrize("name", ["nested lists", "nested objects", "empty tensors"])
def test_member_with_many_objects_is_rejected_within_200_mb(outcomes, name):
    message, taken = outcomes[f"archive: {name}"]
    assert "requires" in message
    assert "the member" in message
    assert taken < MOST_BYTES


def test_ordinary_files_are_within_budget(outcomes):
    assert [outcomes[f"{kind}: whole"][0] for kind in ATTACKS] == ["loaded", "loaded"]


def test_error_names_setting_that_raises_budget(tmp_path):
    archive = saved("DecisionTransformer", tmp_path / "whole.zip")
    agent = put(archive.documents["agent"], ("settings", "context_length"), 10**5)
    write_archive(tmp_path / "long.zip", archive.documents | {"agent": agent}, archive.tensors)
    with pytest.raises(CheckpointError, match=r"memory_budget\((\d+)\)") as refusal:
        DecisionTransformer.load(tmp_path / "long.zip", device="cpu")
    needed = int(str(refusal.value).rpartition("memory_budget(")[2].rstrip(")"))
    with memory_budget(needed):
        assert DecisionTransformer.load(tmp_path / "long.zip", device="cpu").context_length == 10**5


@pytest.mark.parametrize(
    ("settings", "path", "value"),
    [
        (
            {"conditioning": HighestValueReturn(), "objective": QRegularized(hidden_sizes=(8,))},
            ("settings", "conditioning", "candidates"),
            2**31 - 1,
        ),
        ({"conditioning": ElasticHistory(step=1)}, ("settings", "context_length"), 3000),
    ],
    ids=["candidates", "histories"],
)
def test_windows_that_an_acting_step_repeats_count_for_the_budget(tmp_path, settings, path, value):
    offline.small_agent(**settings).save(tmp_path / "whole.zip")
    archive = read_archive(tmp_path / "whole.zip")
    agent = put(archive.documents["agent"], path, value)
    write_archive(tmp_path / "large.zip", archive.documents | {"agent": agent}, archive.tensors)
    with pytest.raises(CheckpointError, match="the context of an episode"):
        DecisionTransformer.load(tmp_path / "large.zip", device="cpu")


def test_repeated_windows_of_images_are_within_budget(tmp_path):
    """The windows hold the features of images, which are fewer than their pixels."""
    data = offline.some_trajectories(observation_space=offline.spaces.Box(0, 255, (84, 84, 4), np.uint8))
    options = {"conditioning": HighestValueReturn(), "objective": QRegularized(hidden_sizes=(8,))}
    offline.small_agent(data, context_length=20, **options).save(tmp_path / "images.zip")
    assert DecisionTransformer.load(tmp_path / "images.zip", device="cpu").context_length == 20


def test_size_of_file_extends_budget(tmp_path):
    """The size of the file itself is not limited by the budget."""
    space = offline.spaces.Discrete(10**5)
    data = offline.some_trajectories(observation_space=space)
    agent = offline.small_agent(data, core=decision_transformer(width=16, layers=1, heads=1))
    agent.save(tmp_path / "large.zip")
    with memory_budget(10**6):
        loaded = DecisionTransformer.load(tmp_path / "large.zip", device="cpu")
    assert loaded.observation_space == space
