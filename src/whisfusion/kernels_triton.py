"""The functions of `kernels` as Triton kernels, for a GPU or under TRITON_INTERPRET=1 on a CPU.

Letters as there; W weights of heads.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from whisfusion.blocks import Rotation
from whisfusion.kernels import Unnormed

# Triton is not on every machine, and takes tensors for what its kernels declare as pointers: checkers see Any.
triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

_LEAST = tl.constexpr(2.0**-25)
"""A uniform of exactly 0 would draw the first token, however unlikely."""
_NEGLIGIBLE = tl.constexpr(2.0**-43)
"""Mass next to the likeliest token's, of which a whole vocabulary is still less than the least uniform."""
_LOGITS_AT_ONCE = 4096
_COLUMNS_AT_ONCE = 4096
_MANY_NUMBERS = 4096


def norm(x_RD: Tensor, weight_D: Tensor, bias_D: Tensor | None, shift_D: Tensor | None, eps: float) -> Tensor:
    """See `kernels.norm`."""
    rows, width = x_RD.shape
    out_RD = torch.empty_like(x_RD)
    _norm[(rows,)](
        x_RD,
        weight_D,
        weight_D if bias_D is None else bias_D,
        weight_D if shift_D is None else shift_D,
        out_RD,
        width,
        eps,
        CENTRED=bias_D is not None,
        SHIFTED=shift_D is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out_RD


@triton.jit
def _norm(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    shift: tl.tensor,
    out: tl.tensor,
    width: tl.constexpr,
    eps: tl.constexpr,
    CENTRED: tl.constexpr,
    SHIFTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row."""
    row = tl.program_id(0).to(tl.int64) * width
    d = tl.arange(0, BLOCK)
    within = d < width
    value = tl.load(x + row + d, mask=within, other=0.0).to(tl.float32)
    if SHIFTED:
        value += tl.load(shift + d, mask=within, other=0.0).to(tl.float32)
    if CENTRED:
        value = tl.where(within, value - tl.sum(value) / width, 0.0)
    value *= tl.rsqrt(tl.sum(value * value) / width + eps)
    value *= tl.load(weight + d, mask=within, other=0.0).to(tl.float32)
    if CENTRED:
        value += tl.load(bias + d, mask=within, other=0.0).to(tl.float32)
    tl.store(out + row + d, value.to(out.dtype.element_ty), mask=within)


def head_norm_(
    x_RHC: Tensor,
    weight_WC: Tensor,
    eps: float,
    *,
    rows: int | None = None,
    heads: int | None = None,
    rotation: Rotation | None = None,
    unnormed: Unnormed | None = None,
) -> None:
    """See `kernels.head_norm_`. The width of a head is a power of two, and heads lie side by side."""
    count_rows, count_heads, width = x_RHC.shape
    if x_RHC.stride(1) != width or x_RHC.stride(2) != 1 or width & (width - 1):
        raise ValueError(f"heads of shape {tuple(x_RHC.shape)} and strides {x_RHC.stride()} are not side by side")
    angles = (weight_WC, weight_WC) if rotation is None else (rotation.cos_LC, rotation.sin_LC)
    heads = count_heads if heads is None else heads
    block = triton.next_power_of_2(count_heads)
    _head_norm[(count_rows,)](
        x_RHC,
        weight_WC,
        *angles,
        x_RHC if unnormed is None else unnormed.x_RD,
        x_RHC.stride(0),
        count_rows if rows is None else rows,
        1 if rotation is None else len(rotation.cos_LC),
        eps,
        0.0 if unnormed is None else unnormed.eps,
        HEADS=count_heads,
        NORMED=count_heads if rows else heads * len(weight_WC),
        HEADS_PER_WEIGHT=heads,
        ROTATED=rotation is not None,
        UNNORMED=0 if unnormed is None else unnormed.x_RD.shape[1],
        HALF=width // 2,
        BLOCK=block,
        ROW=1 if unnormed is None else triton.next_power_of_2(unnormed.x_RD.shape[1]),
        num_warps=8 if block * width >= _MANY_NUMBERS else 4,
    )


@triton.jit
def _row_scale(x: tl.tensor, row: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """What RMSNorm multiplies a row by, but for its weight."""
    d = tl.arange(0, BLOCK)
    value = tl.load(x + row * WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(value * value) / WIDTH + eps)


@triton.jit(do_not_specialize=["rows", "positions"])
def _head_norm(
    x: tl.tensor,
    weight: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    residual: tl.tensor,
    stride: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    eps: tl.constexpr,
    residual_eps: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS_PER_WEIGHT: tl.constexpr,
    ROTATED: tl.constexpr,
    UNNORMED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
) -> None:
    """All heads of one row; the two halves of a head, whose channels turn together, are read apart."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)[:, None]
    c = tl.arange(0, HALF)[None, :]
    within = (head < HEADS) & (c < HALF)
    place = x + row * stride + head * 2 * HALF + c
    first = tl.load(place, mask=within, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=within, other=0.0).to(tl.float32)
    if UNNORMED:
        scale = _row_scale(residual, row, residual_eps, UNNORMED, ROW)
        first *= scale
        second *= scale
    normed = head < NORMED
    square = tl.sum(first * first + second * second, axis=1)[:, None] / (2 * HALF)
    scale = tl.where(normed, tl.rsqrt(square + eps), 1.0)
    own = weight + (row // rows + head // HEADS_PER_WEIGHT) * 2 * HALF + c
    weighted = within & normed
    first *= scale * tl.load(own, mask=weighted, other=1.0).to(tl.float32)
    second *= scale * tl.load(own + HALF, mask=weighted, other=1.0).to(tl.float32)
    if ROTATED:
        angle = (row % positions) * 2 * HALF + c
        cos = tl.where(normed, tl.load(cosine + angle), 1.0)
        sin = tl.where(normed, tl.load(sine + angle + HALF), 0.0)  # of the second half, where it is not negative
        first, second = first * cos - second * sin, second * cos + first * sin
    if not UNNORMED:
        within = weighted
    tl.store(place, first.to(x.dtype.element_ty), mask=within)
    tl.store(place + HALF, second.to(x.dtype.element_ty), mask=within)


def swiglu(x_R2F: Tensor, unnormed: Unnormed | None = None) -> Tensor:
    """See `kernels.swiglu`."""
    rows, both = x_R2F.shape
    out_RF = x_R2F.new_empty(rows, both // 2)
    grid = (rows, triton.cdiv(both // 2, _COLUMNS_AT_ONCE))
    _swiglu[grid](
        x_R2F,
        x_R2F if unnormed is None else unnormed.x_RD,
        out_RF,
        both // 2,
        0.0 if unnormed is None else unnormed.eps,
        UNNORMED=0 if unnormed is None else unnormed.x_RD.shape[1],
        BLOCK=_COLUMNS_AT_ONCE,
        ROW=1 if unnormed is None else triton.next_power_of_2(unnormed.x_RD.shape[1]),
        num_warps=8,
    )
    return out_RF


@triton.jit
def _swiglu(
    x: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    hidden: tl.constexpr,
    eps: tl.constexpr,
    UNNORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = f < hidden
    gate = tl.load(x + row * 2 * hidden + f, mask=within, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * hidden + hidden + f, mask=within, other=0.0).to(tl.float32)
    if UNNORMED:
        scale = _row_scale(residual, row, eps, UNNORMED, ROW)
        gate *= scale
        up *= scale
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * hidden + f, value.to(out.dtype.element_ty), mask=within)


def draw(
    logits_RV: Tensor,
    uniforms_RK: Tensor,
    temperature: float,
    targets_R: Tensor,
    *,
    vocabulary: int,
    wanted_R: Tensor | None,
    lists: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.draw`. Logits are read once, and a 4096-token stretch of them once more for every draw."""
    rows, draws = uniforms_RK.shape
    ids_RK = torch.empty(rows, draws, dtype=torch.int64, device=logits_RV.device)
    logprobs_RK = torch.empty(rows, draws, dtype=torch.float32, device=logits_RV.device)
    target_logprobs_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    allowed_XV, list_R = (targets_R, targets_R) if lists is None else lists
    stretches = triton.cdiv(vocabulary, _LOGITS_AT_ONCE)
    _draw[(rows,)](
        logits_RV,
        uniforms_RK.contiguous(),
        targets_R,
        targets_R if wanted_R is None else wanted_R,
        allowed_XV,
        list_R,
        ids_RK,
        logprobs_RK,
        target_logprobs_R,
        logits_RV.stride(0),
        targets_R.stride(0),
        allowed_XV.stride(0),
        1.0 / temperature if temperature else 1.0,
        VOCABULARY=vocabulary,
        STRETCHES=stretches,
        PARTS=triton.next_power_of_2(stretches),
        DRAWS=draws,
        GREEDY=temperature == 0,
        CHOSEN=wanted_R is not None,
        LISTED=lists is not None,
        BLOCK=_LOGITS_AT_ONCE,
        num_warps=8,
    )
    return ids_RK, logprobs_RK, target_logprobs_R


@triton.jit
def _stretch(
    logits: tl.tensor,
    allowed: tl.tensor,
    first: tl.tensor,
    VOCABULARY: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """BLOCK logits of a row, -inf where there is no token or it is not allowed."""
    v = first + tl.arange(0, BLOCK)
    value = tl.load(logits + v, mask=v < VOCABULARY, other=float("-inf")).to(tl.float32)
    if LISTED:
        value = tl.where(tl.load(allowed + v, mask=v < VOCABULARY, other=0) != 0, value, float("-inf"))
    return value


@triton.jit
def _mass(below: tl.tensor, inverse_temperature: tl.tensor) -> tl.tensor:
    """Mass next to the likeliest token's, of logits less the largest; what is next to nothing is nothing."""
    mass = tl.exp(below * inverse_temperature)
    return tl.where(mass > _NEGLIGIBLE, mass, 0.0)


@triton.jit
def _sums(mass: tl.tensor) -> tl.tensor:
    """Mass up to and with each place, and 0 at places that have none of their own, which must not be drawn.

    A GPU takes each of these sums in another order: one may round to more than the sum before it though nothing was
    added, and then a token that is not allowed, or a column after the last, would seem to be the one that is met.
    """
    return tl.where(mass > 0, tl.cumsum(mass, 0), 0.0)


@triton.jit
def _met(sums: tl.tensor, goal: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The first place whose sum is beyond the goal, or is the largest where rounding puts the goal beyond all."""
    return tl.min(tl.where((sums > goal) | (sums >= tl.max(sums)), tl.arange(0, SIZE), SIZE))


@triton.jit(do_not_specialize=["target_stride", "inverse_temperature"])
def _draw(
    logits: tl.tensor,
    uniforms: tl.tensor,
    targets: tl.tensor,
    wanted: tl.tensor,
    allowed: tl.tensor,
    lists: tl.tensor,
    ids: tl.tensor,
    logprobs: tl.tensor,
    target_logprobs: tl.tensor,
    stride: tl.tensor,
    target_stride: tl.tensor,
    allowed_stride: tl.tensor,
    inverse_temperature: tl.tensor,
    VOCABULARY: tl.constexpr,
    STRETCHES: tl.constexpr,
    PARTS: tl.constexpr,
    DRAWS: tl.constexpr,
    GREEDY: tl.constexpr,
    CHOSEN: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: the mass of each stretch at both temperatures, then for each draw a search in the stretch it meets."""
    row = tl.program_id(0).to(tl.int64)
    if CHOSEN:  # noqa: SIM102 - known when compiled
        if tl.load(wanted + row) == 0:
            return
    own = logits + row * stride
    may = allowed
    if LISTED:
        may = allowed + tl.load(lists + row).to(tl.int64) * allowed_stride
    part = tl.arange(0, PARTS)
    tops = tl.full((PARTS,), float("-inf"), tl.float32)
    masses = tl.zeros((PARTS,), tl.float32)
    sharp_masses = tl.zeros((PARTS,), tl.float32)
    for stretch in range(STRETCHES):
        value = _stretch(own, may, stretch * BLOCK, VOCABULARY, LISTED, BLOCK)
        top = tl.max(value)
        # A stretch in which nothing is allowed has no top to compare with.
        below = value - tl.where(top == float("-inf"), 0.0, top)
        tops = tl.where(part == stretch, top, tops)
        masses = tl.where(part == stretch, tl.sum(tl.exp(below)), masses)
        if not GREEDY:
            sharp_masses = tl.where(part == stretch, tl.sum(tl.exp(below * inverse_temperature)), sharp_masses)
    top = tl.max(tops)
    total = top + tl.log(tl.sum(masses * tl.exp(tops - top)))

    target = tl.load(targets + row * target_stride)
    at_target = tl.load(own + target).to(tl.float32)
    if LISTED:
        at_target = tl.where(tl.load(may + target) != 0, at_target, float("-inf"))
    tl.store(target_logprobs + row, at_target - total)

    if GREEDY:
        best = tl.min(tl.where(tops == top, part, PARTS))
        value = _stretch(own, may, best * BLOCK, VOCABULARY, LISTED, BLOCK)
        token = best * BLOCK + tl.min(tl.where(value == top, tl.arange(0, BLOCK), BLOCK))
        for k in range(DRAWS):
            tl.store(ids + row * DRAWS + k, token.to(tl.int64))
            tl.store(logprobs + row * DRAWS + k, top - total)
    else:
        mass = sharp_masses * _mass(tops - top, inverse_temperature)
        sums = _sums(mass)
        whole = tl.max(sums)
        for k in range(DRAWS):
            goal = tl.maximum(tl.load(uniforms + row * DRAWS + k), _LEAST) * whole
            chosen = _met(sums, goal, PARTS)
            before = tl.sum(tl.where(part < chosen, mass, 0.0))
            value = _stretch(own, may, chosen * BLOCK, VOCABULARY, LISTED, BLOCK)
            # Sums in another order round otherwise: a goal just outside the stretch is met at the nearest token
            # that has some mass.
            goal = tl.maximum(goal - before, _LEAST * whole)
            place = _met(_sums(_mass(value - top, inverse_temperature)), goal, BLOCK)
            token = chosen * BLOCK + place
            tl.store(ids + row * DRAWS + k, token.to(tl.int64))
            # Read again, so that the stretch need not stay in registers.
            tl.store(logprobs + row * DRAWS + k, tl.load(own + token).to(tl.float32) - total)
