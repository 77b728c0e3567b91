import subprocess
import sys
import warnings

import gymnasium
import pytest

from rlxf.envs import TMaze, register_envs

IDS = ["rlxf/TMaze-v0", "rlxf/TMazeActive-v0"]


@pytest.mark.parametrize("env_id", IDS)
def test_registered_id_creates_its_environment(env_id):
    env = gymnasium.make(env_id, corridor_length=7).unwrapped
    assert isinstance(env, TMaze)
    assert (env.rules.corridor_length, env.rules.active) == (7, env_id == IDS[1])


def test_registering_twice_has_no_effect():
    before = {env_id: gymnasium.registry[env_id] for env_id in IDS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_envs()
    assert all(gymnasium.registry[env_id] is spec for env_id, spec in before.items())


def test_registration_does_not_import_torch():
    code = "import sys, rlxf.envs.specs; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
