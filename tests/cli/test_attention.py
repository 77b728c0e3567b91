"""Tests of ``rlxf attention``, without a browser and, where Chromium is installed, with it."""

import base64
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlxf.agents.inspection import EpisodeAttention, episode_inspector
from rlxf.cli import main
from rlxf.cli.attention_page.episode import MAX_TEXT, Recording, Step, data_uri, info_text, numbers_text
from rlxf.cli.attention_page.page import Episode, page
from rlxf.cli.commands.attention import MAX_WEIGHTS, longest_episode
from rlxf.cli.playback import Task, prepare_agent
from rlxf.training import RunFolder
from tests.cli.running import TASK, refused, train
from tests.datasets import record_cartpole

ATTACK = "</script><script>document.documentElement.dataset.attacked = 1</script><!-- & \u2028 {{script}}"
ATTACK += "<img src=x onerror='document.documentElement.dataset.attacked = 1'>"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome")
TINY = "--updates 2 --episodes 0 --batch-size 4 --quiet"
TINY_CORE = "--context-length 4 --core.width 8 --core.layers 1"
MEMORY = "--core.memory.length 4"
SHORT = (
    f"--n-envs 2 --n-steps 16 --segment-length 8 --batch-size 16 {MEMORY} --core.width 8 --core.heads 2 "
    "--total-timesteps 32 --episodes 2 --attention-maps-every None --no-videos --evaluate-every 0 --quiet"
)


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """Run of an agent with GRU gates."""
    path = tmp_path_factory.mktemp("run") / "gated"
    train("--run", str(path), "--quiet")
    return path


@pytest.fixture
def run(gated, tmp_path):
    shutil.copytree(gated, tmp_path / "run")
    return tmp_path / "run"


def data_of(path):
    """Return the JSON data in a page."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text[1])


def weights_of(data):
    """Return the weights in the data of a page, (L, H, t + 1 - first, K) for each step t."""
    numbers, rows = np.frombuffer(base64.b64decode(data["weights"]), "<f4"), []
    for step, first in enumerate(data["first"]):
        shape = len(data["layers"]), data["heads"], step + 1 - first, len(data["tokens"])
        row, numbers = np.split(numbers, [int(np.prod(shape))])
        rows.append(row.reshape(shape))
    assert not len(numbers)
    return rows


def played(path, limit=500):
    """Play the episode of a page; return its attention and its steps."""
    run = RunFolder.open(path)
    recording = Recording.of_task(Task.of_run(run, None, {}, False), limit)
    agent, env = prepare_agent(run, run.final_checkpoint, recording.env, "cpu")
    recording.play(inspector := episode_inspector(agent), env, 1_000_000, limit)
    return inspector.attention(), recording.steps.steps


def test_page_contains_the_attention_of_the_library(run, capsys):
    main(["attention", "run"])
    data, (attention, steps) = data_of(run / "attention.html"), played(run)
    shown = capsys.readouterr().out
    assert shown == f"{len(steps)} steps are written to run/attention.html\n"
    assert len(data["steps"]) == len(data["frames"]) - 1 == len(data["first"]) == len(steps)
    for step, (embedded, computed) in enumerate(zip(weights_of(data), attention.weights, strict=True)):
        first = data["first"][step]
        np.testing.assert_array_equal(embedded, computed[:, :, first:])
        assert (computed[:, :, :first] == 0).all()
        np.testing.assert_allclose(embedded.sum(axis=(2, 3)), 1, atol=1e-5)
        assert step - first <= 2 * 4, "two layers with a memory of 4 steps"
    assert [gate["layer"] for gate in data["gates"]] == ["Layer 1", "Layer 1", "Layer 2", "Layer 2"]
    assert {gate["name"] for gate in data["gates"]} == {"attention gate", "feed forward gate"}
    for gate, values in zip(data["gates"], attention.gates.values(), strict=True):
        np.testing.assert_allclose(gate["values"], values)
        assert len(values) == len(steps)
    assert [step["reward"] for step in data["steps"]] == [step.reward for step in steps]
    assert data["frames"][0].startswith("data:image/png;base64,")
    assert data["returns_to_go"] is None


def test_return_is_that_of_the_playback(run, capsys):
    main(["play", "run"])
    played = re.search(r"return (\S+) in (\d+) steps", capsys.readouterr().out)
    main(["attention", "run"])
    summary = data_of(run / "attention.html")["summary"]
    assert f"return {played[1]} in {played[2]} steps" in summary
    assert "GTrXLPPO in rlxf/TMaze-v0, checkpoint checkpoint.zip, seed 1000000" in summary


def test_long_episodes_are_cut(run, capsys):
    main(["attention", "run", "--max-steps", "2", "--output", "cut.html"])
    data = data_of(Path("cut.html"))
    assert len(data["steps"]) == 2
    assert data["notice"] == "The episode went on: the page shows its first 2 steps only."
    assert "in the first 2 steps" in data["summary"]
    assert "the first 2 steps of the episode are written to cut.html" in capsys.readouterr().out
    assert not (run / "attention.html").exists()


def test_weights_of_the_longest_episode_fit():
    for rows in (1, 8, 3 * 96, 10**7):
        steps = longest_episode(rows, 10**9)
        assert steps == 1 or rows * steps * (steps - 1) / 2 <= MAX_WEIGHTS
    assert longest_episode(8, 500) == 500


def test_page_makes_no_request_and_has_one_script(run):
    main(["attention", "run"])
    text = (run / "attention.html").read_text()
    assert "default-src 'none'; img-src data:" in text
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|src=[\"']?(?!data:)[\w/.]|@import|url\(", outside)
    assert text.count("<script") == 2


def test_texts_of_files_and_environments_are_escaped():
    text = page(hostile_episode())
    assert text.count("<script") == text.count("</script>") == 2
    assert "<img src=x" not in text
    assert "<!--" not in text
    assert html.escape(ATTACK) in re.search(r"<title>(.*?)</title>", text, re.DOTALL)[1]
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert data["title"] == ATTACK
    assert data["steps"][0]["info"] == {ATTACK: ATTACK}


def hostile_episode():
    attention = EpisodeAttention(
        layers=(1,),
        tokens=(ATTACK,),
        weights=(np.ones((1, 2, 1, 1), np.float32),),
        gates={f"{ATTACK}/{ATTACK}": np.ones(1, np.float32)},
    )
    steps = [Step(ATTACK, ATTACK, 1.0, {ATTACK: ATTACK})]
    return Episode(title=ATTACK, summary=ATTACK, steps=steps, frames=[], attention=attention, end="cut")


class Talkative(gymnasium.Env):
    """Environment without frames, with hostile texts in its infos and broken rendering on demand."""

    observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)

    metadata: ClassVar = {"render_modes": []}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.count += 1
        info = {ATTACK: ATTACK, "list": [1], "number": np.float32(0.5), "long": "x" * 1000}
        return self.observation_space.sample(), 0.5, self.count == 3, False, info

    def render(self):
        raise RuntimeError("no driver")


class BrokenRendering(Talkative):
    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}


@pytest.fixture
def talkative():
    """Register environments with the spaces of the T-Maze."""
    for name, kind in (("Talkative", Talkative), ("BrokenRendering", BrokenRendering)):
        gymnasium.register(f"test/{name}-v0", kind)
    yield
    for name in ("Talkative", "BrokenRendering"):
        gymnasium.registry.pop(f"test/{name}-v0")


def trained(env, folder):
    main(["train", "gtrxl", "--env", env, "--run", folder, *SHORT.split()])


@pytest.mark.usefixtures("talkative")
def test_environments_without_frames_are_shown_as_numbers():
    folder = "<img src=x onerror=1>"
    trained("test/Talkative-v0", folder)
    main(["attention", folder])
    path = Path(folder) / "attention.html"
    data = data_of(path)
    assert data["frames"] == []
    assert data["title"] == f"Attention of {folder}"
    assert folder not in path.read_text()
    assert len(data["steps"]) == 3
    assert re.fullmatch(r"-?[\d.]+, -?[\d.]+", data["steps"][0]["observation"])
    info = data["steps"][0]["info"]
    assert list(info) == [ATTACK[:MAX_TEXT] + "..." * (len(ATTACK) > MAX_TEXT), "number", "long"]
    assert len(info["long"]) == MAX_TEXT + 3


@pytest.mark.usefixtures("talkative")
def test_environments_whose_rendering_fails_are_shown_as_numbers(capsys):
    trained("test/BrokenRendering-v0", "broken")
    main(["attention", "broken"])
    assert "warning: the page has no frames, because rendering fails: no driver\n" in capsys.readouterr().err
    assert data_of(Path("broken/attention.html"))["frames"] == []


def test_texts_of_numbers():
    assert numbers_text({"a": np.array([1.0, 2.5]), "b": (1, "text")}) == "a: 1, 2.5; b: 1; text"
    assert numbers_text(np.zeros((7, 7, 3))).endswith("... (147 numbers)")
    assert info_text({"x": float("nan"), "array": np.ones(2), "flag": True}) == {"x": "nan", "flag": "True"}
    assert len(info_text({str(n): n for n in range(99)})) == 8


def test_smaller_image_format_is_used():
    rng = np.random.default_rng(0)
    assert data_uri(np.zeros((64, 64, 3), np.uint8)).startswith("data:image/png")
    assert data_uri(rng.integers(0, 255, (64, 64, 3), np.uint8)).startswith("data:image/jpeg")


def test_decision_transformers_are_shown(minari_root):
    record_cartpole(range(1, 5), "cartpole/random-v0")
    command = f"train dt --dataset cartpole/random-v0 --run offline {TINY} {TINY_CORE}"
    main(command.split())
    main(["attention", "offline", "--max-steps", "6"])
    data = data_of(Path("offline/attention.html"))
    assert data["tokens"] == ["return", "state", "action"]
    assert data["first"] == [max(0, step - 3) for step in range(len(data["steps"]))]
    assert len(data["returns_to_go"]) == len(data["steps"])
    for weights in weights_of(data):
        np.testing.assert_allclose(weights.sum(axis=(2, 3)), 1, atol=1e-5)
    main(["attention", "offline/checkpoint.zip", "--env", "CartPole-v1", "--max-steps", "2"])
    assert Path("offline/attention.html").stat().st_size > 0


def test_agents_without_attention_are_refused(run, minari_root, capsys):
    record_cartpole(range(1, 5), "cartpole/random-v0")
    main(f"train bc --dataset cartpole/random-v0 --run cloning {TINY}".split())
    message = refused(capsys, "attention", "cloning")
    assert "agent 'behavior_cloning'; supported agents are gtrxl, decision_transformer" in message
    core = "--core.memory None --core.position None --core.pattern full --core.recurrence min-gru"
    main(["train", "gtrxl", *TASK, "--run", "recurrent", *SHORT.replace(MEMORY, "").split(), *core.split()])
    message = refused(capsys, "attention", "recurrent")
    assert "no layer of this agent has attention, only recurrence=MinGRU" in message


def test_bad_input_is_one_line(run, capsys):
    for words, message in (
        (["nowhere"], "there is no run folder nowhere"),
        (["run", "--max-steps", "0"], "--max-steps must be at least 1"),
        (["run", "--seed", "-1"], "--seed must be finite and at least 0"),
        (["run", "--checkpoint", "best"], "has no best.zip"),
        (["run", "--env", "CartPole-v1"], "another observation space"),
        (["run", "--env", "Nothing-v1"], "Nothing-v1"),
        (["run", "--env-kwargs", "[1]"], "--env-kwargs must be a JSON object"),
        (["run", "--env-kwargs", '{"length": 5}'], "takes no argument 'length'"),
        (["run", "--output", "nowhere/page.html"], "there is no folder nowhere"),
        (["run", "--output", "run"], "is a folder"),
        (["run/checkpoint.zip"], "pass --env ID"),
    ):
        assert message in refused(capsys, "attention", *words), words
    assert not (run / "attention.html").exists()


def browse(tmp_path, address, *options):
    """Return the document of a page after its scripts have run."""
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", *options, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def embedded(tmp_path, text, width, script):
    """Return the result of a script on a page that is shown in a frame of some width."""
    frame = f'<iframe id="page" style="border: 0" width="{width}" height="800" srcdoc="{html.escape(text)}">'
    inspect = f"const inner = page.contentDocument; result.textContent = JSON.stringify({script});"
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<body>{frame}</iframe><pre id="result"></pre><script>onload = () => {{ {inspect} }}</script></body>'
    )
    shown = browse(tmp_path, outer.as_uri(), "--window-size=1600,1000")
    return json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)[1]))


@browser
def test_browser_shows_the_selected_step(run, tmp_path):
    main(["attention", "run"])
    attention, steps = played(run)
    shown = browse(tmp_path, (run / "attention.html").as_uri() + "#step=2")
    assert f"step 2 of {len(steps) - 1}</output>" in shown
    assert shown.count('class="row"') == 1 + attention.weights[0].shape[0] * attention.weights[0].shape[1]
    mean = attention.weights[2].mean(axis=(0, 1))[:, 0]
    best = int(mean.argmax())
    label = re.search(r'aria-label="mean: (.*?)"', shown)[1]
    assert label.startswith(f"step {best}")
    assert f"{100 * mean[best]:.0f}%" in label
    gate = attention.gates["layer_1/attention_gate"][2]
    assert f"attention gate: {gate:.3f}" in shown


@browser
def test_browser_follows_the_arrow_keys_and_clicks(run, tmp_path):
    main(["attention", "run"])
    text = (run / "attention.html").read_text()
    press = 'inner.dispatchEvent(new inner.defaultView.KeyboardEvent("keydown", {key: "ArrowRight"}))'
    position = 'inner.getElementById("position").textContent'
    click = 'inner.getElementById("previous").click()'
    first, second, third = embedded(
        tmp_path, text, 1280, f"[{position}, ({press}, {press}, {position}), ({click}, {position})]"
    )
    assert [each.split(" of")[0] for each in (first, second, third)] == ["step 0", "step 2", "step 1"]


@browser
@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_the_width_of_the_browser(run, tmp_path, width):
    main(["attention", "run"])
    text = (run / "attention.html").read_text()
    root = "inner.documentElement"
    needed, frame = embedded(tmp_path, text, width, f"[{root}.scrollWidth, {root}.clientWidth]")
    assert needed <= frame <= width


@browser
def test_browser_runs_no_foreign_script(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page(hostile_episode()))
    shown = browse(tmp_path, path.as_uri())
    assert "step 0 of 0</output>" in shown
    assert "data-attacked" not in shown.partition("<head>")[0]
    assert shown.count("<script") == 2
    assert '<img src="x"' not in shown
