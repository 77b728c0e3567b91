"""Tests that uses of agents besides plain training give the same numbers on an accelerator as on the CPU."""

import pytest

from tests.devices import gtrxl_workflows, offline_workflows
from tests.devices.workflows import check


@pytest.mark.parametrize("case", gtrxl_workflows.WORKFLOWS)
def test_gtrxl(case, on_device):
    on_device(check, gtrxl_workflows.__name__, case)


@pytest.mark.parametrize("case", offline_workflows.WORKFLOWS)
def test_offline(case, on_device):
    on_device(check, offline_workflows.__name__, case)
