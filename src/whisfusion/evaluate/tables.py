"""Scores for people: tables in plain text, readable in a log file too."""

from collections.abc import Sequence

from whisfusion.data.table import text_table
from whisfusion.evaluate.score import Bin, Rate, Report, Score


def render_report(report: Report) -> str:
    """Every dataset; as it was written and the language detected, where there is either; durations; what is amiss."""
    every = [*report.scores, *report.totals]
    parts = [_score_table(every)]
    if any(score.written for score in every):
        parts += ["with case and punctuation kept; punctuation by precision, recall and F1", _written_table(every)]
    if any(score.detected for score in every):
        parts += ["language detected", _detection_table(every)]
    for score in report.totals or report.scores:
        title = "all" if score.dataset == "all" else f"{score.dataset} ({score.language})"
        parts += [f"{score.measure.upper()} by duration, {title}", _bin_table(score.bins)]
    errors = sum(score.errors for score in report.scores)
    missing = sum(score.missing for score in report.scores)
    if errors:
        parts.append(f"{errors:,} not decoded, counted as empty")
    if missing:
        treated = "counted as empty" if report.options.missing == "empty" else "left out"
        parts.append(f"{missing:,} without a hypothesis, {treated}")
    if report.unknown:
        parts.append(f"{report.unknown:,} hypotheses of other utterances, left out")
    if report.options.fold_chinese:
        parts.append("Chinese in simplified characters on both sides, by OpenCC t2s")
    return "\n\n".join(parts)


def _score_table(scores: Sequence[Score]) -> str:
    header = ("dataset", "language", "utterances", "hours", "measure", "%", "95 %", "sub", "del", "ins", "units")
    rows = []
    for one in scores:
        rate = one.selected
        counts = (rate.substitutions, rate.deletions, rate.insertions, rate.units)
        rows.append(
            (
                one.dataset,
                one.language,
                f"{rate.utterances:,}",
                f"{rate.seconds / 3600:.2f}",
                one.measure.upper(),
                _percent(rate.rate),
                _interval(rate),
                *(f"{count:,}" for count in counts),
                _percent(one.drawn.rate if one.drawn else None),
                _percent(one.confidence),
                _percent(one.oracle),
            )
        )
    return text_table((*header, "drawn %", "confidence %", "oracle %"), rows)


def _written_table(scores: Sequence[Score]) -> str:
    header = ("dataset", "language", "measure", "punctuated %", "95 %", "cased %", "95 %")
    rows = []
    for one in scores:
        if written := one.written:
            marks = [f"{mark} {100 * of.f1:.0f}" for mark, of in written.marks.items() if of.reference]
            rows.append(
                (
                    one.dataset,
                    one.language,
                    one.measure.upper(),
                    *(_percent(written.punctuated.rate), _interval(written.punctuated)),
                    *(_percent(written.cased.rate), _interval(written.cased)),
                    *map(_percent, (written.punctuation.precision, written.punctuation.recall, written.punctuation.f1)),
                    "  ".join(marks),
                )
            )
    return text_table((*header, "precision %", "recall %", "F1 %", "F1 % by mark"), rows)


def _detection_table(scores: Sequence[Score]) -> str:
    rows = [
        (
            one.dataset,
            one.language,
            f"{one.detected.utterances:,}",
            _percent(one.detected.right / one.detected.utterances),
            ", ".join(f"{language} {count:,}" for language, count in one.detected.mistaken.items()),
        )
        for one in scores
        if one.detected
    ]
    return text_table(("dataset", "language", "utterances", "right %", "else taken for"), rows)


def _bin_table(bins: Sequence[Bin]) -> str:
    rows = [
        (
            f"{one.start:g}-{one.end:g} s" if one.end else f"{one.start:g} s and more",
            f"{one.selected.utterances:,}",
            _percent(one.selected.rate),
            _interval(one.selected),
        )
        for one in bins
    ]
    return text_table(("duration", "utterances", "%", "95 %"), rows)


def _interval(rate: Rate) -> str:
    return f"{100 * rate.low:.2f}-{100 * rate.high:.2f}"


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.2f}"
