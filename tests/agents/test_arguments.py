"""Unknown and unsupported keywords."""

import inspect

import pytest

from rlxf.agents.common.arguments import UnsupportedArgument, load_settings, reject_unknown_arguments


class Learner:
    @reject_unknown_arguments({"use_sde": UnsupportedArgument("use noise instead", neutral=(False,))})
    def __init__(self, width: int, noise: float = 0.5, _hidden: bool = True):
        self.width, self.noise = width, noise


def test_signature_is_preserved():
    assert list(inspect.signature(Learner).parameters) == ["width", "noise", "_hidden"]


def test_rejected_keyword_names_alternative():
    with pytest.raises(TypeError, match=r"^Learner takes no argument 'use_sde': use noise instead$"):
        Learner(3, use_sde=True)


def test_neutral_value_is_accepted():
    assert Learner(3, use_sde=False).width == 3


def test_typo_names_most_similar_parameter():
    with pytest.raises(TypeError, match=r"^Learner takes no argument 'nois'; did you mean 'noise'\?$"):
        Learner(3, nois=1.0)


def test_an_unknown_keyword_lists_the_public_parameters():
    with pytest.raises(TypeError, match=r"^Learner takes no argument 'xyz'; it takes width, noise$"):
        Learner(3, xyz=1.0)


def test_known_arguments_reach_the_function():
    assert vars(Learner(width=3, noise=0.1)) == {"width": 3, "noise": 0.1}


def test_custom_objects_are_constructor_arguments_and_keywords_win():
    given = {"custom_objects": {"gamma": 0.5, "n_steps": 4, "policy_class": int}, "gamma": 0.9}
    assert load_settings(given) == {"gamma": 0.9, "n_steps": 4, "policy": int}


def test_system_info_is_printed(capsys):
    assert load_settings({"print_system_info": True}) == {}
    assert "PyTorch" in capsys.readouterr().out
    load_settings({"print_system_info": False})
    assert not capsys.readouterr().out


def test_force_reset_false_is_rejected():
    assert load_settings({"force_reset": True}) == {}
    with pytest.raises(ValueError, match=r"force_reset=False is not possible.*resume_from=FILE"):
        load_settings({"force_reset": False})
