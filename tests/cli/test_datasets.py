"""Tests of ``rlxf datasets``."""

import numpy as np
import pytest
from gymnasium import spaces

from rlxf.cli import main
from tests.datasets import data_file, record_random

CARTPOLE = spaces.Box(-np.inf, np.inf, (4,), np.float32)


@pytest.fixture
def run(minari_root, monkeypatch, capsys):
    """Function that runs the command and returns its output, by default of a pipe."""

    def call(columns: int | None = None) -> str:
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
            monkeypatch.setenv("TERM", "xterm")
        main(["datasets"])
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


def test_run_an_empty_folder_names_the_folder(run, minari_root):
    assert f"no datasets in {minari_root}" in run().replace("\n", "")


LONG = f"test/{'long-' * 12}v0"


@pytest.mark.parametrize("columns", [None, 20, 80, 200], ids=["pipe", "20", "80", "200"])
def test_ids_are_not_wrapped(run, columns):
    record_random((2,), LONG)
    assert LONG in run(columns)


def test_only_a_wide_terminal_has_a_frame(run):
    record_random((2,), LONG)
    assert not set("│┃") & set(run())
    assert f"│ {LONG} │" in run(200)
