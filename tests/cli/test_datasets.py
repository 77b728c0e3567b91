"""Tests of ``rlxf datasets``."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from io import BytesIO, TextIOWrapper

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from rlxf.cli import main
from tests.cli.running import refused
from tests.datasets import (
    CHOICE,
    ID,
    data_file,
    opened,
    random_episodes,
    record,
    record_cartpole,
    record_random,
)

CARTPOLE = spaces.Box(-np.inf, np.inf, (4,), np.float32)


@pytest.fixture
def run(minari_root, monkeypatch, capsys):
    """Function that runs the command and returns its output, by default of a pipe."""

    def call(*args: str, columns: int | None = None) -> str:
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
            monkeypatch.setenv("TERM", "xterm")
        main(["datasets", *args])
        return capsys.readouterr().out

    return call


def test_each_dataset_has_a_row(run):
    dataset = record_random((3, 1), "test/cart-v0", observation_space=CARTPOLE, env="CartPole-v1")
    record_random((1200,), "test/long-v0")
    returns = [episode.rewards.sum() for episode in dataset]
    rows = {line.split()[0]: line for line in run().splitlines() if line.startswith("test/")}
    assert rows.keys() == {"test/cart-v0", "test/long-v0"}
    cells = rows["test/cart-v0"].split()
    assert cells[:4] == ["test/cart-v0", "CartPole-v1", "4", "2"]
    assert cells[4:7] == [f"{value:.1f}" for value in (min(returns), np.mean(returns), max(returns))]
    assert "1,200" in rows["test/long-v0"]
    assert "unknown" in rows["test/long-v0"]


@pytest.mark.thorough
def test_a_closed_pipe_ends_the_list(minari_root):
    """The table is printed to a pipe without a reader, like that of ``rlxf datasets | head -1`` later."""
    record_cartpole()
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rlxf", "datasets"]
    environment = os.environ | {"MINARI_DATASETS_PATH": str(minari_root)}
    done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_jpeg_images_are_marked(run):
    images = spaces.Box(0, 255, (36, 40, 3), np.uint8)
    for name, jpeg in (("lossy", True), ("exact", False)):
        record_random((2,), f"test/{name}-v0", observation_space=images, jpeg_encoding=jpeg)
    marked = {line.split()[0]: "(JPEG)" in line for line in run().splitlines() if line.startswith("test/")}
    assert marked == {"test/lossy-v0": True, "test/exact-v0": False}


def test_a_damaged_dataset_does_not_hide_the_others(run):
    record_random(dataset_id="test/whole-v0")
    data_file(record_random(dataset_id="test/broken-v0")).write_bytes(b"")
    text = " ".join(run().split())
    assert " test/whole-v0 unknown " in text
    assert "test/broken-v0 cannot be read:" in text
    assert "main_data.hdf5: the file is truncated or altered" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("observation_space", '{"type": "Tuple", "subspaces": 5}'),
        ("observation_space", '{"type": "Dict", "subspaces": [1]}'),
        ("dataset_id", "test/\x1b[31m-v0"),
    ],
)
def test_malformed_metadata_do_not_hide_the_others(run, name, value):
    record_random(dataset_id="test/whole-v0")
    path = data_file(record_random(dataset_id="test/broken-v0")).with_name("metadata.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    text = run()
    assert " test/whole-v0 unknown " in " ".join(text.split())
    assert "test/broken-v0 cannot be read:" in text
    assert "\x1b" not in text


def test_a_folder_with_a_malformed_id_does_not_hide_the_others(run, minari_root, capsys):
    whole = data_file(record_random(dataset_id="test/whole-v0"))
    shutil.copytree(whole.parents[1], minari_root / "t/cart12-v0")
    text = " ".join(run().split())
    assert " test/whole-v0 unknown " in text
    assert "t/cart12-v0 cannot be read: 't/cart12-v0' is not a Minari id" in text
    message = refused(capsys, "train", "bc", "--dataset", "test/who-v0")
    assert "similar names: test/whole-v0" in message


def test_run_an_empty_folder_names_the_folder(run, minari_root):
    assert f"no datasets in {minari_root}" in run().replace("\n", "")


LONG = f"test/{'long-' * 12}v0"


@pytest.mark.parametrize("columns", [None, 20, 80, 200], ids=["pipe", "20", "80", "200"])
def test_ids_are_not_wrapped(run, columns):
    record_random((2,), LONG)
    assert LONG in run(columns=columns)


def test_only_a_wide_terminal_has_a_frame(run):
    record_random((2,), LONG)
    assert not set("│┃") & set(run())
    assert f"│ {LONG} │" in run(columns=200)


# One dataset


def record_with(spec):
    """Record random numbers with the spaces of CartPole-v1 and this spec."""
    return record(random_episodes((3, 4), CARTPOLE), ID, CARTPOLE, CHOICE, env=spec)


def test_one_dataset_is_described(run):
    record_cartpole((9, 3, 12, 1), ref_min_score=0.0, ref_max_score=10.0)
    text = " ".join(run(ID, columns=140).split())
    for part in ("CartPole-v1, at most 500 steps", "Discrete(2)", "4, 25", "50% terminated, 50% truncated"):
        assert part in text
    assert "yes, the same version" in text
    assert "Distribution of returns" in text
    assert "the number of episodes is 4: an agent most likely memorizes them" in text


COLOR, STYLE = re.compile(r"\x1b\[[\d;]*(3|4)\dm"), re.compile(r"\x1b\[[\d;]*m")
HISTOGRAM = 70
"""Maximum width of the histogram, which is not wrapped."""


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_the_description_fits_the_terminal_without_color(run, monkeypatch, columns):
    record_cartpole()
    monkeypatch.setenv("NO_COLOR", "1")
    text = run(ID, columns=columns)
    assert not COLOR.search(text)
    assert max(map(len, STYLE.sub("", text).splitlines())) <= max(columns, HISTOGRAM)


def test_terminals_without_unicode_are_supported(minari_root, monkeypatch):
    record_cartpole()
    stream = TextIOWrapper(BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", stream)
    main(["datasets", ID, "--no-progress-bar"])
    stream.seek(0)
    assert "#" * 36 in stream.read()


def test_a_plot_is_written_on_request(run, tmp_path):
    record_cartpole()
    assert "plot of the distribution of returns: returns.png" in run(ID, "--plot", "returns.png")
    assert Image.open("returns.png").format == "PNG"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"id": "CartPole-v7"},
            "CartPole-v7 is not registered here, but CartPole-v0, CartPole-v1:",
        ),
        ({"id": "Nowhere-v0"}, "unknown environment id 'Nowhere-v0'"),
        (
            {"kwargs": {"sutton_barto_reward": True}},
            "the data describe CartPole-v1 with sutton_barto_reward=True",
        ),
    ],
    ids=["version", "unknown", "arguments"],
)
def test_environments_that_are_not_registered_are_named(run, changes, sentence):
    record_with(replace(gymnasium.spec("CartPole-v1"), **changes))
    text = " ".join(run(ID).split())
    assert "no, see below" in text
    assert sentence in text


def test_nothing_that_a_dataset_names_is_imported(run, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("open('imported', 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    metadata = data_file(record_with(gymnasium.spec("CartPole-v1"))).with_name("metadata.json")
    content = json.loads(metadata.read_text())
    spec = replace(gymnasium.spec("CartPole-v1"), id="Evil-v0", entry_point="evil:Env")
    metadata.write_text(json.dumps(content | {"env_spec": spec.to_json()}))
    assert "unknown environment id 'Evil-v0'" in " ".join(run(ID).split())
    assert not (tmp_path / "imported").exists()


def test_data_without_environment_need_one(run):
    record_random((3, 4))
    text = " ".join(run(ID).split())
    assert "evaluations need an environment, --env ID" in text
    assert "registered here" not in text


def test_values_that_training_refuses_are_named_in_one_line(capsys, minari_root):
    with opened(record_random()) as file:
        file["episode_1/actions"][0] = 9
    assert "episode 1: the action of step 0 is" in refused(capsys, "datasets", ID, "--no-progress-bar")


def test_a_missing_dataset_is_not_downloaded(capsys, minari_root, monkeypatch):
    monkeypatch.setattr("minari.download_dataset", lambda *_: pytest.fail("downloaded"))
    assert "Download it with download=True (--download)" in refused(capsys, "datasets", "test/absent-v0")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--plot", "x.png"], "--plot needs the id of a dataset"),
        (["--download"], "--download needs the id of a dataset"),
        ([ID, "--plot", "x.svg"], "--plot must be a file name that ends in .png, got x.svg"),
        ([ID, "--plot", "none/x.png"], "--plot must be in an existing folder, got none/x.png: create none"),
    ],
    ids=str,
)
def test_options_that_do_not_apply_are_refused(capsys, args, message):
    assert message in refused(capsys, "datasets", *args)
