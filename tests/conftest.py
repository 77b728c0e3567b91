"""Fixtures of all tests, and the selections of ``--fast`` and ``--thorough``."""

import gc
import os
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.progress import Progress
from tensorboard.summary.writer import event_file_writer

from rlxf.attention.registry import TECHNIQUES
from tests.in_process import InProcessPool

CONTRACTS = {
    "test_acting_with_ring_buffer_equals_learning_in_segments",
    "test_changed_token_does_not_affect_earlier_outputs",
    "test_other_episodes_and_empty_slots_have_no_effect",
    "test_input_state_is_not_modified",
    "test_full_memory_equals_one_long_segment",
    "test_every_parameter_gets_a_gradient",
}
"""One test of each contract (tests/attention/test_contracts.py). ``--fast`` runs all techniques of each, and
the default selection all techniques and all choices of their options."""
ALL_SPECS = (
    "tests/attention/test_bad_input.py",
    "tests/attention/test_contracts.py",
    "tests/attention/test_inspection.py",
    "tests/attention/test_transformer.py",
)
"""Files whose tests have a case for each of hundreds of specs. By default, they run for all techniques (those
in `CONTRACTS` also for all choices of options), and with ``--thorough`` for all specs."""
TRAININGS = {
    "test_two_updates",
    "test_all_weights_change_in_two_updates",
    "test_training_reduces_the_loss_of_predictable_tokens",
}
"""One training of each agent, which ``--fast`` runs although it may be long."""
LONG_TESTS = Path(__file__).with_name("long_tests.txt")
"""Names of the tests that need more than `LONG_SECONDS`; most of them train agents or start processes."""
LONG_SECONDS = 0.5
"""CPU time of a long test, including its fixtures and processes."""


# All tests are millions of objects, which each garbage collection would visit: see pytest_collection_finish.
gc.disable()

# Without optimization of its C++ wrapper, a program compiles in three quarters of the time.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

# Names of event files end with a counter: those of one second are in order if counters have as many digits.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10**6)

EMPTY = SimpleNamespace(params={})
"""Parameters of a test without cases."""


@pytest.fixture(autouse=True)
def denormal_numbers():
    """Disable flushing of denormal numbers before each test, as agents enable it for the whole process."""
    torch.set_flush_denormal(False)


@pytest.fixture
def no_progress_bars(monkeypatch):
    """Disable progress bars, which are not part of the output."""
    for name in ("start", "stop"):
        monkeypatch.setattr(Progress, name, lambda self: None)


@pytest.fixture
def benchmarks_in_process(monkeypatch):
    """Run the jobs of benchmarks in this process."""
    monkeypatch.setattr("benchmarks.result_cache.fresh_processes", lambda number: InProcessPool())


@pytest.fixture
def minari_root(tmp_path, monkeypatch):
    """Set empty folders for Minari datasets and for their caches; return the former."""
    root = tmp_path / "minari"
    root.mkdir()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    monkeypatch.setenv("RLXF_CACHE", str(tmp_path / "cache"))
    return root


@pytest.fixture
def restored_registry(monkeypatch):
    """Restore the table of techniques after the test."""
    for axis, techniques in TECHNIQUES.items():
        monkeypatch.setitem(TECHNIQUES, axis, dict(techniques))


def pytest_addoption(parser):
    """Add ``--fast``, ``--thorough`` and ``--record-long``."""
    parser.addoption("--thorough", action="store_true", help="run all tests with all cases")
    parser.addoption("--fast", action="store_true", help="run short tests only, and one case of each")
    parser.addoption(
        "--record-long", action="store_true", help=f"add the tests that are long to {LONG_TESTS.name}"
    )


def pytest_collection_modifyitems(config, items):
    """Select the tests of ``--fast``, or leave out what needs ``--thorough``."""
    covered = {}
    if config.getoption("--fast"):
        long = set(LONG_TESTS.read_text().split())
        selected = [item for item in items if item.originalname not in long and is_fast(item, covered)]
    elif config.getoption("--thorough"):
        selected = items
    else:
        selected = [item for item in items if is_default(item, covered)]
    kept = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = longest_first(selected)


def pytest_collection_finish():
    """Enable garbage collection, for what the tests make."""
    gc.freeze()
    gc.enable()


def longest_first(items):
    """Return the tests with the files first that have slow tests, so that all processes end together."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    return sorted(items, key=lambda item: item.path not in slow)


def is_default(item, covered):
    """Return whether a case runs without options; ``covered`` as in `adds_coverage`."""
    if item.get_closest_marker("thorough"):
        return False
    if mark := item.get_closest_marker("first_cases"):
        test = item.nodeid.partition("[")[0]
        covered[test] = covered.get(test, 0) + 1
        return covered[test] <= mark.args[0]
    if not has_all_specs(item):
        return True
    return adds_coverage(item, covered, choices if item.originalname in CONTRACTS else techniques)


def has_all_specs(item):
    """Return whether a case is one of hundreds of specs."""
    return item.nodeid.startswith(ALL_SPECS) and "spec" in getattr(item, "callspec", EMPTY).params


def is_fast(item, covered):
    """Return whether ``--fast`` runs a case; ``covered`` as in `adds_coverage`."""
    if any(item.get_closest_marker(mark) for mark in ("slow", "faults", "thorough")):
        return False
    if item.originalname in CONTRACTS:
        return adds_coverage(item, covered, techniques)
    test = item.nodeid.partition("[")[0]
    first = test not in covered
    covered[test] = set()
    return first


def techniques(spec):
    """Return the types of the techniques of a spec."""
    return {type(value) for value in vars(spec).values()}


def choices(spec):
    """Return the types of the fields of a spec, and values of texts and flags, also of its techniques."""
    found = set()
    for name, value in vars(spec).items():
        inner = vars(value) if is_dataclass(value) else {}
        flags = {(key, one) for key, one in inner.items() if one is None or isinstance(one, (bool, str))}
        own = value if isinstance(value, (bool, str)) else None
        found |= {(name, type(value), flag) for flag in {own, *flags}}
    return found


def adds_coverage(item, covered, features):
    """Return whether a case is the first one of its test, apart from its spec, with some feature of specs.

    Args:
        item: case of a test.
        covered: features that the selected cases of each test have; it is updated.
        features: function that returns the features of a spec, such as `techniques`.
    """
    others = {name: value for name, value in item.callspec.params.items() if name != "spec"}
    test = f"{item.nodeid.partition('[')[0]}, {others}"
    added = features(item.callspec.params["spec"])
    if test in covered and added <= covered[test]:
        return False
    covered[test] = covered.get(test, set()) | added
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Record the test in `LONG_TESTS` if it is long."""
    before = sum(os.times()[:4])
    result = yield
    if item.config.getoption("--record-long") and sum(os.times()[:4]) - before > LONG_SECONDS:
        names = {*LONG_TESTS.read_text().split(), item.originalname} - CONTRACTS - TRAININGS
        LONG_TESTS.write_text("\n".join(sorted(names)) + "\n")
    return result
