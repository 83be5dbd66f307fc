"""The fast engine: from samples to candidates without the host in between, replayed as CUDA graphs.

The same mathematics as the plain path of `systems`, in shapes that are known beforehand: batches are filled up to one
of a few sizes, logits are computed for every position, and nothing waits for a result. On a GPU each set of shapes is
captured once, on first use, and from then on is three launches: spectrogram, encoder, and all the rest, whose inputs
the host prepares while the encoder runs. Elsewhere the same code runs directly, for tests.

Letters: B windows, K candidates, N steps, L canvas positions, M mel bins, F frames, T audio positions, D width,
R = B * K * L rows, V vocabulary, X languages or lists of tokens, P prompt.
"""

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from whisfusion import attention
from whisfusion.attention import Attend
from whisfusion.checkpoint import Model
from whisfusion.encoder import audio_mask
from whisfusion.fused import FusedEncoder, FusedStack
from whisfusion.graphs import Clock, Graphs, Packing, Work, host_tensor, to_host
from whisfusion.mel import HOP, MAX_FRAMES, clip_frames, log_mel_of_padded
from whisfusion.pdd import (
    Candidate,
    PDDOptions,
    Step,
    batch_uniforms,
    collect,
    denoise,
    empty_canvas,
)
from whisfusion.tokenizer import MASK, PROMPT_LENGTH, get_tokenizer
from whisfusion.transcriber import DecodingOptions, Window, wants_spelling
from whisfusion.whisper import WhisperDecoder, language_logits
from whisfusion.writing import LANGUAGE_POSITION, Head, Scorer, States, Writer

_log = logging.getLogger(__name__)

_FRAMES = 128
"""Windows of a clip's own size are filled up to a multiple of this: fewer shapes, and keys in whole tiles."""
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention kernels, the fastest on Hopper first; each call takes the first that can do it."""


@dataclass(frozen=True)
class Plan:
    """All that decides which kernels run: one graph for each."""

    rows: int
    """B, filled up."""
    frames: int
    """F, filled up."""
    positions: int
    """L: the longest canvas of the batch."""
    pdd: PDDOptions
    detect: bool
    """Whether the language of some is to be found out."""
    rerank: bool
    spelling: bool
    """Whether the adapter's CTC is wanted."""
    trace: bool

    def __str__(self) -> str:
        words = f"{self.rows} x {self.frames / 100:g} s, canvas {self.positions}, K = {self.pdd.candidates}"
        return words + ", rerank" * self.rerank


@dataclass(frozen=True)
class Decoding:
    """What the engine made of a batch."""

    candidates: list[list[Candidate]]
    languages: list[str]
    canvas_B: list[int]
    steps: list[Step]
    likelihoods: list[list[float]] | None
    """Of every candidate, to Whisper, where reranking was asked for."""
    bytes_B: list[Tensor] | None
    """The adapter's CTC logits (T, V) of each window's own frames, for selection by spelling and for proofreading."""
    audio_BTD: Tensor | None = None
    """The encoder's features, on the device, for proofreading."""
    heard_BT: Tensor | None = None
    """Where they are a window's own; None where that is everywhere."""


class GraphEngine:
    """Runs one model. Safe to use from several threads, one batch at a time."""

    def __init__(self, model: Model, *, capture: bool = True, attend: Attend = attention.fastest) -> None:
        """`capture`: whether work is replayed from graphs, which needs a GPU. `attend`: what computes attention."""
        self.model = model
        self.mark: Callable[[str], None] = lambda stage: None
        """Called as each stage of the work ends; a benchmark may put its clock here before the first batch."""
        encoder, decoder = model.encoder, model.decoder
        self._device, self._dtype = encoder.positions.device, encoder.positions.dtype
        self._attend = attend
        self._encoder = FusedEncoder(encoder, attend)
        self._decoder = FusedStack(decoder.blocks, decoder.norm, attend)
        self._head = Head.of(model)
        tokenizer = get_tokenizer()
        self._language_ids_X = torch.tensor(
            [tokenizer.language_id(code) for code in model.config.languages], device=self._device
        )
        # It lays the decoder's weights anew: before a graph that tells the language knows where they are.
        self._scorer = None if model.whisper is None else Scorer(model.whisper, attend)
        self._graphs = Graphs(self._device) if capture else None
        self._lock = threading.Lock()

    def start(
        self,
        batch: Sequence[Window],
        options: DecodingOptions,
        scorer: WhisperDecoder | None = None,
        *,
        mel_BMF: Tensor | None = None,
    ) -> Callable[[dict[str, float]], Decoding]:
        """Begin a batch; what is returned waits for it, and adds each stage's seconds to the dict given.

        scorer: Whisper's decoder, where candidates are to be reranked. mel_BMF: what `hear` made of the batch, if it
        has been asked already.
        """
        plan = self.plan(batch, options, rerank=scorer is not None)
        with self._lock:
            if scorer is not None and (self._scorer is None or self._scorer.decoder is not scorer):
                self._scorer = Scorer(scorer, self._attend)
            clock = Clock(self._device)
            frames_B = self.frames(plan, batch)
            if mel_BMF is None:
                mel_BMF = self.hear(plan, self.samples(plan, batch), frames_B)
                clock.lap("mel")
            audio_BTD = self.encode(plan, mel_BMF, frames_B)
            clock.lap("encode")
            host = to_host(self.decode(plan, audio_BTD, batch))
            clock.lap("decode")
            # Where it lies now, the next batch's will be.
            kept_BTD = audio_BTD[: len(batch)].clone() if options.proofread else None
        canvas_B = self._canvas(batch)

        def wait(timings: dict[str, float]) -> Decoding:
            clock.wait(timings)
            decoding = _decoding({name: value[: len(batch)] for name, value in host.items()}, canvas_B)
            if kept_BTD is None:
                return decoding
            heard_BT = self._heard(frames_B[: len(batch)].to(self._device), kept_BTD.shape[1])
            return replace(decoding, audio_BTD=kept_BTD, heard_BT=heard_BT)

        return wait

    def plan(self, batch: Sequence[Window], options: DecodingOptions, *, rerank: bool = False) -> Plan:
        """The shapes that a batch needs."""
        frames = MAX_FRAMES
        if self.model.config.window == "clip":
            longest = max(clip_frames(len(window.samples)) for window in batch)
            frames = min(MAX_FRAMES, -(-longest // _FRAMES) * _FRAMES)
        return Plan(
            rows=1 << (len(batch) - 1).bit_length(),
            frames=frames,
            positions=max(self._canvas(batch)),
            pdd=options.pdd,
            detect=any(window.language is None for window in batch),
            rerank=rerank,
            spelling=wants_spelling(options) and self.model.config.decoder.adapter > 0,
            trace=options.trace,
        )

    def samples(self, plan: Plan, batch: Sequence[Window]) -> Tensor:
        """Samples (B, 160 F) on the host, zero beyond each clip."""
        samples_BN = host_tensor(plan.rows, plan.frames * HOP, dtype=torch.float32, device=self._device)
        for row_N, window in zip(samples_BN.numpy(), _filled(batch, plan.rows), strict=True):
            row_N[: len(window.samples)] = window.samples
            row_N[len(window.samples) :] = 0
        return samples_BN

    def frames(self, plan: Plan, batch: Sequence[Window]) -> Tensor:
        """Each clip's own frames (B), on the host."""
        frames_B = host_tensor(plan.rows, dtype=torch.int64, device=self._device)
        if self.model.config.window == "padded":
            return frames_B.fill_(plan.frames)
        own = [clip_frames(len(window.samples)) for window in batch]
        return frames_B.copy_(torch.tensor(_filled(own, plan.rows)))

    def hear(self, plan: Plan, samples_BN: Tensor, frames_B: Tensor) -> Tensor:
        """Samples to the log-mel spectrogram (B, M, F); overwritten by the next batch of this shape."""

        def work(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            mel_BMF = log_mel_of_padded(inputs["samples"], inputs["frames"], n_mels=self.model.config.encoder.mels)
            return {"mel": mel_BMF.to(self._dtype)}

        inputs = {"samples": samples_BN, "frames": frames_B}
        return self._run(("mel", plan.rows, plan.frames), work, inputs)["mel"]

    def encode(self, plan: Plan, mel_BMF: Tensor, frames_B: Tensor) -> Tensor:
        """Spectrogram to features (B, T, D); overwritten by the next batch of this shape."""

        def work(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            self.mark("start")
            audio_BTD = self._encoder(inputs["mel"], self._heard(inputs["frames"], inputs["mel"].shape[2] // 2))
            self.mark("encode")
            return {"audio": audio_BTD}

        return self._run(("encode", plan.rows, plan.frames), work, {"mel": mel_BMF, "frames": frames_B})["audio"]

    def decode(self, plan: Plan, audio_BTD: Tensor, batch: Sequence[Window]) -> dict[str, Tensor]:
        """Features to candidates; results are overwritten by the next batch of this plan."""
        if self._graphs is not None and plan not in self._graphs:
            _log.info("getting ready for %s: this happens once", plan)
        inputs = self._inputs(plan, batch)
        packing = Packing.of(inputs)
        packed = packing.pack(inputs, host_tensor(packing.size, dtype=torch.uint8, device=self._device))

        def work(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return self._work(plan, values["audio"], packing.unpack(values["packed"]))

        return self._run(plan, work, {"audio": audio_BTD, "packed": packed})

    def _inputs(self, plan: Plan, batch: Sequence[Window]) -> dict[str, Tensor]:
        """All that is decoded with besides the audio, on the host."""
        tokenizer = get_tokenizer()
        batch = _filled(batch, plan.rows)
        canvas_B = self._canvas(batch)
        prompts = [tokenizer.prompt(window.language or self.model.config.languages[0]) for window in batch]
        return {
            "uniforms": batch_uniforms([window.seed for window in batch], canvas_B, plan.pdd, plan.positions),
            "canvas": torch.tensor(canvas_B),
            "prompts": torch.tensor(prompts),
            "frames": self.frames(plan, batch),
            "unknown": torch.tensor([window.language is None for window in batch]),
        }

    @torch.no_grad()
    def _run(self, key: Hashable, work: Work, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        def prepared(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            with sdpa_kernel(_BACKENDS, set_priority=True):
                return work(values)

        if self._graphs is not None:
            return self._graphs(key, prepared, inputs)
        inputs = {name: value.to(self._device) for name, value in inputs.items()}
        return prepared(inputs) if self._device.type == "cuda" else work(inputs)

    def _heard(self, frames_B: Tensor, positions: int) -> Tensor | None:
        """Which audio positions are a clip's own; None where that is all of them."""
        return audio_mask(frames_B, positions) if self.model.config.window == "clip" else None

    def _work(self, plan: Plan, audio_BTD: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everything from the features on, without a look at any value."""
        decoder, canvas_B = self.model.decoder, inputs["canvas"]
        heard_BT = self._heard(inputs["frames"], audio_BTD.shape[1])
        memory_BTD, own = decoder.prepare(audio_BTD, heard_BT, positions=plan.positions, canvas_B=canvas_B)
        audio = self._decoder.listen(memory_BTD, own.heard_BT)
        position_L = torch.arange(plan.positions, device=audio_BTD.device)
        canvas_BL = None
        if plan.rows > 1 and self.model.config.decoder.canvas.rule == "follow":
            canvas_BL = position_L < canvas_B[:, None]
        states = States(decoder, self._decoder, audio, own.anchors_BLD, canvas_BL)
        self.mark("memory")

        prompts_BP = inputs["prompts"]
        if plan.detect:
            if self.model.whisper is None:
                logits_BX = self._asked(states, prompts_BP, plan.positions)
            else:
                logits_BX = language_logits(self.model.whisper, audio_BTD, self.model.config.languages, heard_BT)
            prompts_BP = self._told(prompts_BP, inputs["unknown"], logits_BX)
        tokens_B1L, writable_B1L = empty_canvas(prompts_BP, canvas_B, plan.positions)
        write = Writer(states, self._head, prompts_BP, plan.pdd.temperature, mark=self.mark)
        tokens_BKL, logprobs_BKL, steps = denoise(write, tokens_B1L, writable_B1L, inputs["uniforms"], plan.pdd)
        result = {"tokens": tokens_BKL.int(), "logprobs": logprobs_BKL, "languages": prompts_BP[:, LANGUAGE_POSITION]}
        if plan.trace:
            for number, step in enumerate(steps):
                parts = {"masked": step.masked_BKL, "tokens": step.tokens_BKL, "logprobs": step.logprobs_BKL}
                result |= {f"{name} {number}": value.contiguous() for name, value in parts.items()}
        if plan.spelling:
            assert own.bytes_BTV is not None
            result |= {"bytes": own.bytes_BTV, "spelled": own.spelled_positions()}
        if plan.rerank:
            assert self._scorer is not None
            result["likelihoods"] = self._scorer(audio_BTD, heard_BT, prompts_BP, tokens_BKL)
            self.mark("rerank")
        return result

    def _asked(self, states: States, prompts_BP: Tensor, positions: int) -> Tensor:
        """Logits (B, X) of the model's languages: one look at an empty canvas whose language is masked too."""
        tokens_B1L = torch.full((len(prompts_BP), 1, positions), MASK, device=prompts_BP.device)
        tokens_B1L[:, 0, :PROMPT_LENGTH] = prompts_BP
        tokens_B1L[:, 0, LANGUAGE_POSITION] = MASK
        states_BD = states(tokens_B1L)[:, LANGUAGE_POSITION]
        return F.linear(states_BD, self.model.decoder.output_weight[self._language_ids_X])

    def _told(self, prompts_BP: Tensor, unknown_B: Tensor, logits_BX: Tensor) -> Tensor:
        """Prompts with the likeliest language, where it is unknown."""
        found_B = self._language_ids_X[logits_BX.argmax(1)]
        prompts_BP = prompts_BP.clone()
        prompts_BP[:, LANGUAGE_POSITION] = torch.where(unknown_B, found_B, prompts_BP[:, LANGUAGE_POSITION])
        return prompts_BP

    def _canvas(self, batch: Sequence[Window]) -> list[int]:
        return [self.model.config.decoder.canvas.positions(window.seconds) for window in batch]


def _filled(values: Sequence, rows: int) -> list:
    """`values`, and the first again as often as it takes: a row more costs nothing but its time."""
    return [*values, *[values[0]] * (rows - len(values))]


def _decoding(host: Mapping[str, Tensor], canvas_B: list[int]) -> Decoding:
    numbers = sorted(int(name.split()[1]) for name in host if name.startswith("masked "))
    steps = [Step(host[f"masked {i}"], host[f"tokens {i}"], host[f"logprobs {i}"]) for i in numbers]
    tokenizer = get_tokenizer()
    return Decoding(
        candidates=collect(host["tokens"], host["logprobs"], PROMPT_LENGTH, canvas_B),
        languages=[tokenizer.language_of(token) for token in host["languages"].tolist()],
        canvas_B=canvas_B,
        steps=steps,
        likelihoods=host["likelihoods"].tolist() if "likelihoods" in host else None,
        bytes_B=[own[:count] for own, count in zip(host["bytes"], host["spelled"].tolist(), strict=True)]
        if "bytes" in host
        else None,
    )
