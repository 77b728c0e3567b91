"""Episodes of one skill."""

from collections.abc import Iterator

import numpy as np
from minari.data_collector import EpisodeBuffer
from stable_baselines3.common.vec_env import VecEnv

from rlxf.collection.recorder import Recorder
from rlxf.collection.skills import Skill
from rlxf.envs.return_to_go import ReturnToGo
from rlxf.evaluation.environment import normalised_as_in_training, warn_of_missing_statistics
from rlxf.evaluation.tally import is_filler, quotas


def play(skill: Skill, env: VecEnv, episodes: int, deterministic: bool, seed: int) -> Iterator[EpisodeBuffer]:
    """So many episodes, in the order in which they end; each environment contributes its share.

    Args:
        skill: who plays.
        env: raw environments.
        episodes: how many.
        deterministic: the most likely action instead of a sample.
        seed: of environments, of which i gets ``seed + i``, and of random actions.
    """
    recorder = Recorder(env)
    shown = normalised_as_in_training(skill.agent, recorder)
    warn_of_missing_statistics(skill.agent, shown)
    if skill.target_return is not None:
        shown = ReturnToGo(shown, skill.target_return)
    player = skill.player(env.action_space, seed)
    env.seed(seed)
    missing = quotas(episodes, env.num_envs)
    obs, state, starts = shown.reset(), None, np.ones(env.num_envs, dtype=bool)
    while missing.any():
        actions, state = player.predict(obs, state, starts, deterministic)  # type: ignore[arg-type]
        obs, _, dones, infos = shown.step(actions)
        starts = dones | is_filler(infos)
        for i, episode in recorder.take():
            if missing[i]:
                missing[i] -= 1
                yield episode
