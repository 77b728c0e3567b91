"""Tests of experiment files: the runs that they describe, and messages for invalid files."""

import re

import pytest

from rlxf.experiments.experiment_file import read_plan
from rlxf.experiments.plan import Plan
from rlxf.experiments.toml_files import PlanError
from rlxf.utils.toml import MAX_BYTES

FILE = """\
seeds = [3, 7]

[settings]
episodes = 5

[tasks.short]
env = "rlxf/TMaze-v0"
env_kwargs = { corridor_length = 3 }
total_timesteps = 64
score_range = [0, 1]

[tasks.short.agents.gru]
n_envs = 4
core.width = 16

[tasks.logged]
dataset = "cartpole/random-v0"

[agents.gru]
command = "train gtrxl"
n_envs = 2
episodes = 7
core.recurrence = "GRU"
core.width = 8

[agents.ppo]
command = "baseline ppo"

[agents.bc]
command = "train bc"
"""


@pytest.fixture
def read(tmp_path):
    def plan(text: str | bytes) -> Plan:
        path = tmp_path / "experiment.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_plan(path)

    return plan


def test_each_agent_trains_on_the_tasks_that_have_what_it_needs(read):
    plan = read(FILE)
    pairs = [(task.name, agent.name) for task, agent in plan.pairs()]
    assert pairs == [("short", "gru"), ("short", "ppo"), ("logged", "bc")]
    cells = plan.cells()
    assert [cell.name for cell in cells[:4]] == [
        "short/gru/seed-3",
        "short/ppo/seed-3",
        "logged/bc/seed-3",
        "short/gru/seed-7",
    ]
    assert len(cells) == 6


@pytest.mark.parametrize(
    ("tasks", "agents", "pairs"),
    [
        ([], [], [("short", "gru"), ("short", "ppo"), ("logged", "bc")]),
        (["short"], [], [("short", "gru"), ("short", "ppo")]),
        (["logged", "short"], ["ppo", "bc"], [("short", "ppo"), ("logged", "bc")]),
        ([], ["bc"], [("logged", "bc")]),
    ],
)
def test_a_selection_has_the_runs_of_the_named_tasks_and_agents(read, tasks, agents, pairs):
    plan = read(FILE)
    chosen = plan.selection(tasks, agents)
    assert [(task.name, agent.name) for task, agent in chosen.pairs()] == pairs
    assert [task.name for task in chosen.tasks] == list(dict.fromkeys(task for task, _ in pairs))
    assert {agent.name for agent in chosen.agents} == {agent for _, agent in pairs}
    named = {cell.name for cell in plan.cells() if (cell.task, cell.agent) in pairs}
    assert {cell.name for cell in chosen.cells()} == named


@pytest.mark.parametrize(
    ("tasks", "agents", "message"),
    [
        (["shrt"], [], "unknown task shrt; did you mean short?"),
        ([], ["lstm"], "unknown agent lstm; choose one of gru, ppo, bc"),
        (["logged"], ["gru"], "task logged has no partner in this selection"),
        (["short"], ["gru", "bc"], "agent bc has no partner in this selection"),
    ],
)
def test_an_invalid_selection_is_refused(read, tasks, agents, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        read(FILE).selection(tasks, agents)


def test_later_settings_replace_earlier_ones(read):
    """The order is that of all runs, of the agent, of the task, and of the agent on the task."""
    options = {cell.agent: cell.settings for cell in read(FILE).cells()}
    assert options["gru"] == {
        "episodes": 7,
        "n_envs": 4,
        "core": {"recurrence": "GRU", "width": 16},
        "env": "rlxf/TMaze-v0",
        "env_kwargs": {"corridor_length": 3},
        "total_timesteps": 64,
    }
    assert options["bc"] == {"episodes": 5, "dataset": "cartpole/random-v0"}


@pytest.mark.parametrize(
    ("first", "second", "core"),
    [
        ('{ name = "Compressive", length = 16 }', "{ length = 32 }", {"name": "Compressive", "length": 32}),
        ('"Compressive"', "{ length = 32 }", {"name": "Compressive", "length": 32}),
        ('{ name = "XL", length = 16 }', '{ name = "RMT" }', {"name": "RMT"}),
        ('{ name = "XL", length = 16 }', '"None"', "None"),
        ('"None"', "{ length = 16 }", {"length": 16}),
    ],
)
def test_options_of_a_technique_keep_its_name(read, first, second, core):
    text = added("[agents.gru]", f"core.memory = {first}", FILE)
    text = added("[tasks.short.agents.gru]", f"core.memory = {second}", text)
    (cell, *_) = (cell for cell in read(text).cells() if (cell.task, cell.agent) == ("short", "gru"))
    assert cell.settings["core"]["memory"] == core


def test_dashes_and_underscores_are_equal_in_all_tables(read):
    text = added("[agents.gru]", "n-steps = 8\ncore.kv-heads = 1", FILE.replace("n_envs = 2", "n-envs = 2"))
    text = added("[tasks.short.agents.gru]", "n_steps = 16\ncore.kv_heads = 2", text)
    options = {(cell.task, cell.agent): cell.settings for cell in read(text).cells()}["short", "gru"]
    assert (options["n_envs"], options["n_steps"], options["core"]["kv_heads"]) == (4, 16, 2)
    with pytest.raises(PlanError, match="n_steps twice, in two spellings: remove one"):
        read(added("[agents.gru]", "n-steps = 8\nn_steps = 8", FILE))


def test_dashes_are_accepted_in_the_keys_of_tasks(read):
    assert read(FILE.replace("score_range", "score-range")).tasks[0].score_range == (0, 1)
    with pytest.raises(PlanError, match="line 10: score_range of task short must be two returns"):
        read(FILE.replace("score_range = [0, 1]", "score-range = [1, 0]"))
    with pytest.raises(PlanError, match=r"tasks\.short has score_range twice, in two spellings: remove one"):
        read(added("[tasks.short]", "score-range = [0, 1]", FILE))


def added(table, lines, text):
    """Return the text of a file with more lines in a table."""
    return text.replace(f"\n{table}\n", f"\n{table}\n{lines}\n")


def test_an_override_with_a_seed_is_refused(read):
    with pytest.raises(PlanError, match="has seed, which the experiment sets for each run"):
        read(added("[tasks.short.agents.gru]", "seed = 5", FILE))


def test_arguments_of_environments_are_replaced_as_a_whole(read):
    text = FILE.replace(
        '[agents.ppo]\ncommand = "baseline ppo"',
        "[agents.ppo]\ncommand = 'baseline ppo'\nenv_kwargs = { active = true }",
    )
    options = {cell.agent: cell.settings for cell in read(text).cells()}
    assert options["ppo"]["env_kwargs"] == {"corridor_length": 3}


def test_a_number_of_seeds_begins_at_0(read):
    assert read(FILE.replace("[3, 7]", "3")).seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds =", "seed =", "line 1: the file has an unknown key seed; did you mean seeds?"),
        ("[3, 7]", "[3, 3]", "line 1: seeds must be a number, or a list of different seeds"),
        ("[3, 7]", "-1", "line 1: seeds must be"),
        ("[3, 7]", "0", "line 1: seeds must be"),
        (
            "[3, 7]",
            "[3, 4294967296]",
            "list of different seeds from 0 to 4,294,967,295, got [3, 4294967296]",
        ),
        ("[3, 7]", "true", "line 1: seeds must be"),
        ("[3, 7]", "[1.5]", "line 1: seeds must be"),
        ("[3, 7]", "100_000_000", "line 1: seeds must be"),
        ("[0, 1]", "[1, 1]", "line 10: score_range of task short must be two returns"),
        ("[0, 1]", "[nan, 1]", "line 10: score_range of task short"),
        ("[0, 1]", "3", "line 10: score_range of task short"),
        (
            "[0, 1]",
            f"[0, 1{400 * '0'}]",
            "line 10: score_range of task short must be two returns up to 1e+100",
        ),
        ("tasks.logged", 'tasks."../x"', "line 16: tasks.../x: names must have letters, digits"),
        ("agents.bc]", 'agents."a/b"]', "agents.a/b: names must have"),
        ("[agents.bc]", '[agents.".."]', "names must have"),
        (
            '"train bc"',
            '"train bcc"',
            "line 29: command of agent bc is 'train bcc'; did you mean train bc?",
        ),
        ('command = "train bc"', "", "line 29: agent bc has no command: add one; choose one of train gtrxl"),
        (
            'command = "train bc"',
            "n_envs = 3\ncomand = 3",
            "line 31: agents.bc has an unknown key comand; did you mean command?",
        ),
        ('"train bc"', "3", "line 29: command of agent bc is 3"),
        (
            '"train bc"',
            '["train", "bc"]',
            "line 29: command of agent bc is ['train', 'bc']; did you mean train bc?",
        ),
        ('"train bc"', "{ name = 3 }", "line 29: command of agent bc is {'name': 3}"),
        ("n_envs = 2", "seed = 2", "gru has seed, which the experiment sets for each run: remove it"),
        ("total_timesteps", "run", "short has run, which the experiment sets"),
        ('dataset = "cartpole/random-v0"', "", "line 16: task logged must have either env or dataset"),
        (
            'dataset = "',
            'datasets = "',
            "line 17: tasks.logged has an unknown key datasets; did you mean dat",
        ),
        ('env = "rl', 'evn = "rl', "line 7: tasks.short has an unknown key evn; did you mean env?"),
        ('dataset = "cartpole/random-v0"', "n_envs = 3", "line 16: task logged must have either env or data"),
        (
            "episodes = 5",
            "seeds = 5",
            "line 4: settings has seeds, which is a key of the file: write it befor",
        ),
        ("n_envs = 4", "checkpoint = 'best'", "agents.gru has checkpoint, which is a key of the file: write"),
        ("total_timesteps = 64", 'dataset = "x"', "task short must have either env or dataset"),
        ("short.agents.gru", "short.agents.gur", "unknown key gur; did you mean gru?"),
        ("tasks.logged", 'tasks."table.md"', "table.md is the name of a file with results"),
        ("tasks.logged", "tasks.'Table.MD'", "Table.MD is the name of a file with results"),
        ("[tasks.logged]", "[tasks.Short]", "tasks.Short: short is the same name in other letter case"),
        ("[agents.ppo]", "[agents.GRU]", "agents.GRU: gru is the same name in other letter case"),
        ("episodes = 5", "episodes = 0", "have episodes = 0, so nothing could be compared"),
        ('[agents.bc]\ncommand = "train bc"', "", "line 16: no agent trains on task logged"),
        ('dataset = "cartpole/random-v0"', 'env = "CartPole-v1"', "agent bc needs a task with dataset"),
        ("[agents.ppo]", "[agents.gru]", "is not a TOML file"),
        ("[3, 7]", "[3, 7", "is not a TOML file"),
        ("[settings]\nepisodes = 5", "settings = 3", "settings must be a table, got 3"),
    ],
)
def test_invalid_files_are_refused_with_their_line(read, old, new, message):
    assert old in FILE
    with pytest.raises(PlanError) as error:
        read(FILE.replace(old, new, 1))
    assert message in str(error.value)
    assert "experiment.toml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "is not a text in UTF-8"),
        (b"#" * (MAX_BYTES + 1), "is larger than 1,048,576 bytes, the limit of experiment files"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "is not a TOML file"),
        (b"seeds" + b".a" * 10_000 + b" = 1", "experiment.toml: the key in line 1 has more than 64 parts$"),
        (b"seeds = " + b"9" * 5000, "experiment.toml: "),
        (b"", "has no tasks: add a table"),
        (b"tasks = 3\nagents = 4", "tasks must be a table, got 3"),
    ],
    ids=["binary", "huge", "deep", "parts", "digits", "empty", "numbers"],
)
def test_other_files_are_refused(read, content, message):
    with pytest.raises(PlanError, match=message) as error:
        read(content)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no experiment file"):
        read_plan(tmp_path / "nowhere.toml")


def test_too_many_runs_are_refused(read):
    with pytest.raises(PlanError, match="more than 100,000 runs"):
        read(FILE.replace("[3, 7]", "90_000"))
