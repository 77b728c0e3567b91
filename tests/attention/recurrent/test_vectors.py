"""Reference vectors of the recurrent mixers: outputs and states, from given states and over resets."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlxf.attention.recurrent import (
    agalite,
    decayed_attention,
    gru,
    heads,
    lru,
    lstm,
    mamba2,
    min_gru,
    retnet,
    shm,
)
from rlxf.attention.recurrent.base import EpisodeRuns, MixerState
from rlxf.attention.recurrent.heads import unit_norm
from tests.attention.oracle import Vector, fill, load, put

TOLERANCE = 1e-9

Mixer = Callable[[Tensor, EpisodeRuns, MixerState], tuple[Tensor, MixerState]]


def forms(vector: Vector, names: dict[str, str]) -> list[tuple[str, EpisodeRuns, MixerState]]:
    """Return prefix, runs and initial state: zero state, given state, and given state with resets.

    ``names`` maps names of a mixer's states to those of the vector.
    """
    reset, given = vector["in_reset"].bool(), {}
    for ours, theirs in names.items():
        given[ours] = vector[f"in_state0_{theirs}"]
    zeros = {name: torch.zeros_like(x) for name, x in given.items()}
    never = torch.zeros_like(reset)
    return [("", runs_of(never), zeros), ("init_", runs_of(never), given), ("reset_", runs_of(reset), given)]


def runs_of(reset: Tensor, position: Tensor | None = None) -> EpisodeRuns:
    """Return runs without empty slots; positions are 0 unless given."""
    return EpisodeRuns(
        reset,
        torch.ones_like(reset),
        torch.zeros(reset.shape, dtype=torch.long) if position is None else position,
        torch.zeros(len(reset), dtype=torch.long),
    )


def assert_equal(y: Tensor, state: MixerState, vector: Vector, prefix: str, names: dict[str, str]) -> None:
    torch.testing.assert_close(y, vector[f"out_{prefix}y"], rtol=0, atol=TOLERANCE)
    for ours, theirs in names.items():
        torch.testing.assert_close(state[ours], vector[f"out_{prefix}final_{theirs}"], rtol=0, atol=TOLERANCE)


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# Cores of the mixers with matrix states.


def retention_core(z: Vector, runs: EpisodeRuns, state: Tensor) -> tuple[Tensor, Tensor]:
    rates = retnet.log_decays(z["in_q"].shape[2], z["in_q"])
    log_decay = rates.expand(z["in_q"].shape[:3])[..., None]
    return decayed_attention.decayed_attention(
        scaled(z["in_q"]), z["in_k"], z["in_v"], log_decay, runs, state
    )


def gla_core(z: Vector, runs: EpisodeRuns, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = scaled(z["in_q"]), z["in_k"], z["in_v"]
    return decayed_attention.decayed_attention(q, k, v, z["in_gk"], runs, state)


def delta_core(z: Vector, runs: EpisodeRuns, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, beta = scaled(z["in_q"]), z["in_k"], z["in_beta"]
    return decayed_attention.delta_rule(q, k, z["in_v"], beta, torch.zeros_like(beta), runs, state)


def gated_delta_core(z: Vector, runs: EpisodeRuns, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k = scaled(unit_norm(z["in_q"])), unit_norm(z["in_k"])
    return decayed_attention.delta_rule(q, k, z["in_v"], z["in_beta"], z["in_g"], runs, state)


def ssd_core(z: Vector, runs: EpisodeRuns, state: Tensor) -> tuple[Tensor, Tensor]:
    x, step = z["in_x"], F.softplus(z["in_dt"] + z["w_dt_bias"])
    keys = (z[f"in_{name}"].expand(-1, -1, x.shape[2], -1) for name in "CB")
    log_decay = (-z["w_A_log"].exp() * step)[..., None]
    y, last = decayed_attention.decayed_attention(
        *keys, x * step[..., None], log_decay, runs, state.transpose(-1, -2)
    )
    return y + z["w_D"][:, None] * x, last.transpose(-1, -2)


def scaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** -0.5


CORES = {
    "retnet": retention_core,
    "gla": gla_core,
    "deltanet": delta_core,
    "gated_deltanet": gated_delta_core,
    "ssd": ssd_core,
}


@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
@pytest.mark.parametrize("name", CORES)
def test_core_of_matrix_states(name, chunk, monkeypatch):
    monkeypatch.setattr(decayed_attention, "CHUNK", chunk)
    monkeypatch.setattr(decayed_attention, "CHANNEL_CHUNK", chunk)
    vector = load(name)
    for prefix, runs, state in forms(vector, {"S": "S"}):
        y, last = CORES[name](vector, runs, state["S"])
        assert_equal(y, {"S": last}, vector, prefix, {"S": "S"})


def test_retention_layer(monkeypatch):
    z = load("retnet")
    monkeypatch.setattr(heads, "NORM_EPSILON", float(z["cfg_layer_rms_eps"]))
    width, values = z["w_layer_v_proj"].shape
    mixer = retnet.Retention(width, int(z["cfg_layer_heads"]), values)
    put(mixer.qk.weight, torch.cat([z["w_layer_q_proj"], z["w_layer_k_proj"]], dim=1).T)
    put(mixer.vg.weight, torch.cat([z["w_layer_v_proj"], z["w_layer_g_proj"]], dim=1).T)
    put(mixer.output.weight, z["w_layer_out_proj"].T)
    x = z["in_layer_x"]
    position = torch.arange(x.shape[1]).expand(x.shape[:2])
    runs = runs_of(torch.zeros(x.shape[:2], dtype=torch.bool), position)
    y, _ = mixer(x, runs, mixer.initial_state(len(x)))
    torch.testing.assert_close(y, z["out_layer_y"], rtol=0, atol=TOLERANCE)


# Whole mixers.


def test_mamba2():
    z = load("mamba2")
    taps = z["w_conv1d_weight"].shape[-1]
    size = z["in_state0_ssm"].shape[-1]
    mixer = mamba2.Mamba2(state=size, convolution=taps).build(z["in_x"].shape[-1], len(z["w_D"]))
    fill(mixer.input, z["w_in_proj_weight_T_out_in"])
    put(mixer.convolution.weight, z["w_conv1d_weight"][:, 0])
    put(mixer.convolution.bias, z["w_conv1d_bias"])
    put(mixer.time_step_bias, z["w_dt_bias"])
    put(mixer.log_rate, z["w_A_log"])
    put(mixer.skip, z["w_D"])
    put(mixer.norm.weight, z["w_norm_weight"])
    fill(mixer.output, z["w_out_proj_weight_T_out_in"])
    for key in [key for key in z if key.endswith("_conv")]:
        z[key] = z[key][:, :, 1:].mT  # the oldest of its columns is never read
    for key in [key for key in z if key.endswith("_ssm")]:
        z[key] = z[key].mT
    names = {"window": "conv", "state": "ssm"}
    for prefix, runs, state in forms(z, names):
        assert_equal(*mixer(z["in_x"], runs, state), z, prefix, names)


def test_lru():
    z = load("lru")
    mixer = lru.LRU().build(z["in_x"].shape[-1], 1)
    for ours, theirs in (("b", "B"), ("c", "C")):
        put(getattr(mixer, ours), torch.stack([z[f"w_{theirs}_{part}_T_out_in"] for part in ("re", "im")]))
    for name in ("nu_log", "theta_log", "gamma_log"):
        put(getattr(mixer, name), z[f"w_{name}"])
    put(mixer.d, z["w_D"])
    for key in [key for key in z if key.endswith("_h")]:
        z[key] = torch.view_as_real(z[key])
    for prefix, runs, state in forms(z, {"state": "h"}):
        assert_equal(*mixer(z["in_x"], runs, state), z, prefix, {"state": "h"})


def test_min_gru_without_positivity_map():
    z = load("mingru")
    width, size = z["w_h"].shape
    mixer = min_gru.MinGRUMixer(min_gru.MinGRU(), width)
    mixer.gate, mixer.candidate = nn.Linear(width, size), nn.Linear(width, size, bias=False)
    fill(mixer.gate, z["w_z"].T, torch.zeros(size))
    fill(mixer.candidate, z["w_h"].T)
    mixer.output = nn.Identity()
    never = torch.zeros(z["in_x"].shape[:2], dtype=torch.bool)
    y, _ = mixer(z["in_x"], runs_of(never), {"state": z["in_plain_state0"]})
    torch.testing.assert_close(y, z["out_plain_y"], rtol=0, atol=TOLERANCE)


def test_agalite():
    z = load("agalite")
    spec = agalite.AGaLiTe(eta=int(z["cfg_eta"]), rank=int(z["cfg_r"]))
    mixer = spec.build(z["in_x"].shape[-1], int(z["cfg_heads"]))
    for ours, theirs in (
        ("features", "linear_kqvbetagammas"),
        ("expansions", "linear_p1p2p3"),
        ("output", "project"),
    ):
        fill(getattr(mixer, ours), z[f"w_{theirs}_kernel"].T, z[f"w_{theirs}_bias"])
    names = {"key": "k", "value": "v", "normalizer": "s"}
    ticks = [1, z["in_state0_tick"][:, :1], z["in_state0_tick"][:, :1]]
    for (prefix, runs, state), tick in zip(forms(z, names), ticks, strict=True):
        steps = torch.arange(runs.reset.shape[1])
        last = torch.where(runs.reset, steps, -1).cummax(dim=1).values
        position = torch.where(last < 0, steps + tick - 1, steps - last).long()
        assert_equal(*mixer(z["in_x"], runs_of(runs.reset, position), state), z, prefix, names)


def test_stable_hadamard_memory(monkeypatch):
    z = load("shm")
    rows, size = z["w_theta_matrix"].shape
    width, outputs = z["in_x"].shape[-1], len(z["w_out_bias"])
    mixer = shm.SHM(size=size, rows=rows).build(width, 1)
    mixer.output = nn.Linear(size, outputs)
    put(mixer.theta, z["w_theta_matrix"])
    theirs = {"calibration": "vc_net", "strength": "eta", "output": "out"}
    for name in ("key", "query", "value", "calibration", "strength", "shortcut", "output"):
        key = theirs.get(name, name)
        fill(getattr(mixer, name), z[f"w_{key}_T_out_in"], z.get(f"w_{key}_bias"))
    monkeypatch.setattr(shm.SHM, "row", lambda self, position: position)  # the vector gives the rows
    x = F.layer_norm(z["in_x"], (width,), z["w_norm_weight"], z["w_norm_bias"])
    for prefix, runs, state in forms(z, {"state": "M"}):
        run = runs_of(runs.reset, z["in_theta_index"].long())
        assert_equal(*mixer(x, run, state), z, prefix, {"state": "M"})


@pytest.mark.parametrize(
    ("name", "states"), [("lstm", {"hidden": "h", "cell": "c"}), ("gru", {"hidden": "h"})]
)
def test_torch_modules(name, states):
    z = load(name)
    kind = {"lstm": nn.LSTM, "gru": nn.GRU}[name]
    size = z["w_weight_hh_T_out_in"].shape[1]
    mixer = lstm.GatedRNN(kind(z["in_x"].shape[-1], size), tuple(states))
    for key in ("weight_ih", "weight_hh"):
        put(getattr(mixer.rnn, f"{key}_l0"), z[f"w_{key}_T_out_in"])
        put(
            getattr(mixer.rnn, key.replace("weight", "bias") + "_l0"), z["w_" + key.replace("weight", "bias")]
        )
    mixer.output = nn.Identity()
    for prefix, runs, state in forms(z, states):
        assert_equal(*mixer(z["in_x"], runs, state), z, prefix, states)


def test_specs_build_these_modules():
    assert isinstance(lstm.LSTM().build(8, 2).rnn, nn.LSTM)
    assert isinstance(gru.GRU().build(8, 2).rnn, nn.GRU)
