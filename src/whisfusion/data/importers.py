"""Other people's corpora into our manifest, their audio left in place or packed into tar shards of Opus."""

import csv
import io
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from whisfusion.data.filters import Progress
from whisfusion.data.manifest import AUDIO_SUFFIXES, Utterance, parse_manifest, write_manifest
from whisfusion.data.pack import pack
from whisfusion.data.shard import read_member, shard_index
from whisfusion.errors import AudioError, ManifestError, OptionError
from whisfusion.tokenizer import canonical_language

Layout = Literal["librispeech", "commonvoice", "manifest"]
# Common Voice's code for Cantonese; all its other tags are a language with a region.
_TAGS = {"zh-hk": "yue"}
_SKIPPED_SHOWN = 10


@dataclass(frozen=True)
class ImportOptions:
    """How to import."""

    layout: Layout | None = None
    """What the source is; None looks at it. "manifest" is ours, NeMo's and WebDataset tars."""
    language: str | None = None
    """Language of everything that does not say its own: a code or an English name."""
    dataset: str | None = None
    """Name of the dataset; None takes the corpus's."""
    split: str = "train"
    """Common Voice: which table, such as train, validated, test."""
    audio: str | None = None
    """Labels whose audio lies elsewhere: a folder of tar shards or files, matched by name without suffix."""
    pack: bool = False
    """Write the audio as 16 kHz mono Opus into tar shards beside the manifest; else leave it where it is."""
    clips_per_shard: int = 3000
    """Clips in a packed shard."""
    workers: int = 0
    """Threads that read and encode; 0 is one for each core."""

    def __post_init__(self) -> None:
        """Report every option that is out of range."""
        problems = []
        if self.clips_per_shard < 1:
            problems.append(f"`clips_per_shard` must be at least 1, not {self.clips_per_shard}")
        if self.audio is not None and not os.path.isdir(self.audio):
            problems.append(f"`audio` must be a folder: {self.audio} is none")
        if self.audio is not None and self.layout not in (None, "manifest"):
            problems.append("`audio` is for label files, not for whole corpora")
        OptionError.collect(problems)


@dataclass(frozen=True)
class ImportReport:
    """What was imported. skipped: a sentence for each clip or line left out."""

    manifest: Path
    utterances: list[Utterance]
    skipped: list[str]
    shards: int

    @property
    def ok(self) -> bool:
        """Whether nothing was left out."""
        return not self.skipped

    def render(self) -> str:
        """Return a summary for people."""
        hours = sum(u.duration for u in self.utterances) / 3600
        counts = Counter(u.language for u in self.utterances)
        languages = ", ".join(f"{language} {count:,}" for language, count in counts.most_common())
        where = f", packed into {self.shards} shards" if self.shards else ""
        lines = [f"{self.manifest}: {len(self.utterances):,} utterances ({languages}), {hours:,.2f} h{where}"]
        if self.skipped:
            lines.append(f"left out {len(self.skipped):,}:")
            lines += [f"  {reason}" for reason in self.skipped[:_SKIPPED_SHOWN]]
        if len(self.skipped) > _SKIPPED_SHOWN:
            lines.append(f"  ... and {len(self.skipped) - _SKIPPED_SHOWN:,} more")
        return "\n".join(lines)


def import_corpus(
    source: str | os.PathLike,
    out: str | os.PathLike,
    options: ImportOptions | None = None,
    *,
    progress: Progress | None = None,
) -> ImportReport:
    """Read a LibriSpeech or Common Voice folder, a NeMo manifest or WebDataset tars; write our manifest to `out`.

    Clips that cannot be read are left out and named in the report. Raises ManifestError where the source is
    nothing we know, or nothing of it could be imported.
    """
    options = options or ImportOptions()
    source, out = Path(os.path.abspath(source)), Path(os.path.abspath(out))
    layout = options.layout or find_layout(source)
    skipped: list[str] = []
    utterances = _READERS[layout](source, options, skipped, progress)
    if options.dataset is not None:
        utterances = [replace(u, dataset=options.dataset) for u in utterances]
    shards = 0
    if options.pack:
        packed = pack(utterances, out, options.clips_per_shard, workers=options.workers, progress=progress)
        utterances, shards = packed.utterances, packed.shards
        skipped += packed.skipped
    if not utterances:
        reasons = "".join(f"\n  {reason}" for reason in skipped[:_SKIPPED_SHOWN])
        raise ManifestError(f"nothing could be imported from {source}{reasons}")
    write_manifest(out, utterances)
    return ImportReport(out, utterances, skipped, shards)


def find_layout(source: Path) -> Layout:
    """Return what kind of corpus lies at `source`. Raises ManifestError where it is none that we know."""
    if source.is_file():
        return "commonvoice" if source.suffix == ".tsv" else "manifest"
    if not source.is_dir():
        raise ManifestError(f"{source} does not exist")
    if (source / "clips").is_dir() and any(source.glob("*.tsv")):
        return "commonvoice"
    if any(source.glob("*.jsonl*")) or any(source.glob("*.tar")):
        return "manifest"
    if any(source.rglob("*.trans.txt")):
        return "librispeech"
    raise ManifestError(
        f"{source} is no corpus that we know: it holds neither *.trans.txt (LibriSpeech), nor clips/ and *.tsv "
        "(Common Voice), nor *.jsonl or *.tar"
    )


def _read_librispeech(
    source: Path, options: ImportOptions, skipped: list[str], progress: Progress | None
) -> list[Utterance]:
    """SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt: one `ID TEXT` a line, the clip beside it as ID.flac."""
    found = []
    for transcript in sorted(source.rglob("*.trans.txt")):
        for number, line in enumerate(transcript.read_text(encoding="utf-8").splitlines(), start=1):
            name, _, text = line.strip().partition(" ")
            audio = next((f for s in AUDIO_SUFFIXES if (f := transcript.parent / f"{name}{s}").is_file()), None)
            if not text or audio is None:
                wrong = "no text" if not text else f"no audio file {name} beside it"
                skipped.append(f"{transcript} line {number}: {wrong}")
                continue
            found.append(
                Utterance(
                    id=name,
                    audio=str(audio),
                    duration=0.0,
                    text=text,
                    language=_language(options.language or "en"),
                    speaker=name.split("-")[0],
                    dataset="librispeech",
                )
            )
    return _measured(found, options, skipped, progress)


def _read_commonvoice(
    source: Path, options: ImportOptions, skipped: list[str], progress: Progress | None
) -> list[Utterance]:
    """LANGUAGE/SPLIT.tsv with client_id, path, sentence and (in most releases) locale; clips in clips/."""
    table = source if source.suffix == ".tsv" else source / f"{options.split}.tsv"
    if not table.is_file():
        others = ", ".join(sorted(f.stem for f in source.glob("*.tsv")))
        raise ManifestError(f"{source} has no {options.split}.tsv; it has {others}")
    seconds = _commonvoice_seconds(table.parent / "clip_durations.tsv")
    found = []
    with open(table, encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        if lacking := {"client_id", "path", "sentence"} - set(rows.fieldnames or ()):
            raise ManifestError(f"{table} is no Common Voice table: it has no {', '.join(sorted(lacking))}")
        for number, row in enumerate(rows, start=2):
            if not row["path"] or not row["sentence"]:
                skipped.append(f"{table} line {number}: no path or no sentence")
                continue
            language = _language(row.get("locale") or options.language or table.parent.name)
            # Old releases leave the suffix out.
            clip = row["path"] if row["path"].endswith(AUDIO_SUFFIXES) else f"{row['path']}.mp3"
            found.append(
                Utterance(
                    id=clip.rsplit(".", 1)[0],
                    audio=str(table.parent / "clips" / clip),
                    duration=seconds.get(clip, 0.0),
                    text=row["sentence"],
                    language=language,
                    speaker=row["client_id"],
                    dataset=f"commonvoice-{language}",
                )
            )
    return _measured(found, options, skipped, progress)


def _commonvoice_seconds(table: Path) -> dict[str, float]:
    """Later releases list every clip's duration, in milliseconds, as the second column."""
    if not table.is_file():
        return {}
    with open(table, encoding="utf-8", newline="") as lines:
        rows = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {row[0]: int(row[1]) / 1000 for row in rows if len(row) == 2 and row[1].isdigit()}


def _read_manifest(
    source: Path, options: ImportOptions, skipped: list[str], progress: Progress | None
) -> list[Utterance]:
    """Ours, NeMo's and WebDataset's: what a record lacks is taken from the options, or measured."""
    elsewhere = _audio_by_name(Path(os.path.abspath(options.audio))) if options.audio else None

    def prepare(record: dict[str, Any], root: Path) -> None:
        tags = [record.pop(name, None) for name in ("language", "lang", "source_lang")]
        if tag := next(filter(None, [*tags, options.language]), None):
            record["language"] = _language(str(tag))
        if record.get("target_lang"):
            record["target_lang"] = _language(str(record["target_lang"]))
        if elsewhere is not None:
            _locate(record, elsewhere)
        audio, shard = record.get("audio") or record.get("audio_filepath"), record.get("shard")
        if record.get("duration") is None and audio:
            source = read_member(os.path.join(root, shard), audio) if shard else os.path.join(root, audio)
            record["duration"] = audio_seconds(source)

    utterances, problems = parse_manifest(source, prepare=prepare)
    skipped += problems
    return utterances


def _audio_by_name(folder: Path) -> dict[str, tuple[str, str | None]]:
    """Return (audio, shard or None) of every sound below `folder`, by its file name without suffix."""
    found: dict[str, tuple[str, str | None]] = {}
    for file in sorted(folder.rglob("*")):
        if file.name.lower().endswith(AUDIO_SUFFIXES):
            found[file.stem] = str(file), None
        elif file.suffix == ".tar":
            for member in shard_index(str(file)).in_file_order():
                if member.lower().endswith(AUDIO_SUFFIXES):
                    found[Path(member).stem] = member, str(file)
    return found


def _locate(record: dict[str, Any], elsewhere: dict[str, tuple[str, str | None]]) -> None:
    """Point a label at its audio. Raises AudioError where there is none of that name."""
    named = str(record.pop("audio", None) or record.pop("audio_filepath", None) or record.get("id"))
    stem = Path(named).stem if named.lower().endswith(AUDIO_SUFFIXES) else Path(named).name
    if stem not in elsewhere:
        raise AudioError(f"no audio called {stem}")
    record["audio"], record["shard"] = elsewhere[stem]


def _measured(
    utterances: list[Utterance], options: ImportOptions, skipped: list[str], progress: Progress | None
) -> list[Utterance]:
    """Fill in durations of 0, which stand for unknown; packing measures for itself."""
    if options.pack:
        return utterances

    def measure(utterance: Utterance) -> Utterance | AudioError:
        try:
            if not os.path.isfile(utterance.audio):
                raise AudioError(f"{utterance.id}: the file {utterance.audio} does not exist")
            return replace(utterance, duration=utterance.duration or audio_seconds(utterance.audio))
        except AudioError as error:
            return error

    measured = []
    with ThreadPoolExecutor(options.workers or os.cpu_count()) as pool:
        for number, result in enumerate(pool.map(measure, utterances), start=1):
            if isinstance(result, AudioError):
                skipped.append(str(result))
            else:
                measured.append(result)
            if progress is not None:
                progress(number, len(utterances))
    return measured


def audio_seconds(source: str | bytes) -> float:
    """Return the duration of a sound file (a path or its bytes), from its header where that has it.

    Raises AudioError where it is missing or not audio.
    """
    import soundfile

    from whisfusion.audio import SAMPLE_RATE, load_audio

    try:
        seconds = soundfile.info(io.BytesIO(source) if isinstance(source, bytes) else source).duration
    except (soundfile.SoundFileError, RuntimeError):
        seconds = len(load_audio(source)) / SAMPLE_RATE
    return round(seconds, 3)


def _language(tag: str) -> str:
    return _TAGS.get(tag.lower()) or canonical_language(tag)


Reader = Callable[[Path, ImportOptions, list[str], Progress | None], list[Utterance]]
_READERS: dict[Layout, Reader] = {
    "librispeech": _read_librispeech,
    "commonvoice": _read_commonvoice,
    "manifest": _read_manifest,
}
