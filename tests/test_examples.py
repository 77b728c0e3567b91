"""Tests of the programs in examples/: they run, and their agents learn."""

import ast
import importlib
import json
import subprocess
import sys
from dataclasses import replace

import gymnasium
import log_sparse
import minari
import numpy as np
import own_dataset
import pytest
import signal_task
import small_images
import torch
from gymnasium.utils.env_checker import check_env

from rlxf.attention import TokenIndex, TransformerSpec, Window
from rlxf.attention.registry import TECHNIQUES
from tests.attention.passes import act, assert_close_for_dtype, learn
from tests.attention.sparse.test_sparse_attention import compare_sparse_with_dense
from tests.attention.specs import DEFAULT, new_model, streaming
from tests.attention.worlds import random_index, random_segment
from tests.cli.running import TINY
from tests.sources import ROOT, imported, parsed

pytestmark = pytest.mark.usefixtures("no_progress_bars")
PATTERNS = TECHNIQUES["pattern"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GUESSING = 1 / signal_task.SIGNALS
"""Success rate of an agent without memory."""


@pytest.fixture(autouse=True)
def _registered_pattern(monkeypatch):
    """Register the pattern of the examples during a test."""
    monkeypatch.setitem(PATTERNS, "LogSparse", log_sparse.LogSparse)


def test_the_page_lists_the_programs():
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert [file.name for file in EXAMPLES if f"[{file.name}]({file.name})" not in page] == []


@pytest.mark.parametrize("path", parsed("examples"))
def test_programs_are_short_and_use_public_modules(path):
    tree = parsed("examples")[path]
    assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) <= 120
    assert ast.get_docstring(tree)
    assert not [name for name in imported(tree) if name.startswith(("tests", "scripts", "rlxf._"))]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_programs_can_be_imported_without_an_effect(file, capsys):
    importlib.import_module(file.stem)
    assert capsys.readouterr().out == ""


# The task.


@pytest.mark.filterwarnings("error")
def test_the_task_is_valid():
    check_env(gymnasium.make(signal_task.TASK).unwrapped)


def play(action_of, seed: int) -> tuple[float, bool, bool, int]:
    """Return return, end flags and length of an episode of the task."""
    env = gymnasium.make(signal_task.TASK)
    observation, _ = env.reset(seed=seed)
    signal, total, length = int(np.argmax(observation[:-1])), 0.0, 0
    while True:
        observation, reward, terminated, truncated, _ = env.step(action_of(signal, observation))
        total, length = total + reward, length + 1
        if terminated or truncated:
            return total, terminated, truncated, length


def test_the_signal_is_rewarded_after_the_lamp_only():
    for seed in range(20):
        assert play(lambda signal, observation: signal, seed)[:3] == (1.0, True, False)
        assert play(lambda signal, observation: (signal + 1) % signal_task.SIGNALS, seed)[0] == 0.0


def test_an_agent_that_waits_is_truncated():
    assert play(lambda signal, observation: signal_task.SIGNALS, 0) == (0.0, False, True, 16)


def test_the_observation_shows_the_signal_once():
    env = gymnasium.make(signal_task.TASK)
    first, _ = env.reset(seed=0)
    later = [env.step(signal_task.SIGNALS)[0] for _ in range(10)]
    assert first.sum() == 1
    assert not np.stack(later)[:, :-1].any()
    assert later[-1][-1] == 1


@pytest.mark.slow
def test_the_agent_remembers_the_signal():
    assert signal_task.train().ci[0] > GUESSING + 0.2


# The features extractor.


def test_pictures_differ_by_signal_and_lamp():
    env = small_images.with_pictures(gymnasium.make(signal_task.TASK))
    pictures = [env.reset(seed=seed)[0] for seed in range(20)]
    assert all(env.observation_space.contains(picture) for picture in pictures)
    assert len({picture.tobytes() for picture in pictures}) == signal_task.SIGNALS


@pytest.mark.thorough
@pytest.mark.slow
def test_the_program_with_small_images_trains_saves_and_loads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    agent, report = small_images.train()
    assert report.ci[0] > GUESSING + 0.2
    assert isinstance(agent.policy.features_extractor, small_images.SmallCNN)
    monkeypatch.setattr(small_images, "train", lambda: (agent, report))
    small_images.main()
    assert "loaded: SmallCNN" in capsys.readouterr().out
    assert (tmp_path / "small_images.zip").is_file()


# The attention technique. It passes the contracts of the techniques of rlxf.


def test_log_sparse_is_the_pattern_of_the_paper():
    i = torch.arange(40)
    seen = log_sparse.LogSparse(reach=16).mask_mod(i[:, None], i)
    assert [(20 - j) for j in range(21) if seen[20, j]] == [16, 8, 4, 2, 1, 0]
    assert torch.equal(seen, seen.T)


SPARSE = [
    replace(DEFAULT, pattern=log_sparse.LogSparse(reach=4)),
    replace(DEFAULT, pattern=log_sparse.LogSparse(reach=8) & Window(6)),
    log_sparse.sparse_core(),
]
del PATTERNS["LogSparse"]  # other tests have the techniques of rlxf only


@pytest.mark.parametrize("spec", SPARSE, ids=["short", "with window", "gtrxl"])
def test_log_sparse_acts_as_it_learns(spec):
    index, spec = random_index(2, 24), streaming(spec, 8)
    model, run = new_model(spec).double(), random_segment(spec, index)
    learned, _ = learn(model, run, [7, 9, 8])
    acted, _ = act(model, run, model.cache(model.initial_state(2), model.memory.length + 1, run.context))
    assert_close_for_dtype(acted[run.filled], learned[run.filled])


@pytest.mark.parametrize("spec", SPARSE[:2], ids=["short", "with window"])
def test_log_sparse_gives_the_same_outputs_in_blocks(spec, monkeypatch):
    """Block-sparse execution, which long sequences use, equals dense execution."""
    compare_sparse_with_dense(monkeypatch, new_model(spec).double())


@pytest.mark.parametrize("spec", SPARSE, ids=["short", "with window", "gtrxl"])
def test_log_sparse_sees_no_later_token(spec):
    model, run = new_model(spec).double(), random_segment(spec, TokenIndex.range(1, 24))
    changed = run.x.clone()
    changed[:, 12:] += 1
    before, after = (model.outputs(x, run.index)[:, :12] for x in (run.x, changed))
    assert torch.equal(before, after)


def test_acting_is_compared_with_training():
    assert log_sparse.largest_difference(log_sparse.sparse_core()) < 1e-10


@pytest.mark.thorough
def test_the_extended_program_trains_with_log_sparse(tmp_path):
    words = "train gtrxl --env examples/Signal-v0 --core.pattern log-sparse --core.pattern.reach 8"
    command = [
        sys.executable,
        str(ROOT / "examples" / "extended_rlxf.py"),
        *words.split(),
        *TINY,
        "--run",
        "run",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["core"]["pattern"]["first"] == {"name": "LogSparse", "reach": 8}  # the second is the memory
    assert (tmp_path / "run/completed.json").is_file()


@pytest.mark.thorough
def test_a_checkpoint_with_an_unknown_technique_names_the_remedy():
    data = log_sparse.sparse_core().to_json()
    code = f"from rlxf import TransformerSpec; TransformerSpec.from_json({data!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "there is no pattern named 'LogSparse'" in result.stderr
    assert "import the module that registers it first" in result.stderr
    assert TransformerSpec.from_json(data) == log_sparse.sparse_core()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_agent_learns_with_log_sparse():
    assert log_sparse.train().ci[0] > GUESSING + 0.2


# The dataset.


def test_the_log_is_converted_without_loss(minari_root):
    log = own_dataset.recorded_log(episodes=10)
    shuffled = np.random.default_rng(0).permutation(log["episode"])  # steps of an episode stay in order
    order = np.argsort(np.argsort(shuffled, kind="stable"), kind="stable")
    own_dataset.convert({name: column[order] for name, column in log.items()})
    episodes = list(minari.load_dataset(own_dataset.DATASET).iterate_episodes())
    assert len(episodes) == 10
    for name, column in (("actions", "action"), ("rewards", "reward"), ("terminations", "terminated")):
        stored = np.concatenate([getattr(episode, name) for episode in episodes])
        assert np.array_equal(stored, log[column])
    stored = np.concatenate([episode.observations[:-1] for episode in episodes])
    assert np.array_equal(stored, log["observation"])


@pytest.mark.slow
def test_the_agent_is_better_than_its_data(minari_root, monkeypatch, capsys):
    sweeps, train = [], own_dataset.train
    monkeypatch.setattr(own_dataset, "train", lambda: sweeps.append(train()) or sweeps[-1])
    own_dataset.main()
    assert "Requested and achieved" in capsys.readouterr().out
    episodes = minari.load_dataset(own_dataset.DATASET).iterate_episodes()
    assert sweeps[0].first.ci[0] > np.mean([episode.rewards.sum() for episode in episodes])
