"""The transformer block, once: Whisper's encoder and decoder and both kinds of diffusion decoder are made of it.

Letters: G sequences, L their length, R = G * L rows, B utterances, T audio positions, D width, H heads, C width of a
head.
A sequence batch holds B * K sequences, the K candidates of an utterance side by side, so that folding them into the
query length of cross-attention is a view: audio keys and values are never copied K times.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeysValues(NamedTuple):
    """Keys and values of one attention layer."""

    k_BHTC: Tensor
    v_BHTC: Tensor


@dataclass(frozen=True)
class Rotation:
    """Rotary position angles for positions 0 .. L - 1."""

    cos_LC: Tensor
    sin_LC: Tensor
    """Negative in the first half of the channels."""

    @classmethod
    @functools.cache
    def of(cls, length: int, head_width: int, base: float, device: torch.device) -> "Rotation":
        """Angles in float32; `base` is the paper's 10^4. Made once, and kept: captured graphs read them."""
        # Tensors born in inference mode would stay barred from training.
        with torch.inference_mode(False):
            frequency_C = base ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
            angle_LC = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency_C)
            return cls(angle_LC.cos().repeat(1, 2), torch.cat((-angle_LC.sin(), angle_LC.sin()), 1))

    def __call__(self, x_GLHC: Tensor) -> Tensor:
        """Rotate queries or keys, pairing channel c with c + C / 2."""
        turned_GLHC = x_GLHC.roll(x_GLHC.shape[-1] // 2, dims=-1)
        cos_L1C, sin_L1C = self.cos_LC.unsqueeze(1), self.sin_LC.unsqueeze(1)
        return torch.addcmul(x_GLHC * cos_L1C, turned_GLHC, sin_L1C).to(x_GLHC.dtype)

    def both(self, q_GLHC: Tensor, k_GLHC: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated; where no gradient is wanted, to the same numbers in three launches, not eight."""
        if torch.is_grad_enabled():
            return self(q_GLHC), self(k_GLHC)
        width = q_GLHC.shape[-1]
        # With every channel there twice, what is turned is a view half a head further on.
        twice_GLH2E = torch.cat((q_GLHC, q_GLHC, k_GLHC, k_GLHC), -1).view(*q_GLHC.shape[:3], 2, 2 * width)
        x_GLH2C, turned_GLH2C = twice_GLH2E.narrow(-1, 0, width), twice_GLH2E.narrow(-1, width // 2, width)
        cos_L11C, sin_L11C = self.cos_LC.view(-1, 1, 1, width), self.sin_LC.view(-1, 1, 1, width)
        rotated_GLH2C = torch.empty_like(x_GLH2C)
        # In float32, as above, and rounded as it is written.
        torch.addcmul(x_GLH2C * cos_L11C, turned_GLH2C, sin_L11C, out=rotated_GLH2C)
        return rotated_GLH2C.select(3, 0), rotated_GLH2C.select(3, 1)


class RMSNorm(nn.RMSNorm):
    """torch's, with its weight in the input's dtype: under autocast the fused kernel takes no mixture."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def _lay_together(*linears: nn.Linear) -> Tensor:
    """The weights of linears without biases as one, (N, D, O); the linears keep theirs as views of it."""
    together_NOD = torch.stack([linear.weight.detach() for linear in linears])
    for linear, weight_OD in zip(linears, together_NOD, strict=True):
        linear.weight = nn.Parameter(weight_OD, requires_grad=False)
    return together_NOD.transpose(1, 2)


def _products(x_RD: Tensor, together_NDO: Tensor | None, *linears: nn.Linear) -> Sequence[Tensor]:
    """What each of `linears` makes of `x_RD`: one product where their weights lie together and nothing is learned."""
    if together_NDO is None or torch.is_grad_enabled():
        return [linear(x_RD) for linear in linears]
    if together_NDO.data_ptr() != linears[0].weight.data_ptr():
        # They were given other weights since, or are on another device.
        return [linear(x_RD) for linear in linears]
    return torch.bmm(x_RD.expand(len(linears), -1, -1), together_NDO).unbind()


class Attention(nn.Module):
    """Multi-head attention with Whisper's biases (none on the keys) or the paper's QK-norm and no biases."""

    def __init__(self, width: int, heads: int, *, biases: bool, qk_norm_eps: float | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=biases)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=biases)
        self.out = nn.Linear(width, width, bias=biases)
        self.together: Tensor | None = None
        """The weights of queries, keys and values, or of the last two, where they have been laid together."""
        head_width = width // heads
        # One weight of head width for all heads of the layer.
        self.q_norm = RMSNorm(head_width, eps=qk_norm_eps) if qk_norm_eps is not None else nn.Identity()
        self.k_norm = RMSNorm(head_width, eps=qk_norm_eps) if qk_norm_eps is not None else nn.Identity()

    def _split(self, x_RD: Tensor, sequences: int) -> Tensor:
        """Heads (G, L, H, C): what is done to each is done where they lie side by side, without a copy."""
        return x_RD.view(sequences, -1, self.heads, x_RD.shape[1] // self.heads)

    def queries(self, x_RD: Tensor, sequences: int) -> Tensor:
        """Queries (G, L, H, C) of so many sequences."""
        return self.q_norm(self._split(self.q(x_RD), sequences))

    def keys_values(self, x_BTD: Tensor) -> KeysValues:
        """Keys and values of what is attended to."""
        k_RD, v_RD = _products(x_BTD.flatten(0, 1), self.together, self.k, self.v)
        k_BTHC = self.k_norm(self._split(k_RD, x_BTD.shape[0]))
        return KeysValues(k_BTHC.transpose(1, 2), self._split(v_RD, x_BTD.shape[0]).transpose(1, 2))

    def own(self, x_RD: Tensor, sequences: int, rotation: Rotation | None) -> tuple[Tensor, KeysValues]:
        """Queries (G, L, H, C), keys and values of sequences that attend to themselves."""
        q_RD, k_RD, v_RD = _products(x_RD, self.together, self.q, self.k, self.v)
        q_GLHC, k_GLHC = self.q_norm(self._split(q_RD, sequences)), self.k_norm(self._split(k_RD, sequences))
        if rotation is not None:
            q_GLHC, k_GLHC = rotation.both(q_GLHC, k_GLHC)
        return q_GLHC, KeysValues(k_GLHC.transpose(1, 2), self._split(v_RD, sequences).transpose(1, 2))


def attend(q_GLHC: Tensor, memory: KeysValues, *, mask: Tensor | None, causal: bool = False) -> Tensor:
    """What is heard (R, D); `mask` is true where a key may be seen and broadcasts to (G, H, L, T)."""
    y_GHLC = F.scaled_dot_product_attention(q_GLHC.transpose(1, 2), *memory, attn_mask=mask, is_causal=causal)
    return y_GHLC.transpose(1, 2).reshape(-1, y_GHLC.shape[1] * y_GHLC.shape[3])


class FeedForward(nn.Module):
    """Whisper's: linear, GELU, linear, with biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def hidden(self, x: Tensor) -> Tensor:
        """What `down` reads."""
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


class SwiGLU(nn.Module):
    """The paper's: a gated linear unit without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.together: Tensor | None = None
        """The weights of `gate` and `up`, where they have been laid together."""

    def hidden(self, x_RD: Tensor) -> Tensor:
        """What `down` reads."""
        gate_RF, up_RF = _products(x_RD, self.together, self.gate, self.up)
        return F.silu(gate_RF) * up_RF

    def forward(self, x_RD: Tensor) -> Tensor:
        return self.down(self.hidden(x_RD))


class Cache:
    """The self-attention keys and values that an autoregressive decoder has already computed, layer by layer."""

    def __init__(self) -> None:
        self._layers: dict[int, KeysValues] = {}

    def extend(self, layer: int, new: KeysValues) -> KeysValues:
        """Append `new` to what `layer` has seen and return all of it."""
        if layer in self._layers:
            seen = self._layers[layer]
            new = KeysValues(torch.cat((seen.k_BHTC, new.k_BHTC), 2), torch.cat((seen.v_BHTC, new.v_BHTC), 2))
        self._layers[layer] = new
        return new

    def keep(self, rows: Tensor) -> None:
        """Drop all sequences but `rows`."""
        self._layers = {i: KeysValues(kv.k_BHTC[rows], kv.v_BHTC[rows]) for i, kv in self._layers.items()}


class Block(nn.Module):
    """Self-attention, cross-attention where there is a memory, feed-forward; each after a norm, each added."""

    def __init__(
        self,
        width: int,
        *,
        attention: Callable[[], Attention],
        feed_forward: FeedForward | SwiGLU,
        norm: Callable[[int], nn.Module],
        cross: bool,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.self_norm, self.self_attn = norm(width), attention()
        if cross:
            self.cross_norm, self.cross_attn = norm(width), attention()
        self.ffn_norm, self.ffn = norm(width), feed_forward
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(
        self,
        x_GLD: Tensor,
        memory: KeysValues | None = None,
        *,
        self_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        causal: bool = False,
        rotation: Rotation | None = None,
        cache: tuple[Cache, int] | None = None,
    ) -> Tensor:
        """`memory` belongs to B utterances; the G sequences of `x_GLD` are their candidates, G / B for each.

        Where no gradient is wanted, `x_GLD` may be used up.
        """
        sequences, x_RD = x_GLD.shape[0], x_GLD.flatten(0, 1)
        near = self.self_attn
        q_GLHC, seen = near.own(self.self_norm(x_RD), sequences, rotation)
        if cache is not None:
            seen = cache[0].extend(cache[1], seen)
        x_RD = self._add(x_RD, near.out, attend(q_GLHC, seen, mask=self_mask, causal=causal))
        if memory is not None:
            far = self.cross_attn
            q_BLHC = far.queries(self.cross_norm(x_RD), memory.k_BHTC.shape[0])
            x_RD = self._add(x_RD, far.out, attend(q_BLHC, memory, mask=memory_mask))
        return self._add(x_RD, self.ffn.down, self.ffn.hidden(self.ffn_norm(x_RD))).view_as(x_GLD)

    def lay_together(self) -> None:
        """Let products without biases that read the same be one, where no gradient is wanted: it spares launches.

        The names and shapes of the weights stay as they are, and the weights are there once.
        """
        near, ffn = self.self_attn, self.ffn
        if near.q.bias is None:
            near.together = _lay_together(near.q, near.k, near.v)
        if hasattr(self, "cross_attn") and self.cross_attn.v.bias is None:
            self.cross_attn.together = _lay_together(self.cross_attn.k, self.cross_attn.v)
        if isinstance(ffn, SwiGLU):
            ffn.together = _lay_together(ffn.gate, ffn.up)

    def _add(self, x_RD: Tensor, linear: nn.Module, y_RD: Tensor) -> Tensor:
        """`x_RD` and what `linear` makes of `y_RD`: where no gradient is wanted and there is no bias, one product."""
        alone = self.dropout is None and isinstance(linear, nn.Linear) and linear.bias is None
        # Under autocast the types differ, and the sum keeps that of `x_RD`.
        if alone and not torch.is_grad_enabled() and x_RD.dtype == y_RD.dtype == linear.weight.dtype:
            return x_RD.addmm_(y_RD, linear.weight.t())
        y_RD = linear(y_RD)
        return x_RD + (y_RD if self.dropout is None else self.dropout(y_RD))


class Stack(nn.ModuleList):
    """Blocks one after another; a ModuleList that knows what it holds."""

    def __iter__(self) -> Iterator[Block]:
        return cast(Iterator[Block], super().__iter__())


def whisper_block(width: int, heads: int, *, hidden: int, cross: bool, dropout: float = 0.0) -> Block:
    """Whisper's block: LayerNorm, GELU, biases."""
    return Block(
        width,
        attention=lambda: Attention(width, heads, biases=True),
        feed_forward=FeedForward(width, hidden),
        norm=nn.LayerNorm,
        cross=cross,
        dropout=dropout,
    )


def paper_block(width: int, heads: int, *, hidden: int, norm_eps: float, dropout: float = 0.0) -> Block:
    """The paper's block: RMSNorm, QK-norm, SwiGLU, no biases; rotary positions come with the call."""
    return Block(
        width,
        attention=lambda: Attention(width, heads, biases=False, qk_norm_eps=norm_eps),
        feed_forward=SwiGLU(width, hidden),
        norm=lambda n: RMSNorm(n, eps=norm_eps),
        cross=True,
        dropout=dropout,
    )
