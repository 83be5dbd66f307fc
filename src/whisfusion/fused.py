"""The model's own weights, laid out for speed: what `blocks`, `encoder` and `decoder` do, in fewer passes.

What is different from the modules, and why: queries, keys and values (and both halves of a gated unit) are one product;
cross-attention keys and values of all layers are one product; a residual is added by the product that makes it; biases
that would stand in the way of that are added by the next norm; where something follows a product that can make up for
the scale of its rows, RMSNorm is not a pass of its own. Weights are shared with the modules, not copied: those of such
a norm are multiplied into what reads it, there too.

Letters: G sequences, L their length, R = G * L rows, B utterances, T audio positions, N layers, D width, H heads,
C width of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisfusion import attention, kernels
from whisfusion.attention import Attend
from whisfusion.blocks import Attention, FeedForward, Rotation, Stack
from whisfusion.encoder import WhisperEncoder

_MULTIPLE = 128
"""Rows of an output head are filled up to a multiple of this: matrix units want whole tiles."""


@dataclass(frozen=True)
class Norm:
    """LayerNorm, or RMSNorm without a bias, of rows to which `shift_D` is still to be added."""

    weight_D: Tensor
    bias_D: Tensor | None
    shift_D: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.Module, shift_D: Tensor | None) -> "Norm":
        """The norm that `module` is."""
        if isinstance(module, nn.LayerNorm):
            return cls(module.weight, module.bias, shift_D, module.eps)
        assert isinstance(module, nn.RMSNorm)
        return cls(module.weight, None, shift_D, module.eps or 0.0)

    def __call__(self, x_RD: Tensor) -> Tensor:
        return kernels.norm(x_RD, self.weight_D, self.bias_D, self.shift_D, self.eps)


@dataclass(frozen=True)
class HeadNorm:
    """QK-norm; one weight for queries, or one for queries and one for keys."""

    weight_WC: Tensor
    eps: float


@dataclass(frozen=True)
class LaterNorm:
    """RMSNorm whose weight is in the product that reads it, and whose scale is made up for after it."""

    eps: float

    def __call__(self, x_RD: Tensor) -> Tensor:
        return x_RD


@dataclass(frozen=True)
class Cross:
    """Cross-attention of one layer: the side of the queries."""

    norm: Norm | LaterNorm
    query: nn.Linear
    query_norm: HeadNorm | None
    out_DD: Tensor


@dataclass(frozen=True)
class Layer:
    """One block."""

    norm: Norm | LaterNorm
    qkv: tuple[Tensor, Tensor | None]
    qk_norm: HeadNorm | None
    out_DD: Tensor
    cross: Cross | None
    ffn_norm: Norm | LaterNorm
    up: tuple[Tensor, Tensor | None]
    gated: bool
    down: Tensor


@dataclass(frozen=True)
class Audio:
    """Keys and values of all layers, and which of them may be seen."""

    keys_NBTD: Tensor
    values_NBTD: Tensor
    bias_BT: Tensor | None
    """Added to attention scores: 0 where there is audio, -inf elsewhere; None where there is audio everywhere."""


class FusedStack:
    """Blocks and the norm after them."""

    def __init__(self, blocks: Stack, norm: nn.Module, attend: Attend = attention.plain) -> None:
        self._attention = attend
        self._layers: list[Layer] = []
        shift: Tensor | None = None
        keys, values, key_norms = [], [], []
        for block in blocks:
            near = block.self_attn
            self._heads = near.heads
            own = _norm(block.self_norm, shift, near.q, near.k, near.v, later=_has_norm(near))
            shift = _shifted(shift, near.out, near.v)
            cross = None
            if hasattr(block, "cross_attn"):
                far = block.cross_attn
                cross_norm = _norm(block.cross_norm, shift, far.q, later=_has_norm(far))
                cross = Cross(cross_norm, far.q, _head_norm(far.q_norm), far.out.weight)
                shift = _shifted(shift, far.out, far.v)
                keys.append(far.k)
                values.append(far.v)
                key_norms.append(_head_norm(far.k_norm))
            ffn = block.ffn
            up = (ffn.up,) if isinstance(ffn, FeedForward) else (ffn.gate, ffn.up)
            ffn_norm = _norm(block.ffn_norm, shift, *up, later=len(up) == 2)
            self._layers.append(
                Layer(
                    norm=own,
                    qkv=(_joined(near.q, near.k, near.v), _query_bias(near)),
                    qk_norm=_head_norm(near.q_norm, near.k_norm),
                    out_DD=near.out.weight,
                    cross=cross,
                    ffn_norm=ffn_norm,
                    up=(_joined(*up), ffn.up.bias),
                    gated=len(up) == 2,
                    down=ffn.down.weight,
                )
            )
            shift = _shifted(shift, ffn.down)
        self._norm = Norm.of(norm, shift)
        if keys:
            # Transposed views, so that the product's inner dimension lies together in memory.
            self._keys_values_MDD = _joined(*keys, *values).unflatten(0, (2 * len(keys), -1)).transpose(1, 2)
            first = key_norms[0]
            self._key_norm = first and HeadNorm(torch.cat([k.weight_WC for k in key_norms if k]), first.eps)

    def listen(self, audio_BTD: Tensor, heard_BT: Tensor | None) -> Audio:
        """Cross-attention keys and values of every layer."""
        rows_RD = audio_BTD.flatten(0, 1)
        layers = len(self._keys_values_MDD)
        both_MRD = torch.bmm(rows_RD.expand(layers, -1, -1), self._keys_values_MDD)
        keys_NRD, values_NRD = both_MRD.chunk(2)
        if self._key_norm is not None:
            heads_RHC = keys_NRD.flatten(0, 1).unflatten(1, (self._heads, -1))
            kernels.head_norm_(heads_RHC, self._key_norm.weight_WC, self._key_norm.eps, rows=len(rows_RD))
        shape = audio_BTD.shape[:2]
        return Audio(
            keys_NRD.unflatten(1, shape), values_NRD.unflatten(1, shape), attention_bias(heard_BT, audio_BTD.dtype)
        )

    def __call__(
        self,
        x_GLD: Tensor,
        audio: Audio | None = None,
        *,
        self_bias_GL: Tensor | None = None,
        causal: bool = False,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """States (G, L, D) after the last norm. `x_GLD` is used up."""
        x_RD, length, heads = x_GLD.flatten(0, 1), x_GLD.shape[1], self._heads
        for i, layer in enumerate(self._layers):
            qkv_RD = F.linear(layer.norm(x_RD), *layer.qkv)
            if layer.qk_norm is not None:
                weight_WC, eps = layer.qk_norm.weight_WC, layer.qk_norm.eps
                qkv_RHC, unnormed = qkv_RD.unflatten(1, (3 * heads, -1)), _unnormed(layer.norm, x_RD)
                kernels.head_norm_(qkv_RHC, weight_WC, eps, heads=heads, rotation=rotation, unnormed=unnormed)
            q, k, v = qkv_RD.view(-1, length, 3, heads, qkv_RD.shape[1] // (3 * heads)).unbind(2)
            x_RD.addmm_(self._attention(q, k, v, self_bias_GL, causal=causal), layer.out_DD.t())
            if audio is not None and layer.cross is not None:
                self._attend(x_RD, layer.cross, audio, i)
            h_RD = layer.ffn_norm(x_RD)
            if layer.gated:
                h_RF = kernels.swiglu(F.linear(h_RD, *layer.up), _unnormed(layer.ffn_norm, x_RD))
            else:
                h_RF = kernels.gelu_linear(h_RD, *layer.up)
            x_RD.addmm_(h_RF, layer.down.t())
        return self._norm(x_RD).view_as(x_GLD)

    def _attend(self, x_RD: Tensor, cross: Cross, audio: Audio, i: int) -> None:
        """Add what is heard; the candidates of an utterance are one long query, so that its audio is read once."""
        q_RD = F.linear(cross.norm(x_RD), cross.query.weight, cross.query.bias)
        if cross.query_norm is not None:
            kernels.head_norm_(
                q_RD.unflatten(1, (self._heads, -1)),
                cross.query_norm.weight_WC,
                cross.query_norm.eps,
                unnormed=_unnormed(cross.norm, x_RD),
            )
        q, k, v = (
            x.reshape(len(audio.keys_NBTD[i]), -1, self._heads, x.shape[-1] // self._heads)
            for x in (q_RD, audio.keys_NBTD[i], audio.values_NBTD[i])
        )
        x_RD.addmm_(self._attention(q, k, v, audio.bias_BT), cross.out_DD.t())


class FusedEncoder:
    """Whisper's encoder; convolutions are matrix products over frames that lie side by side."""

    def __init__(self, encoder: WhisperEncoder, attend: Attend = attention.plain) -> None:
        self._convolutions = [_Convolution(encoder.conv1), _Convolution(encoder.conv2)]
        self._positions_TD = encoder.positions
        self._stack = FusedStack(encoder.blocks, encoder.norm, attend)

    def __call__(self, mel_BMF: Tensor, heard_BT: Tensor | None) -> Tensor:
        """Features (B, T, D), zero where nothing is heard; see `WhisperEncoder`."""
        x_BTD = mel_BMF.transpose(1, 2)
        for convolution in self._convolutions:
            x_BTD = convolution(x_BTD)
        x_BTD = x_BTD + self._positions_TD[: x_BTD.shape[1]]
        x_BTD = self._stack(x_BTD, self_bias_GL=attention_bias(heard_BT, x_BTD.dtype))
        return x_BTD if heard_BT is None else x_BTD * heard_BT[..., None]


class _Convolution:
    """GELU of a convolution over time of (B, T, D)."""

    def __init__(self, module: nn.Conv1d) -> None:
        self._weight_OK = module.weight.transpose(1, 2).flatten(1).contiguous()
        self._bias, self._size, self._stride = module.bias, module.kernel_size[0], module.stride[0]

    def __call__(self, x_BTD: Tensor) -> Tensor:
        reach = self._size // 2
        padded = F.pad(x_BTD, (0, 0, reach, reach))
        last = padded.shape[1] - self._size + 1
        near = [padded[:, i : last + i : self._stride] for i in range(self._size)]
        near_BTK = torch.cat(near, 2)
        return kernels.gelu_linear(near_BTK.flatten(0, 1), self._weight_OK, self._bias).unflatten(0, near_BTK.shape[:2])


def attention_bias(seen_BT: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """(B, T): 0 where `seen_BT` is true, -inf elsewhere."""
    if seen_BT is None:
        return None
    return torch.zeros_like(seen_BT, dtype=dtype).masked_fill(~seen_BT, -torch.inf)


def padded_rows(weight_VD: Tensor) -> Tensor:
    """A copy with rows of zeros after the last, for a product without ragged tiles."""
    return F.pad(weight_VD, (0, 0, 0, -len(weight_VD) % _MULTIPLE))


def _joined(*linears: nn.Linear) -> Tensor:
    """The weights of linears that read the same, as one; the linears keep theirs as views of it."""
    if len(linears) == 1:
        return linears[0].weight
    joined = torch.cat([linear.weight for linear in linears])
    for linear, part in zip(linears, joined.split([len(linear.weight) for linear in linears]), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return joined


def _norm(module: nn.Module, shift_D: Tensor | None, *readers: nn.Linear, later: bool) -> Norm | LaterNorm:
    """The norm that `readers` read; `later`, where something after them can make up for the scale of rows."""
    if not later or shift_D is not None or not isinstance(module, nn.RMSNorm):
        return Norm.of(module, shift_D)
    with torch.no_grad():
        for reader in readers:
            reader.weight.copy_(reader.weight.float() * module.weight.float())
        module.weight.fill_(1.0)
    return LaterNorm(module.eps or 0.0)


def _unnormed(norm: Norm | LaterNorm, x_RD: Tensor) -> kernels.Unnormed | None:
    return kernels.Unnormed(x_RD, norm.eps) if isinstance(norm, LaterNorm) else None


def _has_norm(attention: Attention) -> bool:
    """Whether queries and keys are normed, whatever their scale was."""
    return isinstance(attention.q_norm, nn.RMSNorm)


def _query_bias(attention: Attention) -> Tensor | None:
    """Keys have none, and that of the values comes through attention unchanged: it is in the shift."""
    bias_D = attention.q.bias
    return None if bias_D is None else F.pad(bias_D, (0, 2 * len(bias_D)))


def _shifted(shift_D: Tensor | None, out: nn.Linear, values: nn.Linear | None = None) -> Tensor | None:
    """`shift_D` and the biases that adding `out` to the residual leaves out, in float32."""
    if out.bias is None:
        return shift_D
    added_D = out.bias.float()
    if values is not None and values.bias is not None:
        added_D = added_D + out.weight.float() @ values.bias.float()
    return added_D if shift_D is None else shift_D + added_D


def _head_norm(*modules: nn.Module) -> HeadNorm | None:
    norms = [module for module in modules if isinstance(module, nn.RMSNorm)]
    return HeadNorm(torch.stack([norm.weight for norm in norms]), norms[0].eps or 0.0) if norms else None
