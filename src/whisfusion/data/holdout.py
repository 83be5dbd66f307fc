"""A test set out of a corpus that has none: clips drawn once and named in a blacklist for training."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from whisfusion.data.filters import MAX_SECONDS, FilterOptions, write_blacklist
from whisfusion.data.manifest import Utterance, write_manifest
from whisfusion.errors import ManifestError, OptionError


@dataclass(frozen=True)
class HoldoutOptions:
    """What to hold out. The defaults are the paper's, which drew from ReazonSpeech."""

    count: int = 1000
    """Audio files (or shard members) to hold out."""
    seed: int = 42
    """Another seed holds out others."""
    max_seconds: float = MAX_SECONDS
    """Longer clips are not drawn."""
    include: tuple[str, ...] = ("*/*",)
    """Corpora to draw from: LANGUAGE/DATASET patterns, such as ja/reazon*."""

    def __post_init__(self) -> None:
        """Report every option that is out of range."""
        problems = []
        if self.count < 1:
            problems.append(f"`count` must be at least 1, not {self.count}")
        if not self.max_seconds > 0:
            problems.append(f"`max_seconds` must be positive, not {self.max_seconds:g}")
        OptionError.collect(problems)


@dataclass(frozen=True)
class Holdout:
    """Clips held out of `eligible` audio files, and the files that say so."""

    utterances: list[Utterance]
    eligible: int
    manifest: Path
    blacklist: Path

    def render(self) -> str:
        """Return a summary for people."""
        hours = sum(u.duration for u in self.utterances) / 3600
        return (
            f"held out {len(self.utterances):,} clips ({hours:.2f} h) of {self.eligible:,} eligible files\n"
            f"evaluate on {self.manifest}\ntrain without {self.blacklist}"
        )


def hold_out(utterances: Iterable[Utterance], out: str | os.PathLike, options: HoldoutOptions | None = None) -> Holdout:
    """Draw the hold-out, write its manifest to `out` and its blacklist beside it (`NAME.blacklist.txt`).

    A file is held out with all its clips, since training drops whole files. Raises ManifestError where fewer
    files are eligible than asked for.
    """
    options = options or HoldoutOptions()
    drawn, eligible = draw_holdout(utterances, options)
    manifest = Path(os.path.abspath(out))
    blacklist = manifest.with_name(f"{manifest.name.split('.')[0]}.blacklist.txt")
    write_manifest(manifest, drawn)
    write_blacklist(blacklist, drawn)
    return Holdout(drawn, eligible, manifest, blacklist)


def draw_holdout(utterances: Iterable[Utterance], options: HoldoutOptions) -> tuple[list[Utterance], int]:
    """Return the clips drawn, in the order they came, and how many files were eligible.

    The files whose names, hashed with the seed, come first are taken: the order of the manifest, the machine
    and the library's version do not matter, and a corpus that grows keeps most of its hold-out.
    """
    rules = FilterOptions(include=options.include)
    files: dict[str, list[Utterance]] = defaultdict(list)
    too_long: set[str] = set()
    for utterance in utterances:
        if rules.wants(utterance.language, utterance.dataset):
            files[utterance.audio_path].append(utterance)
            if utterance.duration > options.max_seconds:
                too_long.add(utterance.audio_path)
    eligible = [path for path in files if path not in too_long]
    if len(eligible) < options.count:
        raise ManifestError(
            f"cannot hold out {options.count:,} files: {len(eligible):,} of at most "
            f"{options.max_seconds:g} s match {', '.join(options.include)}. Ask for fewer, or of other corpora"
        )
    taken = set(sorted(eligible, key=lambda path: _rank(path, options.seed))[: options.count])
    return [u for path in files if path in taken for u in files[path]], len(eligible)


def _rank(path: str, seed: int) -> bytes:
    """Only the file's name and its folder's (or shard's) count: corpora lie elsewhere on other machines."""
    name = "/".join(path.split(os.sep)[-2:])
    return hashlib.sha256(f"{seed} {name}".encode()).digest()
