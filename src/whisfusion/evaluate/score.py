"""Error rates of raw hypotheses: words, or characters where a language is scored so. Pure, seeded, repeatable.

On normalised text, and beside it on the text as it is written; and how often the language was detected right.
"""

import json
import lzma
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from whisfusion.data.manifest import Utterance
from whisfusion.errors import ManifestError, OptionError
from whisfusion.evaluate.rates import Edits, Rate, count_edits, error_rate
from whisfusion.evaluate.written import Written, WrittenEdits, judge_written, punctuation
from whisfusion.normalise import CHARACTER_LANGUAGES, simplified, units
from whisfusion.tokenizer import canonical_language

BIN_SECONDS = 5.0
LAST_BIN = 30.0
"""Durations are binned by five seconds; whatever is longer than this shares one more bin."""

Measure = Literal["wer", "cer"]


@dataclass(frozen=True)
class ScoreOptions:
    """How to score."""

    missing: Literal["error", "empty", "skip"] = "error"
    """Utterances without a hypothesis: refuse to score, count them as empty text, or leave them out. Always told."""
    resamples: int = 1000
    """Of the bootstrap over utterances that gives the 95 % intervals."""
    seed: int = 0
    fold_chinese: bool = False
    """Take Chinese on both sides in simplified characters, by OpenCC: models and corpora write either kind."""

    def __post_init__(self) -> None:
        problems = []
        if self.missing not in ("error", "empty", "skip"):
            problems.append(f"missing must be error, empty or skip, not {self.missing!r}")
        if self.resamples < 1:
            problems.append(f"resamples must be at least 1, not {self.resamples}")
        OptionError.collect(problems)


@dataclass(frozen=True)
class Bin:
    """The utterances that last from `start` up to, not including, `end` seconds; None is without end."""

    start: float
    end: float | None
    selected: Rate


@dataclass(frozen=True)
class Detection:
    """How well the language was told, over the utterances whose language was detected."""

    utterances: int
    right: int
    mistaken: Mapping[str, int]
    """How many of the others were taken for which language, the most frequent first."""


@dataclass(frozen=True)
class Score:
    """A dataset in one language, or ("all", "all") of everything that is measured alike."""

    dataset: str
    language: str
    measure: Measure
    selected: Rate
    """Of the text that the run selected, proofread where it did that."""
    drawn: Rate | None
    """Of the candidate that it selected, before it was proofread; None where no hypothesis has candidates."""
    confidence: float | None
    """Rate if the candidate of highest confidence had been selected; None where no hypothesis has candidates."""
    oracle: float | None
    """Rate if the best candidate had been selected: the least that selection could reach."""
    errors: int
    """Utterances that could not be decoded, counted as empty text."""
    missing: int
    """Utterances without a hypothesis."""
    bins: tuple[Bin, ...]
    written: Written | None
    """With case and punctuation; None where either side has no punctuation, and of everything together."""
    detected: Detection | None
    """None where the run was told the language."""


@dataclass(frozen=True)
class Report:
    """Scores of all datasets and, where there are several, of all together."""

    scores: tuple[Score, ...]
    totals: tuple[Score, ...]
    unknown: int
    """Hypotheses of utterances that are in none of the manifests, left out."""
    options: ScoreOptions

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def read_hypotheses(*paths: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of files that `whisfusion evaluate` wrote, or of such files compressed as .xz.

    Raises ManifestError naming the lines that are no hypotheses.
    """
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in map(Path, paths):
        try:
            content = path.read_bytes()
            lines = (lzma.decompress(content) if path.suffix == ".xz" else content).decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                record = None
            if isinstance(record, dict) and all(
                isinstance(record.get(name), str) for name in ("id", "dataset", "text")
            ):
                records.append(record)
            else:
                problems.append(f"{path} line {number} is no hypothesis: it needs id, dataset and text")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ManifestError("; ".join(problems[:5]) + more)
    return records


def score(
    hypotheses: Iterable[Mapping[str, Any]], utterances: Sequence[Utterance], options: ScoreOptions | None = None
) -> Report:
    """Compare hypotheses with the texts of `utterances`; they are matched by dataset and id.

    Raises ManifestError where an utterance has two hypotheses, or none and `options.missing` is "error".
    """
    options = options or ScoreOptions()
    heard = _by_key(hypotheses)
    keys = {(utterance.dataset, utterance.id) for utterance in utterances}
    absent = [u for u in utterances if (u.dataset, u.id) not in heard]
    if absent and options.missing == "error":
        raise ManifestError(
            f"{len(absent):,} of {len(utterances):,} utterances have no hypothesis, the first {absent[0].id}: "
            "finish the run with --resume, or choose --missing empty or --missing skip"
        )
    groups: dict[tuple[str, str], list[_Judged]] = {}
    missing: dict[tuple[str, str], int] = {}
    for utterance in utterances:
        record = heard.get((utterance.dataset, utterance.id))
        group = utterance.dataset, canonical_language(utterance.language)
        judged = groups.setdefault(group, [])
        if record is None:
            missing[group] = missing.get(group, 0) + 1
        if record is not None or options.missing == "empty":
            judged.append(_judge(utterance, record or {"text": ""}, options))
    scores = tuple(
        _score(dataset, language, _measure(language), judged, missing.get((dataset, language), 0), options)
        for (dataset, language), judged in sorted(groups.items())
        if judged
    )
    return Report(scores, _totals(groups, missing, options), len(heard.keys() - keys), options)


@dataclass(frozen=True)
class _Judged:
    """One utterance: the edits of what was selected, and what other selections would have cost."""

    seconds: float
    language: str
    selected: Edits
    drawn: Edits
    written: WrittenEdits
    detected: str | None
    confidence: int
    oracle: int
    has_candidates: bool
    failed: bool


def _judge(utterance: Utterance, record: Mapping[str, Any], options: ScoreOptions) -> _Judged:
    language = canonical_language(utterance.language)

    def folded(text: str) -> str:
        return simplified(text) if options.fold_chinese and language == "zh" else text

    reference = units(folded(utterance.text), language)

    def edits(text: str) -> Edits:
        return count_edits(units(folded(text), language), reference)

    selected = edits(record["text"])
    candidates = record.get("candidates") or []
    # Without candidates (Whisper, audio of several windows, a failure) every selection has the same one to choose.
    found = [edits(candidate["text"]) for candidate in candidates] or [selected]
    totals = [one.total for one in found]
    confidences = [candidate["confidence"] for candidate in candidates] or [0.0]
    return _Judged(
        utterance.duration,
        language,
        selected,
        found[record.get("index", 0)] if candidates else selected,
        judge_written(folded(record["text"]), folded(utterance.text), language),
        record.get("detected_language"),
        confidence=totals[int(np.argmax(confidences))],
        oracle=min(totals),
        has_candidates=bool(candidates),
        failed="error" in record,
    )


def _by_key(hypotheses: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    heard: dict[tuple[str, str], Mapping[str, Any]] = {}
    for record in hypotheses:
        key = record["dataset"], record["id"]
        if key in heard:
            raise ManifestError(f"there are two hypotheses for {record['id']} of {record['dataset']}")
        heard[key] = record
    return heard


def _measure(language: str) -> Measure:
    return "cer" if language in CHARACTER_LANGUAGES else "wer"


def _score(
    dataset: str,
    language: str,
    measure: Measure,
    judged: Sequence[_Judged],
    missing: int,
    options: ScoreOptions,
) -> Score:
    reference_units = max(1, sum(one.selected.units for one in judged))
    has_candidates = any(one.has_candidates for one in judged)
    return Score(
        dataset,
        language,
        measure,
        _rate(judged, options),
        _rate(judged, options, attrgetter("drawn")) if has_candidates else None,
        confidence=sum(one.confidence for one in judged) / reference_units if has_candidates else None,
        oracle=sum(one.oracle for one in judged) / reference_units if has_candidates else None,
        errors=sum(one.failed for one in judged),
        missing=missing,
        bins=_bins(judged, options),
        written=_written(judged, options),
        detected=_detection(judged),
    )


def _totals(
    groups: Mapping[tuple[str, str], Sequence[_Judged]],
    missing: Mapping[tuple[str, str], int],
    options: ScoreOptions,
) -> tuple[Score, ...]:
    """All words together and all characters together, where there are several groups of them to add up."""
    totals = []
    for measure in ("wer", "cer"):
        alike = [group for group in groups if groups[group] and _measure(group[1]) == measure]
        if len(alike) > 1:
            judged = [one for group in alike for one in groups[group]]
            lost = sum(missing.get(group, 0) for group in alike)
            total = _score("all", "all", measure, judged, lost, options)
            # Some references may be written, others in capitals or in lower case.
            totals.append(replace(total, written=None))
    return tuple(totals)


def _rate(
    judged: Sequence[_Judged], options: ScoreOptions, of: Callable[[_Judged], Edits] = attrgetter("selected")
) -> Rate:
    seconds = sum(one.seconds for one in judged)
    return error_rate(list(map(of, judged)), seconds, resamples=options.resamples, seed=options.seed)


def _written(judged: Sequence[_Judged], options: ScoreOptions) -> Written | None:
    # References in capitals have no punctuation, and models of normalised text write none.
    if not all(any(getattr(one.written, side) for one in judged) for side in ("reference", "hypothesis")):
        return None
    return Written(
        _rate(judged, options, attrgetter("written.punctuated")),
        _rate(judged, options, attrgetter("written.cased")),
        *punctuation([one.written for one in judged]),
    )


def _detection(judged: Sequence[_Judged]) -> Detection | None:
    detected = [(one.detected, one.language) for one in judged if one.detected is not None]
    if not detected:
        return None
    mistaken = Counter(found for found, spoken in detected if found != spoken)
    return Detection(len(detected), len(detected) - mistaken.total(), dict(mistaken.most_common()))


def _bins(judged: Sequence[_Judged], options: ScoreOptions) -> tuple[Bin, ...]:
    starts = np.arange(0.0, LAST_BIN + 1, BIN_SECONDS).tolist()
    bins = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        inside = [one for one in judged if start <= one.seconds < (end or np.inf)]
        if inside:
            bins.append(Bin(start, end, _rate(inside, options)))
    return tuple(bins)
