"""Arguments of Stable-Baselines3 that agents with a multilayer perceptron do not have."""

from rlxf.agents.common.arguments import UnsupportedArgument
from rlxf.agents.offline.sb3_arguments import NO_EXPLORATION, OFFLINE_SB3_ARGUMENTS

_NO_TARGET = UnsupportedArgument("there is no target network; leave it out")
_NO_ENV = UnsupportedArgument("the agent learns from a dataset only, without environments; leave it out")
MLP_SB3_ARGUMENTS = OFFLINE_SB3_ARGUMENTS | {
    **dict.fromkeys(
        ("policy", "policy_kwargs", "net_arch"),
        UnsupportedArgument("the network has the hidden layers hidden_sizes=(...)", neutral=(None, {})),
    ),
    **dict.fromkeys(("buffer_size", "n_envs", "n_steps", "train_freq"), _NO_ENV),
    **dict.fromkeys(("gradient_steps", "n_epochs", "learning_starts"), _NO_ENV),
    **dict.fromkeys(
        ("replay_buffer_class", "replay_buffer_kwargs", "optimize_memory_usage"),
        UnsupportedArgument("batches are drawn from the dataset; leave it out", neutral=(None, {}, False)),
    ),
    **dict.fromkeys(
        ("gamma", "gae_lambda"),
        UnsupportedArgument("returns are sums of rewards without discount; leave it out"),
    ),
    **dict.fromkeys(("tau", "target_update_interval"), _NO_TARGET),
    "action_noise": UnsupportedArgument(NO_EXPLORATION, neutral=(None,)),
}
"""Unsupported arguments of the constructors of `BehaviorCloning` and `ReturnConditionedMLP`."""
