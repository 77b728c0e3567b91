"""Tests of ``rlxf push`` and ``rlxf pull`` with a local server in place of the Hub."""

import errno
import json
import pickle
import shlex
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import HfApi, ModelCard, constants

from rlxf.cli import main
from rlxf.cli.entry_point import parse
from rlxf.cli.run_options import options_to_config
from rlxf.sharing.download import download, find_run
from rlxf.sharing.upload import upload
from tests.cli.running import refused, returns_of, train
from tests.sharing.hub_server import TOKEN, HubServer, use


@pytest.fixture
def hub(monkeypatch):
    """A server with the interface of the Hub, which huggingface_hub uses."""
    with HubServer() as server:
        use(server.url, monkeypatch)
        yield server


@pytest.fixture
def files(finished):
    """Files of a valid repository."""
    return {name: (finished / name).read_bytes() for name in ("config.json", "checkpoint.zip")}


def nothing_is_left():
    """Return whether there is no file of a download, not even a temporary one."""
    return not any(Path("runs").rglob("*")) if Path("runs").exists() else True


def test_pulled_agent_has_the_returns_of_the_pushed_one(finished, hub, capsys):
    main(["push", str(finished), "me/maze"])
    main(["pull", "me/maze"])
    shown = capsys.readouterr()
    assert shown.err == ""
    assert f"are uploaded to {hub.url}/me/maze" in shown.out
    assert "is written to runs/maze" in shown.out
    names = {"README.md", "checkpoint.zip", "config.json", "evaluation.json"}
    assert {path.name for path in Path("runs/maze").iterdir()} == names
    assert all(path.is_file() and not path.is_symlink() for path in Path("runs/maze").iterdir())
    np.testing.assert_array_equal(
        returns_of("runs/maze/checkpoint.zip"), returns_of(finished / "checkpoint.zip")
    )
    main(["evaluate", "runs/maze", "--episodes", "2", "--no-progress-bar"])
    assert "Evaluation over 2 episodes" in capsys.readouterr().out


def test_normalization_is_shared(hub, capsys):
    train("--run", "runs/own", "--normalize-observations", "--core.layers", "1", "--episodes", "2")
    main(["push", "runs/own", "me/own"])
    main(["pull", "me/own", "--output", "pulled"])
    main(["evaluate", "pulled", "--episodes", "2", "--no-progress-bar"])
    assert Path("pulled/normalizer.zip").read_bytes() == Path("runs/own/normalizer.zip").read_bytes()


def test_best_checkpoint_becomes_the_checkpoint_of_the_repository(finished, hub, capsys):
    main(["push", str(finished), "me/maze", "--checkpoint", "best"])
    shared = hub.repositories["me/maze"].files
    assert shared["checkpoint.zip"] == (finished / "best.zip").read_bytes()
    assert "best.zip" not in shared
    assert "the best checkpoint" in shared["README.md"].decode()
    reports = json.loads((finished / "evaluation.json").read_text())
    assert json.loads(shared["evaluation.json"]) == {"last": reports["best"]}
    main(["pull", "me/maze"])
    assert "ignored files" not in capsys.readouterr().out
    main(["push", "runs/maze", "me/copy"])
    assert "the best checkpoint" in hub.repositories["me/copy"].files["README.md"].decode()
    main(["push", str(finished), "me/maze"])
    assert "shared.json" not in hub.repositories["me/maze"].files


def test_card_names_the_command_that_trains_the_agent(finished, hub):
    main(["push", str(finished), "me/maze"])
    card = ModelCard(hub.repositories["me/maze"].files["README.md"].decode())
    command = card.text.partition("```bash\n")[2].partition("\n```")[0]
    words = shlex.split(command.replace("\\\n", " "))
    config = json.loads((finished / "config.json").read_text())
    options = json.loads(json.dumps(options_to_config(parse(words[1:]))))
    assert options | {"agent": "gtrxl"} == config
    assert "--gamma" not in words, "options with their default are left out"
    (result,) = card.data.eval_results
    report = json.loads((finished / "evaluation.json").read_text())["last"]
    assert result.metric_value == f"{report['mean']:.2f} +/- {report['std']:.2f}"
    assert (card.data.library_name, result.dataset_name) == ("rlxf", "rlxf/TMaze-v0")


def test_run_without_an_evaluation_can_be_shared(files, hub, capsys):
    Path("plain").mkdir()
    for name, content in files.items():
        Path("plain", name).write_bytes(content)
    main(["push", "plain", "me/plain", "--private"])
    assert hub.repositories["me/plain"].private
    assert "The agent was not evaluated" in hub.repositories["me/plain"].files["README.md"].decode()


def test_second_push_replaces_the_run_and_keeps_other_files(finished, hub):
    main(["push", str(finished), "me/maze", "--video"])
    repository = hub.repositories["me/maze"]
    assert repository.files["replay.gif"].startswith(b"GIF89a")
    assert "![One episode](replay.gif)" in repository.files["README.md"].decode()
    first = repository.commit(repository.files | {"notes.txt": b"own"})
    main(["push", str(finished), "me/maze", "--checkpoint", "best"])
    assert set(repository.files) == set(repository.commits[first]) - {"replay.gif"} | {"shared.json"}
    main(["pull", "me/maze", "--revision", first, "--output", "first"])
    assert Path("first/checkpoint.zip").read_bytes() == (finished / "checkpoint.zip").read_bytes()


def test_repositories_of_others_are_not_overwritten(finished, hub, capsys):
    hub.add("me/public", {".gitattributes": b""})
    message = refused(capsys, "push", str(finished), "me/public", "--private")
    assert "me/public exists and is public" in message
    hub.add("me/bert", {"config.json": b"{}"}, library="transformers")
    assert "has a config.json that rlxf did not write" in refused(capsys, "push", str(finished), "me/bert")
    assert set(hub.repositories["me/bert"].files) == {"config.json"}
    assert "no permission for others/maze" in refused(capsys, "push", str(finished), "others/maze")


def test_a_repository_that_has_only_a_card_is_filled(hub):
    """The website of the Hub can create one with a card, which names no library."""
    repository = hub.add("me/new", {"README.md": b"# mine"})
    files = {"README.md": b"# run", "config.json": b"{}"}
    upload("me/new", files)
    assert repository.files == files


def test_bad_input_of_push_is_one_line(finished, hub, capsys, monkeypatch):
    for name in ("maze", "me/a b", "me/..", "a/b/c", "../x"):
        assert "a repository of the Hub is OWNER/NAME" in refused(capsys, "push", str(finished), name)
    assert "there is no run folder nowhere" in refused(capsys, "push", "nowhere", "me/maze")
    for token in ("hf_wrong", "hf_two words", "hf_line\x00"[:7]):
        monkeypatch.setenv("HF_TOKEN", token)
        message = refused(capsys, "push", str(finished), "me/maze")
        assert token not in message
        assert "HF_TOKEN" in message
    assert not hub.repositories


def pickled():
    """Return a pickle that would write a file."""

    class Attack:
        def __reduce__(self):
            return (open, ("ran", "w"))

    return pickle.dumps(Attack())


def zipped(**members):
    """Return a zip archive with these members."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


def changed(config, **values):
    return json.dumps(json.loads(config) | values).encode()


HOSTILE = {
    "pickle": (lambda files: {"checkpoint.zip": pickled()}, "cannot read checkpoint checkpoint.zip"),
    "pickle in a zip": (
        lambda files: {"checkpoint.zip": zipped(**{"data.pkl": pickled()})},
        "cannot read checkpoint checkpoint.zip",
    ),
    "member outside": (lambda files: {"checkpoint.zip": zipped(**{"../ran": "x"})}, "cannot read checkpoint"),
    "truncated": (lambda files: {"checkpoint.zip": files["checkpoint.zip"][:-9]}, "cannot read checkpoint"),
    "link": (lambda files: {"checkpoint.zip": b"/etc/passwd"}, "cannot read checkpoint"),
    "hostile best": (lambda files: {"best.zip": pickled()}, "cannot read checkpoint best.zip"),
    "hostile normalizer": (lambda files: {"normalizer.zip": pickled()}, "cannot read checkpoint normalizer"),
    "no object": (lambda files: {"config.json": b"[1]"}, "config.json contains a list"),
    "no JSON": (lambda files: {"config.json": b"\xff"}, "config.json cannot be read"),
    "deep JSON": (lambda files: {"config.json": b"[" * 10**5}, "config.json cannot be read"),
    "unknown agent": (
        lambda files: {"config.json": changed(files["config.json"], agent="os:system")},
        "is a run of agent 'os:system'",
    ),
    "other agent": (
        lambda files: {"config.json": changed(files["config.json"], agent="decision_transformer")},
        "is no valid run",
    ),
    "agent that is a list": (
        lambda files: {"config.json": changed(files["config.json"], agent=["gtrxl"])},
        "is no valid run",
    ),
    "evaluation": (lambda files: {"evaluation.json": b"[]"}, "evaluation.json contains a list"),
    "name of the checkpoint": (
        lambda files: {"shared.json": b'{"checkpoint": "../ran"}'},
        "shared.json has checkpoint = '../ran', which must be last or best",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_repository_leaves_nothing(name, files, hub, capsys):
    change, message = HOSTILE[name]
    hub.add("them/hostile", files | change(files))
    assert message in refused(capsys, "pull", "them/hostile")
    assert nothing_is_left()
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("checkpoint.zip", 2**30 + 1, "more than the limit of 1,073,741,824"),
        ("config.json", 2**23 + 1, "more than the limit of 8,388,608"),
        ("README.md", 10**18, "more than the limit"),
        ("checkpoint.zip", None, "no size of checkpoint.zip"),
        ("checkpoint.zip", -1, "no size of checkpoint.zip"),
    ],
)
def test_sizes_are_limited_before_the_download(name, size, message, files, hub, capsys):
    hub.add("them/large", files | {"README.md": b""}, sizes={name: size})
    assert message in refused(capsys, "pull", "them/large")
    assert not any("/resolve/" in request for request in hub.requests)
    assert nothing_is_left()


def test_sizes_are_compared_after_the_download(files, hub, capsys):
    hub.add("them/other", files, sizes={"checkpoint.zip": 10})
    assert "and 10 were announced" in refused(capsys, "pull", "them/other")
    assert nothing_is_left()


def test_a_commit_after_the_look_up_is_not_downloaded(hub, tmp_path):
    """All files are of the commit whose content was checked, even if the later ones have the same sizes."""
    files = {"config.json": b"{}", "checkpoint.zip": b"12"}
    repository = hub.add("them/run", files)
    found = find_run("them/run")
    repository.commit({name: content[::-1] for name, content in files.items()})
    download(found, tmp_path / "run", lambda folder: None)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files


def test_other_files_are_named_and_not_downloaded(files, hub, capsys):
    others = {
        "../outside": b"x",
        "code.py": b"x",
        "a/b/config.json": b"x",
        "\x1b[2Jevil": b"x",
        "/etc/x": b"x",
    }
    hub.add("them/more", files | others | {"replay.gif": b"", "z.bin": b""})
    main(["pull", "them/more"])
    shown = capsys.readouterr().out
    assert "ignored files of them/more" in shown
    assert "'../outside'" in shown
    assert "and 1 more" in shown
    assert "\x1b" not in shown
    assert {path.name for path in Path("runs/more").rglob("*")} == set(files)
    assert not Path("outside").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "has no config.json and no checkpoint.zip"),
        ({"config.json": b"{}"}, "has no checkpoint.zip; it belongs to the library 'transformers'"),
    ],
)
def test_repositories_without_a_run_are_refused(content, message, hub, capsys):
    hub.add("them/bert", content, library="transformers" if content else None)
    assert message in refused(capsys, "pull", "them/bert")


def test_missing_repositories_and_revisions_are_one_line(files, hub, capsys, monkeypatch):
    hub.add("me/maze", files)
    hub.add("me/secret", files, private=True)
    assert "there is no model repository me/none" in refused(capsys, "pull", "me/none")
    message = refused(capsys, "pull", "me/maze", "--revision", "v9")
    assert "me/maze has no revision 'v9'" in message
    assert "me/maze has no revision" in refused(capsys, "pull", "me/maze", "--revision", "../../x")
    main(["pull", "me/secret"])
    monkeypatch.delenv("HF_TOKEN")
    message = refused(capsys, "pull", "me/secret", "--output", "secret")
    assert "it is private and no valid token gives access" in message


def test_missing_network_is_one_line(finished, hub, capsys, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for words in (["pull", "me/maze"], ["push", str(finished), "me/maze"]):
        message = refused(capsys, *words)
        assert "http://127.0.0.1:9 cannot be reached" in message
        assert TOKEN not in message
    monkeypatch.setattr(constants, "ENDPOINT", "nonsense")
    assert "nonsense cannot be reached" in refused(capsys, "pull", "me/maze")


@pytest.mark.parametrize("status", [200, 403, 500])
def test_wrong_endpoint_is_one_line(status, hub, capsys, monkeypatch):
    hub.failing = status
    message = refused(capsys, "pull", "me/maze")
    assert {200: "does not answer as the Hub", 403: "no permission", 500: "with status 500"}[
        status
    ] in message
    assert nothing_is_left()


def test_interrupted_download_leaves_nothing(files, hub, capsys):
    hub.add("them/maze", files, interrupted={"checkpoint.zip"})
    assert "them/maze" in refused(capsys, "pull", "them/maze")
    assert nothing_is_left()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
    ],
)
def test_failure_while_writing_leaves_nothing(error, status, message, files, hub, capsys, monkeypatch):
    hub.add("them/maze", files)
    original = HfApi.hf_hub_download

    def download(self, repository, name, **arguments):
        if name == "checkpoint.zip":
            raise error
        return original(self, repository, name, **arguments)

    monkeypatch.setattr(HfApi, "hf_hub_download", download)
    with pytest.raises(SystemExit) as exit_info:
        main(["pull", "them/maze"])
    assert exit_info.value.code == status
    assert message in capsys.readouterr().err
    assert nothing_is_left()


def test_existing_folder_is_refused_without_a_request(hub, capsys):
    Path("runs/maze").mkdir(parents=True)
    Path("link").symlink_to("elsewhere")
    assert "runs/maze exists" in refused(capsys, "pull", "me/maze")
    assert "link exists" in refused(capsys, "pull", "me/maze", "--output", "link")
    assert not hub.requests


def test_environment_of_a_stranger_needs_trust(files, hub, capsys):
    config = changed(files["config.json"], env="stranger.notes:CartPole-v1")
    hub.add("them/module", files | {"config.json": config})
    main(["pull", "them/module"])
    assert "needs trust" in capsys.readouterr().out
    message = refused(capsys, "evaluate", "runs/module", "--episodes", "1", "--no-progress-bar")
    assert "a module that a file names is not imported" in message
