"""Tests that uses of agents besides plain training give the same numbers on an accelerator as on the CPU."""

import pytest

from tests.devices import gtrxl_workflows, offline_workflows


@pytest.mark.parametrize("case", gtrxl_workflows.WORKFLOWS)
def test_gtrxl(case, on_device):
    on_device(gtrxl_workflows.check, case)


@pytest.mark.parametrize("case", offline_workflows.WORKFLOWS)
def test_offline(case, on_device):
    on_device(offline_workflows.check, case)
