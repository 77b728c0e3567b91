"""A requested device is used or rejected."""

import pytest
import torch

from rlxf import GTrXLPPO, import_sb3
from rlxf.agents.common.arguments import check_device


def gpus(monkeypatch, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")], ids=str)
def test_no_gpu(monkeypatch, device):
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match=r"requires a GPU .*: torch finds none .* use device='cpu'"):
        check_device(device)


def test_too_few_gpus(monkeypatch):
    gpus(monkeypatch, 2)
    check_device("cuda:1")
    with pytest.raises(ValueError, match=r"device='cuda:2' requires a GPU .*: torch finds 2"):
        check_device("cuda:2")


@pytest.mark.parametrize("device", ["auto", "cpu", "meta", torch.device("cpu")], ids=str)
def test_devices_that_need_no_gpu(monkeypatch, device):
    gpus(monkeypatch, 0)
    check_device(device)


def test_no_such_device():
    with pytest.raises(ValueError, match=r"device must be 'auto', 'cpu' or 'cuda', got 'gpu'"):
        check_device("gpu")


def test_an_agent_does_not_fall_back_to_the_cpu(monkeypatch, tmp_path):
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match=r"requires a GPU"):
        GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", device="cuda")
    GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", n_envs=8, device="auto").save(tmp_path / "agent")
    with pytest.raises(ValueError, match=r"requires a GPU"):
        GTrXLPPO.load(tmp_path / "agent", device="cuda")


def test_an_imported_agent_does_not_fall_back_to_the_cpu(monkeypatch, tmp_path):
    gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match="requires a GPU"):
        import_sb3(tmp_path / "agent.zip", trust=True, device="cuda")
