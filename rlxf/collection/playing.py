"""Rollout of one behavior policy."""

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
    """Yield episodes of a policy in the order in which they end, an equal share from each environment.

    Args:
        skill: policy to play.
        env: environments without ``VecNormalize``.
        episodes: number of episodes.
        deterministic: use the most likely action instead of a sample.
        seed: seed of the random actions and of the environments; environment i gets ``seed + i``.
    """
    recorder = Recorder(env)
    agent_env = normalised_as_in_training(skill.agent, recorder)
    warn_of_missing_statistics(skill.agent, agent_env)
    if skill.target_return is not None:
        agent_env = ReturnToGo(agent_env, skill.target_return)
    player = skill.player(env.action_space, seed)
    env.seed(seed)
    missing = quotas(episodes, env.num_envs)
    obs, state, starts = agent_env.reset(), None, np.ones(env.num_envs, dtype=bool)
    while missing.any():
        actions, state = player.predict(obs, state, starts, deterministic)  # type: ignore[arg-type]
        obs, _, dones, infos = agent_env.step(actions)
        starts = dones | is_filler(infos)
        for i, episode in recorder.take():
            if missing[i]:
                missing[i] -= 1
                yield episode
