"""int8: how matrices are kept in a model folder, and how a CPU multiplies by them.

A matrix is kept as whole numbers from -127 to 127 and one scale per row, the output's. Multiplying, the activations are
quantised as they come, each position (a row) with a scale of its own: a loud frame costs its neighbours nothing. Sums
are exact, in int32; processors that first add two products in 16 bits get activations of 7 bits, so that these are too.

Letters: G sequences, L their length, R rows, B utterances, T audio positions, D width, N outputs, H heads,
C width of a head.
"""

import zlib
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisfusion.blocks import Attention, Block, Cache, FeedForward, KeysValues
from whisfusion.errors import ModelError

_INT8, _DEFLATED, _SCALE = ":int8", ":deflated", ":scale"
_WORTH = 0.9
"""A matrix is kept deflated where that makes it at least so much smaller: reading it takes longer."""
_TOP = 127
_LEAST = 1e-30
"""A row of zeros is not divided by zero."""


def quantise_rows(x_ND: Tensor, top: int = _TOP) -> tuple[Tensor, Tensor]:
    """The nearest whole numbers (N, D), of which the largest in each row is `top`, and the scale (N, 1) of each row."""
    scale_N1 = _scale(x_ND, top)
    return (x_ND / scale_N1).round_().clamp_(-top, top).to(torch.int8), scale_N1


def _scale(x_ND: Tensor, top: int = _TOP) -> Tensor:
    # The largest and the smallest, and not the largest magnitude: without a pass that writes magnitudes.
    largest_N1 = torch.maximum(x_ND.amax(1, keepdim=True), -x_ND.amin(1, keepdim=True))
    return largest_N1.clamp_(min=_LEAST).div_(top)


def quantise(state: Mapping[str, Tensor], dtype: torch.dtype, *, bits: int = 8) -> dict[str, Tensor]:
    """Matrices as int8 with a float32 scale per row, under two names; vectors, and matrices of one row, as `dtype`.

    Small numbers are more frequent than large ones, the more so where rows have a few large ones: deflating makes the
    matrix smaller. With fewer `bits` numbers are smaller still: six come to two thirds of the size.
    """
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        value = value.detach().cpu()
        # The one row that counts tokens (`memory.Anchors`) adds up over the whole audio: rounded, it miscounts.
        if value.dim() < 2 or len(value) == 1:
            stored[name] = value.to(dtype) if value.is_floating_point() else value
            continue
        whole, scale = quantise_rows(value.float().flatten(1), 2 ** (bits - 1) - 1)
        deflated = _deflated(whole)
        if value.dim() == 2 and len(deflated) < _WORTH * value.numel():
            stored[name + _DEFLATED] = torch.frombuffer(bytearray(deflated), dtype=torch.uint8)
        else:
            stored[name + _INT8] = whole.view_as(value)
        stored[name + _SCALE] = scale.squeeze(1)
    return stored


def dequantise(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state that `quantise` was given, as near as int8 comes to it; other tensors as they are."""
    state: dict[str, Tensor] = {}
    for name, value in stored.items():
        if name.endswith((_INT8, _DEFLATED)):
            whole, _, form = name.rpartition(":")
            scale = stored.get(whole + _SCALE)
            if scale is None:
                raise ModelError(f"the weights of {whole} have no scale: pull the model again")
            if f":{form}" == _DEFLATED:
                value = _inflated(value, len(scale), whole)
            state[whole] = (value.float().flatten(1) * scale[:, None]).view_as(value)
        elif not name.endswith(_SCALE):
            state[name] = value
    return state


def _deflated(whole_ND: Tensor) -> bytes:
    """Nothing in weights repeats itself: only how often each number occurs is of use."""
    deflate = zlib.compressobj(9, strategy=zlib.Z_HUFFMAN_ONLY)
    return deflate.compress(whole_ND.numpy().tobytes()) + deflate.flush()


def _stored_top(x_ND: Tensor) -> int:
    """What the largest number in each row becomes, such that what was stored in few bits stays as it is."""

    def rounding(top: int) -> float:
        whole_ND, scale_N1 = quantise_rows(few_ND, top)
        return (whole_ND * scale_N1 - few_ND).abs().sum().item()

    few_ND = x_ND[:8]
    stored = (2**bits - 1 for bits in range(6, 1, -1))
    best = min((_TOP // top * top for top in stored), key=rounding)
    return best if rounding(best) < 0.01 * rounding(_TOP) else _TOP


def is_quantised(stored: Mapping[str, Tensor]) -> bool:
    """Whether `stored` is what `quantise` makes."""
    return any(name.endswith(_SCALE) for name in stored)


def _inflated(deflated: Tensor, rows: int, name: str) -> Tensor:
    try:
        octets = bytearray(zlib.decompress(deflated.numpy().tobytes()))
        return torch.frombuffer(octets, dtype=torch.int8).view(rows, -1)
    except (zlib.error, RuntimeError) as error:
        raise ModelError(f"the weights of {name} cannot be read ({error}): pull the model again") from None


def is_fast_here() -> bool:
    """Whether this processor multiplies int8 faster than float32: x86 with AVX2."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx2_supported()


@cache
def activation_top() -> int:
    """The largest whole number that activations become.

    Without VNNI a processor adds pairs of products in 16 bits: 2 * 127 * 127 is the most that these hold.
    """
    # From torch 2.13 on there is a public function that tells this.
    return _TOP if torch.cpu._is_vnni_supported() else _TOP // 2


def _zero() -> int:
    """What stands for 0 in activations, which are unsigned: oneDNN has no fast product of two signed matrices."""
    return activation_top() + 1


class Rows(NamedTuple):
    """Activations in whole numbers: a row's, less what stands for 0 and times its scale, are what it stands for."""

    whole_RD: Tensor
    """uint8."""
    scale_R1: Tensor

    @classmethod
    def of(cls, x_RD: Tensor) -> "Rows":
        """The nearest."""
        scale_R1 = _scale(x_RD, activation_top())
        signed_RD = (x_RD * scale_R1.reciprocal()).round_().to(torch.int8)
        # Wraps around; torch turns floats into int8 several times faster than into uint8.
        return cls(signed_RD.view(torch.uint8).add_(_zero()), scale_R1)


class Int8Linear(nn.Module):
    """A linear layer that multiplies whole numbers. Frozen, and on a CPU."""

    def __init__(self, weight_ND: Tensor, bias_N: Tensor | None = None) -> None:
        super().__init__()
        weight_ND = weight_ND.detach().float()
        whole_ND, scale_N1 = quantise_rows(weight_ND, _stored_top(weight_ND))
        # oneDNN's own layout, which no other operation can read: so not a buffer.
        self._packed = torch.ops.onednn.qlinear_prepack(whole_ND, None)
        self._scale_N = scale_N1.flatten()
        self._zero_N = torch.zeros(len(whole_ND), dtype=torch.int32)
        self._bias_N = None if bias_N is None else bias_N.detach().float()

    @classmethod
    def joined(cls, *linears: nn.Linear) -> "Int8Linear":
        """Layers that read the same, as one."""
        biases = [
            torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach() for linear in linears
        ]
        return cls(torch.cat([linear.weight for linear in linears]), torch.cat(biases))

    def forward(self, x: Tensor) -> Tensor:
        """What nn.Linear gives, but for rounding; `x` is float32."""
        return self.of_rows(Rows.of(x.reshape(-1, x.shape[-1]))).unflatten(0, x.shape[:-1])

    def of_rows(self, rows: Rows) -> Tensor:
        """The same (R, N) of rows that are quantised already."""
        product_RN = self._product(rows)
        if self._bias_N is None:
            return product_RN.mul_(rows.scale_R1)
        return torch.addcmul(self._bias_N, product_RN, rows.scale_R1, out=product_RN)

    def add_to(self, x_RN: Tensor, y_RD: Tensor) -> Tensor:
        """`x_RN` and the layer's output for `y_RD`."""
        rows = Rows.of(y_RD)
        product_RN = self._product(rows)
        sum_RN = torch.addcmul(x_RN, product_RN, rows.scale_R1, out=product_RN)
        return sum_RN if self._bias_N is None else sum_RN.add_(self._bias_N)

    def _product(self, rows: Rows) -> Tensor:
        """Without the scales of the rows, and without the bias."""
        return torch.ops.onednn.qlinear_pointwise(
            rows.whole_RD,
            1.0,
            _zero(),
            self._packed,
            self._scale_N,
            self._zero_N,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )


class Int8Attention(nn.Module):
    """Cross-attention of Whisper's block."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.heads = attention.heads
        self.q = Int8Linear.joined(attention.q)
        self.kv = Int8Linear.joined(attention.k, attention.v)
        self.out = Int8Linear.joined(attention.out)

    def keys_values(self, x_BTD: Tensor) -> KeysValues:
        """Keys and values of what is attended to."""
        # Contiguous, as they are read many times.
        return KeysValues(*(x_BHTC.contiguous() for x_BHTC in _heads(self.kv(x_BTD), 2, self.heads)))

    def add_to(self, x_RD: Tensor, h_RD: Tensor, memory: KeysValues, mask: Tensor | None) -> Tensor:
        """`x_RD` and what is heard by `h_RD`, the candidates of an utterance side by side."""
        q_BHLC = _heads(self.q(h_RD).unflatten(0, (len(memory.k_BHTC), -1)), 1, self.heads)[0]
        return self.out.add_to(x_RD, _rows(F.scaled_dot_product_attention(q_BHLC, *memory, attn_mask=mask)))


class Int8Block(nn.Module):
    """Whisper's block (see `blocks.Block`), with all products in int8 and as few passes over memory as torch allows."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        attention = block.self_attn
        self.heads = attention.heads
        self.self_norm, self.ffn_norm = block.self_norm, block.ffn_norm
        self.qkv = Int8Linear.joined(attention.q, attention.k, attention.v)
        self.out = Int8Linear.joined(attention.out)
        if hasattr(block, "cross_attn"):
            self.cross_norm, self.cross_attn = block.cross_norm, Int8Attention(block.cross_attn)
        assert isinstance(block.ffn, FeedForward)
        self.up, self.down = Int8Linear.joined(block.ffn.up), Int8Linear.joined(block.ffn.down)

    def forward(
        self,
        x_GLD: Tensor,
        memory: KeysValues | None = None,
        *,
        self_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        causal: bool = False,
        rotation: None = None,
        cache: tuple[Cache, int] | None = None,
    ) -> Tensor:
        """`memory` belongs to B utterances; the G sequences of `x_GLD` are their candidates, G / B for each."""
        x_RD = x_GLD.flatten(0, 1)
        qkv_GLD = self.qkv(self.self_norm(x_RD)).unflatten(0, x_GLD.shape[:2])
        q_GHLC, *near = _heads(qkv_GLD, 3, self.heads)
        seen = KeysValues(*near)
        if cache is not None:
            seen = cache[0].extend(cache[1], seen)
        y_GHLC = F.scaled_dot_product_attention(q_GHLC, *seen, attn_mask=self_mask, is_causal=causal)
        x_RD = self.out.add_to(x_RD, _rows(y_GHLC))
        if memory is not None:
            x_RD = self.cross_attn.add_to(x_RD, self.cross_norm(x_RD), memory, memory_mask)
        x_RD = self.down.add_to(x_RD, F.gelu(self.up(self.ffn_norm(x_RD))))
        return x_RD.view_as(x_GLD)


def to_int8(*modules: nn.Module) -> None:
    """Make all products of frozen modules int8, in place, but for convolutions and a decoder's output head."""
    for module in modules:
        _replace(module)


def _replace(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child.weight, child.bias))
        elif isinstance(child, Block) and isinstance(child.ffn, FeedForward):
            setattr(module, name, Int8Block(child))
        else:
            _replace(child)


def _heads(x_GLD: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """So many parts of the last dimension, each as (G, H, L, C)."""
    return x_GLD.unflatten(-1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind()


def _rows(y_GHLC: Tensor) -> Tensor:
    """Heads side by side again: (R, D)."""
    return y_GHLC.transpose(1, 2).reshape(-1, y_GHLC.shape[1] * y_GHLC.shape[3])
