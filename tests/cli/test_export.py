"""Tests of ``rlxf export``."""

import numpy as np

from rlxf import GTrXLPPO
from rlxf.cli import main
from rlxf.export.onnx_player import Player
from tests.cli.running import refused, train


def test_exported_run_acts_as_its_agent(capsys):
    train("--run", "maze", "--core.layers", "1")
    main(["export", "maze"])
    assert "the agent is written to maze/export/policy.onnx" in " ".join(capsys.readouterr().out.split())
    agent, player = GTrXLPPO.load("maze/checkpoint.zip", device="cpu"), Player("maze/export/policy.onnx")
    state = own = None
    for _ in range(6):
        observation = agent.observation_space.sample()
        action, own = player.predict(observation, own)
        expected, state = agent.predict(observation, state, deterministic=True)
        np.testing.assert_array_equal(action, expected)


def test_wrong_options_are_one_line(capsys):
    train("--run", "maze", "--core.layers", "1")
    assert "opset 9 is too old" in refused(capsys, "export", "maze", "--opset", "9")
    assert "must end in .pt2" in refused(
        capsys, "export", "maze", "--format", "torch", "--output", "policy.onnx"
    )
    assert "has no best.zip" in refused(capsys, "export", "maze", "--checkpoint", "best")
