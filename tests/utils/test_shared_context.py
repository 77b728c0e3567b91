"""A setting of the process is restored, whatever the order in which its users leave."""

import logging
import sys
import warnings
from contextlib import contextmanager

import pytest
from torch.distributions import Distribution

from rlxf.utils.distributions import unvalidated_distributions
from rlxf.utils.shared_context import SharedContext
from rlxf.utils.warnings import silenced


class Setting:
    """Setting that records its changes."""

    def __init__(self):
        self.values = ["given"]

    @contextmanager
    def changed(self):
        before = self.values[-1]
        self.values.append("changed")
        try:
            yield
        finally:
            self.values.append(before)


def test_the_first_user_changes_and_the_last_one_restores():
    setting = Setting()
    first = second = SharedContext(setting.changed)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert setting.values == ["given", "changed"]
    second.__exit__(None, None, None)
    assert setting.values == ["given", "changed", "given"]


def test_it_restores_after_an_error_and_can_be_used_again():
    setting = Setting()
    shared = SharedContext(setting.changed)
    for _ in range(2):
        with pytest.raises(KeyError), shared, shared:
            raise KeyError
    assert setting.values == ["given", "changed", "given", "changed", "given"]


def test_it_decorates_recursive_functions():
    setting = Setting()

    @SharedContext(setting.changed)
    def count(n):
        return n and 1 + count(n - 1)

    assert count(3) == 3
    assert setting.values == ["given", "changed", "given"]


def test_checks_of_distributions_are_restored_in_any_order():
    before = Distribution._validate_args
    one, other = unvalidated_distributions(), unvalidated_distributions()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not Distribution._validate_args
    other.__exit__(None, None, None)
    assert Distribution._validate_args == before


def test_output_and_logs_are_restored_in_any_order():
    stdout, stderr, disabled = sys.stdout, sys.stderr, logging.root.manager.disable
    filters = list(warnings.filters)
    one, other = silenced(), silenced()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.stdout is not stdout
    other.__exit__(None, None, None)
    assert (sys.stdout, sys.stderr, logging.root.manager.disable) == (stdout, stderr, disabled)
    assert warnings.filters == filters
