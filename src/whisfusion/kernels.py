"""The few operations between matrix products that the fast engine runs, each as one pass over memory.

Here they are in plain torch, which is what they mean and what runs where there is no GPU; `kernels_triton` holds the
same functions as Triton kernels. Numbers are read and written in the tensors' own type and computed in float32.

Letters: R rows, D width, H heads, C width of a head, F width inside the feed-forward, L positions, V vocabulary,
K draws from a row, X lists of allowed tokens.
"""

from functools import cache
from importlib import import_module, util
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion.blocks import Rotation
from whisfusion.sampling import sample


class Drawn(NamedTuple):
    """What was read off rows of logits."""

    ids_RK: Tensor
    """The tokens drawn."""
    logprobs_RK: Tensor
    """Their log-probabilities at temperature 1, float32."""
    target_logprobs_R: Tensor
    """The log-probability of each row's target, float32."""


class Lists(NamedTuple):
    """Which tokens may be drawn."""

    allowed_XV: Tensor
    """uint8, not 0 where a list has the token; V may be larger than the vocabulary."""
    list_R: Tensor
    """int32: each row's list."""


class Unnormed(NamedTuple):
    """Rows that a product has read without the RMSNorm before it, whose weight is in the product's own.

    A row's scale goes through the product as it is, so that it can be made up for afterwards: a pass less.
    """

    x_RD: Tensor
    eps: float

    def scale(self) -> Tensor:
        """What the norm would have multiplied each row (R, 1) by, in float32."""
        return torch.rsqrt(self.x_RD.float().square().mean(1, keepdim=True) + self.eps)


@cache
def has_triton() -> bool:
    """Whether the kernels can be compiled here; without them everything on the GPU is plain torch."""
    return util.find_spec("triton") is not None


def _kernels(x: Tensor) -> ModuleType | None:
    return import_module("whisfusion.kernels_triton") if x.is_cuda and has_triton() else None


def norm(x_RD: Tensor, weight_D: Tensor, bias_D: Tensor | None, shift_D: Tensor | None, eps: float) -> Tensor:
    """LayerNorm, or RMSNorm where there is no bias, of `x_RD + shift_D`."""
    if kernels := _kernels(x_RD):
        return kernels.norm(x_RD, weight_D, bias_D, shift_D, eps)
    shifted_RD = x_RD if shift_D is None else (x_RD + shift_D).to(x_RD.dtype)
    if bias_D is None:
        return F.rms_norm(shifted_RD, weight_D.shape, weight_D, eps)
    return F.layer_norm(shifted_RD, weight_D.shape, weight_D, bias_D, eps)


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
    """RMSNorm of heads, then rotary positions, in place.

    There is another weight for every `rows` rows or every `heads` heads; None where all have the same. Heads beyond
    those that have a weight are values: of them nothing but the row's scale is wanted, where `unnormed` tells of one.
    Row r is at position r modulo the rotation's L.
    """
    if kernels := _kernels(x_RHC):
        return kernels.head_norm_(x_RHC, weight_WC, eps, rows=rows, heads=heads, rotation=rotation, unnormed=unnormed)
    if unnormed is not None:
        x_RHC.copy_(x_RHC * unnormed.scale()[..., None])
    if heads:
        x_RHC = x_RHC[:, : heads * len(weight_WC)]
    weight_RHC = weight_WC.repeat_interleave(rows, 0)[:, None] if rows else weight_WC.repeat_interleave(heads or 1, 0)
    normed_RHC = (F.rms_norm(x_RHC, x_RHC.shape[2:], None, eps) * weight_RHC).to(x_RHC.dtype)
    if rotation is not None:
        positions = len(rotation.cos_LC)
        normed_RHC = rotation(normed_RHC.unflatten(0, (-1, positions))).flatten(0, 1)
    x_RHC.copy_(normed_RHC)
    return None


def swiglu(x_R2F: Tensor, unnormed: Unnormed | None = None) -> Tensor:
    """The first half of every row, gated by SiLU, times the second half."""
    if kernels := _kernels(x_R2F):
        return kernels.swiglu(x_R2F, unnormed)
    if unnormed is not None:
        x_R2F = (x_R2F * unnormed.scale()).to(x_R2F.dtype)
    gate_RF, up_RF = x_R2F.chunk(2, dim=1)
    return F.silu(gate_RF) * up_RF


def gelu_linear(x_RD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """GELU of a linear layer.

    In half precision on a GPU it is part of the product, by tanh: nearer to the exact one than these numbers can tell.
    """
    if bias_F is not None and x_RD.is_cuda and x_RD.dtype != torch.float32:
        return torch._addmm_activation(bias_F, x_RD, weight_FD.t(), use_gelu=True)
    return F.gelu(F.linear(x_RD, weight_FD, bias_F))


def draw(
    logits_RV: Tensor,
    uniforms_RK: Tensor,
    temperature: float,
    targets_R: Tensor,
    *,
    vocabulary: int,
    wanted_R: Tensor | None = None,
    lists: Lists | None = None,
) -> Drawn:
    """Draw K tokens from each row by inverting the cumulative distribution, as `sampling.sample` does.

    Columns from `vocabulary` on do not exist. Rows that are not wanted hold anything afterwards. Temperature 0 takes
    the likeliest, the first of equals.
    """
    if kernels := _kernels(logits_RV):
        return Drawn(
            *kernels.draw(
                logits_RV, uniforms_RK, temperature, targets_R, vocabulary=vocabulary, wanted_R=wanted_R, lists=lists
            )
        )
    logits_RV = logits_RV[:, :vocabulary].float()
    if lists is not None:
        allowed_RV = lists.allowed_XV[lists.list_R.long(), :vocabulary]
        logits_RV = logits_RV.masked_fill(allowed_RV == 0, -torch.inf)
    ids_RK, total_R1 = sample(logits_RV, uniforms_RK.contiguous(), temperature)
    logprobs_RK = logits_RV.gather(1, ids_RK) - total_R1
    return Drawn(ids_RK, logprobs_RK, (logits_RV.gather(1, targets_R[:, None]) - total_R1)[:, 0])
