"""Table of settings at the start of a training: agent, core, and options that differ from their defaults."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from rich.table import Table

from rlxf.attention import TransformerSpec
from rlxf.cli.config_values import default_core
from rlxf.cli.output import print_out
from rlxf.cli.run_options import to_json
from rlxf.training import RunFolder
from rlxf.utils.run_files import CONFIG

ALWAYS = ("seed", "total_timesteps", "updates", "steps")
"""Options that are shown with any value, even their default."""
SIZES = ("width", "layers", "heads")
"""Fields of a core that are shown with any value."""


def print_settings(run: RunFolder, options: Any, agent: Any) -> None:
    """Print the agent of a run, and the options that are required or differ from their default.

    Options whose default depends on the environment or the data are shown with their values. A last line has
    the path of the file with all settings.

    Args:
        run: folder of the run.
        options: dataclass of the options of the command.
        agent: agent of the run.
    """
    table = Table(title=str(run.path), show_header=False)
    table.add_row("agent", describe_agent(run.config["agent"], agent))
    defaults = default_values(options)
    for name, value in run.config.items():
        if name in defaults and (name in ALWAYS or value != defaults[name]):
            table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    default = default_core(options) or TransformerSpec()
    for name, value in core_rows(getattr(agent, "core", None), default):
        table.add_row(f"core.{name}", value)
    print_out(table)
    print_out(f"all settings: {run.path / CONFIG}")


def describe_agent(name: str, agent: Any) -> str:
    """Return name, number of parameters and device of an agent; the latter two if it has weights."""
    policy = getattr(agent, "policy", None)
    if policy is None:
        return name
    count = sum(parameter.numel() for parameter in policy.parameters())
    return f"{name}, {count:,} parameters, device {agent.device}"


def core_rows(core: TransformerSpec | None, default: TransformerSpec) -> Iterator[tuple[str, str]]:
    """Yield name and value of each of `SIZES` of a core, and of fields that differ from a default core."""
    if core is not None:
        for name, value in vars(core).items():
            if name in SIZES or value != getattr(default, name):
                yield name, str(value)


def default_values(options: Any, reference: Any = None) -> dict[str, Any]:
    """Return the default of each option, MISSING for one without; tuples are lists as in ``config.json``.

    Options in nested dataclasses are included, except those of a core.

    Args:
        options: dataclass of options.
        reference: the same dataclass with default values; None for the defaults of its fields.
    """
    defaults: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        default = _default(field) if reference is None else getattr(reference, field.name)
        if isinstance(value, TransformerSpec):
            continue
        if is_dataclass(value):
            defaults |= default_values(value, None if default is MISSING else default)
        else:
            defaults[field.name] = to_json(default)
    return defaults


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
