"""Decode manifests into raw hypotheses: JSON Lines that hold what was heard, and never what should have been.

Scoring is `whisfusion.evaluate.score`. Beside `NAME.jsonl` lies `NAME.run.json` with how it was made.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from whisfusion.data.manifest import Utterance, load_samples
from whisfusion.environment import machine, versions
from whisfusion.errors import AudioError, ManifestError, OptionError
from whisfusion.transcriber import Transcriber
from whisfusion.transcript import Segment, Transcript

_BATCHES_READ_AHEAD = 4
_READERS = 4


@dataclass(frozen=True)
class RunOptions:
    """How to decode a manifest."""

    decoding: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `Transcriber.transcribe`: candidates, steps, seed, batch_size, ..."""
    detect_language: bool = False
    """Let the model find the language, instead of telling it the manifest's."""
    existing: Literal["refuse", "resume", "overwrite"] = "refuse"
    """What to do where the output is there already."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else to keep with the run: the model's name and hashes, the manifests."""


@dataclass(frozen=True)
class RunSummary:
    """What a run did. Seconds of audio and of waiting are of this run alone, without what it resumed from."""

    utterances: int
    resumed: int
    errors: int
    audio_seconds: float
    wall_seconds: float


def evaluate(
    transcriber: Transcriber,
    utterances: Sequence[Utterance],
    out: Path,
    options: RunOptions | None = None,
    *,
    device: str = "cpu",
    on_progress: Callable[[float], None] | None = None,
) -> RunSummary:
    """Transcribe every utterance and append its line to `out` as soon as its batch is done.

    A line has id, dataset, language (the manifest's), duration, text, confidence, detected_language (where it was),
    candidates, index (which of them the text is, or was before proofreading) and timings; where the audio cannot be
    read, an empty text and an error. `on_progress` is told the seconds of audio done so far. Raises OptionError where
    `out` is there and `options.existing` does not say what to do, or where it was made with other options;
    ManifestError where two utterances share dataset and id.
    """
    options = options or RunOptions()
    _check_unique(utterances)
    for language in {utterance.language for utterance in utterances}:
        transcriber.transcribe([], **_arguments(options, language))  # refuses before any work is done
    settings = {
        "decoding": dict(options.decoding),
        "model_defaults": asdict(transcriber.system.default),
        "detect_language": options.detect_language,
        **options.facts,
    }
    done = _prepare(out, options, settings)
    pending = [u for u in utterances if (u.dataset, u.id) not in done]
    started = time.perf_counter()
    errors, seconds = 0, 0.0
    _write_facts(out, settings, device, None)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as lines:
        for group in _loaded_groups(pending, options):
            good = {u: samples for u, samples in group if not isinstance(samples, AudioError)}
            arguments = _arguments(options, group[0][0].language)
            before = seconds
            transcripts = transcriber.transcribe(
                list(good.values()),
                **arguments,
                on_progress=None if on_progress is None else lambda s, b=before: on_progress(b + s),
            )
            heard = dict(zip(good, transcripts, strict=True))
            for utterance, samples in group:
                if isinstance(samples, AudioError):
                    record = _identity(utterance) | {"text": "", "error": str(samples)}
                    errors += 1
                else:
                    record = _identity(utterance) | _hypothesis(heard[utterance], options.detect_language)
                lines.write(json.dumps(record, ensure_ascii=False) + "\n")
            lines.flush()
            seconds += sum(u.duration for u, _ in group)
    summary = RunSummary(len(utterances), len(done), errors, seconds, time.perf_counter() - started)
    _write_facts(out, settings, device, summary)
    return summary


def facts_path(out: Path) -> Path:
    """Where a run's facts lie: NAME.run.json beside NAME.jsonl."""
    return out.with_suffix(".run.json")


def _arguments(options: RunOptions, language: str) -> dict[str, Any]:
    return {**options.decoding, "language": None if options.detect_language else language}


def _check_unique(utterances: Sequence[Utterance]) -> None:
    seen: set[tuple[str, str]] = set()
    for utterance in utterances:
        key = utterance.dataset, utterance.id
        if key in seen:
            raise ManifestError(f"two utterances of {utterance.dataset} are called {utterance.id}")
        seen.add(key)


def _prepare(out: Path, options: RunOptions, settings: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Which utterances `out` has already; what is damaged or failed in it is taken out, to be tried again."""
    if not out.exists() or options.existing == "overwrite":
        out.unlink(missing_ok=True)
        return set()
    if options.existing == "refuse":
        raise OptionError(f"{out} is there already: add --resume to go on with it, or --overwrite")
    _check_same_settings(out, settings)
    kept, done = [], set()
    for line in out.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was cut off
            continue
        if "error" not in record:
            kept.append(f"{line}\n")
            done.add((record["dataset"], record["id"]))
    part = out.with_suffix(".part")
    part.write_text("".join(kept), encoding="utf-8")
    part.replace(out)
    return done


def _check_same_settings(out: Path, settings: Mapping[str, Any]) -> None:
    try:
        then = json.loads(facts_path(out).read_text(encoding="utf-8"))["settings"]
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        raise OptionError(f"cannot resume {out}: {facts_path(out).name} is missing or damaged") from None
    now = json.loads(json.dumps(settings))
    other = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if other:
        raise OptionError(
            f"cannot resume {out}, which was made with another "
            + "; another ".join(f"{name} ({then.get(name)}, now {now.get(name)})" for name in other)
        )


def _write_facts(out: Path, settings: Mapping[str, Any], device: str, summary: RunSummary | None) -> None:
    facts = {
        "settings": settings,
        "versions": versions(),
        "machine": machine(device),
        "summary": None if summary is None else asdict(summary),
    }
    path = facts_path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _loaded_groups(
    utterances: Sequence[Utterance], options: RunOptions
) -> Iterator[list[tuple[Utterance, np.ndarray | AudioError]]]:
    """A few batches of one language at a time, longest first, each read while the one before is decoded."""
    size = _BATCHES_READ_AHEAD * options.decoding.get("batch_size", 16)
    by_language: dict[str, list[Utterance]] = {}
    for utterance in sorted(utterances, key=lambda u: -u.duration):
        by_language.setdefault("" if options.detect_language else utterance.language, []).append(utterance)
    groups = [of_one[first : first + size] for of_one in by_language.values() for first in range(0, len(of_one), size)]
    with ThreadPoolExecutor(_READERS) as readers:
        ahead = [readers.submit(_read, utterance) for utterance in groups[0]] if groups else []
        for number, group in enumerate(groups):
            current = ahead
            following = groups[number + 1] if number + 1 < len(groups) else []
            ahead = [readers.submit(_read, utterance) for utterance in following]
            yield [(utterance, read.result()) for utterance, read in zip(group, current, strict=True)]


def _read(utterance: Utterance) -> np.ndarray | AudioError:
    try:
        return load_samples(utterance)
    except AudioError as error:
        return error


def _identity(utterance: Utterance) -> dict[str, Any]:
    return {name: getattr(utterance, name) for name in ("id", "dataset", "language", "duration")}


def _hypothesis(transcript: Transcript, detected: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"text": transcript.text, "confidence": transcript.confidence}
    if detected:
        record["detected_language"] = transcript.language
    if len(transcript.segments) == 1 and transcript.segments[0].candidates:
        segment = transcript.segments[0]
        record["candidates"] = [asdict(candidate) for candidate in segment.candidates]
        record["index"] = _chosen(segment)
    return record | {"timings": transcript.timings}


def _chosen(segment: Segment) -> int:
    """Which candidate became the segment's text, before that was proofread."""
    chosen = [i for i, candidate in enumerate(segment.candidates) if candidate.confidence == segment.avg_logprob]
    return next((i for i in chosen if segment.candidates[i].text == segment.text), chosen[0])
