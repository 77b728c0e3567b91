"""Tests of model cards."""

import ast
import shlex

import pytest
from huggingface_hub import ModelCard as Parsed

from rlxf.sharing.card import ModelCard, Score, read_scores

SCORE = Score(100, 12.5, 3.25, (11.0, 14.0))


def card(**changes):
    arguments = {
        "folder": "runs/agent",
        "repository": "me/agent",
        "agent": "DecisionTransformer",
        "env": "CartPole-v1",
        "progress": "2 updates",
        "checkpoint": "last",
        "scores": [SCORE],
        "command": "rlxf train dt",
    }
    return ModelCard(**arguments | changes).text()


def test_header_is_that_of_the_hub():
    data = Parsed(card()).data
    assert data.library_name == "rlxf"
    assert {"reinforcement-learning", "CartPole-v1"} <= set(data.tags)
    (result,) = data.eval_results
    assert (result.task_type, result.dataset_type) == ("reinforcement-learning", "CartPole-v1")
    assert (result.metric_type, result.metric_value) == ("mean_reward", "12.50 +/- 3.25")


@pytest.mark.parametrize("env", ["a: b", "- x", "---\nlibrary_name: evil", "'\"", "{[", "#1", "é\t"])
def test_special_characters_do_not_break_the_header(env):
    data = Parsed(card(env=env)).data
    assert data.library_name == "rlxf"
    assert env in data.tags


def test_missing_parts_are_named():
    text = card(scores=[], env=None, command=None)
    assert "The agent was not evaluated. Evaluate it with `rlxf evaluate runs/agent --env ID`." in text
    assert "The command of the training is unknown" in text
    assert Parsed(text).data.eval_results is None


def test_card_of_a_folder_has_no_header_and_no_download():
    text = card(repository=None, folder="zoo/agent", commit="abc123")
    assert text.startswith("# DecisionTransformer on CartPole-v1\n")
    assert "(commit abc123)" in text
    assert "rlxf play zoo/agent" in text
    assert "rlxf pull" not in text


def test_trust_is_part_of_the_commands():
    assert "rlxf evaluate runs/agent --trust\n" in card(trust=" --trust")
    assert "--trust" not in card()


@pytest.mark.parametrize("folder", ["my agents/a", 'say "hi"', "it's; ls", "a\\b"])
def test_folders_are_quoted_in_commands_and_programs(folder):
    text = card(folder=folder, repository=None)
    bash, python = (block.split("```")[0] for block in text.partition("## Usage")[2].split("```", 4)[1::2])
    assert [shlex.split(line)[2] for line in bash.splitlines()[1:]] == [folder] * 2
    (call,) = (node for node in ast.walk(ast.parse(python.partition("\n")[2])) if is_load(node))
    assert ast.literal_eval(call.args[0]) == f"{folder}/checkpoint.zip"


def test_the_program_of_a_card_has_the_wrappers_of_the_agent():
    """`tests.cli.test_pack` runs such programs."""
    text = card(make_env='make_vec_env("CartPole-v1", n_envs=1)', normalizer=True, target=1234567.5)
    program = text.partition("```python\n")[2].partition("```")[0]
    ast.parse(program)
    assert "from rlxf.envs import ReturnToGo, make_vec_env\n" in program
    assert 'env = load_normalizer("runs/agent/normalizer.zip", env)\n' in program
    assert "env.training = env.norm_reward = False\n" in program
    assert "env = ReturnToGo(env, target_return=1234567.5)\n" in program
    own = card(make_env="agent.make_env(1)")
    assert "env = agent.make_env(1)\nobs, state, start = env.reset()" in own
    assert "rlxf.envs" not in own
    assert "predict" not in card()


def is_load(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load"


def test_scores_of_all_targets_are_shown():
    report = {"episodes": 3, "mean": 1.0, "std": 0.5, "ci": [0.5, 1.5]}
    scores = read_scores({"targets": [report | {"target": 5}, report | {"target": 9.5, "mean": 2.0}]})
    text = card(scores=scores)
    assert "| 3, target return 5 | 1 ± 0.5 | 0.5 to 1.5 |" in text
    assert Parsed(text).data.eval_results[0].metric_value == "2.00 +/- 0.50"


@pytest.mark.parametrize(
    "report",
    [
        *(None, [], 5, {}, {"targets": 5}, {"targets": [None]}, {"episodes": 1, "mean": "x"}),
        {"episodes": float("inf"), "mean": 1, "std": 1, "ci": [0, 1]},
    ],
)
def test_malformed_reports_are_refused(report):
    with pytest.raises(ValueError, match=r"evaluation\.json is not a report"):
        read_scores(report)
