"""Tests of the benchmarks that also run on a GPU, on the CPU."""

import pytest
import torch
from benchmarks import acting, attention, cleanrl, hugging_face, offline, operations
from benchmarks.acting import Acting
from benchmarks.attention import ALL_PAIRS, Attention
from benchmarks.attention_flex import CUDA_SUBJECTS, PATTERNS, FlexAttention
from benchmarks.attention_sizes import HEADS, SIZE
from benchmarks.attention_subjects import SUBJECTS, Sublayers, SublayersWithKeptMasks
from benchmarks.machine import now
from benchmarks.offline import Offline
from benchmarks.shapes import cleanrl_shape

from rlxf import collect
from rlxf.data import load_trajectories

pytestmark = pytest.mark.usefixtures("benchmarks_in_process")
LENGTH = 512


@pytest.fixture
def waits(monkeypatch):
    """Devices for which the program waits, in order."""
    devices = []
    monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
    return devices


def test_clocks_wait_for_a_gpu_only(waits):
    assert now("cpu", lambda: 3.0) == 3.0
    assert waits == []
    assert now("cuda", lambda: 3.0) != 3.0
    assert now(torch.device("cuda")) <= now("cuda:1")
    assert list(map(str, waits)) == ["cuda", "cuda", "cuda:1"]


def test_calls_on_a_gpu_are_timed_together(waits):
    calls = []
    assert acting.mean_seconds(lambda: calls.append(len(waits)), 3, "cuda") > 0
    assert (calls, len(waits)) == ([1, 1, 1], 2)
    assert operations.fastest(lambda: calls.append(len(waits)), 0.0, "cuda") == float("inf")


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", PATTERNS)
def test_rules_for_flex_attention_are_those_of_the_patterns(name):
    pattern, make_rule = PATTERNS[name]
    torch.manual_seed(0)
    flex, ours = FlexAttention(make_rule), Sublayers(pattern=pattern)
    attention = ours.transformer.blocks[0].attention
    flex.attention.qkv.load_state_dict(getattr(attention, "others", attention).qkv.state_dict())
    flex.attention.out.load_state_dict(attention.out.state_dict())
    first = 1 if name == "Longformer" else 0  # its query has other projections there
    x = torch.randn(1, LENGTH, HEADS * SIZE)
    with torch.no_grad():
        torch.testing.assert_close(flex(x)[:, first:], ours(x)[:, first:], rtol=1e-5, atol=1e-5)


def test_masks_that_are_kept_do_not_change_outputs():
    torch.manual_seed(0)
    kept, other = SublayersWithKeptMasks(), Sublayers()
    other.load_state_dict(kept.state_dict())
    for length in (5, 7, 5, 5):
        x = torch.randn(1, length, HEADS * SIZE)
        assert torch.equal(kept(x), other(x))
    assert list(kept.kept) == [5, 7]


def test_attention_is_measured(tmp_path, capsys):
    bench = Attention((32, 64), only=("Window",), repeats=1, output=tmp_path / "attention.jsonl")
    bench.run()
    shown = capsys.readouterr().out
    assert "1.15" in shown
    assert [(p.name, p.length) for p in bench.points()] == [
        (name, n) for name in (ALL_PAIRS, "Window") for n in (32, 64)
    ]
    assert all(point.seconds > 0 for point in bench.points())
    assert len(bench.output.read_text().splitlines()) == 4
    with pytest.raises(ValueError, match="only must be among all pairs"):
        Attention(only=("flex_attention, Window",))


def test_attention_on_a_gpu_has_more_subjects_and_no_claims():
    bench = Attention(only=("flex_attention, Window",), device="cuda")
    assert list(bench.subjects) == [*SUBJECTS, *CUDA_SUBJECTS]
    points = [attention.Point(name, n, 1e-9 * n**2, 10**6) for name in bench.subjects for n in (2048, 4096)]
    for subjects, claimed in ((bench.subjects, False), (SUBJECTS | CUDA_SUBJECTS, True)):
        assert ("missed" in "".join(attention.table(points, subjects).columns[-1].cells)) == claimed


def test_cleanrl_uses_the_device():
    shape = cleanrl_shape(gated=False)
    assert cleanrl.arguments(shape, 1)[0] == "--no-cuda"
    assert cleanrl.arguments(shape, 1, "cuda")[0] == "--cuda"
    assert cleanrl.arguments(shape, 1)[1:] == cleanrl.arguments(shape, 1, "cuda")[1:]


@pytest.mark.parametrize("module", [cleanrl, hugging_face])
def test_environments_with_the_requirements_are_not_installed(module, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(module.subprocess, "run", lambda command, check: commands.append(command))
    module.install(tmp_path)
    assert commands
    assert (tmp_path / "ready").read_text() == module.requirements()
    commands.clear()
    module.install(tmp_path)
    assert not commands


def test_versions_are_compared_on_the_cpu_only(tmp_path):
    with pytest.raises(ValueError, match="got device='cuda'"):
        Acting(checkout=tmp_path, device="cuda")


def test_both_offline_programs_get_the_device_and_memory_is_optional(
    minari_root, monkeypatch, tmp_path, capsys
):
    collect(None, "CartPole-v1", "cartpole/random-v0", episodes=8, n_envs=4)
    asked = []

    def run_task(venv, task, setting, **options):
        asked.append(options)
        return {"update_seconds": [0.1] * 10, "steps": options["episodes"], "seconds": 1.0}

    monkeypatch.setattr(hugging_face, "run_task", run_task)
    monkeypatch.setattr(hugging_face, "install", lambda venv: None)
    monkeypatch.setattr(offline, "matrix_rate", lambda device: 1e9)
    bench = Offline(
        "cartpole/random-v0", "small", updates=2, rounds=2, episodes=2, original_episodes=1, large=(),
        device="cpu", output=tmp_path / "offline.json",
    )  # fmt: skip
    bench.run()
    assert "reading a batch" in capsys.readouterr().out
    assert [options["episodes"] for options in asked] == [0, 1]
    assert {options["device"] for options in asked} == {"cpu"}
    assert asked[0]["target"] == load_trajectories("cartpole/random-v0").returns.max()
