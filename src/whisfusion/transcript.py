"""Transcripts: what was said in a file, window by window, and how sure the system was."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from whisfusion.audio import SAMPLE_RATE
from whisfusion.pdd import UtteranceStep
from whisfusion.words import Word


@dataclass(frozen=True)
class Alternative:
    """One candidate transcript of a segment, and what selection knew of it."""

    text: str
    confidence: float
    """Mean log-probability of its tokens."""
    risk: float
    """Summed edit rate to the other candidates."""
    score: float
    """What the selector decided by: the highest won."""


@dataclass(frozen=True)
class Segment:
    """A window of the audio and what was said in it. Times in seconds from the start of the file."""

    id: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    avg_logprob: float
    no_speech_prob: float
    """Whisper's own; for diffusion the share of candidates that heard nothing."""
    candidates: tuple[Alternative, ...] = ()
    agreement: float | None = None
    """1 where all candidates say the same, towards 0 where they share nothing."""
    complete: bool = True
    """False where the canvas was full before the transcript ended: there may be more to hear."""
    words: tuple[Word, ...] = ()
    """When each word was said, if that was asked for."""
    trace: tuple[UtteranceStep, ...] = ()
    """Every denoising step, if it was asked for."""


@dataclass(frozen=True)
class Transcript:
    """What was said in one file."""

    text: str
    language: str
    duration: float
    segments: tuple[Segment, ...]
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds spent on this file's share of each stage: mel, encode, decode, select."""

    @property
    def confidence(self) -> float:
        """Mean log-probability per token over all segments."""
        tokens = [len(segment.tokens) + 1 for segment in self.segments]
        return sum(s.avg_logprob * n for s, n in zip(self.segments, tokens, strict=True)) / sum(tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of all segments, one after another."""
        return tuple(token for segment in self.segments for token in segment.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Plain values with Whisper's names, ours beside them: what the json format holds."""
        value = asdict(self)
        for segment in value["segments"]:
            if not segment["candidates"]:
                del segment["candidates"], segment["agreement"]
            for asked_for in ("trace", "words"):
                if not segment[asked_for]:
                    del segment[asked_for]
        return value | {"confidence": self.confidence}


@dataclass(frozen=True)
class Heard:
    """What a system makes of a window."""

    language: str
    text: str
    tokens: tuple[int, ...]
    avg_logprob: float
    no_speech_prob: float
    candidates: tuple[Alternative, ...] = ()
    agreement: float | None = None
    complete: bool = True
    words: tuple[Word, ...] = ()
    """Seconds from the start of the window."""
    trace: tuple[UtteranceStep, ...] = ()


def join(ranges: list[tuple[int, int]], heard: list[Heard], timings: list[dict[str, float]]) -> Transcript:
    """The transcript of a file from what was heard in each of its windows, whose samples `ranges` has."""
    segments = tuple(
        Segment(
            id=number,
            start=round(first / SAMPLE_RATE, 3),
            end=round(last / SAMPLE_RATE, 3),
            text=result.text,
            tokens=result.tokens,
            avg_logprob=result.avg_logprob,
            no_speech_prob=result.no_speech_prob,
            candidates=result.candidates,
            agreement=result.agreement,
            complete=result.complete,
            words=tuple(_placed(word, first / SAMPLE_RATE, last / SAMPLE_RATE) for word in result.words),
            trace=result.trace,
        )
        for number, ((first, last), result) in enumerate(zip(ranges, heard, strict=True))
    )
    total: dict[str, float] = {}
    for spent in timings:
        for stage, seconds in spent.items():
            total[stage] = total.get(stage, 0.0) + seconds
    language = heard[0].language
    return Transcript(_join_texts(segments, language), language, ranges[-1][1] / SAMPLE_RATE, segments, total)


def _placed(word: Word, begins: float, ends: float) -> Word:
    """Times from the start of the file; CTC hears on in the silence after a window."""
    start, end = (round(min(begins + time, ends), 3) for time in (word.start, word.end))
    return replace(word, start=start, end=end)


def _join_texts(segments: Sequence[Segment], language: str) -> str:
    """One text; languages that write no spaces between words get none between windows either."""
    return ("" if language in ("zh", "ja", "yue") else " ").join(s.text for s in segments if s.text)
