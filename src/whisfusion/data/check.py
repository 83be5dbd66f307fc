"""Is this data fit to train on: what there is, what is wrong with it, and what it shares with a test set."""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from whisfusion.data.filters import MAX_SECONDS, MIN_SECONDS, Progress
from whisfusion.data.manifest import Utterance, load_samples, missing_audio, parse_manifest
from whisfusion.data.table import text_table
from whisfusion.errors import AudioError, OptionError
from whisfusion.normalise import CHARACTER_LANGUAGES, normalise
from whisfusion.tokenizer import LANGUAGES

# What can be found, whether it is wrong (and not just worth knowing), and what it means.
KINDS: dict[str, tuple[bool, str]] = {
    "bad-line": (True, "lines that are no utterance"),
    "missing-audio": (True, "shards, members or files that are not there"),
    "undecodable": (True, "clips that do not decode"),
    "wrong-duration": (True, "clips longer or shorter than the manifest says"),
    "too-long": (True, "clips too long to train on"),
    "too-short": (False, "clips too short to train on"),
    "no-text": (True, "texts of which the normaliser leaves nothing"),
    "nothing-said": (False, "clips with an empty text, learned as such"),
    "no-language-token": (True, "languages that the tokenizer has no token for"),
    "duplicate-id": (True, "ids used more than once"),
    "duplicate-audio": (True, "clips listed more than once"),
    "repeated-sentence": (False, "sentences that one speaker says more than once"),
    "shared-sentence": (True, "sentences shared with an evaluation set"),
    "shared-speaker": (True, "speakers shared with an evaluation set"),
}
_EXAMPLES = 10
# Encoders pad to whole packets, and manifests round.
_DURATION_SLACK = 0.15


@dataclass(frozen=True)
class CheckOptions:
    """How to look."""

    decode: Literal["none", "sample", "all"] = "sample"
    """Which clips to decode: none, `sample_size` of each corpus, or all."""
    sample_size: int = 50
    """Clips of each (language, dataset) to decode."""
    min_seconds: float = MIN_SECONDS
    """Shorter clips are noted."""
    max_seconds: float = MAX_SECONDS
    """Longer clips are wrong."""
    allow: tuple[str, ...] = ()
    """Kinds of finding that are reported without failing the check."""
    seed: int = 42
    """Which clips are decoded."""
    workers: int = 0
    """Threads that decode; 0 is one for each core."""

    def __post_init__(self) -> None:
        """Report every option that is out of range."""
        problems = [f"{kind!r} is not one of {', '.join(KINDS)}" for kind in self.allow if kind not in KINDS]
        if self.decode not in ("none", "sample", "all"):
            problems.append(f"`decode` is none, sample or all, not {self.decode!r}")
        if self.sample_size < 1:
            problems.append(f"`sample_size` must be at least 1, not {self.sample_size}")
        OptionError.collect(problems)


@dataclass(frozen=True)
class CorpusRow:
    """One (language, dataset) of the table; shortest and longest in seconds."""

    language: str
    dataset: str
    utterances: int
    hours: float
    speakers: int
    shortest: float
    longest: float


@dataclass(frozen=True)
class Finding:
    """Something worth knowing. kind: a key of KINDS. fails: whether it makes the check fail."""

    kind: str
    count: int
    examples: tuple[str, ...]
    fails: bool


@dataclass(frozen=True)
class CheckReport:
    """What `check_data` saw: the corpora, what is wrong or noteworthy, and how many clips were decoded."""

    corpora: list[CorpusRow]
    findings: list[Finding]
    decoded: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not any(finding.fails for finding in self.findings)

    def render(self) -> str:
        """Return the table of corpora, and below it every finding with its first examples."""
        header = ("language", "dataset", "utterances", "hours", "speakers", "shortest s", "longest s")
        rows = [
            (
                row.language,
                row.dataset,
                f"{row.utterances:,}",
                f"{row.hours:,.2f}",
                f"{row.speakers:,}",
                f"{row.shortest:.2f}",
                f"{row.longest:.2f}",
            )
            for row in self.corpora
        ]
        clips, hours = sum(row.utterances for row in self.corpora), sum(row.hours for row in self.corpora)
        lines = [text_table(header, rows)] if rows else []
        lines.append(f"{clips:,} utterances, {hours:,.2f} h, {self.decoded:,} of them decoded")
        for finding in self.findings:
            mark = "WRONG" if finding.fails else "note "
            lines.append(f"{mark}  {finding.kind}: {finding.count:,} {KINDS[finding.kind][1]}")
            lines += [f"         {example}" for example in finding.examples]
            if finding.count > len(finding.examples):
                lines.append(f"         ... and {finding.count - len(finding.examples):,} more")
        lines.append("nothing wrong" if self.ok else "not fit to train on: see WRONG above")
        return "\n".join(lines)


def check_data(
    paths: Sequence[str | os.PathLike],
    *,
    against: Sequence[str | os.PathLike] = (),
    options: CheckOptions | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Look at manifests (see `read_manifest`) without changing anything, and report all there is to say.

    against: manifests of evaluation sets; sentences (normalised) and speakers of theirs found in `paths` are
    wrong. Nothing is raised for bad data: it is in the report, which is `ok` or not.
    """
    options = options or CheckOptions()
    utterances, bad_lines = parse_manifest(*paths)
    evaluation, bad_evaluation = parse_manifest(*against)
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    found["bad-line"] += bad_lines + bad_evaluation
    found["missing-audio"] += missing_audio(utterances)
    sentences, speakers = _evaluation_keys(evaluation)
    _look_at_text(utterances, sentences, speakers, options, found)
    to_decode = _choose(utterances, options)
    _decode(to_decode, options, found, progress)
    findings = [
        Finding(kind, len(items), tuple(items[:_EXAMPLES]), fails=KINDS[kind][0] and kind not in options.allow)
        for kind, items in found.items()
        if items
    ]
    return CheckReport(_corpora(utterances), findings, len(to_decode))


def _corpora(utterances: Iterable[Utterance]) -> list[CorpusRow]:
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    speakers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for utterance in utterances:
        corpus = utterance.language, utterance.dataset
        seconds[corpus].append(utterance.duration)
        speakers[corpus] |= {utterance.speaker} - {""}
    return [
        CorpusRow(*corpus, len(s), sum(s) / 3600, len(speakers[corpus]), min(s), max(s))
        for corpus, s in sorted(seconds.items())
    ]


def _sentence(utterance: Utterance) -> tuple[str, str]:
    """What counts as the same sentence: the language and its normalised text, spaces only where they count."""
    text = normalise(utterance.text, utterance.language)
    return utterance.language, text.replace(" ", "") if utterance.language in CHARACTER_LANGUAGES else text


def _evaluation_keys(
    evaluation: Iterable[Utterance],
) -> tuple[dict[tuple[str, str], str], dict[tuple[str, str], str]]:
    """Return sentences and speakers of evaluation sets, each with the id of an utterance that has it."""
    sentences: dict[tuple[str, str], str] = {}
    speakers: dict[tuple[str, str], str] = {}
    for utterance in evaluation:
        sentences.setdefault(_sentence(utterance), utterance.id)
        if utterance.speaker:
            speakers.setdefault((utterance.language, utterance.speaker), utterance.id)
    return sentences, speakers


def _look_at_text(
    utterances: Iterable[Utterance],
    sentences: dict[tuple[str, str], str],
    speakers: dict[tuple[str, str], str],
    options: CheckOptions,
    found: dict[str, list[str]],
) -> None:
    ids: set[str] = set()
    clips: set[tuple[str, float | None]] = set()
    said: set[int] = set()
    languages: set[str] = set()
    shared_speakers: set[tuple[str, str]] = set()
    for utterance in utterances:
        name = utterance.id
        if name in ids:
            found["duplicate-id"].append(name)
        ids.add(name)
        clip = utterance.audio_path, utterance.start
        if clip in clips:
            found["duplicate-audio"].append(f"{name}: {clip[0]}")
        clips.add(clip)
        if utterance.duration > options.max_seconds:
            found["too-long"].append(f"{name}: {utterance.duration:g} s")
        if utterance.duration < options.min_seconds:
            found["too-short"].append(f"{name}: {utterance.duration:g} s")
        if utterance.language not in LANGUAGES and utterance.language not in languages:
            languages.add(utterance.language)
            found["no-language-token"].append(f"{utterance.language!r}, first in {name}")
        sentence = _sentence(utterance)
        if not utterance.text:
            found["nothing-said"].append(name)
        elif not sentence[1]:
            found["no-text"].append(f"{name}: {utterance.text!r}")
        elif sentence in sentences:
            found["shared-sentence"].append(f"{name} and {sentences[sentence]}: {sentence[1]!r}")
        if not utterance.speaker:
            continue
        speaker = utterance.language, utterance.speaker
        if speaker in speakers and speaker not in shared_speakers:
            shared_speakers.add(speaker)
            found["shared-speaker"].append(f"{utterance.speaker}, in {name} and {speakers[speaker]}")
        # Hashes, not strings: this set is as large as the corpus.
        key = hash((sentence, utterance.speaker))
        if sentence[1] and key in said:
            found["repeated-sentence"].append(f"{name}: {sentence[1]!r} by {utterance.speaker}")
        said.add(key)


def _choose(utterances: Sequence[Utterance], options: CheckOptions) -> list[Utterance]:
    if options.decode == "none":
        return []
    if options.decode == "all":
        return list(utterances)
    corpora: dict[tuple[str, str], list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        corpora[utterance.language, utterance.dataset].append(utterance)
    rng = np.random.default_rng(options.seed)
    return [
        corpora[corpus][i]
        for corpus in sorted(corpora)
        for i in sorted(rng.permutation(len(corpora[corpus]))[: options.sample_size])
    ]


def _decode(
    utterances: Sequence[Utterance],
    options: CheckOptions,
    found: dict[str, list[str]],
    progress: Progress | None,
) -> None:
    from whisfusion.audio import SAMPLE_RATE

    def seconds_of(utterance: Utterance) -> float | AudioError:
        try:
            return len(load_samples(utterance)) / SAMPLE_RATE
        except AudioError as error:
            return error

    # Threads: the decoders let go of the interpreter while they work.
    with ThreadPoolExecutor(options.workers or os.cpu_count()) as pool:
        results = pool.map(seconds_of, utterances)
        for number, (utterance, seconds) in enumerate(zip(utterances, results, strict=True), start=1):
            if isinstance(seconds, AudioError):
                # What is not there at all is under missing-audio already.
                found["undecodable"] += [] if missing_audio([utterance]) else [str(seconds)]
            elif abs(seconds - utterance.duration) > _DURATION_SLACK:
                found["wrong-duration"].append(
                    f"{utterance.id}: {seconds:.2f} s, the manifest has {utterance.duration:.2f} s"
                )
            if progress is not None:
                progress(number, len(utterances))
