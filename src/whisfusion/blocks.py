"""The transformer block, once: Whisper's encoder and decoder and both kinds of diffusion decoder are made of it.

Letters: G sequences, L their length, B utterances, T audio positions, D width, H heads, C width of a head.
A sequence batch holds B * K sequences, the K candidates of an utterance side by side, so that folding them into the
query length of cross-attention is a view: audio keys and values are never copied K times.
"""

from collections.abc import Callable, Iterator
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
    def of(cls, length: int, head_width: int, base: float, device: torch.device) -> "Rotation":
        """Angles in float32; `base` is the paper's 10^4."""
        frequency_C = base ** -(torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width)
        angle_LC = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency_C)
        return cls(angle_LC.cos().repeat(1, 2), torch.cat((-angle_LC.sin(), angle_LC.sin()), 1))

    def __call__(self, x_GLHC: Tensor) -> Tensor:
        """Rotate queries or keys, pairing channel c with c + C / 2."""
        turned_GLHC = x_GLHC.roll(x_GLHC.shape[-1] // 2, dims=-1)
        cos_L1C, sin_L1C = self.cos_LC.unsqueeze(1), self.sin_LC.unsqueeze(1)
        return torch.addcmul(x_GLHC * cos_L1C, turned_GLHC, sin_L1C).to(x_GLHC.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's, with its weight in the input's dtype: under autocast the fused kernel takes no mixture."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


class Attention(nn.Module):
    """Multi-head attention with Whisper's biases (none on the keys) or the paper's QK-norm and no biases."""

    def __init__(self, width: int, heads: int, *, biases: bool, qk_norm_eps: float | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=biases)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=biases)
        self.out = nn.Linear(width, width, bias=biases)
        head_width = width // heads
        # One weight of head width for all heads of the layer.
        self.q_norm = RMSNorm(head_width, eps=qk_norm_eps) if qk_norm_eps is not None else nn.Identity()
        self.k_norm = RMSNorm(head_width, eps=qk_norm_eps) if qk_norm_eps is not None else nn.Identity()

    def _split(self, x_GLD: Tensor) -> Tensor:
        return x_GLD.view(*x_GLD.shape[:2], self.heads, -1)

    def _normed(self, x_GLD: Tensor, norm: nn.Module, rotation: Rotation | None) -> Tensor:
        """Heads of queries or keys; what is done to each is done where they lie side by side, without a copy."""
        x_GLHC = norm(self._split(x_GLD))
        if rotation is not None:
            x_GLHC = rotation(x_GLHC)
        return x_GLHC.transpose(1, 2)

    def keys_values(self, x_BTD: Tensor, rotation: Rotation | None = None) -> KeysValues:
        """Keys and values of what is attended to."""
        k_BHTC = self._normed(self.k(x_BTD), self.k_norm, rotation)
        return KeysValues(k_BHTC, self._split(self.v(x_BTD)).transpose(1, 2))

    def forward(
        self,
        x_GLD: Tensor,
        memory: KeysValues,
        *,
        mask: Tensor | None = None,
        causal: bool = False,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Attend from `x_GLD` to `memory`; `mask` is true where a key may be seen and broadcasts to (G, H, L, T)."""
        q_GHLC = self._normed(self.q(x_GLD), self.q_norm, rotation)
        y_GHLC = F.scaled_dot_product_attention(q_GHLC, *memory, attn_mask=mask, is_causal=causal)
        return self.out(y_GHLC.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Whisper's: linear, GELU, linear, with biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_GLD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_GLD)))


class SwiGLU(nn.Module):
    """The paper's: a gated linear unit without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_GLD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_GLD)) * self.up(x_GLD))


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
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

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
        """`memory` belongs to B utterances; the G sequences of `x_GLD` are their candidates, G / B for each."""
        h_GLD = self.self_norm(x_GLD)
        seen = self.self_attn.keys_values(h_GLD, rotation)
        if cache is not None:
            seen = cache[0].extend(cache[1], seen)
        x_GLD = x_GLD + self.dropout(self.self_attn(h_GLD, seen, mask=self_mask, causal=causal, rotation=rotation))
        if memory is not None:
            folded = self.cross_norm(x_GLD).reshape(memory.k_BHTC.shape[0], -1, x_GLD.shape[-1])
            x_GLD = x_GLD + self.dropout(self.cross_attn(folded, memory, mask=memory_mask)).reshape_as(x_GLD)
        return x_GLD + self.dropout(self.ffn(self.ffn_norm(x_GLD)))


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
