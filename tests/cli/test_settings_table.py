"""Tests of the settings that a command prints before a training."""

import json
from pathlib import Path

import pytest

from rlxf.cli import main
from tests.cli.running import train
from tests.datasets import ID, record_cartpole


def shown(out: str) -> dict[str, str]:
    """Return the rows of the first table in an output."""
    table = out[: out.index("└")]
    rows: list[list[str]] = []
    for line in table.splitlines():
        if line.startswith("│"):
            _, name, value, _ = (cell.strip() for cell in line.split("│"))
            if name:
                rows.append([name, value])
            else:
                rows[-1][1] += f" {value}"  # of a wrapped cell
    return {name: value for name, value in rows}


def test_options_of_the_user_are_shown_and_defaults_are_not(capsys):
    train("--run", "run", "--gamma", "0.9", "--normalize-rewards", "--core.norm-type", "rms_norm")
    out = capsys.readouterr().out
    rows = shown(out)
    assert rows["agent"].startswith("gtrxl, ")
    given = {"env": "rlxf/TMaze-v0", "env_kwargs": '{"corridor_length": 3}', "gamma": "0.9", "seed": "0"}
    given |= {"normalize_rewards": "true", "total_timesteps": "64", "core.norm_type": "rms_norm"}
    assert rows | given == rows
    config = json.loads(Path("run/config.json").read_text())
    default = {
        *("gae_lambda", "clip_range", "target_kl", "previous_action"),
        "track",
        "device",
        "checkpoint_seconds",
    }
    assert default <= config.keys()
    assert not default & rows.keys()
    assert "all settings: run/config.json\n" in out


def test_sizes_and_changes_of_the_core_are_shown_by_names_of_options(capsys):
    train("--run", "run", "--core.position", "RoPE", "--core.residual", "Add")
    rows = shown(capsys.readouterr().out)
    core = {name.removeprefix("core."): value for name, value in rows.items() if name.startswith("core.")}
    assert core.pop("position").startswith("RoPE(")
    assert core == {
        "width": "8",
        "layers": "2",
        "heads": "2",
        "residual": "Add()",
        "pattern": "Window(size=5)",
        "memory": "XL(length=4)",  # of --core.memory.length 4
    }


def test_the_number_of_parameters_is_that_of_the_agent(capsys):
    from rlxf import GTrXLPPO

    train("--run", "run")
    count = sum(x.numel() for x in GTrXLPPO.load("run/checkpoint.zip", device="cpu").policy.parameters())
    assert shown(capsys.readouterr().out)["agent"] == f"gtrxl, {count:,} parameters, device cpu"


@pytest.mark.parametrize("agent", ["dt", "bc", "rvs"])
def test_offline_agents(capsys, minari_root, agent):
    record_cartpole()
    capsys.readouterr()
    small = "--updates 2 --episodes 0 --batch-size 4 --run run"
    main(["train", agent, "--dataset", ID, *small.split()])
    rows = shown(capsys.readouterr().out)
    data = {"target_returns", "return_scale"} & rows.keys()
    assert data == ({"target_returns", "return_scale"} if agent != "bc" else set())
    core = {name for name in rows if name.startswith("core.")}
    assert core == ({"core.width", "core.layers", "core.heads"} if agent == "dt" else set())
    assert rows.keys() - core - data - {"episode_length"} == {
        *("agent", "dataset", "updates", "env", "seed", "episodes", "batch_size")
    }
    main(["resume", "run", "--updates", "3"])
    assert shown(capsys.readouterr().out) == rows | {"updates": "3"}


def test_a_resumed_run_shows_the_same_settings(capsys):
    train("--run", "run", "--gamma", "0.9", "--checkpoint-seconds", "0")
    first = shown(capsys.readouterr().out)
    main(["resume", "run", "--total-timesteps", "96", "--no-progress-bar"])
    assert shown(capsys.readouterr().out) == first | {"total_timesteps": "96"}


def test_paths_are_shown_as_they_are(capsys):
    train("--run", "runs/x:dog:[bold]y")
    assert "all settings: runs/x:dog:[bold]y/config.json\n" in capsys.readouterr().out


def test_students_and_baselines(capsys):
    train("--run", "teacher", "--quiet", "--device", "cpu")
    capsys.readouterr()
    main(["distill", "teacher", "--steps", "32", "--no-progress-bar"])
    rows = shown(capsys.readouterr().out)
    assert rows | {"teacher": "teacher", "steps": "32", "core.width": "4"} == rows
    assert "device" not in rows, "that of the teacher"
    main(["baseline", "random", "--env", "CartPole-v1", "--episodes", "3", "--run", "random"])
    rows = shown(capsys.readouterr().out)
    assert rows["agent"] == "random"
    assert rows["episodes"] == "3"
