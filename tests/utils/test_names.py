"""Proposals for unknown names."""

import pytest

from rlxf.utils.names import MAX_LENGTH, choose_one_of, did_you_mean, plain_name, short_repr, similar_name

OPTIONS = ["total-timesteps", "core.memory.length", "core.position.base", "n-envs"]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("total_timestep", "total-timesteps"),
        ("TOTAL-TIMESTEPS", "total-timesteps"),
        ("core.position.bas", "core.position.base"),
        ("core.memory.lenght", "core.memory.length"),
        ("memory.base", "core.position.base"),
        ("core.memory.zzz", None),
        ("zzz", None),
        ("", None),
    ],
)
def test_the_most_similar_name_is_proposed_and_none_if_none_is_similar(name, near):
    assert similar_name(name, OPTIONS) == near
    assert similar_name(name, reversed(OPTIONS)) == near


@pytest.mark.parametrize(("name", "near"), [("lgo", "log"), ("core.lgo", "core.log"), ("lwo", "low")])
def test_of_equally_similar_names_the_one_with_the_same_letters_is_proposed(name, near):
    known = [name.replace(name[-3:], each) for each in ("low", "log", "lag")]
    assert similar_name(name, known) == near
    assert similar_name(name, reversed(known)) == near


def test_without_known_names_nothing_is_proposed():
    assert similar_name("name", []) is None
    assert did_you_mean("name", []) == ""
    assert did_you_mean("name", [], "there are none") == "; there are none"


def test_no_proposal_is_searched_for_a_long_name():
    name = "n" * (MAX_LENGTH + 1)
    assert similar_name(name, [name + "s"]) is None
    assert similar_name(name[1:], [name]) == name


def test_messages_continue_with_a_semicolon():
    assert did_you_mean("n_env", OPTIONS, "see: --help") == "; did you mean n-envs?"
    assert choose_one_of("rop", ["RoPE", "ALiBi"]) == "; did you mean RoPE? Choose one of RoPE, ALiBi"
    assert choose_one_of("zzz", ["RoPE", "ALiBi"]) == "; choose one of RoPE, ALiBi"


def test_names_are_compared_without_case_dashes_and_underscores():
    assert plain_name("Gated-Delta_Net") == plain_name("GatedDeltaNet") == "gateddeltanet"


def test_long_values_are_shortened_in_messages():
    assert short_repr("rlxf/StitchingMazeDiscrete-v0") == "'rlxf/StitchingMazeDiscrete-v0'"
    assert short_repr(None) == "None"
    assert len(short_repr("x" * 100_000)) <= MAX_LENGTH
    assert len(short_repr([["x" * 100_000] * 100] * 100)) < 50 * MAX_LENGTH
