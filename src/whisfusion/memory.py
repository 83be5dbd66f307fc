"""What a decoder keeps of an utterance's audio, and the small learned parts that prepare it. Both parts are ours.

Letters: B utterances, T audio positions, S frames of a stride, L canvas positions, D width, E audio width,
V classes of CTC.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisfusion.blocks import FeedForward, KeysValues, RMSNorm, Stack, whisper_block
from whisfusion.ctc import CLASSES

SPELLER_REACH = 31
"""Positions that a convolution of the speller hears: 1.2 s at 25 positions a second."""


@dataclass(frozen=True)
class AudioMemory:
    """What the decoder keeps of an utterance's audio: computed once, read at every step by every candidate."""

    layers: list[KeysValues]
    heard_BT: Tensor | None
    """True where there is audio; None where every position counts. An adapter's positions may be fewer."""
    audio_BTE: Tensor | None = None
    """What the anchors are cut from."""
    anchors_BLD: Tensor | None = None
    """Added to the input of each canvas position."""
    amounts_BT: Tensor | None = None
    """How much of a token the anchors hear at each audio position, endoftext included."""
    bytes_BTV: Tensor | None = None
    """CTC logits, one or more for every audio position: the blank and the 256 bytes of UTF-8."""
    earlier: tuple[Tensor, ...] = ()
    """The same (B, T, V) of earlier layers that spelled."""

    def spelled_positions(self) -> Tensor:
        """How many of `bytes_BTV` are an utterance's own."""
        assert self.bytes_BTV is not None
        utterances, positions = self.bytes_BTV.shape[:2]
        if self.heard_BT is None:
            return torch.full((utterances,), positions, device=self.bytes_BTV.device)
        return self.heard_BT.sum(1) * (positions // self.heard_BT.shape[1])

    def own_bytes(self) -> list[Tensor]:
        """Each utterance's own part (T, V) of `bytes_BTV`."""
        assert self.bytes_BTV is not None
        return [own_TV[:count] for own_TV, count in zip(self.bytes_BTV, self.spelled_positions().tolist(), strict=True)]


class Nearby(nn.Module):
    """What is heard just before and after each position: a gated convolution of every channel by itself.

    Attention without positions finds what is alike, not what is next; letters are told apart by what is next to them.
    It is the convolution of a Conformer, with a layer norm in the place of its batch norm.
    """

    def __init__(self, width: int, reach: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.beside = nn.Conv1d(width, width, reach, padding=reach // 2, groups=width)
        self.beside_norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BTD: Tensor, present_BT: Tensor | None) -> Tensor:
        """`x_BTD`, and what is to be added to it."""
        h_BTD = F.glu(self.gate(self.norm(x_BTD)))
        if present_BT is not None:
            # What other clips of a batch need room for is no sound.
            h_BTD = h_BTD * present_BT[..., None]
        h_BTD = self._hear_beside(h_BTD)
        return x_BTD + self.dropout(self.out(F.silu(self.beside_norm(h_BTD))))

    def _hear_beside(self, x_BTD: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return self.beside(x_BTD.transpose(1, 2)).transpose(1, 2)
        # The same sum in words that a compiler makes one pass of; libraries are slow with a channel by itself.
        reach, positions = self.beside.kernel_size[0], x_BTD.shape[1]
        padded_BTD = F.pad(x_BTD, (0, 0, reach // 2, reach // 2))
        weight_RD = self.beside.weight[:, 0].T
        shifted = (padded_BTD[:, r : r + positions] * weight_RD[r] for r in range(reach))
        assert self.beside.bias is not None
        return sum(shifted, self.beside.bias).to(x_BTD.dtype)


class Adapter(nn.Module):
    """Turns features made for a decoder that walks through them into features that can be read anywhere at once.

    A convolution and bidirectional blocks, added to what the encoder says; they start by adding nothing. CTC on the
    bytes of the transcript teaches them where in the audio each letter is. With a stride the blocks hear the mean of
    as many frames at a time, and so does the decoder, unless what they add is given to each frame (`every_frame`); CTC
    spells at every frame in either case. Before each block, `reach` positions can be heard by a convolution. Blocks can
    be told how those before them would spell (self-conditioned CTC).
    """

    def __init__(
        self, width: int, layers: int, *, stride: int, every_frame: bool, reach: int, spells_every: int, dropout: float
    ) -> None:
        super().__init__()
        self.stride, self.every_frame, self.spells_every = stride, every_frame, spells_every
        self.near = nn.Conv1d(width, width, 2 * stride + 1, stride=stride, padding=stride)
        self.mix = nn.Linear(width, width)
        self.blocks = Stack(
            whisper_block(width, max(1, width // 64), hidden=4 * width, cross=False, dropout=dropout)
            for _ in range(layers)
        )
        self.nearby = nn.ModuleList(Nearby(width, reach, dropout) for _ in range(layers if reach else 0))
        self.ctc = nn.Linear(width, CLASSES if every_frame else stride * CLASSES)
        if spells_every:
            self.told = nn.Linear(stride * CLASSES, width, bias=False)

    def forward(self, audio_BTD: Tensor, heard_BT: Tensor | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Features of every frame, or of every `stride`, zero where nothing was heard; where that is; CTC logits of
        the blocks that spell, those of the last one last.
        """
        near_BTD = self.near(audio_BTD.transpose(1, 2)).transpose(1, 2).contiguous()
        means_BTD, present_BT = self._pool(audio_BTD, heard_BT)
        x_BTD = means_BTD + self.mix(F.gelu(near_BTD))
        mask = None if present_BT is None else present_BT[:, None, None, :]
        spelled = []
        for number, block in enumerate(self.blocks, 1):
            if self.nearby:
                x_BTD = self.nearby[number - 1](x_BTD, present_BT)
            x_BTD = block(x_BTD, self_mask=mask)
            if self.spells_every and number < len(self.blocks) and number % self.spells_every == 0:
                spelled.append(self.spell(x_BTD))
                likely_BTV = spelled[-1].softmax(-1).unflatten(1, (-1, self.stride)).flatten(2)
                x_BTD = x_BTD + self.told(likely_BTV.to(x_BTD.dtype))
        if self.every_frame:
            added_BTD = (x_BTD - means_BTD).repeat_interleave(self.stride, 1)[:, : audio_BTD.shape[1]]
            x_BTD, present_BT = audio_BTD + added_BTD, heard_BT
        if present_BT is not None:
            x_BTD = x_BTD * present_BT[..., None]
        return x_BTD, present_BT, [*spelled, self.spell(x_BTD)]

    def spell(self, x_BTD: Tensor) -> Tensor:
        """CTC logits of what a block hears, `stride` for each of its positions."""
        return self.ctc(x_BTD).unflatten(-1, (-1, CLASSES)).flatten(1, 2)

    def _pool(self, x_BTD: Tensor, heard_BT: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Means over `stride` frames, of those that were heard."""
        if self.stride == 1:
            return x_BTD, heard_BT
        spare = -x_BTD.shape[1] % self.stride
        if heard_BT is None and not spare:
            return x_BTD.unflatten(1, (-1, self.stride)).mean(2), None
        if heard_BT is None:
            heard_BT = x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.bool)
        share_BTS = F.pad(heard_BT, (0, spare)).unflatten(1, (-1, self.stride)).to(x_BTD.dtype)
        share_BTS = share_BTS / share_BTS.sum(-1, keepdim=True).clamp(min=1)
        pieces_BTSD = F.pad(x_BTD, (0, 0, 0, spare)).unflatten(1, (-1, self.stride))
        return (pieces_BTSD * share_BTS[..., None]).sum(2), share_BTS.any(-1)


class Speller(nn.Module):
    """Goes on where the adapter ends, for CTC alone: a convolution and a feed-forward in each layer, which start by
    adding nothing.

    The decoder does not hear it. So it can learn last, by itself and from much less speech, and what was learned before
    stays as it was.
    """

    def __init__(self, width: int, layers: int, *, dropout: float) -> None:
        super().__init__()
        self.nearby = nn.ModuleList(Nearby(width, SPELLER_REACH, dropout) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.ffns = nn.ModuleList(FeedForward(width, 3 * width // 2) for _ in range(layers))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x_BTD: Tensor, present_BT: Tensor | None) -> Tensor:
        """What CTC is to read (B, T, D), of what the adapter hears."""
        for nearby, norm, ffn in zip(self.nearby, self.norms, self.ffns, strict=True):
            x_BTD = nearby(x_BTD, present_BT)
            x_BTD = x_BTD + self.dropout(ffn(norm(x_BTD)))
        return x_BTD


class Anchors(nn.Module):
    """Cuts the audio into one slice per token and gives each canvas position the mean of its own slice.

    Every frame gets a weight a_t; their running sum A_t is a position in the transcript, so that position i takes
    frame t with weight max(0, min(A_t, i + 1) - max(A_(t-1), i)). A slice can be heard in several parts of equal
    weight, the mean of each beside the others: one mean alone would lose the order of its sounds.
    """

    def __init__(self, audio_width: int, width: int, *, parts: int = 1, hidden: int = 256) -> None:
        super().__init__()
        self.parts = parts
        self.context = nn.Conv1d(audio_width, hidden, kernel_size=5, padding=2)
        self.weigh = nn.Linear(hidden, 1)
        self.project = nn.Linear(parts * audio_width, width, bias=False)
        # Audio features are far larger than token embeddings: unbounded, slices would drown the tokens.
        self.norm = RMSNorm(width, eps=1e-5)

    def forward(
        self,
        audio_BTD: Tensor,
        heard_BT: Tensor | None,
        *,
        positions: int,
        counts_B: Tensor | None,
        room_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Anchors (B, positions, D), 0 where nothing is left to hear, and the weights (B, T): tokens heard at each."""
        slices_BLE, a_BT = self.cut(audio_BTD, heard_BT, positions=positions, counts_B=counts_B, room_B=room_B)
        return self.norm(self.project(slices_BLE)), a_BT

    def cut(
        self,
        audio_BTD: Tensor,
        heard_BT: Tensor | None,
        *,
        positions: int,
        counts_B: Tensor | None,
        room_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mean audio of each position's slice (B, positions, parts * audio width), and the weights.

        The weights are scaled to sum to `counts_B` (in training the true counts) or to the nearest whole number that
        fits: at most `room_B`, which is `positions` unless an utterance's own canvas is shorter.
        """
        h_BTE = F.gelu(self.context(audio_BTD.transpose(1, 2))).transpose(1, 2)
        a_BT = torch.sigmoid(self.weigh(h_BTE).squeeze(-1).float())
        if heard_BT is not None:
            a_BT = a_BT * heard_BT
        quantity_B = a_BT.sum(1)
        if counts_B is None:
            counts_B = quantity_B.round().clamp(1, positions)
            counts_B = counts_B if room_B is None else torch.minimum(counts_B, room_B)
        # Parts are positions of their own until they are put side by side.
        end_BT = (a_BT * (self.parts * counts_B / quantity_B)[:, None]).cumsum(1)
        start_BT = F.pad(end_BT[:, :-1], (1, 0))
        i_L1 = torch.arange(self.parts * positions, device=a_BT.device, dtype=torch.float32)[:, None]
        w_BLT = torch.minimum(end_BT[:, None], i_L1 + 1) - torch.maximum(start_BT[:, None], i_L1)
        slices_BLE = w_BLT.clamp(min=0).to(audio_BTD.dtype) @ audio_BTD
        return slices_BLE.unflatten(1, (positions, self.parts)).flatten(2), a_BT
