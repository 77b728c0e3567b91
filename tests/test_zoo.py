"""The trained agents in zoo/ load, are as small as promised, and act as their cards say."""

import json
import shutil
from pathlib import Path

import pytest

from rlxf.cli.entry_point import main
from rlxf.cli.shared_commands import training_command_line
from rlxf.cli.shared_runs import load_shared_agent
from rlxf.training import RunFolder

ZOO = Path(__file__).parents[1] / "zoo"
FOLDERS = sorted(path for path in ZOO.glob("*") if path.is_dir())
needs_zoo = pytest.mark.skipif(not ZOO.exists(), reason="source distributions have no trained agents")


@needs_zoo
def test_every_agent_is_listed_with_its_return():
    rows = [line for line in (ZOO / "README.md").read_text().splitlines() if line.startswith("| [")]
    assert len(rows) == len(FOLDERS) > 0
    for folder, row in zip(sorted(FOLDERS), sorted(rows), strict=True):
        assert row.startswith(f"| [{folder.name}]({folder.name}/README.md) |")
        (scores,) = json.loads((folder / "evaluation.json").read_text()).values()
        assert row.endswith(f"| {scores['mean']:g} |")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_an_agent_is_small_loads_and_has_a_card(folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "checkpoint.zip", "config.json", "evaluation.json"}
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    card = (folder / "README.md").read_text()
    assert f"rlxf play zoo/{folder.name}" in card
    assert training_command_line(RunFolder.open(folder)) in card
    assert "(commit " in card
    assert "95% interval of the mean" in card
    agent = load_shared_agent(RunFolder.open(folder), "last")
    assert f"{agent.num_timesteps:,} steps" in card


@needs_zoo
def test_an_agent_reaches_the_return_of_its_card(tmp_path, capsys):
    shutil.copytree(ZOO / "CartPoleNoVel-gru", tmp_path / "agent")
    main(["evaluate", str(tmp_path / "agent"), "--episodes", "2"])
    assert "500 ± 0" in capsys.readouterr().out
