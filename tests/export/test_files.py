"""Exported files: written, played without rlxf and torch, and refused if they were altered."""

import ast
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnvWrapper, VecFrameStack, VecMonitor, VecNormalize

from rlxf.export.files import PLAYER, check_target
from rlxf.export.formats import ExportError
from rlxf.export.onnx_player import Player
from rlxf.utils.errors import NumericalError
from tests.agents.gtrxl.worlds import ACTIONS, VECTOR, recurrent_core, scripts, shifted, small_agent


def box_agent(**changes):
    core = recurrent_core(layers=1, **changes)
    return small_agent(scripts(shifted(1), VECTOR, ACTIONS["Box"]), core=core)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return an agent and the folder of its export."""
    folder, agent = tmp_path_factory.mktemp("export"), box_agent()
    agent.export(folder / "policy.onnx")
    return agent, folder


def test_all_files_are_written(exported):
    names = {path.name for path in exported[1].iterdir()}
    assert names == {"policy.onnx", "policy.json", "policy.sha256", "onnx_player.py"}


def test_player_acts_as_predict(exported):
    agent, folder = exported
    player, rng, state, own = Player(folder / "policy.onnx"), np.random.default_rng(0), None, None
    VECTOR.seed(0)
    for number in range(60):
        observation, start = VECTOR.sample(), (rng.random(1) < 0.1) | (number == 0)
        action, own = player.predict(observation, own, start)
        expected, state = agent.predict(observation, state, start, deterministic=True)
        assert action.dtype == expected.dtype
        np.testing.assert_allclose(action, expected, atol=1e-5)


def test_player_needs_neither_rlxf_nor_torch(exported):
    code = (
        "import sys, numpy as np, onnx_player\n"
        "player = onnx_player.Player('policy.onnx')\n"
        "action, state = player.predict(np.zeros(3, np.float32))\n"
        "action, state = player.predict(np.zeros(3, np.float32), state)\n"
        "print(action.shape, 'torch' in sys.modules, 'rlxf' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=exported[1], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == "(2,) False False\n"


def test_player_is_short_and_runs_no_code_of_files():
    source = PLAYER.read_text()
    assert len(source.splitlines()) <= 100
    assert max(map(len, source.splitlines())) <= 110
    called = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"eval", "exec", "compile", "__import__", "open"}
    assert "pickle" not in source


@pytest.mark.parametrize("name", ["policy.onnx", "policy.json"])
def test_altered_files_are_refused(exported, tmp_path, name):
    for path in exported[1].iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} was altered: its SHA-256 is .* export the agent again"):
        Player(tmp_path / "policy.onnx")


def damaged(exported, folder, change):
    """Write a copy of an export whose .sha256 file is changed, and return the path of the agent in it."""
    for path in exported[1].iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    sums = folder / "policy.sha256"
    sums.write_bytes(change(sums.read_bytes()))
    return folder / "policy.onnx"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda sums: b"", "policy.onnx"),
        (lambda sums: sums[:40], "policy.onnx"),
        (lambda sums: sums[:100], "policy.json"),
        (lambda sums: b"\xff\n", "policy.onnx"),
        (lambda sums: sums.replace(b"policy", b"other"), "policy.onnx"),
    ],
    ids=["empty", "truncated", "truncated in the second line", "bytes", "other names"],
)
def test_damaged_checksums_are_named(exported, tmp_path, change, name):
    with pytest.raises(ValueError, match=rf"{name} is not in the \.sha256 file: .* or export again"):
        Player(damaged(exported, tmp_path, change))


@pytest.mark.parametrize(
    "change",
    [
        lambda sums: sums.replace(b"  ", b" *"),
        lambda sums: sums.replace(b"\n", b"\r\n"),
        lambda sums: sums + b"\n",
    ],
    ids=["binary mode of sha256sum", "CRLF", "empty line"],
)
def test_other_forms_of_checksums_are_accepted(exported, tmp_path, change):
    assert Player(damaged(exported, tmp_path, change)).envs == 1


def test_wrong_observations_are_named(exported):
    player = Player(exported[1] / "policy.onnx")
    with pytest.raises(ValueError, match=r"observation must have shape \[1, 3\] of numbers, got \[4\] of"):
        player.predict(np.zeros(4))
    with pytest.raises(ValueError, match="use deterministic=True"):
        player.predict(np.zeros(3), deterministic=False)


def test_unsuitable_arguments_of_the_player_are_named(exported):
    player = Player(exported[1] / "policy.onnx")
    with pytest.raises(ValueError, match="observation contains nan, must be float32 from"):
        player.predict(np.array([0, np.nan, 0]))
    with pytest.raises(ValueError, match=r"episode_start must have shape \(1,\), got \(2,\)"):
        player.predict(np.zeros(3), player.initial_state(), [True, False])
    given = player.initial_state()
    name, values = next(iter(given.items()))
    wrong = [given | {name: x} for x in (np.stack([values] * 2), values.astype(np.complex64), None, "text")]
    for state in ({"other": np.zeros(1)}, 3, {}, *wrong):
        with pytest.raises(ValueError, match="state is not that of this agent"):
            player.predict(np.zeros(3), state)


def test_observations_that_are_too_large_are_named_as_by_predict(tmp_path):
    space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    agent = small_agent(scripts(shifted(1), space), core=recurrent_core(layers=1))
    agent.export(tmp_path / "policy.onnx")
    large = np.full(3, 1e200)
    with pytest.raises(NumericalError):
        agent.predict(large)
    with pytest.raises(ValueError, match="the action or the next state is NaN"):
        Player(tmp_path / "policy.onnx").predict(large)


def test_renamed_files_are_named(exported, tmp_path):
    for path in exported[1].iterdir():
        if path.is_file():
            (tmp_path / path.name.replace("policy", "agent")).write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"agent\.onnx is not in the \.sha256 file: keep the file names"):
        Player(tmp_path / "agent.onnx")


def test_another_format_does_not_replace_the_description(exported):
    agent, folder = exported
    with pytest.raises(FileExistsError, match=r"policy\.json describes policy\.onnx: .* policy-torch\.pt2"):
        agent.export(folder / "policy.pt2")
    Player(folder / "policy.onnx")


def test_agents_without_previous_actions_and_with_bounds_in_float64(tmp_path):
    """Bounds of float64 that float32 cannot represent are kept."""
    space = spaces.Box(-0.1, 0.3, (2,), np.float64)
    agent = small_agent(scripts(shifted(2), VECTOR, space), n_envs=2, previous_action=False)
    with torch.no_grad():
        agent.policy.action_net.bias[:] = torch.tensor([5.0, -5.0])
    agent.export(tmp_path / "policy.onnx", n_envs=2)
    player, state, own = Player(tmp_path / "policy.onnx"), None, None
    for _ in range(4):
        observation = np.stack([VECTOR.sample(), VECTOR.sample()])
        action, own = player.predict(observation, own)
        expected, state = agent.predict(observation, state, deterministic=True)
        np.testing.assert_array_equal(action, expected)
        assert all(space.contains(row) for row in action)


def test_normalization_that_cannot_be_exported_is_named(tmp_path):
    agent = small_agent(VecFrameStack(VecNormalize(scripts(shifted(1), VECTOR)), 2))
    with pytest.raises(ValueError, match="only a VecNormalize outside of other wrappers"):
        agent.export(tmp_path / "policy.onnx")


class Negative(VecEnvWrapper):
    """Wrapper that changes observations, but not their space."""

    def reset(self):
        return -self.venv.reset()

    def step_wait(self):
        observations, *others = self.venv.step_wait()
        return -observations, *others


def test_wrappers_outside_of_the_normalization_are_named(tmp_path):
    def export(env):
        agent = small_agent(env)
        agent.export(tmp_path / "policy.pt2")

    env = scripts(shifted(1), VECTOR)
    with pytest.warns(UserWarning, match="lacks the wrapper Negative, which is outside of VecNormalize"):
        export(Negative(VecNormalize(env)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(VecNormalize(Negative(env)))
        export(VecMonitor(VecNormalize(env)))


def test_description_names_all_tensors(exported):
    description = json.loads((exported[1] / "policy.json").read_text())
    assert description["agent"] == "GTrXLPPO"
    assert description["inputs"][:2] == ["observation", "episode_start"]
    largest = float(np.finfo(np.float32).max)
    part = {"shape": [1, 3], "dtype": "float32", "low": -largest, "high": largest}
    assert description["observations"] == {"observation": part}
    assert [f"state.{name}" for name in description["state"]] == description["inputs"][2:]


def test_programs_of_torch_act_as_predict(tmp_path):
    agent = box_agent()
    agent.export(tmp_path / "policy", "torch")
    step = torch.export.load(tmp_path / "policy.pt2").module()
    description = json.loads((tmp_path / "policy.json").read_text())
    state = {
        name: torch.as_tensor(np.resize(np.array(one["values"], one["dtype"]), one["shape"]))
        for name, one in description["state"].items()
    }
    VECTOR.seed(0)
    observation = VECTOR.sample()[None]
    action, after = step(
        {"observation": torch.as_tensor(observation)}, torch.ones(1, dtype=torch.bool), state
    )
    assert not any(x.requires_grad for x in (action, *after.values())), "each step would keep all before it"
    np.testing.assert_allclose(action, agent.predict(observation, deterministic=True)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "policy.onnx", "opset": 9}, "opset 9 is too old: torch writes ONNX from opset 18"),
        ({"path": "policy.onnx", "format": "tflite"}, "format must be one of onnx, torch, got 'tflite'"),
        ({"path": "policy.pt2", "format": "onnx"}, r"a file of format 'onnx' must end in \.onnx"),
        ({"path": "policy.onnx", "n_envs": 0}, "n_envs must be at least 1, got 0"),
        ({"path": "policy.pt2", "opset": 20}, "opset=20 is for the format 'onnx', and the format is 'torch'"),
        ({"path": "policy.onnx", "opset": "20"}, "opset must be a whole number, got '20'"),
        ({"path": "."}, "is a folder: choose a file in it"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises((ValueError, TypeError, IsADirectoryError), match=message):
        box_agent().export(**arguments | {"path": tmp_path / arguments["path"]})
    assert not list(tmp_path.iterdir())


def test_a_converter_that_changes_results_is_detected(tmp_path, monkeypatch):
    onnx_ir = pytest.importorskip("onnx_ir")

    def converted(*args, **options):
        result = export(*args, **options)
        for weight in result.model.graph.initializers.values():
            values = weight.const_value.numpy()
            if values.dtype == np.float32 and values.ndim == 2:
                weight.const_value = onnx_ir.tensor(1.1 * values)
        return result

    export, agent = torch.onnx.export, box_agent()
    monkeypatch.setattr(torch.onnx, "export", converted)
    with pytest.raises(ExportError, match=r"onnxruntime .* computes other results than torch"):
        agent.export(tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ['{"mine": 1}', "[1]", "no JSON"])
def test_other_json_files_are_not_replaced(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(FileExistsError, match=r"config\.json would be replaced .* choose another name"):
        box_agent().export(tmp_path / "config.onnx")
    assert [file.read_text() for file in tmp_path.iterdir()] == [content]


DIGEST = "0" * 64
OTHER_CHECKSUMS = {
    "files of the user": f"{DIGEST}  data.csv\n",
    "an additional file": f"{DIGEST}  policy.onnx\n{DIGEST}  policy.json\n{DIGEST}  data.csv\n",
    "one of two files": f"{DIGEST}  policy.onnx\n",
    "text": "no checksums\n",
    "nothing": "",
}


@pytest.mark.parametrize("content", OTHER_CHECKSUMS.values(), ids=OTHER_CHECKSUMS)
def test_other_checksums_are_not_replaced(tmp_path, content):
    (tmp_path / "policy.sha256").write_text(content)
    with pytest.raises(FileExistsError, match=r"policy\.sha256 would be replaced .* choose another name"):
        check_target(tmp_path / "policy.onnx", None, None)
    with pytest.raises(FileExistsError, match=r"checksums of policy\.json and policy\.onnx, but is another"):
        box_agent().export(tmp_path / "policy.onnx")
    assert [file.read_text() for file in tmp_path.iterdir()] == [content]


@pytest.mark.parametrize("name", ["policy.sha256", "onnx_player.py"])
@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.write_bytes(b"\xff")], ids=["folder", "bytes"]
)
def test_folders_and_binary_files_are_not_replaced(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(FileExistsError, match=rf"{name} would be replaced by .* or move this file"):
        check_target(tmp_path / "policy.onnx", None, None)


@pytest.mark.parametrize(
    "content",
    ["", "import numpy\n", "# mine\n" + PLAYER.read_text(encoding="utf-8")],
    ids=["empty", "other code", "edited"],
)
def test_another_player_is_not_replaced(tmp_path, content):
    (tmp_path / "onnx_player.py").write_text(content, encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"onnx_player\.py would be replaced .* choose another folder"):
        box_agent().export(tmp_path / "policy.onnx")
    assert [file.read_text(encoding="utf-8") for file in tmp_path.iterdir()] == [content]
    check_target(tmp_path / "policy.pt2", None, None)  # has no player


@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_players_of_other_versions_are_replaced(tmp_path, ending):
    source = PLAYER.read_text(encoding="utf-8").splitlines()[:-1]
    (tmp_path / "onnx_player.py").write_bytes(ending.join(source).encode())
    check_target(tmp_path / "policy.onnx", None, None)


def test_an_export_can_be_repeated(exported):
    agent, folder = exported
    sums = folder / "policy.sha256"
    for _ in range(2):
        agent.export(folder / "policy.onnx")
    sums.write_text(sums.read_text().replace("  ", " *"))  # sha256sum --binary
    agent.export(folder / "policy.onnx")


def test_missing_folders_are_created(tmp_path):
    box_agent().export(tmp_path / "new" / "folder" / "policy.onnx")
    assert {file.suffix for file in (tmp_path / "new" / "folder").iterdir()} == {
        ".onnx",
        ".json",
        ".sha256",
        ".py",
    }


def test_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(NotADirectoryError, match="taken is a file, not a folder: choose another path"):
        box_agent().export(tmp_path / "taken" / "new" / "policy.onnx")
