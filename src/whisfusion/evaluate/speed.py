"""How fast a model recognises: the paper's protocol, for either engine, one utterance at a time or in batches.

At batch 1 utterances run one after another, the device waited for at both ends of each, selection inside the timer. In
larger batches it is wall time over the whole set: selection of one batch overlaps the next, as it does for users. The
timer covers encoder, decoding, selection, reranking and proofreading; the spectrogram is outside it, and in a second
figure inside.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from whisfusion.checkpoint import Model, ModelConfig
from whisfusion.decoder import Canvas, DecoderConfig, DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.engine import GraphEngine
from whisfusion.environment import machine
from whisfusion.errors import OptionError
from whisfusion.evaluate.speed_set import SpeedClip, misheard
from whisfusion.normalise import normalise
from whisfusion.pdd import PDDOptions
from whisfusion.selection import Pool
from whisfusion.systems import DiffusionSystem
from whisfusion.tokenizer import SAMPLEABLE, get_tokenizer
from whisfusion.train.flops import encoder_flops
from whisfusion.train.recipes import trial
from whisfusion.transcriber import DecodingOptions, Window
from whisfusion.transcript import Heard
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig

WARMUP_UTTERANCES = 5
MOST_CANDIDATES = 15
EngineKind = Literal["eager", "graph"]

SHAPES: dict[str, tuple[ModelConfig, WhisperDecoderConfig]] = {
    "paper": (ModelConfig(), WhisperDecoderConfig()),
    "trial": (
        ModelConfig(
            decoder=trial().decoder,
            encoder=EncoderConfig(mels=80, width=512, layers=6, heads=8),
            encoder_name="whisper-base",
            window="clip",
        ),
        WhisperDecoderConfig(vocab_size=51_865, width=512, layers=6, heads=8),
    ),
    "tiny": (
        ModelConfig(
            decoder=DecoderConfig(layers=1, width=64, heads=2, hidden=96, audio_width=64, canvas=Canvas("fixed", 32)),
            encoder=EncoderConfig(mels=80, width=64, layers=1, heads=1),
            encoder_name="whisper-base",
        ),
        WhisperDecoderConfig(vocab_size=51_865, width=64, layers=1, heads=1),
    ),
}
"""Models of random weights: speed does not depend on them."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    engine: str
    batch: int
    k: int
    n: int
    canvas: int | str
    """Positions, or "follow"."""
    window_s: float | str
    """Seconds that the encoder hears, or "clip"."""
    rerank: bool
    ms: float
    """Milliseconds an utterance."""
    rtfx: float
    """Seconds of speech recognised in a second."""
    device: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Subject:
    """A model whose speed is measured."""

    name: str
    model: Model
    whisper: WhisperDecoder | None
    """For reranking."""
    random: bool
    """Whether its weights are random, so that what it writes must be replaced for selection to have real work."""

    def arranged(self, *, canvas: Canvas | None = None, window: Literal["padded", "clip"] | None = None) -> "Subject":
        """The same weights with another canvas or window."""
        config = self.model.config
        config = replace(
            config,
            decoder=replace(config.decoder, canvas=canvas or config.decoder.canvas),
            window=window or config.window,
        )
        return replace(self, model=replace(self.model, config=config))


def random_subject(shape: str, device: torch.device, dtype: torch.dtype) -> Subject:
    """A model and a Whisper decoder of one of `SHAPES`."""
    if shape not in SHAPES:
        raise OptionError(f"there is no shape {shape!r}: choose one of {', '.join(SHAPES)}")
    config, whisper_config = SHAPES[shape]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        decoder, encoder = DiffusionDecoder(config.decoder), WhisperEncoder(config.encoder)
        whisper = WhisperDecoder(whisper_config)
        torch.nn.init.normal_(whisper.positions, std=0.02)
    decoder = decoder.to(dtype).requires_grad_(False).eval()
    model = Model(config, decoder, encoder.to(dtype), PDDOptions())
    return Subject(f"{shape} (random weights)", model, whisper.to(dtype), random=True)


@dataclass(frozen=True)
class _Script:
    """What the candidates of an utterance are made to say."""

    tokens: int
    texts: list[str]


class Rehearsal(DiffusionSystem):
    """A system of random weights: its candidates are cut to the length of the reference and read as misheard texts."""

    def __init__(self, subject: Subject, engine: GraphEngine | None, clips: Sequence[SpeedClip]) -> None:
        super().__init__(subject.model, engine)
        self.engine = engine
        self._scripts: dict[str, _Script] = {}
        if subject.whisper is not None:
            self._whisper = subject.whisper
        if subject.random:
            rng = random.Random(0)
            for clip in clips:
                texts = [misheard(clip.text, rng) for _ in range(MOST_CANDIDATES)]
                self._scripts[clip.text] = _Script(len(get_tokenizer().encode(clip.text)), texts)

    def _select(self, pools: Sequence[Pool], *rest: Any, **more: Any) -> list[Heard]:
        return super()._select([self._scripted(pool) for pool in pools], *rest, **more)

    def _scripted(self, pool: Pool) -> Pool:
        script = self._scripts.get(pool.reference or "")
        if script is None:
            return pool
        candidates = [
            replace(c, tokens=c.tokens[: script.tokens], logprobs=c.logprobs[: script.tokens + 1])
            for c in pool.candidates
        ]
        return replace(pool, candidates=candidates, texts=script.texts[: len(candidates)])


class Stage:
    """Measures one subject with one engine on one set of clips."""

    def __init__(
        self, subject: Subject, engine: EngineKind, clips: Sequence[SpeedClip], *, capture: bool = True
    ) -> None:
        self.subject, self.clips, self._kind = subject, clips, engine
        self.engine = GraphEngine(subject.model, capture=capture) if engine == "graph" else None
        self.device = subject.model.encoder.positions.device
        self._system = Rehearsal(subject, self.engine, clips)

    def measure(self, *, batch: int, pdd: PDDOptions, rerank: bool) -> tuple[Row, Row]:
        """Milliseconds an utterance, the spectrogram outside the timer and inside it."""
        options = self._system._settled(DecodingOptions(pdd, "rerank" if rerank else "mbr"))
        batches = self.batches(batch)
        self._warm(batches, options)
        spent: dict[str, float] = {}
        inside = self._seconds(batches, options, spent, mels=None)
        if self.engine is None:
            # The plain path waits for the device at the end of each stage, so that one can be taken away.
            outside = inside - spent["mel"]
        else:
            outside = self._seconds(batches, options, {}, mels=[self._hear(each, options) for each in batches])
        return self._row(batch, pdd, rerank, outside), self._row(batch, pdd, rerank, inside)

    def batches(self, batch: int) -> list[list[Window]]:
        """The clips as windows: in their order one by one, else sorted by duration, as users' batches are."""
        clips = list(self.clips) if batch == 1 else sorted(self.clips, key=lambda clip: -clip.seconds)
        windows = [Window(clip.samples, number, clip.language, clip.text) for number, clip in enumerate(clips)]
        return [windows[i : i + batch] for i in range(0, len(windows), batch)]

    def _warm(self, batches: Sequence[Sequence[Window]], options: DecodingOptions) -> None:
        """The first utterances, and whatever shape they have not met."""
        first = -(-WARMUP_UTTERANCES // len(batches[0]))
        met = set()
        for number, windows in enumerate(batches):
            plan = self.engine.plan(windows, options) if self.engine else None
            if number < first or plan not in met:
                self._run([windows], options, mels=None)
            met.add(plan)

    def _seconds(
        self,
        batches: Sequence[Sequence[Window]],
        options: DecodingOptions,
        spent: dict[str, float],
        *,
        mels: list[Tensor] | None,
    ) -> float:
        """Wall time of all batches, whose stages are added to `spent`."""
        normalise.cache_clear()  # texts that selection has met before would cost it nothing
        if len(batches[0]) > 1:
            return self._timed(lambda: self._run(batches, options, mels, spent))
        return sum(
            self._timed(lambda i=i, one=one: self._run([one], options, mels and mels[i : i + 1], spent))
            for i, one in enumerate(batches)
        )

    def _hear(self, windows: Sequence[Window], options: DecodingOptions) -> Tensor:
        assert self.engine is not None
        plan = self.engine.plan(windows, options)
        return self.engine.hear(plan, self.engine.samples(plan, windows), self.engine.frames(plan, windows)).clone()

    def _timed(self, run: Callable[[], object]) -> float:
        _wait(self.device)
        since = time.perf_counter()
        run()
        _wait(self.device)
        return time.perf_counter() - since

    def _run(
        self,
        batches: Sequence[Sequence[Window]],
        options: DecodingOptions,
        mels: Sequence[Tensor] | None,
        timings: dict[str, float] | None = None,
    ) -> None:
        """Recognise; a batch is finished after the next has begun."""
        spent = {} if timings is None else timings
        if self.engine is None:
            for windows in batches:
                self._system.start(windows, options, spent)()
            return
        scorer = self.subject.whisper if options.selection == "rerank" else None
        waiting: Callable[[], object] | None = None
        for i, windows in enumerate(batches):
            wait = self.engine.start(windows, options, scorer, mel_BMF=None if mels is None else mels[i])
            if waiting is not None:
                waiting()
            waiting = lambda w=wait, own=windows: self._system._finish(w(spent), own, options, spent)  # noqa: E731
        if waiting is not None:
            waiting()

    def _row(self, batch: int, pdd: PDDOptions, rerank: bool, seconds: float) -> Row:
        config = self.subject.model.config
        canvas = config.decoder.canvas
        return Row(
            model=self.subject.name,
            engine=self._kind,
            batch=batch,
            k=pdd.candidates,
            n=pdd.steps,
            canvas=canvas.size if canvas.rule == "fixed" else "follow",
            window_s=30 if config.window == "padded" else "clip",
            rerank=rerank,
            ms=round(1000 * seconds / len(self.clips), 3),
            rtfx=round(sum(clip.seconds for clip in self.clips) / seconds, 1),
            device=machine(str(self.device))["device_name"],
        )


class Marks:
    """When each stage of the engine's work ended, for `GraphEngine.mark`; on a GPU, as events inside the graph."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def __call__(self, stage: str) -> None:
        # A stage that is met again was a rehearsal before: its work is run, then captured.
        met = [name for name, _ in self._marks]
        self._marks = self._marks[: met.index(stage) if stage in met else None]
        moment: Any = time.perf_counter()
        if self._cuda:
            moment = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
            moment.record()
        self._marks.append((stage, moment))

    def milliseconds(self) -> dict[str, float]:
        """Of the last run, by stage."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._cuda:
            torch.cuda.synchronize()
            return {stage: before.elapsed_time(after) for (_, before), (stage, after) in pairs}
        return {stage: 1000 * (after - before) for (_, before), (stage, after) in pairs}


def breakdown(
    subject: Subject, windows: Sequence[Window], pdd: PDDOptions, *, rerank: bool, peak: float | None, runs: int = 10
) -> list[dict[str, Any]]:
    """The engine's stages on one batch: milliseconds, TFLOP, and their share of what the matrix units can do.

    `peak`: FLOP/s of a large matrix product here; None leaves the share out.
    """
    device = subject.model.encoder.positions.device
    engine = GraphEngine(subject.model, capture=device.type == "cuda")
    engine.mark = marks = Marks(device)
    options = DecodingOptions(pdd, "rerank" if rerank else "mbr")
    scorer = subject.whisper if rerank else None
    plan = engine.plan(windows, options, rerank=rerank)
    spent: dict[str, list[float]] = {}
    for run in range(runs + 1):
        heard: dict[str, float] = {}
        engine.start(windows, options, scorer)(heard)
        if run:  # the first run got things ready
            for stage, ms in {"mel": 1000 * heard["mel"], **marks.milliseconds()}.items():
                spent.setdefault(stage, []).append(ms)
    work = stage_flops(subject, rows=plan.rows, frames=plan.frames, positions=plan.positions, pdd=pdd)
    rows = []
    for stage, times in spent.items():
        ms = sorted(times)[len(times) // 2]
        flops = work.get(stage, 0.0)
        share = None if peak is None or not flops else round(1000 * flops / ms / peak, 3)
        rows.append({"stage": stage, "ms": round(ms, 3), "tflop": round(flops / 1e12, 3), "of_matrix_peak": share})
    return rows


def stage_flops(subject: Subject, *, rows: int, frames: int, positions: int, pdd: PDDOptions) -> dict[str, float]:
    """Multiply-adds of the matrix products of each stage, two FLOPs each, padding included: it is computed."""
    config = subject.model.config
    decoder, audio = config.decoder, frames // 2
    width = decoder.width
    heard = audio // decoder.stride
    projection = heard * (decoder.audio_width * width + width * width) if decoder.block == "paper" else 0
    matrices = 2 if decoder.block == "whisper" else 3

    def passes(sequences: int, layers: int, ffn: int, listening: int) -> float:
        per_position = 6 * width * width + ffn + 2 * (positions + listening) * width
        return 2.0 * rows * sequences * positions * layers * per_position

    found = {
        "encode": encoder_flops(config.encoder, rows, frames),
        "memory": 2.0 * rows * (projection + decoder.layers * 2 * heard * width * width),
    }
    for step in range(pdd.steps):
        sequences = 1 if step == 0 and pdd.share_first_step else pdd.candidates
        found[f"step {step + 1}"] = passes(sequences, decoder.layers, matrices * width * decoder.hidden, heard)
        found[f"head {step + 1}"] = 2.0 * rows * sequences * positions * width * SAMPLEABLE
    if subject.whisper is not None:
        whisper = subject.whisper.config
        found["rerank"] = (
            passes(pdd.candidates, whisper.layers, 8 * width * width, audio)
            + 2.0 * rows * whisper.layers * 2 * audio * width * width
            + 2.0 * rows * pdd.candidates * positions * width * whisper.vocab_size
        )
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
