"""Arguments of Stable-Baselines3 that `GTrXLPPO` and its policies do not have."""

from rlxf.agents.common.arguments import UnsupportedArgument

_GSDE_OPTION = (
    "with use_sde, there is a deviation for each feature and action, and no gradient flows into the "
    "features; leave it out"
)
_OWN_BUFFER = UnsupportedArgument(
    "the rollout buffer stores segments with their memory and cannot be replaced; its sizes are n_steps, "
    "segment_length and n_envs",
    neutral=(None, {}),
)
_NO_REPLAY_BUFFER = UnsupportedArgument(
    "GTrXLPPO is on-policy and has no replay buffer; n_steps and n_envs set the size of a rollout"
)
_STORED_SPACE = UnsupportedArgument(
    "the file holds the spaces; pass env=... to use the agent in another environment with the same spaces"
)
_LAYERS = "the transformer replaces {}; use core=gtrxl({})"
_NET_ARCH = _LAYERS.format("the hidden layers", "width=..., layers=..., feed_forward=...")
_SHARED = "actor and critic share the transformer; leave it out"

_REPLAY_BUFFER_ARGUMENTS = (
    *("buffer_size", "learning_starts", "replay_buffer_class", "replay_buffer_kwargs"),
    "optimize_memory_usage",
)
_NO_TARGET_NETWORK = UnsupportedArgument("GTrXLPPO is on-policy and has no target network; leave it out")
_EXPLORATION = UnsupportedArgument("GTrXLPPO explores by sampling actions; use ent_coef, or use_sde for Box")

PPO_SB3_ARGUMENTS = {
    **dict.fromkeys(("rollout_buffer_class", "rollout_buffer_kwargs"), _OWN_BUFFER),
    "lr_schedule": UnsupportedArgument("use learning_rate, which may be a schedule"),
    **dict.fromkeys(("observation_space", "action_space"), _STORED_SPACE),
    "net_arch": UnsupportedArgument(_NET_ARCH),
    **dict.fromkeys(_REPLAY_BUFFER_ARGUMENTS, _NO_REPLAY_BUFFER),
    **dict.fromkeys(("tau", "target_update_interval"), _NO_TARGET_NETWORK),
    "train_freq": UnsupportedArgument("use n_steps, the steps in each environment between two updates"),
    "gradient_steps": UnsupportedArgument("use n_epochs and batch_size"),
    **dict.fromkeys(("action_noise", "exploration_fraction"), _EXPLORATION),
    **dict.fromkeys(("exploration_initial_eps", "exploration_final_eps"), _EXPLORATION),
}
"""Unsupported arguments of the constructor of `GTrXLPPO`, among them those of off-policy agents."""

SB3_POLICY_ARGUMENTS = {
    "net_arch": UnsupportedArgument(_NET_ARCH, neutral=(None,)),
    "activation_fn": UnsupportedArgument(
        "the activation belongs to the transformer; use core=TransformerSpec(activation='gelu', ...)"
    ),
    "ortho_init": UnsupportedArgument(
        "weights outside of the transformer are always orthogonal; leave it out", neutral=(True,)
    ),
    "full_std": UnsupportedArgument(_GSDE_OPTION, neutral=(True,)),
    "use_expln": UnsupportedArgument(
        "deviations of use_sde are exponentials; leave it out", neutral=(False,)
    ),
    "squash_output": UnsupportedArgument(
        "Box actions are clipped to their bounds, not squashed; leave it out", neutral=(False, None)
    ),
    "dist_kwargs": UnsupportedArgument(_GSDE_OPTION, neutral=(None, {})),
    "share_features_extractor": UnsupportedArgument(
        "actor and critic share the features extractor and the transformer; leave it out", neutral=(True,)
    ),
    "lstm_hidden_size": UnsupportedArgument(_LAYERS.format("the LSTM", "width=...")),
    "n_lstm_layers": UnsupportedArgument(_LAYERS.format("the LSTM", "layers=...")),
    "shared_lstm": UnsupportedArgument(_SHARED, neutral=(True,)),
    "enable_critic_lstm": UnsupportedArgument(_SHARED, neutral=(False,)),
    "lstm_kwargs": UnsupportedArgument(
        "there is no LSTM; use core=gtrxl(...) or core=TransformerSpec(...)", neutral=(None, {})
    ),
}
"""Unsupported arguments of the policies of `GTrXLPPO`, i.e. entries of ``policy_kwargs`` in SB3."""
