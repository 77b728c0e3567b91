"""Tests of ``rlxf export``."""

from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register, registry

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


class Images(gymnasium.Env):
    """Episodes of two random images with channels in the last axis."""

    observation_space = spaces.Box(0, 255, (40, 36, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.integers(256, size=(40, 36, 3), dtype=np.uint8), {}

    def step(self, action):
        return self.np_random.integers(256, size=(40, 36, 3), dtype=np.uint8), 1.0, True, False, {}


def test_images_have_the_axes_of_the_environment(monkeypatch):
    loaded, load = [], GTrXLPPO.load
    monkeypatch.setattr(
        GTrXLPPO, "load", lambda *args, **options: loaded.append(load(*args, **options)) or loaded[-1]
    )
    register("test/Images-v0", Images)
    try:
        train("--run", "images", "--core.layers", "1", "--env", "test/Images-v0", "--env-kwargs", "{}")
        main(["export", "images"])
    finally:
        del registry["test/Images-v0"]
    action, _ = Player("images/export/policy.onnx").predict(Images().reset(seed=0)[0])
    assert action in (0, 1)
    assert len(loaded) == 1


def test_missing_folders_of_the_output_are_created():
    train("--run", "maze", "--core.layers", "1")
    main(["export", "maze", "--output", "new folder/policy.onnx"])
    assert Path("new folder/policy.onnx").is_file()


def test_wrong_options_are_one_line(capsys):
    train("--run", "maze", "--core.layers", "1")
    assert "opset 9 is too old" in refused(capsys, "export", "maze", "--opset", "9")
    assert not Path("maze/export").exists()
    assert "must end in .pt2" in refused(
        capsys, "export", "maze", "--format", "torch", "--output", "policy.onnx"
    )
    assert "cannot write ONNX opset 99" in refused(capsys, "export", "maze", "--opset", "99")
    message = "has no best.zip: it is a shared copy of one checkpoint, or was trained without evaluations"
    assert message in refused(capsys, "export", "maze", "--checkpoint", "best")
