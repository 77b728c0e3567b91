"""Reference implementation of attention: the formulas of the papers, one pair of tokens at a time."""

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from rlxf.attention import (
    FIRE,
    KERPLE,
    ALiBi,
    Deberta,
    DistanceAware,
    ETCLabels,
    RoPE,
    ShawRelative,
    T5Bias,
    TokenIndex,
    Tupe,
    XLRelative,
    XPos,
)
from rlxf.attention.attention import Attention
from rlxf.attention.positions.kerple import KERPLEBias
from rlxf.attention.token_index import EMPTY

Score = Callable[[Attention, Tensor, Tensor, int, int, int], Tensor]
"""Module, q (D,), k (D,), position of the query, of the key, head -> score.

``module.shared`` holds the position module that all layers share.
"""
Value = Callable[[Attention, int, int], Tensor]
"""Module, position of the query, of the key -> term that is added to the value (D,)."""


def plain(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    return q @ k / math.sqrt(len(q))


def alibi(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    return q @ k / math.sqrt(len(q)) - 2 ** (-8 * (head + 1) / module.heads) * abs(i - j)


def rope(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    spec = module.position.spec
    angles = [speed(spec, m, len(q), i + 1) for m in range(len(q) // 2)]
    factor = 0.1 * math.log(spec.factor) + 1 if spec.scaling == "yarn" else 1
    return turned(q, i, angles) @ turned(k, j, angles) * factor**2 / math.sqrt(len(q))


def speed(spec: RoPE, m: int, size: int, length: int) -> float:
    plain, longest = 10000 ** (-2 * m / size), spec.original_length
    if spec.scaling == "yarn":
        turns = [size * math.log(longest / (2 * math.pi * n)) / (2 * math.log(10000)) for n in (32, 1)]
        low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), size - 1)
        share = min(1, max(0, (m - low) / (high - low)))
        return plain * (1 - share) + plain / spec.factor * share
    if spec.scaling == "dynamic":
        factor = spec.factor * max(length, longest) / longest - (spec.factor - 1)
        return (10000 * factor ** (size / (size - 2))) ** (-2 * m / size)
    return plain


def turned(x: Tensor, t: int, speeds: list[float] | None = None) -> Tensor:
    parts = []
    for m in range(len(x) // 2):
        angle = t * (speeds[m] if speeds else 10000 ** (-2 * m / len(x)))
        a, b = x[2 * m], x[2 * m + 1]
        parts += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
    return torch.stack(parts)


def xpos(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    size, pairs = len(q), zip(turned(q, i).view(-1, 2), turned(k, j).view(-1, 2), strict=True)
    decays = [
        ((2 * n / size + 0.4) / 1.4) ** ((i - j) / module.position.spec.scale_base) for n in range(size)
    ]
    return sum(decay * (a @ b) for decay, (a, b) in zip(decays, pairs, strict=False)) / math.sqrt(size)


def xl_relative(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    learned, width = module.position, module.out.in_features
    angles = [(i - j) * 10000 ** (-2 * m / width) for m in range(width // 2)]
    r = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
    distance = (learned.r.weight @ torch.tensor(r, dtype=q.dtype)).view(module.heads, -1)[head]
    return ((q + learned.u[head]) @ k + (q + learned.v[head]) @ distance) / math.sqrt(len(q))


def shaw(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    return q @ (k + of_distance(module.position.key_table, i, j)) / math.sqrt(len(q))


def shaw_value(module: Attention, i: int, j: int) -> Tensor:
    return of_distance(module.position.value_table, i, j)


def of_distance(table: Tensor, i: int, j: int) -> Tensor:
    most = len(table) // 2
    return table[max(-most, min(most, j - i)) + most]


def t5(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    table, spec = module.shared.weight, module.shared.spec
    if module.causal:
        number = bucket(max(0, i - j), spec.buckets, spec.max_distance)
    else:
        number = bucket(abs(i - j), spec.buckets // 2, spec.max_distance) + (j > i) * (spec.buckets // 2)
    return q @ k / math.sqrt(len(q)) + table[number, head]


def bucket(distance: int, buckets: int, farthest: int) -> int:
    exact = buckets // 2
    if distance < exact:
        return distance
    far = math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact)
    return min(buckets - 1, exact + int(far))


def tupe(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    learned, scale = module.shared, math.sqrt(2 * len(q))
    of_query, of_key = (0, 0) if i == 0 else (1, 1) if j == 0 else (i + 1, j + 1)
    positions = learned.norm(learned.weight)
    a = learned.query_projection(positions[of_query]).view(module.heads, -1)[head]
    b = learned.key_projection(positions[of_key]).view(module.heads, -1)[head]
    half = learned.spec.buckets // 2
    number = bucket(abs(i - j), half, learned.spec.max_distance) + (j > i) * half
    number = half if i == 0 else 2 * half if j == 0 else number
    return (q @ k + a @ b) / scale + learned.buckets[number, head]


def deberta(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    learned, vectors = module.position, module.shared.weight
    most = len(vectors) // 2
    there = i - j if learned.spec.form == "code" else j - i
    row, other = (max(0, min(2 * most - 1, d + most)) for d in (i - j, there))
    of_key = learned.key_projection(vectors[row]).view(module.heads, -1)[head]
    of_query = learned.query_projection(vectors[other]).view(module.heads, -1)[head]
    return (q @ k + q @ of_key + k @ of_query) / math.sqrt(3 * len(q))


def distance_aware(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    alpha, beta = module.position.alpha[head], module.position.beta[head]
    weight = (1 + beta.exp()) / (1 + (beta - alpha * abs(i - j)).exp())
    return torch.clamp(q @ k, min=0) * weight / math.sqrt(len(q))


def etc_labels(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    learned, spec = module.position, module.position.spec
    most, count = spec.max_distance, spec.global_tokens
    if (i < count) == (j < count):
        label = min(j - i, most) if j >= i else most + min(i - j, most)
    else:
        first, token = min(i, j), max(i, j) - count
        label = 2 * most + 1 + (spec.segment is not None and token // spec.segment == first)
    return (q @ (k + learned.keys[label, head]) + learned.biases[label, head]) / math.sqrt(len(q))


def kerple(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    learned, distance = module.position, abs(i - j)
    r_1 = (1 + learned.first[head].exp()).log()
    if type(learned) is KERPLEBias:
        r_2 = (1 + learned.second[head].exp()).log()
        return q @ k / math.sqrt(len(q)) - r_1 * (1 + r_2 * distance).log()
    r_2 = 2 / (1 + (-learned.second[head]).exp())
    return q @ k / math.sqrt(len(q)) - (r_1 * distance**r_2 if distance else 0)


def fire(module: Attention, q: Tensor, k: Tensor, i: int, j: int, head: int) -> Tensor:
    learned = module.position
    c, length = abs(learned.c), torch.clamp(abs(learned.scale * learned.spec.threshold), min=max(i, j))
    ratio = (c * abs(i - j) + 1).log() / ((c * length + 1).log() + 1e-6)
    hidden = torch.clamp(learned.inner.weight[:, 0] * ratio + learned.inner.bias, min=0)
    return q @ k / math.sqrt(len(q)) + learned.outer.weight[head] @ hidden + learned.outer.bias[head]


def nothing(module: Attention, i: int, j: int) -> Tensor:
    return module.qkv.weight.new_zeros(())


SCORES: dict[type, Score] = {
    type(None): plain,
    ALiBi: alibi,
    RoPE: rope,
    XPos: xpos,
    XLRelative: xl_relative,
    ShawRelative: shaw,
    T5Bias: t5,
    Tupe: tupe,
    Deberta: deberta,
    DistanceAware: distance_aware,
    ETCLabels: etc_labels,
    KERPLE: kerple,
    FIRE: fire,
}
VALUES: dict[type, Value] = {ShawRelative: shaw_value}


def attend(
    module: Attention,
    technique: type,
    x: Tensor,
    memory: Tensor,
    key: TokenIndex,
    allows: Callable[[int, int], bool],
) -> Tensor:
    """Attend from queries x (B, T, C), the last T slots of key, over memory (B, M, C) and x -> (B, T, C)."""
    return torch.stack(
        [
            attend_row(module, technique, x[b], torch.cat([memory[b], x[b]]), places(key, b), allows)
            for b in range(len(x))
        ]
    )


def weights(
    module: Attention,
    score: Score,
    x: Tensor,
    memory: Tensor,
    key: TokenIndex,
    allows: Callable[[int, int], bool],
) -> Tensor:
    """Return the attention weights of `attend`, (B, H, T, M + T)."""
    batch, queries, keys = len(x), x.shape[1], key.shape[1]
    taken = torch.zeros(batch, module.heads, queries, keys, dtype=x.dtype)
    tokens = torch.cat([memory, x], dim=1)
    q = module.split(x @ module.qkv.weight.T + module.qkv.bias)[0]
    k = module.split(tokens @ module.qkv.weight.T + module.qkv.bias)[1]
    for b, head, i in product(range(batch), range(module.heads), range(queries)):
        place = places(key, b)
        here = place[keys - queries + i]
        visible = [n for n, there in enumerate(place) if meets(here, there) and allows(here[0], there[0])]
        scores = [score(module, q[b, head, i], k[b, head, n], here[0], place[n][0], head) for n in visible]
        one_hot = list(torch.eye(keys, dtype=x.dtype)[visible])
        taken[b, head, i] = average(scores, one_hot, module.kernel.softmax1, keys)
    return taken


def places(index: TokenIndex, b: int) -> list[tuple[int, int]]:
    """Return (position, episode) of each slot of a row."""
    return list(zip(index.position[b].tolist(), index.episode[b].tolist(), strict=True))


def attend_row(module, technique, x, tokens, place, allows) -> Tensor:
    """Attend in one row: queries x (T, C) over tokens (M + T, C)."""
    score, value = SCORES[technique], VALUES.get(technique, nothing)
    w_q, w_k, w_v = module.qkv.weight.chunk(3)
    b_q, b_k, b_v = module.qkv.bias.chunk(3)
    q, k, v = x @ w_q.T + b_q, tokens @ w_k.T + b_k, tokens @ w_v.T + b_v
    size, outputs = x.shape[1] // module.heads, []
    for query, here in enumerate(place[-len(x) :]):
        visible = [n for n, there in enumerate(place) if meets(here, there) and allows(here[0], there[0])]
        heads = [slice(head * size, (head + 1) * size) for head in range(module.heads)]
        mixed = [
            average(
                [score(module, q[query, f], k[n, f], here[0], place[n][0], head) for n in visible],
                [v[n, f] + value(module, here[0], place[n][0]) for n in visible],
                module.kernel.softmax1,
                size,
            )
            for head, f in enumerate(heads)
        ]
        y = module.out.weight @ torch.cat(mixed) + module.out.bias
        outputs.append(y if visible else torch.zeros_like(y))
    return torch.stack(outputs)


def meets(here: tuple[int, int], there: tuple[int, int]) -> bool:
    return here[1] == there[1] != EMPTY


def average(scores: list[Tensor], values: list[Tensor], softmax1: bool, size: int) -> Tensor:
    """Compute ``sum_j exp(s_j) v_j / (sum_j exp(s_j) + 1 if softmax1)``; 0 without visible keys."""
    if not scores:
        return torch.zeros(size, dtype=torch.float64)
    exponentials = [score.exp() for score in scores]
    total = sum(exponentials) + (1 if softmax1 else 0)
    return sum(e / total * value for e, value in zip(exponentials, values, strict=True))
