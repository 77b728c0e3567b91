"""Tests of the options in ``config.json``: a run is resumed with the options that it was started with."""

import shlex
from pathlib import Path

import pytest

from rlxf.cli.entry_point import parse
from rlxf.cli.run_options import NOT_SAVED, check_config_types, options_from_config, options_to_config
from rlxf.training.strict_json import dump_json, load_json

COMMANDS = [
    "train gtrxl --env x --env-kwargs '{\"length\": 3}' --pretrained runs/a --workers 2 --quiet",
    "train dt --dataset a b --target-returns 3 1 --pretrained runs/a --settings odt --core.width 32",
    "pretrain --dataset a --core.residual add --core.pattern 'window & strided' --run new",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_options_survive_the_file(words):
    options = parse(shlex.split(words))
    config = load_json(dump_json(options_to_config(options)))
    assert not set(config) & set(NOT_SAVED)
    check_config_types(type(options), config, Path("config.json"))
    given = {"run": options.run, "progress_bar": options.progress_bar, "quiet": options.quiet}
    assert options_from_config(type(options), config, **given) == options


@pytest.mark.parametrize("words", COMMANDS)
def test_a_missing_option_is_an_error(words):
    options = parse(shlex.split(words))
    config = options_to_config(options)
    for name in ("seed", "core", "learning_rate"):
        with pytest.raises(KeyError, match=name):
            options_from_config(type(options), {key: config[key] for key in config if key != name}, run=None)
