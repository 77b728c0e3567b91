"""Settings files of the commands that train: TOML files, and the ``config.json`` of earlier runs.

A settings file becomes words of the command line, which stand before those of the user. Of an option that is
given twice, the last one counts, so the options of the user have precedence.
"""

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import Any

from rlxf.attention import TransformerSpec
from rlxf.attention.registry import TECHNIQUES, technique_to_json
from rlxf.cli.config_values import (
    CHOICES,
    SettingsError,
    check_settings,
    default_core,
    known_options,
    technique_name,
)
from rlxf.cli.env_options import check_curriculum_trust
from rlxf.cli.options import given_lists, given_options, with_dashes
from rlxf.cli.run_options import NOT_SAVED, check_config_types, options_from_config
from rlxf.cli.runs import PRETRAINING, TRAINING_COMMANDS, check_weights_trust
from rlxf.cli.spec_options import bound_to_memory, given_techniques
from rlxf.cli.training_command import TrainingCommand
from rlxf.experiments.plan import COMMANDS as EXPERIMENT_COMMANDS
from rlxf.training import RunFolder
from rlxf.training.strict_json import dump_json, load_json
from rlxf.utils.names import did_you_mean
from rlxf.utils.run_files import BASELINE, CONFIG, PROGRAM, TEACHER
from rlxf.utils.toml import MAX_PARTS, line_of, loads, read_text

JSON_OPTIONS = ("env_kwargs", "curriculum", "arguments", *CHOICES)
"""Options whose tables are one JSON text."""
NUMBER = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
"""Pattern of a negative number; other words with a leading dash are options."""
SETTINGS_OF_DATA = ("env", "env_kwargs", "trust_data", "target_returns", "return_scale", "episode_length")
"""Settings in a ``config.json`` that are those of its datasets, or depend on them."""
TOML_ADVICE = "write the settings as TOML"
"""Advice in messages about a ``config.json`` whose settings cannot be read."""
Settings = Mapping[str, Any]


def to_arguments(settings: Settings) -> list[str]:
    """Return the words of the command line for a table of settings.

    Keys are option names with dashes or underscores. Nested tables are joined by dots. A technique is a name,
    or a table with the key ``name`` as in `TransformerSpec.to_dict`. Booleans become ``--flag`` or
    ``--no-flag``, lists several words, None the word ``None``, and tables of JSON options one JSON text.

    Raises:
        SettingsError: if a key occurs in two spellings, a text looks like an option, or a value has another
            type.
    """
    return [word for name, value in flat_options(settings).items() for word in _words(name, value)]


def flat_options(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Return the settings by full name, e.g. ``core.memory.length``, with underscores in names.

    Raises:
        SettingsError: if a name occurs twice.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        for name, each in _entries(prefix + key.replace("-", "_"), value).items():
            if name in flat:
                raise SettingsError(name, "is set twice, in two spellings: keep one")
            flat[name] = each
    return flat


def _entries(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or name in JSON_OPTIONS:
        return {name: value}
    axis = name.removeprefix("core.")
    if axis == name or axis not in TECHNIQUES or "name" not in value:
        return flat_options(value, f"{name}.") if value or name.startswith("core") else {name: value}
    if any(isinstance(each, Mapping) for each in value.values()):  # a combination of techniques
        return {name: _json_text(name, value)}
    options = {key: each for key, each in value.items() if key != "name"}
    return {name: value["name"]} | flat_options(options, f"{name}.")


def _words(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        group, dot, last = option.rpartition(".")
        return [f"--{option}" if value else f"--{group}{dot}no-{last}"]
    if isinstance(value, Mapping):
        return [f"--{option}", _json_text(name, value)]
    values = value if isinstance(value, list | tuple) else [value]
    return [f"--{option}", *(_word(name, each) for each in values)]


def _json_text(name: str, value: Mapping[str, Any]) -> str:
    try:
        return dump_json(dict(value)).decode()
    except (TypeError, ValueError) as error:
        reason = f"must contain texts, finite numbers, booleans, lists and tables, got {reprlib.repr(value)}"
        raise SettingsError(name, reason) from error


def _word(name: str, value: Any) -> str:
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float)):
        raise SettingsError(name, f"must contain texts or numbers, got {reprlib.repr(value)}")
    if isinstance(value, str) and value.startswith("-") and not NUMBER.fullmatch(value):
        raise SettingsError(name, f"must not begin with a dash, got {reprlib.repr(value)}")
    return str(value)


def file_arguments(path: Path, words: str, command: type[TrainingCommand], args: Sequence[str]) -> list[str]:
    """Return the words of the command line for a settings file, without settings that ``args`` override.

    Args:
        path: a TOML file, the ``config.json`` of a run, or the folder of a run.
        words: words of the command, e.g. "train dt".
        command: dataclass of the command.
        args: words of the user after the words of the command.

    Raises:
        ValueError, TypeError, OSError: if the file cannot be read, a setting is invalid, or the file is that
            of a run that needs trust.
    """
    path = RunFolder.reopen(path).path / CONFIG if path.is_dir() else path
    text = _read(path)
    try:
        if text.lstrip().startswith("{"):
            run = RunFolder(path.parent, _read_json(text))
            _check_agent(run.config, words, path)
            return to_arguments(run_settings(run, path, command, args))
        return to_arguments(_toml_settings(text, words, command, args))
    except SettingsError as error:
        line = None if text.lstrip().startswith("{") else line_of(text, error.name)
        raise ValueError(f"{path}{'' if line is None else f', line {line}'}: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: use at most {MAX_PARTS} levels") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _read(path: Path) -> str:
    try:
        return read_text(path, "settings file")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}: check the path") from None
    except ValueError as error:
        raise ValueError(f"{error}: give a TOML file, or the folder of a run") from None


def _toml_settings(
    text: str, words: str, command: type[TrainingCommand], args: Sequence[str]
) -> dict[str, Any]:
    """Return the settings in a TOML file that are in effect with the options of the user."""
    try:
        flat = flat_options(loads(text))
    except TOMLDecodeError as error:
        raise ValueError(f"it is not valid TOML: {error}") from error
    core = _core_of_settings(flat, command, args)
    check_settings(flat, command, core, f"see: rlxf {words} --help")
    return _without_overridden(flat, command, core, args)


def _core_of_settings(
    flat: Settings, command: type[TrainingCommand], args: Sequence[str]
) -> TransformerSpec | None:
    """Return the default core with the tuned settings in effect; None for a command without a core."""
    named = given_options(args, "settings").get("settings", flat.get("settings"))
    return default_core(command, ["--settings", str(named)])


def _read_json(text: str) -> Any:
    try:
        return load_json(text.encode())
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error


def _check_agent(config: Any, words: str, file: Path) -> None:
    """Raise ValueError unless a JSON value is the configuration of a run of this command."""
    if not isinstance(config, dict) or not isinstance(agent := config.get("agent"), str):
        raise ValueError("it names no agent: give the config.json of a run, or write settings as TOML")
    if TEACHER in config:
        raise ValueError(
            f"it belongs to a run of rlxf distill, not of rlxf {words}: use rlxf distill TEACHER"
        )
    if config.get(PROGRAM) == BASELINE and f"baseline {agent}" in EXPERIMENT_COMMANDS:
        raise ValueError(
            f"it belongs to a run of {BASELINE} {agent}, whose options rlxf {words} cannot read: "
            f"{TOML_ADVICE}"
        )
    if PROGRAM in config or agent not in TRAINING_COMMANDS:
        raise ValueError(
            f"it belongs to another program with the agent {reprlib.repr(agent)}, not to rlxf {words}: "
            f"{TOML_ADVICE}"
        )
    if (command := TRAINING_COMMANDS[agent]) != words:
        raise ValueError(
            f"it belongs to a run of rlxf {command}, not of rlxf {words}: use rlxf {command} --config {file}"
        )


def run_settings(
    run: RunFolder, file: Path, command: type[TrainingCommand], args: Sequence[str]
) -> dict[str, Any]:
    """Return the settings of a run that are in effect with the options of the user.

    The run is checked as by ``rlxf resume``: it may be untrusted. Its tracker is left out, and so
    are `SETTINGS_OF_DATA` if the user gives other datasets.
    """
    known = set(known_options(command)) - set(NOT_SAVED)
    options = _options_of_run(run, file, command, known)
    flat = {name: value for name, value in run.config.items() if name in known - {"track"}}
    core = _core_of_settings(flat, command, args)
    if core is not None:
        _check_core(options.core, command)
        flat |= flat_options({"core": _core_settings(options.core, core)})
    if given_lists(args, "dataset").get("dataset", flat.get("dataset")) != flat.get("dataset"):
        flat = {name: value for name, value in flat.items() if name not in SETTINGS_OF_DATA}
    flat = _without_overridden(flat, command, core, args)
    if _flag(args, "trust") is not True:
        _check_trust(run, flat, command, args)
    return flat


def _options_of_run(
    run: RunFolder, file: Path, command: type[TrainingCommand], known: Collection[str]
) -> TrainingCommand:
    """Return the options of a run after their checks; ``known`` are the names of the saved options."""
    check_config_types(command, run.config, file)
    if unknown := sorted(name for name in run.config if name not in {*known, "agent", "core"}):
        raise SettingsError(
            unknown[0], f"is unknown to this version of rlxf{did_you_mean(unknown[0], known)}"
        )
    try:
        options = options_from_config(command, run.config)
    except KeyError as error:
        raise ValueError(
            f"{error} is missing; the file was changed, or written by another version"
        ) from error
    options.check_memory(run)
    return options


def _check_core(core: TransformerSpec, command: type[TrainingCommand]) -> None:
    """Raise ValueError unless a core is possible in the agents of a command."""
    if core.cross_attention or not (core.causal or command.agent_name == PRETRAINING):
        raise ValueError("core must be causal, without cross_attention: the agent cannot act otherwise")


def _check_trust(run: RunFolder, flat: Settings, command: type[TrainingCommand], args: Sequence[str]) -> None:
    """Raise ValueError if settings of a run need trust.

    An environment without arguments of the file, and a number of workers, need none if the user gives them.
    """
    kwargs, given = flat.get("env_kwargs", {}), given_options(args, "env").get("env")
    check_curriculum_trust({"env": given, **flat})
    own: dict[str, Any] = {"curriculum": {}}
    own |= {"workers": 0} if given_options(args, "workers") else {}
    described = {"env": flat.get("env", given if kwargs else None), "env_kwargs": kwargs}
    command.check_trust(RunFolder(run.path, {**flat, **described, **own}))
    if not given_options(args, "pretrained"):
        check_weights_trust(run)


def _core_settings(core: TransformerSpec, default: TransformerSpec) -> dict[str, Any]:
    """Return the settings of a core without techniques that are those of the default.

    They then adapt to other options of the user as defaults do.
    """
    settings = {name: getattr(core, name) for name in core.to_dict() if name not in TECHNIQUES}
    del settings["causal"], settings["cross_attention"]
    defaults = {axis: getattr(default, axis) for axis in TECHNIQUES}
    defaults["pattern"] = bound_to_memory(core.memory, None)
    changed = {axis: getattr(core, axis) for axis in TECHNIQUES if getattr(core, axis) != defaults[axis]}
    return settings | {axis: technique_to_json(technique) for axis, technique in changed.items()}


def _flag(args: Sequence[str], name: str) -> bool | None:
    """Return the value of the last ``--NAME`` or ``--no-NAME``; None if neither is given."""
    values = {f"--{name}": True, f"--no-{name}": False}
    words = map(with_dashes, reversed(args))
    return next((values[word] for word in words if word in values), None)


def _without_overridden(
    flat: Settings, command: type[TrainingCommand], core: TransformerSpec | None, args: Sequence[str]
) -> dict[str, Any]:
    """Return the settings without those that the options of the user replace.

    A technique of the user replaces that of the file with its options, unless it is the same one. Another
    environment replaces the arguments of the environment and its curriculum.
    """
    replaced = [*command.replaced_options(args)]
    for axis, name in given_techniques(args).items():
        if core is None or name != technique_name(axis, flat, core):
            replaced.append(f"core.{axis}")
    given = given_options(args, "env", "env-kwargs", "curriculum")
    if "env" in flat and given.get("env", flat["env"]) != flat["env"]:
        replaced += ["env_kwargs", "curriculum"]
    replaced += [name.replace("-", "_") for name in given]
    replaced += [] if _flag(args, "trust-data") is None else ["trust_data"]
    prefixes = tuple(f"{name}." for name in replaced)
    return {name: value for name, value in flat.items() if not f"{name}.".startswith(prefixes)}
