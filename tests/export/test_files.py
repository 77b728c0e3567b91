"""Exported files: written, played without rlxf and torch, and refused if they were altered."""

import ast
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from rlxf.export.files import PLAYER
from rlxf.export.formats import ExportError
from rlxf.export.onnx_player import Player
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


def test_wrong_observations_are_named(exported):
    player = Player(exported[1] / "policy.onnx")
    with pytest.raises(ValueError, match=r"observation must have shape \[1, 3\], got \[4\]"):
        player.predict(np.zeros(4))
    with pytest.raises(ValueError, match="use deterministic=True"):
        player.predict(np.zeros(3), deterministic=False)


def test_description_names_all_tensors(exported):
    description = json.loads((exported[1] / "policy.json").read_text())
    assert description["agent"] == "GTrXLPPO"
    assert description["inputs"][:2] == ["observation", "episode_start"]
    assert description["observations"] == {"observation": {"shape": [1, 3], "dtype": "float32"}}
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
    observation = VECTOR.sample()[None]
    with torch.no_grad():
        action, _ = step(
            {"observation": torch.as_tensor(observation)}, torch.ones(1, dtype=torch.bool), state
        )
    np.testing.assert_allclose(action, agent.predict(observation, deterministic=True)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "policy.onnx", "opset": 9}, "opset 9 is too old: torch writes ONNX from opset 18"),
        ({"path": "policy.onnx", "format": "tflite"}, "format must be one of onnx, torch, got 'tflite'"),
        ({"path": "policy.pt2", "format": "onnx"}, r"a file of format 'onnx' must end in \.onnx"),
        ({"path": "policy.onnx", "n_envs": 0}, "n_envs must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
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


def test_an_export_can_be_repeated(exported):
    agent, folder = exported
    agent.export(folder / "policy.onnx")


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder: create it"):
        box_agent().export(tmp_path / "nowhere" / "policy.onnx")
