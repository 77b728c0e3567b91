"""Checks of transformers for agents that act token by token with a state."""

from rlxf.attention import TransformerSpec


def check_state(core: TransformerSpec, agent: str) -> None:
    """Check that acting token by token with a state of fixed size equals training.

    Args:
        core: spec of the transformer.
        agent: name of the agent, for messages.

    Raises:
        ValueError: if the core is not causal, has cross-attention, has attention without a memory, or attends
            to tokens that its memory does not hold.
    """
    if not core.causal or core.cross_attention:
        raise ValueError(
            f"{agent} acts step by step, so its core needs causal=True and cross_attention=False"
        )
    if core.memory is None and core.has_attention:
        raise ValueError(f"{agent} needs a core with memory, e.g. memory=XL(128), pattern=Window(129)")
    if core.memory and not core.memory.covers(core.pattern):
        raise ValueError(
            f"{core.pattern} reaches farther back than {core.memory}, so acting and training would differ; "
            f"use pattern={core.pattern.limit_distance(core.memory.length)}"
        )


def check_token_by_token(core: TransformerSpec, agent: str) -> None:
    """Raise ValueError unless the core decides about the exit of each token alone."""
    if not core.depth.exits_token_by_token:
        raise ValueError(
            f"{core.depth} decides exits by the mean over a sequence, but {agent} acts step by step; "
            f"use classifier='multinomial' or 'geometric'"
        )
