"""Videos of episodes that a training records for TensorBoard."""

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import gymnasium
from stable_baselines3.common.callbacks import BaseCallback

from rlxf.cli.env_options import EnvOptions
from rlxf.cli.output import print_out
from rlxf.envs.make import make_env
from rlxf.envs.specs import declares_images, find_spec
from rlxf.evaluation import VideoCallback
from rlxf.evaluation.video import RENDER_MODE
from rlxf.utils.rng import preserve_rng_state


def make_rendering_env(task: EnvOptions) -> gymnasium.Env | None:
    """Make one environment that renders images; return None if it declares no render mode ``rgb_array``."""
    if not declares_images(find_spec(task.env)):
        return None
    return make_env(task.env, task.env_kwargs | {"render_mode": RENDER_MODE}, **task.observation_options)


def make_video_callbacks(
    name: str, make: Callable[[], gymnasium.Env | None], stack: ExitStack, every: int, **options: Any
) -> list[BaseCallback]:
    """Return the callback that records videos of an environment; ``stack`` closes the environment.

    If the environment cannot render images, print the reason and return no callback.

    Args:
        name: name of the environment in messages.
        make: function that creates the environment with ``render_mode="rgb_array"``, or returns None if the
            environment does not declare this mode.
        stack: callbacks at the end of the training.
        every: number of steps or updates between two videos.
        options: further arguments of `VideoCallback`.
    """
    try:
        # Drivers warn; warnings of the environment were shown when it was made for the training.
        with warnings.catch_warnings(), preserve_rng_state():
            warnings.simplefilter("ignore")
            if (env := make()) is None:
                print_out(f"no videos: {name} has no render mode rgb_array")
                return []
            stack.callback(env.close)
            return [VideoCallback(env, every, **options)]
    except Exception as error:  # training does not need videos: a driver or package may be missing
        reason = " ".join(str(error).split())
        has_hint = "opengl" in reason.lower() and "MUJOCO_GL" not in os.environ
        hint = "; on a machine without a display, set MUJOCO_GL=egl for MuJoCo" if has_hint else ""
        print_out(f"no videos: {name} cannot render images: {reason}{hint}")
        return []
