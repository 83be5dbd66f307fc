"""What is trained on: clips of the right duration, text that fits, the corpora one wants, none held out."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from whisfusion.data.manifest import Utterance
from whisfusion.data.table import text_table
from whisfusion.errors import ManifestError, OptionError
from whisfusion.tokenizer import LANGUAGES, PROMPT_LENGTH

MIN_SECONDS = 1.0
MAX_SECONDS = 30.0

Progress = Callable[[int, int], None]
"""Called with (done, total) during long work; total is 0 where it is not known."""


@dataclass(frozen=True)
class FilterOptions:
    """Which utterances are kept. Patterns are `LANGUAGE/DATASET` with * and ?, in any case: `en/*`."""

    min_seconds: float = MIN_SECONDS
    """Shorter clips are dropped: mostly back-channels."""
    max_seconds: float = MAX_SECONDS
    """Longer clips are dropped: Whisper's window ends there."""
    exclude: tuple[str, ...] = ()
    """Corpora to drop."""
    include: tuple[str, ...] = ()
    """Exceptions to `exclude`; where nothing is excluded, these alone are kept."""
    blacklist: tuple[str, ...] = ()
    """Files of audio paths to drop, one a line, absolute or relative to the blacklist's own folder."""
    text_style: Literal["normalised", "written"] = "normalised"
    """How the text is learned, and so how long it is in tokens."""

    def __post_init__(self) -> None:
        """Report every option that is out of range."""
        problems = [
            f"the pattern {pattern!r} must be LANGUAGE/DATASET, such as en/* or */commonvoice*"
            for pattern in (*self.exclude, *self.include)
            if pattern.count("/") != 1
        ]
        if not 0 <= self.min_seconds < self.max_seconds:
            problems.append(f"no clip lasts from {self.min_seconds:g} to {self.max_seconds:g} s")
        OptionError.collect(problems)

    def wants(self, language: str, dataset: str) -> bool:
        """Return whether the rules keep this corpus."""
        name = f"{language}/{dataset}".lower()
        if any(fnmatchcase(name, pattern.lower()) for pattern in self.include):
            return True
        if not self.exclude:
            return not self.include
        return not any(fnmatchcase(name, pattern.lower()) for pattern in self.exclude)


PAPER_FILTERS = FilterOptions(exclude=("en/*",), include=("en/*common*voice*", "en/*voxpopuli*", "en/*earnings*22*"))
"""The paper's: of English only CommonVoice, VoxPopuli and Earnings-22; 1 to 30 s."""


@dataclass(frozen=True)
class Filtered:
    """What is left, and what became of the rest.

    tokens: text tokens of each kept utterance. dropped: utterances by reason, each counted once, under the
    first that held. unmatched: blacklisted paths that no utterance had.
    """

    kept: list[Utterance]
    tokens: np.ndarray
    dropped: Counter[str] = field(default_factory=Counter)
    unmatched: tuple[str, ...] = ()

    def render(self) -> str:
        """Return a table of what was kept and dropped."""
        rows = [("kept", f"{len(self.kept):,}"), *((why, f"{n:,}") for why, n in self.dropped.most_common())]
        table = text_table(("utterances", "count"), rows)
        if not self.unmatched:
            return table
        return f"{table}\n{len(self.unmatched):,} blacklisted paths matched nothing, first {self.unmatched[0]}"


def filter_utterances(
    utterances: Iterable[Utterance],
    options: FilterOptions,
    *,
    positions: Callable[[float], int],
    progress: Progress | None = None,
) -> Filtered:
    """Keep what `options` want and what fits the model.

    positions: the canvas of an utterance of so many seconds (`Canvas.positions`), which must hold the prompt,
    the text and endoftext. Raises ManifestError where a blacklist cannot be read.
    """
    banned = read_blacklists(options.blacklist)
    met: set[str] = set()
    wants = cache(options.wants)
    kept: list[Utterance] = []
    tokens: list[int] = []
    dropped: Counter[str] = Counter()
    for number, utterance in enumerate(utterances):
        if progress is not None and number % 1000 == 0:
            progress(number, 0)
        seconds = utterance.duration
        if banned and utterance.audio_path in banned:
            met.add(utterance.audio_path)
            dropped["on the blacklist"] += 1
        elif not wants(utterance.language, utterance.dataset):
            dropped["excluded by language or dataset"] += 1
        elif seconds < options.min_seconds:
            dropped[f"shorter than {options.min_seconds:g} s"] += 1
        elif seconds > options.max_seconds:
            dropped[f"longer than {options.max_seconds:g} s"] += 1
        elif utterance.language not in LANGUAGES:
            dropped["language without a token"] += 1
        elif not (count := text_tokens(utterance, options.text_style)) and utterance.text:
            # Something was written of which nothing is left; an empty text is meant: nobody speaks.
            dropped["no text"] += 1
        elif PROMPT_LENGTH + count + 1 > positions(seconds):
            dropped["text longer than its canvas"] += 1
        else:
            kept.append(utterance)
            tokens.append(count)
    unmatched = tuple(path for path in banned if path not in met)
    return Filtered(kept, np.array(tokens, dtype=np.int64), dropped, unmatched)


def text_tokens(utterance: Utterance, style: Literal["normalised", "written"]) -> int:
    """Return how many tokens the utterance's text has as the decoder learns it; 0 where nothing is left."""
    from whisfusion.data.batch import label_ids

    return len(label_ids(utterance.text, utterance.language, style))


def read_blacklists(files: Iterable[str | os.PathLike]) -> dict[str, None]:
    """Return the absolute audio paths of blacklist files, in order (see `Utterance.audio_path`).

    Raises ManifestError naming every file that cannot be read.
    """
    paths: dict[str, None] = {}
    problems = []
    for file in files:
        folder = os.path.dirname(os.path.abspath(file))
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"the blacklist {file} cannot be read: {error}")
            continue
        paths |= {os.path.normpath(os.path.join(folder, line.strip())): None for line in lines if line.strip()}
    if problems:
        raise ManifestError("; ".join(problems))
    return paths


def write_blacklist(path: str | os.PathLike, utterances: Iterable[Utterance]) -> int:
    """Write the audio paths of `utterances`, once each, for `read_blacklists`; return how many.

    Paths under the blacklist's own folder are written relative to it, so that both can move together.
    """
    path = Path(os.path.abspath(path))
    audio = [Path(audio_path) for audio_path in dict.fromkeys(u.audio_path for u in utterances)]
    lines = [str(a.relative_to(path.parent) if a.is_relative_to(path.parent) else a) for a in audio]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)
