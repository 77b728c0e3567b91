"""Environments in worker processes, which are restarted if they raise, die or hang."""

from rlxf.envs.workers.vec_env import WorkerVecEnv, restart_counts
from rlxf.envs.workers.worker import Workers

__all__ = ["Workers", "WorkerVecEnv", "restart_counts"]
