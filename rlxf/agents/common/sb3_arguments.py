"""Arguments of Stable-Baselines3 that the agents do not accept, and what to use instead."""

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
_NO_EXPLORATION = UnsupportedArgument(
    "the agent explores by sampling its actions; use objective=MaximumEntropy(...)", neutral=(None,)
)
_ENTROPY = UnsupportedArgument("only objective=MaximumEntropy(...) has an entropy coefficient")

OFFLINE_SB3_ARGUMENTS = {
    "policy": _NETWORK,
    "policy_kwargs": _NETWORK,
    "net_arch": _NETWORK,
    "buffer_size": _use_learn_online("replay_episodes=..."),
    "n_envs": _use_learn_online("n_envs=..."),
    "n_steps": _use_learn_online("round_steps=..."),
    "train_freq": _use_learn_online("round_steps=..."),
    "gradient_steps": _use_learn_online("round_updates=..."),
    "n_epochs": _use_learn_online("round_updates=..."),
    "learning_starts": UnsupportedArgument(
        "the agent learns from the dataset from the beginning, and the replay of learn_online starts with it"
    ),
    "replay_buffer_class": _REPLAY,
    "replay_buffer_kwargs": _REPLAY,
    "optimize_memory_usage": _REPLAY,
    "gamma": _RETURNS,
    "gae_lambda": _RETURNS,
    "tau": UnsupportedArgument("there is no target network; leave it out"),
    "target_update_interval": UnsupportedArgument("there is no target network; leave it out"),
    "ent_coef": _ENTROPY,
    "target_entropy": _ENTROPY,
    "action_noise": _NO_EXPLORATION,
    "use_sde": UnsupportedArgument(_NO_EXPLORATION.advice, neutral=(False,)),
    "total_timesteps": UnsupportedArgument("pass the number of updates to learn(steps=...)"),
    "observation_space": UnsupportedArgument("the spaces are those of the dataset; leave it out"),
    "action_space": UnsupportedArgument("the spaces are those of the dataset; leave it out"),
    "lr_schedule": UnsupportedArgument("use learning_rate, which may be a schedule"),
}
"""Unsupported arguments of the constructors."""

SB3_LEARN_ARGUMENTS = {
    "total_timesteps": UnsupportedArgument("it counts updates, not steps of an environment; use steps=...")
}
"""Unsupported arguments of ``learn``."""

SB3_ONLINE_ARGUMENTS = {
    "total_timesteps": UnsupportedArgument("use steps=..., which counts steps over all environments"),
    "buffer_size": UnsupportedArgument("use replay_episodes=..."),
    "train_freq": UnsupportedArgument("use round_steps=..."),
    "gradient_steps": UnsupportedArgument("use round_updates=..."),
}
"""Unsupported arguments of ``learn_online``."""


_NO_GSDE = UnsupportedArgument(
    "state-dependent exploration (gSDE) is not offered; Box actions are drawn from a Gaussian, whose initial "
    "deviation is policy_kwargs=dict(log_std_init=...)",
    neutral=(False,),
)
_OWN_BUFFER = UnsupportedArgument(
    "the rollout buffer stores segments with their memory and cannot be replaced; its sizes are n_steps, "
    "segment_length and n_envs",
    neutral=(None, {}),
)
_STORED_SPACE = UnsupportedArgument(
    "the file holds the spaces; pass env=... to use the agent in another environment with the same spaces"
)
_LAYERS = "the transformer replaces {}; use core=gtrxl({})"
_ACTIVATION = UnsupportedArgument(
    "the activation belongs to the transformer; use core=TransformerSpec(activation='gelu', ...)"
)
_CLIPPED = UnsupportedArgument(
    "Box actions are clipped to their bounds, not squashed; leave it out", neutral=(False, None)
)
_LSTM = UnsupportedArgument(
    "there is no LSTM; use core=gtrxl(...) or core=TransformerSpec(...)", neutral=(None, {})
)

PPO_SB3_ARGUMENTS = {
    "use_sde": _NO_GSDE,
    "sde_sample_freq": UnsupportedArgument(_NO_GSDE.advice, neutral=(-1,)),
    "rollout_buffer_class": _OWN_BUFFER,
    "rollout_buffer_kwargs": _OWN_BUFFER,
    "lr_schedule": UnsupportedArgument("use learning_rate, which may be a schedule"),
    "observation_space": _STORED_SPACE,
    "action_space": _STORED_SPACE,
    "net_arch": UnsupportedArgument(
        _LAYERS.format("the hidden layers", "width=..., layers=..., feed_forward=...")
    ),
}
"""Unsupported arguments of the constructors."""

SB3_POLICY_ARGUMENTS = {
    "net_arch": UnsupportedArgument(
        _LAYERS.format("the hidden layers", "width=..., layers=..., feed_forward=..."), neutral=(None,)
    ),
    "activation_fn": _ACTIVATION,
    "ortho_init": UnsupportedArgument(
        "weights outside of the transformer are always orthogonal; leave it out", neutral=(True,)
    ),
    "use_sde": _NO_GSDE,
    "full_std": UnsupportedArgument(_NO_GSDE.advice, neutral=(True,)),
    "use_expln": UnsupportedArgument(_NO_GSDE.advice, neutral=(False,)),
    "squash_output": _CLIPPED,
    "dist_kwargs": UnsupportedArgument(_NO_GSDE.advice, neutral=(None, {})),
    "share_features_extractor": UnsupportedArgument(
        "actor and critic share the features extractor and the transformer; leave it out", neutral=(True,)
    ),
    "lstm_hidden_size": UnsupportedArgument(_LAYERS.format("the LSTM", "width=...")),
    "n_lstm_layers": UnsupportedArgument(_LAYERS.format("the LSTM", "layers=...")),
    "shared_lstm": UnsupportedArgument(
        "actor and critic share the transformer; leave it out", neutral=(True,)
    ),
    "enable_critic_lstm": UnsupportedArgument(
        "actor and critic share the transformer; leave it out", neutral=(False,)
    ),
    "lstm_kwargs": _LSTM,
}
"""Unsupported arguments of the policies, i.e. entries of ``policy_kwargs`` in SB3."""
