"""Arguments of SB3's PPO and RecurrentPPO that `GTrXLPPO` and its policies do not support."""

from rlxf.agents.arguments import Refused

_NO_GSDE = Refused(
    "state-dependent exploration (gSDE) is not offered; Box actions are drawn from a Gaussian, whose initial "
    "deviation is policy_kwargs=dict(log_std_init=...)",
    neutral=(False,),
)
_OWN_BUFFER = Refused(
    "the rollout buffer stores segments with their memory and cannot be replaced; its sizes are n_steps, "
    "segment_length and n_envs",
    neutral=(None, {}),
)
_STORED_SPACE = Refused(
    "the file holds the spaces; pass env=... to use the agent in another environment with the same spaces"
)
_LAYERS = "the transformer replaces {}; use core=gtrxl({})"
_ACTIVATION = Refused(
    "the activation belongs to the transformer; use core=TransformerSpec(activation='gelu', ...)"
)
_CLIPPED = Refused(
    "Box actions are clipped to their bounds, not squashed; leave it out", neutral=(False, None)
)
_LSTM = Refused("there is no LSTM; use core=gtrxl(...) or core=TransformerSpec(...)", neutral=(None, {}))

SB3_ARGUMENTS = {
    "use_sde": _NO_GSDE,
    "sde_sample_freq": Refused(_NO_GSDE.advice, neutral=(-1,)),
    "rollout_buffer_class": _OWN_BUFFER,
    "rollout_buffer_kwargs": _OWN_BUFFER,
    "lr_schedule": Refused("use learning_rate, which may be a schedule"),
    "observation_space": _STORED_SPACE,
    "action_space": _STORED_SPACE,
    "net_arch": Refused(_LAYERS.format("the hidden layers", "width=..., layers=..., feed_forward=...")),
}
"""Unsupported arguments of the constructors."""

SB3_POLICY_ARGUMENTS = {
    "net_arch": Refused(
        _LAYERS.format("the hidden layers", "width=..., layers=..., feed_forward=..."), neutral=(None,)
    ),
    "activation_fn": _ACTIVATION,
    "ortho_init": Refused(
        "weights outside of the transformer are always orthogonal; leave it out", neutral=(True,)
    ),
    "use_sde": _NO_GSDE,
    "full_std": Refused(_NO_GSDE.advice, neutral=(True,)),
    "use_expln": Refused(_NO_GSDE.advice, neutral=(False,)),
    "squash_output": _CLIPPED,
    "dist_kwargs": Refused(_NO_GSDE.advice, neutral=(None, {})),
    "share_features_extractor": Refused(
        "actor and critic share the features extractor and the transformer; leave it out", neutral=(True,)
    ),
    "lstm_hidden_size": Refused(_LAYERS.format("the LSTM", "width=...")),
    "n_lstm_layers": Refused(_LAYERS.format("the LSTM", "layers=...")),
    "shared_lstm": Refused("actor and critic share the transformer; leave it out", neutral=(True,)),
    "enable_critic_lstm": Refused("actor and critic share the transformer; leave it out", neutral=(False,)),
    "lstm_kwargs": _LSTM,
}
"""Unsupported arguments of the policies, i.e. entries of ``policy_kwargs`` in SB3."""
