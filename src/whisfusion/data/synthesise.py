"""Sentences into speech to train on, spoken by programs of the system in as many processes as there are cores.

No torch here: each of the processes would have to load it.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.corpus import CODINGS, Coding, MadeClip, encode, write_corpus
from whisfusion.data.engines import ENGINES, EngineName, Voice, find_voices, speak
from whisfusion.data.filters import MIN_SECONDS, Progress
from whisfusion.data.manifest import Utterance
from whisfusion.data.parallel import in_processes
from whisfusion.data.sentences import MAX_SECONDS, choose_sentences, sentence_key
from whisfusion.errors import AudioError, ManifestError, OptionError

HELD_OUT_FOLDER = "heldout"
_SKIPPED_SHOWN = 10
_TEMPOS = (0.8, 1.25)
# Decibels below what the program wrote: recordings are not all as loud.
_QUIETEST = -15.0


@dataclass(frozen=True)
class SynthesisOptions:
    """What to make."""

    language: str
    """Code of the language that the sentences are in."""
    engine: EngineName
    """Which program speaks: "pico" (pico2wave; en de es fr it), "rhvoice" (RHVoice-test; pl pt es), "jtalk"
    (open_jtalk; ja) or "espeak" (espeak-ng; all but ja)."""
    hours: float | None = None
    """Speech to make; when all sentences are said, they are said again by other voices."""
    sentences: int | None = None
    """Clips to make, instead of `hours`."""
    held_out_voices: int = 0
    """Voices that are kept out of training, and speak the dev set instead."""
    held_out_sentences: int = 200
    """Clips of that dev set; its sentences are in no other clip."""
    coding: Coding = "flac"
    """How the audio is stored."""
    seed: int = 42
    """Which sentences, by which voices, how fast and how loud."""
    workers: int = 0
    """Processes; 0 is one for each core."""

    def __post_init__(self) -> None:
        """Report every option that is out of range."""
        problems = []
        if (self.hours is None) == (self.sentences is None):
            problems.append("give either `hours` or `sentences`")
        if self.hours is not None and not self.hours > 0:
            problems.append(f"`hours` must be more than 0, not {self.hours:g}")
        if self.sentences is not None and self.sentences < 1:
            problems.append(f"`sentences` must be at least 1, not {self.sentences}")
        if self.engine not in ENGINES:
            problems.append(f"`engine` is {' or '.join(ENGINES)}, not {self.engine!r}")
        if self.coding not in CODINGS:
            problems.append(f"`coding` is one of {', '.join(CODINGS)}, not {self.coding!r}")
        if self.held_out_voices < 0:
            problems.append(f"`held_out_voices` must not be negative, not {self.held_out_voices}")
        if self.held_out_sentences < 1:
            problems.append(f"`held_out_sentences` must be at least 1, not {self.held_out_sentences}")
        if self.seed < 0 or self.workers < 0:
            problems.append("`seed` and `workers` must not be negative")
        OptionError.collect(problems)

    @property
    def dataset(self) -> str:
        """What the manifest calls it."""
        return f"synthetic-{self.engine}-{self.language}"


@dataclass(frozen=True)
class SynthesisReport:
    """What was made. dropped: sentences that were not tried, by reason. failed: a sentence for each that failed."""

    folder: Path
    utterances: list[Utterance]
    held_out: list[Utterance]
    dropped: Counter[str]
    failed: list[str]
    asked: str = ""
    """What is missing of what was asked for, in words."""

    def render(self) -> str:
        """Return a summary for people."""
        lines = [_summary(self.folder, self.utterances)]
        if self.held_out:
            lines.append(_summary(self.folder / HELD_OUT_FOLDER, self.held_out))
        lines += [f"sentences left out, {reason}: {count:,}" for reason, count in self.dropped.most_common()]
        if self.failed:
            lines.append(f"clips that failed: {len(self.failed):,}")
            lines += [f"  {reason}" for reason in self.failed[:_SKIPPED_SHOWN]]
        return "\n".join([*lines, *filter(None, [self.asked])])


def _summary(folder: Path, utterances: Sequence[Utterance]) -> str:
    hours = sum(u.duration for u in utterances) / 3600
    voices = len({u.speaker for u in utterances})
    manifest = folder / f"{utterances[0].dataset}.jsonl"
    return f"{manifest}: {len(utterances):,} clips, {hours:,.2f} h, {voices} voices"


def synthesise(
    sentences: Iterable[str],
    out: str | os.PathLike,
    options: SynthesisOptions,
    *,
    without: Collection[str] = (),
    progress: Progress | None = None,
) -> SynthesisReport:
    """Have `sentences` spoken, and write tar shards and a manifest into the folder `out`.

    What is made follows from the sentences, the options and the program alone, not from the number of workers. The
    dev set of held-out voices lies in a folder of its own below, so that `out` as a whole can be trained on.
    `progress` is told of seconds of speech with `hours`, else of clips. without: sentences of evaluation sets.
    Raises OptionError where the program is missing or voices are too few, LanguageError where it lacks the language,
    and ManifestError where no sentence can be spoken.
    Worker processes import the main module anew, so a script needs the usual `if __name__ == "__main__":`.
    """
    engine = ENGINES[options.engine]
    voices = find_voices(engine, options.language)
    if options.held_out_voices >= len(voices):
        raise OptionError(f"`held_out_voices` must leave some of the {len(voices)} voices to train on")
    keys = {sentence_key(sentence, options.language) for sentence in without}
    chosen, dropped = choose_sentences(sentences, options.language, without=keys)
    rng = np.random.default_rng([options.seed, 0])
    order = rng.permutation(len(chosen))
    held, rest = np.split(order, [options.held_out_sentences if options.held_out_voices else 0])
    if not len(rest):
        raise ManifestError(f"{len(chosen)} sentences can be spoken, too few: {dict(dropped) or 'none were given'}")
    aside = rng.permutation(len(voices))
    held_voices, train_voices = (
        [voices[i] for i in sorted(some)] for some in np.split(aside, [options.held_out_voices])
    )

    folder = Path(os.path.abspath(out))
    failed: list[str] = []
    held_out: list[Utterance] = []
    workers = options.workers or os.cpu_count() or 1
    if held_voices:
        spoken = in_processes(_speak, _tasks(chosen, held, held_voices, options, passes=1), workers=workers)
        made = _made(spoken, options.held_out_sentences, None, failed, None)
        held_out = write_corpus(folder / HELD_OUT_FOLDER, f"{options.dataset}-heldout", options.coding, made)
    tasks = _tasks(chosen, rest, train_voices, options, passes=len(train_voices))
    spoken = in_processes(_speak, tasks, workers=workers)
    made = _made(spoken, options.sentences, options.hours, failed, progress)
    utterances = write_corpus(folder, options.dataset, options.coding, made)
    if not utterances:
        raise ManifestError("no sentence could be spoken:" + "".join(f"\n  {why}" for why in failed[:_SKIPPED_SHOWN]))
    return SynthesisReport(folder, utterances, held_out, dropped, failed, _missing(utterances, options))


def _missing(utterances: Sequence[Utterance], options: SynthesisOptions) -> str:
    hours = sum(u.duration for u in utterances) / 3600
    if options.hours is not None and hours < options.hours:
        return f"{options.hours:g} h were asked for: every voice has said every sentence; give more sentences"
    if options.sentences is not None and len(utterances) < options.sentences:
        return f"{options.sentences:,} clips were asked for: every voice has said every sentence; give more sentences"
    return ""


class _Task(NamedTuple):
    """A sentence to be spoken. tempo: relative to the program's own. gain: in decibels."""

    text: str
    language: str
    engine: EngineName
    voice: Voice
    tempo: float
    gain: float
    coding: Coding


def _tasks(
    sentences: Sequence[str], numbers: np.ndarray, voices: Sequence[Voice], options: SynthesisOptions, passes: int
) -> Iterator[_Task]:
    """Every sentence once in each pass, each time by another voice."""
    for lap in range(passes):
        for number in np.random.default_rng([options.seed, 1, lap]).permutation(numbers).tolist():
            first = int(np.random.default_rng([options.seed, 2, number]).integers(len(voices)))
            rng = np.random.default_rng([options.seed, 3, number, lap])
            yield _Task(
                sentences[number],
                options.language,
                options.engine,
                voices[(first + lap) % len(voices)],
                float(rng.uniform(*_TEMPOS)),
                float(rng.uniform(_QUIETEST, 0.0)),
                options.coding,
            )


def _made(
    results: Iterable[MadeClip | str],
    clips: int | None,
    hours: float | None,
    failed: list[str],
    progress: Progress | None,
) -> Iterator[MadeClip]:
    """The clips up to what is wanted; what failed is noted."""
    seconds, count = 0.0, 0
    for result in results:
        if isinstance(result, str):
            failed.append(result)
            continue
        yield result
        seconds, count = seconds + result.seconds, count + 1
        if progress is not None:
            done, total = (seconds, hours * 3600) if hours is not None else (count, clips or 0)
            progress(min(round(done), round(total)), round(total))
        if (hours is not None and seconds >= hours * 3600) or count == clips:
            return


def _speak(task: _Task) -> MadeClip | str:
    """In a process of its own: a clip, or why there is none."""
    try:
        samples = speak(ENGINES[task.engine], task.text, task.voice, task.tempo)
    except AudioError as error:
        return f"{task.text!r}: {error}"
    seconds = len(samples) / SAMPLE_RATE
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        return f"{task.text!r}: lasts {seconds:.2f} s, which is not between {MIN_SECONDS:g} and {MAX_SECONDS:g}"
    samples = samples * np.float32(10 ** (task.gain / 20))
    return MadeClip(encode(samples, task.coding), seconds, task.text, task.language, task.voice.name)
