"""Recurrent techniques under test, with small sizes, and random tokens for them."""

import torch
from torch import Tensor

from rlxf.attention.recurrent.agalite import AGaLiTe
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState, Recurrence, RecurrentMixer
from rlxf.attention.recurrent.conv_former import ConvFormer
from rlxf.attention.recurrent.deltanet import DeltaNet
from rlxf.attention.recurrent.gated_deltanet import GatedDeltaNet
from rlxf.attention.recurrent.gla import GLA
from rlxf.attention.recurrent.gru import GRU
from rlxf.attention.recurrent.infini import InfiniAttention
from rlxf.attention.recurrent.linear_attention import RecurrentPerformer, RecurrentRFA
from rlxf.attention.recurrent.lru import LRU
from rlxf.attention.recurrent.lstm import LSTM
from rlxf.attention.recurrent.mamba2 import Mamba2
from rlxf.attention.recurrent.min_gru import MinGRU
from rlxf.attention.recurrent.retnet import RetNet
from rlxf.attention.recurrent.shm import SHM
from rlxf.attention.token_index import EMPTY, TokenIndex

WIDTH, HEADS = 8, 2

TECHNIQUES: dict[str, Recurrence] = {
    "AGaLiTe": AGaLiTe(eta=2, rank=4),
    "ConvFormer": ConvFormer(4),
    "ConvFormer, three kinds": ConvFormer(3, kinds=3),
    "ConvFormer, one tap": ConvFormer(1),
    "DeltaNet": DeltaNet(convolution=3),
    "DeltaNet, negative eigenvalues": DeltaNet(negative_eigenvalues=True),
    "GatedDeltaNet": GatedDeltaNet(),
    "GLA": GLA(),
    "GRU": GRU(),
    "InfiniAttention": InfiniAttention(2),
    "InfiniAttention, delta": InfiniAttention(2, "delta"),
    "LRU": LRU(),
    "LSTM": LSTM(),
    "Mamba2": Mamba2(state=4, convolution=3),
    "Mamba2 without convolution": Mamba2(state=4, convolution=1),
    "MinGRU": MinGRU(),
    "RecurrentPerformer": RecurrentPerformer(6),
    "RecurrentPerformer, relu": RecurrentPerformer(6, "relu"),
    "RecurrentRFA": RecurrentRFA(16, sigma=2.0),
    "RecurrentRFA, gated": RecurrentRFA(16, sigma=2.0, gate=True, gate_bias=1.0),
    "RetNet": RetNet(),
    "SHM": SHM(size=6, rows=5),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> RecurrentMixer:
    """Build a mixer with fixed random weights; biases that start at 0 are random, too."""
    torch.manual_seed(0)
    mixer = TECHNIQUES[name].build(WIDTH, HEADS)
    for parameter in mixer.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.5)
    return mixer.to(dtype)


def differentiable(state: MixerState) -> MixerState:
    """Return the parts of a state that carry all of its gradient.

    The scale of a `KVState` is a common exponent without gradient, which total and energy are relative to.
    """
    return {} if "scale" in state else state


def by_steps(
    mixer: RecurrentMixer, x: Tensor, index: TokenIndex, state: MixerState, episode: Tensor
) -> tuple[Tensor, MixerState]:
    """Run a mixer token by token."""
    outputs = []
    for time in range(x.shape[1]):
        now = index.at(slice(time, time + 1))
        y, state = mixer(x[:, time : time + 1], EpisodeRuns.of(now, episode), state)
        episode = torch.where(now.episode[:, 0] == EMPTY, episode, now.episode[:, 0])
        outputs.append(y)
    return torch.cat(outputs, dim=1), state
