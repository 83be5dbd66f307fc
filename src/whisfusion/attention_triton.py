"""Attention as Triton kernels, for a GPU or under TRITON_INTERPRET=1 on a CPU.

One program takes a tile of queries of one head through the keys, a tile of them at a time, and keeps for each query its
largest score, the sum of its masses and the mixture of values (flash attention). Where there are too few tiles of
queries to keep a GPU busy, keys are divided among several programs, and a second kernel joins what they found.

Letters as in `attention`; M queries and N keys of a tile, P parts of the keys.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from whisfusion.attention import Tiles

# Triton is not on every machine, and takes tensors for what its kernels declare as pointers: checkers see Any.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(-1e30)
"""A score below all others: unlike -inf, it can be subtracted from itself."""


def attention(
    q_GQHC: Tensor, k_GTHC: Tensor, v_GTHC: Tensor, bias_GT: Tensor | None, *, causal: bool, tiles: Tiles
) -> Tensor:
    """See `attention.Attend`. The width of a head is a power of two, and heads lie side by side."""
    sequences, queries, heads, width = q_GQHC.shape
    keys = k_GTHC.shape[1]
    for x in (q_GQHC, k_GTHC, v_GTHC):
        if x.stride(2) != width or x.stride(3) != 1 or width & (width - 1):
            raise ValueError(f"heads of shape {tuple(x.shape)} and strides {x.stride()} are not side by side")
    if causal and queries != keys:
        raise ValueError(f"causal attention of {queries} queries on {keys} keys")
    rows = sequences * queries
    out_RD = q_GQHC.new_empty(rows, heads * width)
    mixed_PRD, best_PRH, total_PRH = out_RD, out_RD, out_RD
    if tiles.parts > 1:
        mixed_PRD = torch.empty(tiles.parts, rows, heads * width, dtype=torch.float32, device=out_RD.device)
        best_PRH, total_PRH = mixed_PRD.new_empty(2, tiles.parts, rows, heads)
    _attention[(triton.cdiv(queries, tiles.rows), sequences * heads, tiles.parts)](
        q_GQHC,
        k_GTHC,
        v_GTHC,
        q_GQHC if bias_GT is None else bias_GT,
        mixed_PRD,
        best_PRH,
        total_PRH,
        queries,
        keys,
        *(x.stride(i) for x in (q_GQHC, k_GTHC, v_GTHC) for i in (0, 1)),
        0 if bias_GT is None else bias_GT.stride(0),
        width**-0.5 * _LOG2_E.value,
        HEADS=heads,
        WIDTH=width,
        BIASED=bias_GT is not None,
        CAUSAL=causal,
        PARTS=tiles.parts,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if tiles.parts > 1:
        _join[(rows,)](
            mixed_PRD,
            best_PRH,
            total_PRH,
            out_RD,
            rows,
            HEADS=heads,
            WIDTH=width,
            PARTS=tiles.parts,
            BLOCK=triton.next_power_of_2(heads),
            num_warps=4,
        )
    return out_RD


@triton.jit
def _attend(
    q_MC: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    bias: tl.tensor,
    best_M: tl.tensor,
    total_M: tl.tensor,
    mixed_MC: tl.tensor,
    m: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A tile of keys and values more. Scores are compared in powers of two."""
    n = start + tl.arange(0, COLUMNS)
    c = tl.arange(0, WIDTH)
    if RAGGED:
        k_CN = tl.load(k + n[None, :] * k_row + c[:, None], mask=(n < stop)[None, :], other=0.0)
        v_NC = tl.load(v + n[:, None] * v_row + c[None, :], mask=(n < stop)[:, None], other=0.0)
    else:
        k_CN = tl.load(k + n[None, :] * k_row + c[:, None])
        v_NC = tl.load(v + n[:, None] * v_row + c[None, :])
    scores_MN = tl.dot(q_MC, k_CN)
    if RAGGED:
        scores_MN = tl.where((n < stop)[None, :], scores_MN, float("-inf"))
    if CAUSAL:
        scores_MN = tl.where(m[:, None] >= n[None, :], scores_MN, float("-inf"))
    if BIASED:
        own_N = tl.load(bias + n, mask=n < stop, other=float("-inf")).to(tl.float32) * _LOG2_E
        scores_MN = scores_MN * scale + own_N[None, :]
        higher_M = tl.maximum(best_M, tl.max(scores_MN, 1))
        mass_MN = tl.exp2(scores_MN - higher_M[:, None])
    else:
        # The scale is positive, so the largest can be found before it is applied.
        higher_M = tl.maximum(best_M, tl.max(scores_MN, 1) * scale)
        mass_MN = tl.exp2(scores_MN * scale - higher_M[:, None])
    fading_M = tl.exp2(best_M - higher_M)
    total_M = total_M * fading_M + tl.sum(mass_MN, 1)
    mixed_MC = tl.dot(mass_MN.to(v_NC.dtype), v_NC, mixed_MC * fading_M[:, None])
    return higher_M, total_M, mixed_MC


@triton.jit(do_not_specialize=["queries", "keys", "scale"])
def _attention(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    q_sequence: tl.tensor,
    q_row: tl.tensor,
    k_sequence: tl.tensor,
    k_row: tl.tensor,
    v_sequence: tl.tensor,
    v_row: tl.tensor,
    bias_sequence: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """ROWS queries of one head, and one part of its keys."""
    sequence, head = (tl.program_id(1) // HEADS).to(tl.int64), tl.program_id(1) % HEADS
    part = tl.program_id(2)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    within = (m < queries)[:, None]
    q_MC = tl.load(q + sequence * q_sequence + head * WIDTH + m[:, None] * q_row + c[None, :], mask=within, other=0.0)
    k += sequence * k_sequence + head * WIDTH
    v += sequence * v_sequence + head * WIDTH
    bias += sequence * bias_sequence
    best_M = tl.full([ROWS], _NEVER, tl.float32)
    total_M = tl.zeros([ROWS], tl.float32)
    mixed_MC = tl.zeros([ROWS, WIDTH], tl.float32)
    first, stop = 0, keys
    if CAUSAL:
        stop = tl.minimum(keys, (tl.program_id(0) + 1) * ROWS)
    if PARTS > 1:
        share = tl.cdiv(tl.cdiv(keys, COLUMNS), PARTS) * COLUMNS
        first = part * share
        stop = tl.maximum(tl.minimum(stop, first + share), first)
    whole = first + (stop - first) // COLUMNS * COLUMNS
    for start in range(first, whole, COLUMNS):
        best_M, total_M, mixed_MC = _attend(
            q_MC, k, v, bias, best_M, total_M, mixed_MC, m, start, stop, k_row, v_row, scale,
            WIDTH, BIASED, CAUSAL, False, COLUMNS,
        )  # fmt: skip
    if whole < stop:
        best_M, total_M, mixed_MC = _attend(
            q_MC, k, v, bias, best_M, total_M, mixed_MC, m, whole, stop, k_row, v_row, scale,
            WIDTH, BIASED, CAUSAL, True, COLUMNS,
        )  # fmt: skip
    row = sequence * queries + m
    if PARTS > 1:
        row += part.to(tl.int64) * (tl.num_programs(1) // HEADS) * queries
        tl.store(best + row * HEADS + head, best_M, mask=m < queries)
        tl.store(total + row * HEADS + head, total_M, mask=m < queries)
    else:
        mixed_MC *= (1.0 / total_M)[:, None]
    place = out + row[:, None] * (HEADS * WIDTH) + head * WIDTH + c[None, :]
    tl.store(place, mixed_MC.to(out.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["rows"])
def _join(
    mixed: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """All heads of one row: what the parts of the keys gave, each by its share of the mass."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    c = tl.arange(0, WIDTH)[None, :]
    within = head < HEADS
    top_H = tl.full([BLOCK], _NEVER, tl.float32)
    for part in tl.static_range(PARTS):
        top_H = tl.maximum(top_H, tl.load(best + (part * rows + row) * HEADS + head, mask=within, other=_NEVER))
    total_H = tl.zeros([BLOCK], tl.float32)
    mixed_HC = tl.zeros([BLOCK, WIDTH], tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * rows + row) * HEADS + head
        share_H = tl.exp2(tl.load(best + at, mask=within, other=_NEVER) - top_H)
        total_H += share_H * tl.load(total + at, mask=within, other=1.0)
        mixed_HC += share_H[:, None] * tl.load(mixed + at[:, None] * WIDTH + c, mask=within[:, None], other=0.0)
    place = out + (row * HEADS + head)[:, None] * WIDTH + c
    tl.store(place, (mixed_HC / total_H[:, None]).to(out.dtype.element_ty), mask=within[:, None])
