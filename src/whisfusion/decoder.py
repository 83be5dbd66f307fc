"""The masked-diffusion decoder: reads a partly masked transcript and the audio, predicts every position at once.

Letters: B utterances, K candidates, G = B * K sequences, L canvas positions, T audio positions, D width, V vocabulary.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisfusion.blocks import FeedForward, RMSNorm, Rotation, Stack, paper_block, whisper_block
from whisfusion.errors import ModelError, OptionError
from whisfusion.memory import Adapter, Anchors, AudioMemory, Nearby, Speller
from whisfusion.tokenizer import MASK, PROMPT_LENGTH, SAMPLEABLE, VOCAB_SIZE, embedding_rows


@dataclass(frozen=True)
class Canvas:
    """How many positions a transcript is written on, the prompt's four included."""

    rule: Literal["fixed", "follow"] = "fixed"
    """"fixed": always `size` (the paper). "follow": as many as speech of the clip's duration may need."""
    size: int = 192
    """All positions, or the most of them."""

    def positions(self, seconds: float) -> int:
        """Positions for a clip of this duration: the fastest speech has 6.5 tokens a second."""
        if self.rule == "fixed":
            return self.size
        return min(self.size, 16 * math.ceil((12 + 6.5 * seconds) / 16))


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a diffusion decoder. The defaults are the paper's: 828,216,064 parameters."""

    layers: int = 24
    width: int = 1280
    heads: int = 20
    hidden: int = 4096
    """Width inside the feed-forward."""
    audio_width: int = 1280
    """Width of the encoder's features."""
    block: Literal["paper", "whisper"] = "paper"
    """"paper": RMSNorm, SwiGLU, RoPE, QK-norm, no biases. "whisper": Whisper's own, to start from its weights."""
    tied: bool = False
    """Whether the output head is the token embedding."""
    anchors: bool = False
    """Whether each position is told which slice of the audio is its own. Ours; off in the paper."""
    anchor_parts: int = 1
    """Parts, one after another, in which each position hears its slice."""
    adapter: int = 0
    """Layers between encoder and decoder that learn, with a CTC loss of their own. Ours; none in the paper."""
    stride: int = 1
    """Frames of the encoder that the adapter makes one position of."""
    reach: int = 0
    """Positions that a convolution before each of the adapter's layers hears at a time; 0: there are none."""
    every_frame: bool = False
    """Whether what the adapter adds is given to each of them, so that the decoder hears as many positions as ever."""
    spells_every: int = 0
    """After every so many of its layers the adapter spells what it has heard, and the next are told; 0: at the end."""
    speller: int = 0
    """Layers above the adapter that CTC alone reads, for proofreading: the decoder does not hear them."""
    drafts: bool = False
    """Whether a masked position is told what the step before wrote there. Ours; off in the paper."""
    canvas: Canvas = field(default_factory=Canvas)
    norm_eps: float = 1e-5
    rope_base: float = 1e4
    dropout: float = 0.0
    vocab_size: int = VOCAB_SIZE

    def __post_init__(self) -> None:
        problems = [
            f"decoder {name} must be at least 1, not {getattr(self, name)}"
            for name in ("layers", "width", "heads", "hidden", "audio_width", "anchor_parts")
            if getattr(self, name) < 1
        ]
        if self.adapter < 0:
            problems.append(f"decoder adapter must be a number of layers, not {self.adapter}")
        if self.stride < 1 or (self.stride > 1 and not self.adapter):
            problems.append(f"decoder stride must be 1, or more with an adapter, not {self.stride}")
        if self.reach < 0 or (self.reach and (not self.adapter or self.reach % 2 == 0)):
            problems.append(f"decoder reach must be 0, or with an adapter an odd number, not {self.reach}")
        if self.spells_every < 0 or (self.spells_every and (not self.adapter or self.every_frame)):
            problems.append(
                f"decoder spells_every must be 0, or with an adapter without every_frame more, not {self.spells_every}"
            )
        if self.speller < 0 or (self.speller and (not self.adapter or self.every_frame)):
            problems.append(
                f"decoder speller must be 0, or with an adapter without every_frame more, not {self.speller}"
            )
        if self.heads >= 1 and self.width % (2 * self.heads):
            problems.append(f"decoder width {self.width} must divide into {self.heads} heads of even width")
        if self.block not in ("paper", "whisper"):
            problems.append(f"decoder block must be 'paper' or 'whisper', not {self.block!r}")
        if self.block == "whisper" and self.audio_width != self.width:
            problems.append("a decoder of Whisper blocks must be as wide as its encoder")
        if self.canvas.rule not in ("fixed", "follow") or self.canvas.size <= PROMPT_LENGTH:
            problems.append(f"canvas must be fixed or follow with more than {PROMPT_LENGTH} positions")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout must be in [0, 1), not {self.dropout}")
        OptionError.collect(problems)


class Draft(NamedTuple):
    """What the step before wrote, and how surely."""

    tokens_GL: Tensor
    probabilities_GL: Tensor

    def of_sequences(self) -> "Draft":
        """The same as (G, L), of (B, K, L)."""
        return Draft(*(values_BKL.flatten(0, 1) for values_BKL in self))


class DiffusionDecoder(nn.Module):
    """Bidirectional transformer over the canvas, with cross-attention to the audio in every block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        width, layers = config.width, range(config.layers)
        self.embed = nn.Embedding(config.vocab_size, width)
        if config.block == "paper":
            self.project = nn.Sequential(
                nn.Linear(config.audio_width, width, bias=False),
                nn.GELU(),
                nn.Linear(width, width, bias=False),
            )
            self.blocks = Stack(
                paper_block(
                    width,
                    config.heads,
                    hidden=config.hidden,
                    norm_eps=config.norm_eps,
                    dropout=config.dropout,
                )
                for _ in layers
            )
            self.norm: nn.Module = RMSNorm(width, eps=config.norm_eps)
        else:
            self.positions = nn.Parameter(torch.empty(config.canvas.size, width))
            self.project = nn.Identity()
            self.blocks = Stack(
                whisper_block(width, config.heads, hidden=config.hidden, cross=True, dropout=config.dropout)
                for _ in layers
            )
            self.norm = nn.LayerNorm(width)
        if config.adapter:
            self.adapter = Adapter(
                config.audio_width,
                config.adapter,
                stride=config.stride,
                every_frame=config.every_frame,
                reach=config.reach,
                spells_every=config.spells_every,
                dropout=config.dropout,
            )
        if config.speller:
            self.speller = Speller(config.audio_width, config.speller, dropout=config.dropout)
        if config.anchors:
            self.anchors = Anchors(config.audio_width, width, parts=config.anchor_parts)
        if config.drafts:
            self.draft = nn.Linear(width, width, bias=False)
        if not config.tied:
            self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """N(0, 0.02^2) everywhere; output projections of attention and feed-forward scaled by 1 / sqrt(2 layers)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
                nn.init.normal_(module.weight, std=0.02, generator=generator)
                if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.config.block == "whisper":
            nn.init.normal_(self.positions, std=0.02, generator=generator)
        scale = 1 / math.sqrt(2 * self.config.layers)
        with torch.no_grad():
            for block in self.blocks:
                for output in (block.self_attn.out, block.cross_attn.out, block.ffn.down):
                    output.weight.mul_(scale)
            if self.config.adapter:
                self.adapter.mix.weight.zero_()
                if self.config.spells_every:
                    self.adapter.told.weight.zero_()
                for block in self.adapter.blocks:
                    for output in (block.self_attn.out, block.ffn.down):
                        output.weight.zero_()
                for nearby in self.adapter.nearby:
                    assert isinstance(nearby, Nearby)
                    nearby.out.weight.zero_()
            if self.config.speller:
                for nearby, ffn in zip(self.speller.nearby, self.speller.ffns, strict=True):
                    assert isinstance(nearby, Nearby)
                    assert isinstance(ffn, FeedForward)
                    nearby.out.weight.zero_()
                    ffn.down.weight.zero_()
            if self.config.drafts:
                self.draft.weight.zero_()
            if self.config.anchors:
                # Starts near real speech rates: sigmoid(-2.6) of 50 frames a second are 3.5 tokens a second.
                slower = 1 if self.config.every_frame else self.config.stride
                self.anchors.weigh.bias.fill_(-2.6 + math.log(slower))
                # As large as a token embedding, the paper's and Whisper's alike.
                self.anchors.norm.weight.fill_(0.02)

    @property
    def reads_ahead(self) -> bool:
        """Whether the prediction for a position is read at the one before it, as Whisper does."""
        return self.config.block == "whisper"

    def listen(
        self,
        audio_BTD: Tensor,
        heard_BT: Tensor | None = None,
        *,
        positions: int,
        counts_B: Tensor | None = None,
        canvas_B: Tensor | None = None,
    ) -> AudioMemory:
        """Keys and values of every layer, and the anchors of a canvas of `positions`, from the encoder's features.

        `counts_B`: token counts with endoftext, where they are known. `canvas_B`: each utterance's own positions, where
        fewer.
        """
        memory_BTD, own = self.prepare(audio_BTD, heard_BT, positions=positions, counts_B=counts_B, canvas_B=canvas_B)
        return replace(own, layers=[block.cross_attn.keys_values(memory_BTD) for block in self.blocks])

    def prepare(
        self,
        audio_BTD: Tensor,
        heard_BT: Tensor | None = None,
        *,
        positions: int,
        counts_B: Tensor | None = None,
        canvas_B: Tensor | None = None,
    ) -> tuple[Tensor, AudioMemory]:
        """What keys and values are made of (B, T, D), and the memory as it is before they are made: see `listen`."""
        own = self.hear(audio_BTD, heard_BT)
        assert own.audio_BTE is not None
        memory_BTD = self.project(own.audio_BTE)
        return memory_BTD, self.cut(own, positions=positions, counts_B=counts_B, canvas_B=canvas_B)

    def hear(self, audio_BTD: Tensor, heard_BT: Tensor | None = None) -> AudioMemory:
        """The memory as it is before anything is made of it for the canvas: what adapter and speller hear and spell."""
        if not self.config.adapter:
            return AudioMemory([], heard_BT, audio_BTD)
        audio_BTD, heard_BT, (*earlier, bytes_BTV) = self.adapter(audio_BTD, heard_BT)
        own = AudioMemory([], heard_BT, audio_BTD, bytes_BTV=bytes_BTV, earlier=tuple(earlier))
        return self.spell(own) if self.config.speller else own

    def spell(self, memory: AudioMemory) -> AudioMemory:
        """The memory with what the speller spells of what the adapter hears; the adapter's own is an earlier one."""
        assert memory.audio_BTE is not None
        earlier = memory.earlier if memory.bytes_BTV is None else (*memory.earlier, memory.bytes_BTV)
        bytes_BTV = self.adapter.spell(self.speller(memory.audio_BTE, memory.heard_BT))
        return replace(memory, bytes_BTV=bytes_BTV, earlier=earlier)

    def cut(
        self, memory: AudioMemory, *, positions: int, counts_B: Tensor | None = None, canvas_B: Tensor | None = None
    ) -> AudioMemory:
        """The memory with anchors for a canvas of `positions`, where the decoder has anchors: see `listen`."""
        if not self.config.anchors or memory.audio_BTE is None:
            return memory
        own_BLD, amounts_BT = self.anchors(
            memory.audio_BTE,
            memory.heard_BT,
            positions=positions - PROMPT_LENGTH,
            counts_B=counts_B,
            room_B=None if canvas_B is None else canvas_B - PROMPT_LENGTH,
        )
        before = PROMPT_LENGTH - self.reads_ahead
        anchors_BLD = F.pad(own_BLD, (0, 0, before, PROMPT_LENGTH - before))
        return replace(memory, anchors_BLD=anchors_BLD, amounts_BT=amounts_BT)

    def forward(
        self,
        tokens_GL: Tensor,
        memory: AudioMemory,
        canvas_BL: Tensor | None = None,
        ahead: Tensor | None = None,
        draft: Draft | None = None,
    ) -> Tensor:
        """States (G, L, D) from which `logits` predicts each position.

        G is a whole multiple K of the memory's B utterances, candidates of one side by side. `canvas_BL` is true on
        each utterance's own canvas; None where all are of full length. `ahead` is added to the attention scores of
        later positions: far below 0 they are not seen, as in the decoder that Whisper blocks come from. `draft` is
        shown to a decoder that takes drafts.
        """
        utterances = memory.layers[0].k_BHTC.shape[0]
        x_GLD = self.inputs(tokens_GL, memory.anchors_BLD, draft)
        rotation = None
        if self.config.block == "paper":
            head_width = self.config.width // self.config.heads
            rotation = Rotation.of(tokens_GL.shape[1], head_width, self.config.rope_base, x_GLD.device)
        self_mask = None
        if canvas_BL is not None:
            candidates = tokens_GL.shape[0] // utterances
            self_mask = canvas_BL.repeat_interleave(candidates, 0)[:, None, None, :]
        if ahead is not None:
            self_mask = _with_bias(self_mask, tokens_GL.shape[1], ahead, memory.layers[0].k_BHTC.dtype)
        memory_mask = None if memory.heard_BT is None else memory.heard_BT[:, None, None, :]
        for block, audio in zip(self.blocks, memory.layers, strict=True):
            x_GLD = block(x_GLD, audio, self_mask=self_mask, memory_mask=memory_mask, rotation=rotation)
        x_GLD = self.norm(x_GLD)
        return x_GLD.roll(1, dims=1) if self.reads_ahead else x_GLD

    def inputs(self, tokens_GL: Tensor, anchors_BLD: Tensor | None, draft: Draft | None = None) -> Tensor:
        """What the first block sees (G, L, D): tokens, drafts of those that are masked, what the anchors hear, and with
        Whisper's blocks positions.
        """
        x_GLD = self.embed(tokens_GL)
        if self.config.drafts and draft is not None:
            sure_GL = draft.probabilities_GL * (tokens_GL == MASK)
            x_GLD = x_GLD + self.draft(self.embed(draft.tokens_GL)) * sure_GL[..., None].to(x_GLD.dtype)
        if anchors_BLD is not None:
            x_GLD = (x_GLD.unflatten(0, (len(anchors_BLD), -1)) + anchors_BLD[:, None]).flatten(0, 1)
        if self.config.block == "whisper":
            x_GLD = x_GLD + self.positions[: tokens_GL.shape[1]]
        return x_GLD

    @property
    def output_weight(self) -> Tensor:
        """The weights of the output head, a row for each token."""
        return self.embed.weight if self.config.tied else self.head.weight

    def logits(self, states_RD: Tensor, ids: slice = slice(SAMPLEABLE)) -> Tensor:
        """Logits of `states_RD` for the tokens `ids`: by default those that decoding may write."""
        return F.linear(states_RD, self.output_weight[ids])


def _with_bias(mask_G11L: Tensor | None, positions: int, ahead: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores to add (G or 1, 1, L, L): `ahead` at later positions, minus infinity where the mask is false."""
    later_LL = torch.ones(positions, positions, device=ahead.device, dtype=torch.bool).triu(1)
    bias_LL = (later_LL * ahead).to(dtype)
    return bias_LL[None, None] if mask_G11L is None else torch.where(mask_G11L, bias_LL, -torch.inf)


@torch.no_grad()
def start_from_whisper(decoder: DiffusionDecoder, whisper: dict[str, Tensor]) -> None:
    """Copy what fits of a Whisper decoder's state: everything for Whisper blocks, token embeddings for the paper's.

    Tokens that Whisper does not have (the mask) get the mean embedding. Raises ModelError where shapes do not fit.
    """
    source_VD = whisper["embed.weight"]
    if source_VD.shape[1] != decoder.config.width:
        raise ModelError(
            f"cannot start a decoder of width {decoder.config.width} from a Whisper of width {source_VD.shape[1]}"
        )
    mean_D = source_VD.mean(0)
    rows = embedding_rows(source_VD.shape[0])
    table_VD = torch.stack([mean_D if row is None else source_VD[row] for row in rows])
    assert rows[MASK] is None
    decoder.embed.weight.copy_(table_VD)
    if not decoder.config.tied:
        decoder.head.weight.copy_(table_VD)
    if decoder.config.block != "whisper":
        return
    if len(whisper["positions"]) < decoder.config.canvas.size:
        raise ModelError(f"Whisper has {len(whisper['positions'])} positions, the canvas {decoder.config.canvas.size}")
    decoder.positions.copy_(whisper["positions"][: decoder.config.canvas.size])
    for name, module in (("blocks", decoder.blocks), ("norm", decoder.norm)):
        own = module.state_dict()
        odd = [key for key, value in own.items() if whisper.get(f"{name}.{key}", value[:0]).shape != value.shape]
        if odd:
            raise ModelError(
                f"Whisper's {name}.{odd[0]} does not fit: layers and hidden must be at most and just its own"
            )
        given = {key.removeprefix(f"{name}."): value for key, value in whisper.items() if key.startswith(f"{name}.")}
        # A shallower decoder takes Whisper's first blocks.
        module.load_state_dict({key: given[key] for key in own if key in given}, strict=True)
