"""Arguments of Stable-Baselines3 that offline agents do not have."""

from rlxf.agents.common.arguments import UnsupportedArgument


def _use_learn_online(use: str) -> UnsupportedArgument:
    return UnsupportedArgument(
        f"the agent learns from a dataset; to continue in an environment use learn_online({use})"
    )


_NETWORK = UnsupportedArgument(
    "the network is a transformer; use core=decision_transformer(...)", neutral=(None, {})
)
_REPLAY = UnsupportedArgument(
    "batches are drawn from the dataset, and by learn_online from its replay of replay_episodes=... episodes",
    neutral=(None, {}, False),
)
_RETURNS = UnsupportedArgument(
    "returns are sums of rewards without discount; to scale them use return_scale=..."
)
_TARGET_RATE = UnsupportedArgument("only objective=QRegularized(target_rate=...) has target networks")
_NO_EXPLORATION = "the agent explores by sampling its actions; use objective=MaximumEntropy(...)"
_ENTROPY = UnsupportedArgument("only objective=MaximumEntropy(...) has an entropy coefficient")
_DATASET_SPACE = UnsupportedArgument("the spaces are those of the dataset; leave it out")
_SCHEDULE = UnsupportedArgument("use learning_rate, which may be a schedule")

OFFLINE_SB3_ARGUMENTS = {
    **dict.fromkeys(("policy", "policy_kwargs", "net_arch"), _NETWORK),
    "buffer_size": _use_learn_online("replay_episodes=..."),
    "n_envs": _use_learn_online("n_envs=..."),
    **dict.fromkeys(("n_steps", "train_freq"), _use_learn_online("round_steps=...")),
    **dict.fromkeys(("gradient_steps", "n_epochs"), _use_learn_online("round_updates=...")),
    "learning_starts": UnsupportedArgument(
        "the agent learns from the dataset from the beginning, and the replay of learn_online starts with it"
    ),
    **dict.fromkeys(("replay_buffer_class", "replay_buffer_kwargs", "optimize_memory_usage"), _REPLAY),
    **dict.fromkeys(("gamma", "gae_lambda"), _RETURNS),
    **dict.fromkeys(("tau", "target_update_interval"), _TARGET_RATE),
    **dict.fromkeys(("ent_coef", "target_entropy"), _ENTROPY),
    "action_noise": UnsupportedArgument(
        f"{_NO_EXPLORATION}, or objective=QRegularized(...) and learn_online(exploration_noise=...)",
        neutral=(None,),
    ),
    "use_sde": UnsupportedArgument(_NO_EXPLORATION, neutral=(False,)),
    "total_timesteps": UnsupportedArgument("pass the number of updates to learn(steps=...)"),
    **dict.fromkeys(("observation_space", "action_space"), _DATASET_SPACE),
    "lr_schedule": _SCHEDULE,
}
"""Unsupported arguments of the constructors of `DecisionTransformer` and `MaskedPretraining`."""

MLP_SB3_ARGUMENTS = OFFLINE_SB3_ARGUMENTS | {
    **dict.fromkeys(
        ("policy", "policy_kwargs", "net_arch"),
        UnsupportedArgument("the network has the hidden layers hidden_sizes=(...)", neutral=(None, {})),
    ),
    **dict.fromkeys(
        ("buffer_size", "n_envs", "n_steps", "train_freq", "gradient_steps", "n_epochs", "learning_starts"),
        UnsupportedArgument("the agent learns from a dataset only, without environments; leave it out"),
    ),
    **dict.fromkeys(
        ("replay_buffer_class", "replay_buffer_kwargs", "optimize_memory_usage"),
        UnsupportedArgument("batches are drawn from the dataset; leave it out", neutral=(None, {}, False)),
    ),
    **dict.fromkeys(
        ("gamma", "gae_lambda"),
        UnsupportedArgument("returns are sums of rewards without discount; leave it out"),
    ),
    **dict.fromkeys(
        ("tau", "target_update_interval"),
        UnsupportedArgument("there is no target network; leave it out"),
    ),
    "action_noise": UnsupportedArgument(_NO_EXPLORATION, neutral=(None,)),
}
"""Unsupported arguments of the constructors of `BehaviorCloning` and `ReturnConditionedMLP`."""

SB3_LEARN_ARGUMENTS = {
    "total_timesteps": UnsupportedArgument("it counts updates, not steps of an environment; use steps=...")
}
"""Unsupported arguments of the method ``learn`` of all offline agents."""

SB3_ONLINE_ARGUMENTS = {
    "total_timesteps": UnsupportedArgument("use steps=..., which counts steps over all environments"),
    "buffer_size": UnsupportedArgument("use replay_episodes=..."),
    "train_freq": UnsupportedArgument("use round_steps=..."),
    "gradient_steps": UnsupportedArgument("use round_updates=..."),
    "action_noise": UnsupportedArgument("use exploration_noise=..., a standard deviation", neutral=(None,)),
}
"""Unsupported arguments of `DecisionTransformer.learn_online`."""
