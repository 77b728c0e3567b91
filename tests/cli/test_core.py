"""The options of the transformer."""

import pytest

from rlxf.agents.gtrxl import gtrxl
from rlxf.attention.techniques import TECHNIQUES
from rlxf.cli.core import Core
from rlxf.cli.program import parse


def test_the_default_core_is_the_agents():
    assert Core().spec() == gtrxl()


@pytest.mark.parametrize(
    ("axis", "name"), [(axis, name) for axis in ("residual", "position") for name in TECHNIQUES[axis]]
)
def test_every_technique_can_be_named(axis, name):
    command = parse(["train", "gtrxl", "--env", "x", f"{axis}:{name}"])
    assert getattr(command.core.spec(), axis) == TECHNIQUES[axis][name]()


def test_the_options_of_a_technique_arrive():
    spec = parse(
        ["train", "gtrxl", "--env", "x", "residual:GRUGate", "--residual.bias", "1.5", "position:none"]
    )
    assert spec.core.spec().residual.bias == 1.5
    assert spec.core.spec().position is None
