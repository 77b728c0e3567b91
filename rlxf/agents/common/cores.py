"""Checks of transformers, and of their states, for agents that act token by token."""

from collections.abc import Collection
from typing import Any

from rlxf.attention import TransformerSpec
from rlxf.attention.memory.base import NoMemory
from rlxf.attention.patterns.window import limit_distance
from rlxf.training.json_rules import first_difference

EXAMPLE = "TransformerSpec(memory=XL(128), pattern=Window(129))"
"""Core in messages: the simplest one that acts step by step."""
STATELESS_OPTIONS = ("dropout", "feed_forward_chunk")
"""Options on which states do not depend."""


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
            f"{agent} acts step by step, so its core needs causal=True and cross_attention=False, e.g. "
            f"{EXAMPLE}; got causal={core.causal}, cross_attention={core.cross_attention}"
        )
    if core.memory is None and core.has_attention:
        alone = f" or attention_layers=() for {core.recurrence} alone" if core.has_recurrence else ""
        raise ValueError(f"{agent} needs a core with memory, e.g. memory=XL(128), pattern=Window(129){alone}")
    if core.memory and not core.memory.covers(core.pattern):
        raise ValueError(
            f"{core.pattern} reaches farther back than {core.memory}, so acting and training would differ; "
            f"use pattern={limit_distance(core.pattern, core.memory.length)}"
        )


def check_token_by_token(core: TransformerSpec, agent: str) -> None:
    """Raise ValueError unless the core decides about the exit of each token alone."""
    if not core.depth.exits_token_by_token:
        raise ValueError(
            f"{core.depth} decides exits by the mean over a sequence, but {agent} acts step by step; "
            f"use classifier='multinomial' or 'geometric'"
        )


def check_exportable(core: TransformerSpec) -> None:
    """Raise ValueError if an acting step of a core is not a function of tensors that can be exported."""
    core.depth.check_no_early_exit("export")
    try:
        (core.memory or NoMemory()).check_traceable()
    except ValueError as error:
        raise ValueError(
            f"the agent cannot be exported, because {error}; train one with another memory, e.g. XL(128)"
        ) from error


def check_state_core(given: TransformerSpec, own: TransformerSpec, advice: str) -> None:
    """Check that a state passed to ``predict`` is one of the agent's core.

    Args:
        given: core of the state.
        own: core of the agent.
        advice: what to do instead, for the message.

    Raises:
        ValueError: if the cores differ in an option on which states depend; the message names it.
    """
    if (difference := core_difference(given, own, STATELESS_OPTIONS)) is not None:
        name, value, expected = difference
        raise ValueError(
            f"the state is of another core: {name} is {value} in the state, {expected} in this agent; "
            f"{advice}"
        )


def core_difference(
    one: TransformerSpec, other: TransformerSpec, ignored: Collection[str]
) -> tuple[str, Any, Any] | None:
    """Return the first option in which two specs differ, with both values; None if there is none.

    Args:
        one: first spec.
        other: second spec.
        ignored: names of the options that are not compared.
    """
    if one == other:
        return None
    first, second = (spec.resolved().to_dict() for spec in (one, other))
    names = (name for name in first if name not in ignored)
    differences = (first_difference(name, first[name], second[name]) for name in names)
    return next((difference for difference in differences if difference), None)
