"""The fast engine: from samples to candidates without the host in between, replayed as CUDA graphs.

The same mathematics as the plain path of `systems`, in shapes that are known beforehand: batches are filled up to one
of a few sizes, logits are computed for every position, and nothing waits for a result. On a GPU each set of shapes is
captured once, on first use, and from then on is three launches: spectrogram, encoder, and all the rest, whose inputs
the host prepares while the encoder runs. Elsewhere the same code runs directly, for tests.

Letters: B windows, K candidates, N steps, L canvas positions, M mel bins, F frames, T audio positions, D width,
R = B * K * L rows, V vocabulary, X lists of tokens, P prompt.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from whisfusion import attention, kernels
from whisfusion.attention import Attend
from whisfusion.blocks import Rotation
from whisfusion.checkpoint import Model
from whisfusion.decoder import Draft
from whisfusion.encoder import audio_mask
from whisfusion.fused import Audio, FusedEncoder, FusedStack, attention_bias, padded_rows
from whisfusion.graphs import Graphs, Packing, Work, host_tensor, to_host
from whisfusion.kernels import Lists
from whisfusion.look import CANVASES, Canvases, Look, LookAt, looks, masked, predicted, read
from whisfusion.mel import HOP, MAX_FRAMES, clip_frames, log_mel_of_padded
from whisfusion.pdd import (
    Candidate,
    PDDOptions,
    Step,
    Thoughts,
    batch_uniforms,
    collect,
    denoise,
    empty_canvas,
    most_likely,
)
from whisfusion.repair import CHOICES
from whisfusion.tokenizer import ENDOFTEXT, LANGUAGES, MASK, PROMPT_LENGTH, SAMPLEABLE, embedding_rows, get_tokenizer
from whisfusion.transcriber import DecodingOptions, Window
from whisfusion.whisper import WhisperDecoder

_log = logging.getLogger(__name__)

_LANGUAGE_POSITION = 1
_FRAMES = 128
"""Windows of a clip's own size are filled up to a multiple of this: fewer shapes, and keys in whole tiles."""
_POSITIONS = 16
"""Canvases of texts that are looked at again are filled up to a multiple of this."""
_ROWS_AT_ONCE = 8192
"""Logits over the vocabulary exist for this many positions at a time: 0.8 GB in bf16."""
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
    thoughts: bool
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
    """The adapter's CTC logits (T, V) of each window's own frames, for selection by spelling and for repair."""
    thoughts: Thoughts | None
    """What the decoder made of the empty canvases (B, L, M), for repair."""
    look: LookAt | None = None
    """What it makes of finished texts of the batch, for repair."""


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
        self._head_VD = padded_rows(decoder.output_weight[:SAMPLEABLE])
        tokenizer = get_tokenizer()
        self._language_ids_X = torch.tensor(
            [tokenizer.language_id(code) for code in model.config.languages], device=self._device
        )
        self._lists = _lists(model, self._device)
        self._scorer: _Scorer | None = None
        self._rotations: dict[int, Rotation] = {}
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
                self._scorer = _Scorer(scorer, self._attend)
            clock = _Clock(self._device)
            frames_B = self.frames(plan, batch)
            if mel_BMF is None:
                mel_BMF = self.hear(plan, self.samples(plan, batch), frames_B)
                clock.lap("mel")
            audio_BTD = self.encode(plan, mel_BMF, frames_B)
            clock.lap("encode")
            host = to_host(self.decode(plan, audio_BTD, batch))
            clock.lap("decode")
            # Where it lies now, the next batch's will be.
            kept_BTD = audio_BTD.clone() if options.looks else None
        canvas_B = self._canvas(batch)

        def wait(timings: dict[str, float]) -> Decoding:
            clock.wait(timings)
            decoding = _decoding({name: value[: len(batch)] for name, value in host.items()}, canvas_B)
            if kept_BTD is None:
                return decoding
            return replace(decoding, look=partial(self.look, plan, kept_BTD, batch, decoding.languages))

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
            spelling=options.selection == "spelling" or bool(options.repair),
            thoughts=bool(options.repair),
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

    def look(
        self,
        plan: Plan,
        audio_BTD: Tensor,
        batch: Sequence[Window],
        languages: Sequence[str],
        texts: Sequence[tuple[int, ...]],
    ) -> list[Look]:
        """What the decoder makes of finished texts of a batch, whose features are given; waits for it."""
        longest = PROMPT_LENGTH + 1 + max(map(len, texts))
        positions = min(self.model.config.decoder.canvas.size, -(-longest // _POSITIONS) * _POSITIONS)
        prompts = torch.tensor([get_tokenizer().prompt(language) for language in _filled(languages, plan.rows)])
        canvases = Canvases.of(prompts, _filled(texts, plan.rows), positions=positions)
        inputs = {"written": canvases.written_BL, "counts": canvases.counts_B, "frames": self.frames(plan, batch)}
        packing = Packing.of(inputs)
        packed = packing.pack(inputs, host_tensor(packing.size, dtype=torch.uint8, device=self._device))

        def work(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return self._look(values["audio"], **packing.unpack(values["packed"]))

        with self._lock:
            clock = _Clock(self._device)
            found = self._run(("look", plan.rows, plan.frames, positions), work, {"audio": audio_BTD, "packed": packed})
            host = to_host(found)
            clock.lap("look")
        clock.wait({})
        return looks(texts, Thoughts(host["tokens"], host["logprobs"]), host["written"])

    def _look(self, audio_BTD: Tensor, *, written: Tensor, counts: Tensor, frames: Tensor) -> dict[str, Tensor]:
        """Features and texts (B, L) to the likeliest tokens after the prompts, and how likely what is written is."""
        heard_BT, positions = self._heard(frames, audio_BTD.shape[1]), written.shape[1]
        memory_BTD, own = self.model.decoder.prepare(audio_BTD, heard_BT, positions=positions, counts_B=counts)
        tokens_B2L, own_BL = masked(written, counts)
        states = _States(self, self._decoder.listen(memory_BTD, own.heard_BT), own.anchors_BLD, own_BL)
        states_BLD = predicted(states(tokens_B2L).unflatten(0, (-1, CANVASES)))[:, PROMPT_LENGTH:]
        written_BL = written[:, PROMPT_LENGTH:]
        list_R = None
        if self._lists is not None:
            list_B1 = self._lists[1][written[:, _LANGUAGE_POSITION], None]
            list_R = list_B1.expand(written_BL.shape).reshape(-1)

        def logits(rows: slice) -> Tensor:
            logits_RV = F.linear(states_BLD.flatten(0, 1)[rows], self._head_VD)[:, :SAMPLEABLE]
            return self._allowed(logits_RV, None if list_R is None else list_R[rows])

        tokens_RM, logprobs_RM, written_R = read(logits, written_BL.flatten(), CHOICES, at_once=_ROWS_AT_ONCE)
        shape = written_BL.shape
        return {
            "tokens": tokens_RM.int().unflatten(0, shape),
            "logprobs": logprobs_RM.unflatten(0, shape),
            "written": written_R.unflatten(0, shape),
        }

    def _allowed(self, logits_RV: Tensor, list_R: Tensor | None) -> Tensor:
        """Minus infinity for tokens that are not in a row's list."""
        if self._lists is None or list_R is None:
            return logits_RV
        return logits_RV.masked_fill(self._lists[0][list_R] == 0, -torch.inf)

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
        states = _States(self, audio, own.anchors_BLD, canvas_BL)
        self.mark("memory")

        prompts_BP = inputs["prompts"]
        if plan.detect:
            prompts_BP = self._detect(states, prompts_BP, inputs["unknown"], plan.positions)
        tokens_B1L, writable_B1L = empty_canvas(prompts_BP, canvas_B, plan.positions)
        write = _Writer(self, states, prompts_BP, plan.pdd.temperature, choices=CHOICES * plan.thoughts)
        tokens_BKL, logprobs_BKL, steps = denoise(write, tokens_B1L, writable_B1L, inputs["uniforms"], plan.pdd)
        result = {"tokens": tokens_BKL.int(), "logprobs": logprobs_BKL, "languages": prompts_BP[:, _LANGUAGE_POSITION]}
        if plan.trace:
            for number, step in enumerate(steps):
                parts = {"masked": step.masked_BKL, "tokens": step.tokens_BKL, "logprobs": step.logprobs_BKL}
                result |= {f"{name} {number}": value.contiguous() for name, value in parts.items()}
        if plan.spelling:
            assert own.bytes_BTV is not None
            result |= {"bytes": own.bytes_BTV, "spelled": own.spelled_positions()}
        if write.thoughts is not None:
            result |= {"thoughts": write.thoughts.tokens.int(), "thought logprobs": write.thoughts.logprobs}
        if plan.rerank:
            assert self._scorer is not None
            result["likelihoods"] = self._scorer(audio_BTD, heard_BT, prompts_BP, tokens_BKL)
            self.mark("rerank")
        return result

    def _detect(self, states: "_States", prompts_BP: Tensor, unknown_B: Tensor, positions: int) -> Tensor:
        """One look at an empty canvas whose language is masked too, for those whose language is unknown."""
        tokens_B1L = torch.full((len(prompts_BP), 1, positions), MASK, device=prompts_BP.device)
        tokens_B1L[:, 0, :PROMPT_LENGTH] = prompts_BP
        tokens_B1L[:, 0, _LANGUAGE_POSITION] = MASK
        states_BD = states(tokens_B1L)[:, _LANGUAGE_POSITION]
        logits_BX = F.linear(states_BD, self.model.decoder.output_weight[self._language_ids_X])
        found_B = self._language_ids_X[logits_BX.argmax(1)]
        prompts_BP = prompts_BP.clone()
        prompts_BP[:, _LANGUAGE_POSITION] = torch.where(unknown_B, found_B, prompts_BP[:, _LANGUAGE_POSITION])
        return prompts_BP

    def rotation(self, positions: int) -> Rotation | None:
        """Rotary angles of so many positions, if the blocks want them."""
        config = self.model.decoder.config
        if config.block != "paper":
            return None
        if positions not in self._rotations:
            self._rotations[positions] = Rotation.of(
                positions, config.width // config.heads, config.rope_base, self._device
            )
        return self._rotations[positions]

    def _canvas(self, batch: Sequence[Window]) -> list[int]:
        return [self.model.config.decoder.canvas.positions(window.seconds) for window in batch]


class _States:
    """The decoder listening to a batch: hidden states of canvases."""

    def __init__(self, engine: GraphEngine, audio: Audio, anchors_BLD: Tensor | None, canvas_BL: Tensor | None) -> None:
        self._engine, self._audio, self._anchors_BLD, self._canvas_BL = engine, audio, anchors_BLD, canvas_BL

    def __call__(self, tokens_BKL: Tensor, draft: Draft | None = None) -> Tensor:
        """States (B * K, L, D)."""
        engine, decoder = self._engine, self._engine.model.decoder
        if draft is not None:
            draft = draft.of_sequences()
        x_GLD = decoder.inputs(tokens_BKL.flatten(0, 1), self._anchors_BLD, draft)
        canvas_GL = self._canvas_BL
        if canvas_GL is not None:
            canvas_GL = canvas_GL[:, None].expand(tokens_BKL.shape).flatten(0, 1)
        states_GLD = engine._decoder(
            x_GLD,
            self._audio,
            self_bias_GL=attention_bias(canvas_GL, x_GLD.dtype),
            rotation=engine.rotation(tokens_BKL.shape[2]),
        )
        return states_GLD.roll(1, dims=1) if decoder.reads_ahead else states_GLD


class _Writer:
    """Writes wanted positions (`pdd.Write`): logits for all, draws for those that are wanted."""

    def __init__(
        self, engine: GraphEngine, states: _States, prompts_BP: Tensor, temperature: float, *, choices: int
    ) -> None:
        self._engine, self._states, self._temperature, self._choices = engine, states, temperature, choices
        self.thoughts: Thoughts | None = None
        """Of the first step (B, L, M), where they were asked for."""
        self._end_1 = torch.full((1,), ENDOFTEXT, device=prompts_BP.device)
        self._list_B = None
        if engine._lists is not None:
            self._list_B = engine._lists[1][prompts_BP[:, _LANGUAGE_POSITION]]
        self._step = 0

    def __call__(
        self,
        tokens_BKL: Tensor,
        draft: Draft | None,
        wanted_BKL: Tensor,
        logprobs_BKL: Tensor,
        ends_BKL: Tensor,
        uniforms_BKL: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probabilities and endoftext's, for as many candidates as there are uniforms."""
        engine, draws = self._engine, uniforms_BKL.shape[1] // tokens_BKL.shape[1]
        self._step += 1
        states_RD = self._states(tokens_BKL, draft).flatten(0, 1)
        engine.mark(f"step {self._step}")
        uniforms_RC = uniforms_BKL.unflatten(1, (-1, draws)).movedim(2, -1).reshape(-1, draws)
        wanted_R = wanted_BKL.reshape(-1)
        list_R = None
        if self._list_B is not None:
            list_R = self._list_B[:, None].expand(-1, tokens_BKL[0].numel()).reshape(-1)
        parts, likely = [], []
        for first in range(0, len(states_RD), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            logits_RV = F.linear(states_RD[rows], engine._head_VD)
            if self._choices and self._step == 1:
                likely.append(self._likely(logits_RV[:, :SAMPLEABLE].float(), None if list_R is None else list_R[rows]))
            parts.append(
                kernels.draw(
                    logits_RV,
                    uniforms_RC[rows],
                    self._temperature,
                    self._end_1.expand(len(logits_RV)),
                    vocabulary=SAMPLEABLE,
                    wanted_R=wanted_R[rows],
                    lists=None if engine._lists is None or list_R is None else Lists(engine._lists[0], list_R[rows]),
                )
            )
        drawn = [torch.cat(values) if len(values) > 1 else values[0] for values in zip(*parts, strict=True)]
        ids_RC, new_RC, end_R = drawn
        if likely:
            # Of candidates that do not share their first step, the first one's.
            tokens, logprobs = (
                torch.cat(part).unflatten(0, tokens_BKL.shape)[:, 0] for part in zip(*likely, strict=True)
            )
            self.thoughts = Thoughts(tokens, logprobs)
        engine.mark(f"head {self._step}")

        def candidates(values_RC: Tensor) -> Tensor:
            """(R, draws) of canvases that stand for several candidates, or (R, 1), as (B, K, L)."""
            values = values_RC.unflatten(0, tokens_BKL.shape).movedim(-1, 2)
            return values.expand(-1, -1, draws, -1).flatten(1, 2)

        wanted_BKL = candidates(wanted_R[:, None])
        return (
            torch.where(wanted_BKL, candidates(ids_RC), candidates(tokens_BKL.reshape(-1, 1))),
            torch.where(wanted_BKL, candidates(new_RC), logprobs_BKL),
            torch.where(wanted_BKL, candidates(end_R[:, None]), ends_BKL),
        )

    def _likely(self, logits_RV: Tensor, list_R: Tensor | None) -> tuple[Tensor, Tensor]:
        logits_RV = self._engine._allowed(logits_RV, list_R)
        return most_likely(logits_RV, logits_RV.logsumexp(1, keepdim=True), self._choices)


class _Scorer:
    """Whisper's decoder reading finished candidates: `whisper.log_likelihood` in shapes known beforehand."""

    def __init__(self, decoder: WhisperDecoder, attend: Attend) -> None:
        self.decoder = decoder
        self._stack = FusedStack(decoder.blocks, decoder.norm, attend)
        self._head_VD = padded_rows(decoder.embed.weight)
        rows = [-1 if row is None else row for row in embedding_rows(decoder.config.vocab_size)]
        self._rows = torch.tensor(rows, device=decoder.embed.weight.device)

    def __call__(self, audio_BTD: Tensor, heard_BT: Tensor | None, prompts_BP: Tensor, tokens_BKL: Tensor) -> Tensor:
        """Mean log-probability (B, K) of each candidate's tokens and endoftext."""
        # What was written has the same ids in every Whisper; prompts have not.
        text_GL = tokens_BKL[..., PROMPT_LENGTH:].flatten(0, 1)
        prompts_GP = self._rows[prompts_BP][:, None].expand(-1, tokens_BKL.shape[1], -1).flatten(0, 1)
        tokens_GL = torch.cat((prompts_GP, text_GL), 1)
        targets_GL = F.pad(text_GL, (0, 1), value=ENDOFTEXT)
        x_GLD = self.decoder.embed(tokens_GL) + self.decoder.positions[: tokens_GL.shape[1]]
        states_GLD = self._stack(x_GLD, self._stack.listen(audio_BTD, heard_BT), causal=True)
        states_RD = states_GLD[:, PROMPT_LENGTH - 1 :].reshape(-1, x_GLD.shape[2])
        # Padding after the first endoftext does not count.
        ends_GL = targets_GL == ENDOFTEXT
        scored_GL = ends_GL.cumsum(1) <= ends_GL
        targets_R, scored_R = targets_GL.reshape(-1), scored_GL.reshape(-1)
        nothing_R1 = torch.zeros(len(targets_R), 1, device=targets_R.device)
        parts = []
        for first in range(0, len(states_RD), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            drawn = kernels.draw(
                F.linear(states_RD[rows], self._head_VD),
                nothing_R1[rows],
                0.0,
                targets_R[rows],
                vocabulary=self.decoder.config.vocab_size,
                wanted_R=scored_R[rows],
            )
            parts.append(drawn.target_logprobs_R)
        logprobs_GL = torch.cat(parts).view_as(scored_GL).masked_fill(~scored_GL, 0.0)
        return (logprobs_GL.sum(1) / scored_GL.sum(1)).view(tokens_BKL.shape[:2])


class _Clock:
    """Seconds between laps of one batch, on the GPU's own clock where there is one: nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps = [("", self._now())]

    def _now(self) -> "torch.cuda.Event | float":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, stage: str) -> None:
        """What has passed since the last lap was `stage`."""
        self._laps.append((stage, self._now()))

    def wait(self, timings: dict[str, float]) -> None:
        """Wait for the last lap, and add all to `timings`."""
        last = self._laps[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        for (_, before), (stage, after) in zip(self._laps, self._laps[1:], strict=False):
            if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
                seconds = before.elapsed_time(after) / 1000
            elif isinstance(before, float) and isinstance(after, float):
                seconds = after - before
            timings[stage] = timings.get(stage, 0.0) + seconds


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
        thoughts=Thoughts(host["thoughts"], host["thought logprobs"]) if "thoughts" in host else None,
    )


def _lists(model: Model, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Allowed tokens by list (X, V), and by language id the number of its list; None where all may be written."""
    if not model.vocabulary:
        return None
    tokenizer = get_tokenizer()
    allowed_XV = torch.zeros(1 + len(model.vocabulary), SAMPLEABLE, dtype=torch.uint8)
    allowed_XV[0] = 1
    list_of_id = torch.zeros(1 + max(tokenizer.language_id(code) for code in LANGUAGES), dtype=torch.int32)
    for number, (language, ids) in enumerate(model.vocabulary.items(), 1):
        allowed_XV[number, ids] = 1
        list_of_id[tokenizer.language_id(language)] = number
    return allowed_XV.to(device), list_of_id.to(device)
