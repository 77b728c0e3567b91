"""The path from the policy to the attention scores is short enough to follow in a debugger."""

import sys
from pathlib import Path

import torch

import rlxf
from rlxf import GTrXLPPO

MAX_FRAMES = 8
PACKAGE = str(Path(rlxf.__file__).parent)


def frames_since(name: str) -> list[str]:
    """Return the functions of rlxf on the call stack, from the function ``name`` to the current one."""
    frame, names = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_qualname)
            if frame.f_code.co_name == name:
                return names[::-1]
        frame = frame.f_back
    return []


def test_attention_scores_are_few_calls_below_act(monkeypatch):
    agent = GTrXLPPO("MlpGTrXLPolicy", "CartPole-v1", n_steps=4, segment_length=4, batch_size=4, n_epochs=1)
    paths, softmax = [], torch.Tensor.softmax

    def recorded(*args, **kwargs):
        paths.append(frames_since("act"))
        return softmax(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "softmax", recorded)
    agent.learn(4)
    below_act = [path for path in paths if path]
    assert below_act
    assert max(map(len, below_act)) <= MAX_FRAMES, below_act[0]
