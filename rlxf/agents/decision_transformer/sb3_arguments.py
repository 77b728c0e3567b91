"""Arguments of SB3's algorithms that offline training does not support."""

from rlxf.agents.arguments import Refused


def _use_learn_online(use: str) -> Refused:
    return Refused(f"the agent learns from a dataset; to continue in an environment use learn_online({use})")


_NETWORK = Refused("the network is a transformer; use core=decision_transformer(...)", neutral=(None, {}))
_REPLAY = Refused(
    "batches are drawn from the dataset, and by learn_online from its replay of replay_episodes=... episodes",
    neutral=(None, {}, False),
)
_RETURNS = Refused("returns are sums of rewards without discount; to scale them use return_scale=...")
_NO_EXPLORATION = Refused(
    "the agent explores by sampling its actions; use objective=MaximumEntropy(...)", neutral=(None,)
)
_ENTROPY = Refused("only objective=MaximumEntropy(...) has an entropy coefficient")

SB3_ARGUMENTS = {
    "policy": _NETWORK,
    "policy_kwargs": _NETWORK,
    "net_arch": _NETWORK,
    "buffer_size": _use_learn_online("replay_episodes=..."),
    "n_envs": _use_learn_online("n_envs=..."),
    "n_steps": _use_learn_online("round_steps=..."),
    "train_freq": _use_learn_online("round_steps=..."),
    "gradient_steps": _use_learn_online("round_updates=..."),
    "n_epochs": _use_learn_online("round_updates=..."),
    "learning_starts": Refused(
        "the agent learns from the dataset from the beginning, and the replay of learn_online starts with it"
    ),
    "replay_buffer_class": _REPLAY,
    "replay_buffer_kwargs": _REPLAY,
    "optimize_memory_usage": _REPLAY,
    "gamma": _RETURNS,
    "gae_lambda": _RETURNS,
    "tau": Refused("there is no target network; leave it out"),
    "target_update_interval": Refused("there is no target network; leave it out"),
    "ent_coef": _ENTROPY,
    "target_entropy": _ENTROPY,
    "action_noise": _NO_EXPLORATION,
    "use_sde": Refused(_NO_EXPLORATION.advice, neutral=(False,)),
    "total_timesteps": Refused("pass the number of updates to learn(steps=...)"),
    "observation_space": Refused("the spaces are those of the dataset; leave it out"),
    "action_space": Refused("the spaces are those of the dataset; leave it out"),
    "lr_schedule": Refused("use learning_rate, which may be a schedule"),
}
"""Unsupported arguments of the constructors."""

SB3_LEARN_ARGUMENTS = {
    "total_timesteps": Refused("it counts updates, not steps of an environment; use steps=...")
}
"""Unsupported arguments of ``learn``."""

SB3_ONLINE_ARGUMENTS = {
    "total_timesteps": Refused("use steps=..., which counts steps over all environments"),
    "buffer_size": Refused("use replay_episodes=..."),
    "train_freq": Refused("use round_steps=..."),
    "gradient_steps": Refused("use round_updates=..."),
}
"""Unsupported arguments of ``learn_online``."""
