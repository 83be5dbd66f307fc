"""Manifests: what was said in which clip. JSON Lines of our own or of NeMo, or WebDataset tar files.

One record inside, whatever was read: `Utterance`. Other people's names for its fields exist only here.
"""

import gzip
import json
import lzma
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from whisfusion.data.shard import read_member, shard_index
from whisfusion.data.utterance import Utterance, load_samples, missing_audio, relocate
from whisfusion.errors import AudioError, ManifestError, WhisfusionError

__all__ = [
    "AUDIO_SUFFIXES",
    "Prepare",
    "Style",
    "Utterance",
    "describe_problems",
    "load_samples",
    "missing_audio",
    "parse_manifest",
    "read_manifest",
    "to_record",
    "write_manifest",
]

AUDIO_SUFFIXES = (".opus", ".ogg", ".flac", ".wav", ".mp3", ".m4a", ".webm", ".aac", ".mp4")
_MANIFEST_SUFFIXES = (".jsonl", ".jsonl.xz", ".jsonl.gz")
_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
_PROBLEMS_SHOWN = 20

_FIELDS = ("id", "shard", "audio", "start", "duration", "text", "language", "speaker", "dataset")
_NEMO_NAMES = {"audio": "audio_filepath", "language": "lang", "start": "offset"}

Style = Literal["whisfusion", "nemo"]
Prepare = Callable[[dict[str, Any], Path], None]
"""Completes a parsed record, in place, before it is checked; its paths are relative to the folder given."""


def read_manifest(*paths: str | os.PathLike) -> list[Utterance]:
    """Read manifests: JSON Lines files (.xz and .gz too), WebDataset tar files, or folders of them.

    A folder stands for all *.jsonl, *.jsonl.xz and *.jsonl.gz in it, or for its *.tar where it has none.
    Raises one ManifestError for every bad line of every file: the first 20 with line numbers, and a count.
    """
    utterances, problems = parse_manifest(*paths)
    if problems:
        raise ManifestError(describe_problems(problems))
    return utterances


def parse_manifest(*paths: str | os.PathLike, prepare: Prepare | None = None) -> tuple[list[Utterance], list[str]]:
    """Like `read_manifest`, but return the good utterances and a sentence for each problem; never raises.

    prepare: fills in what records lack; a WhisfusionError that it raises becomes the record's problem.
    """
    utterances: list[Utterance] = []
    problems: list[str] = []
    for given in paths:
        path = Path(os.path.abspath(given))
        files = _files_of(path)
        if not path.exists():
            problems.append(f"{path}: no such file or folder")
        elif not files:
            problems.append(f"{path}: a folder without {', '.join(_MANIFEST_SUFFIXES)} or .tar files")
        for file in files:
            read = _parse_tar if file.suffix == ".tar" else _parse_lines
            read(file, prepare, utterances, problems)
    return utterances, problems


def describe_problems(problems: Sequence[str]) -> str:
    """Return the first 20 problems, one a line, and how many there are."""
    count = len(problems)
    head = f"{count} problem{'s' * (count != 1)} in the manifest{'s' * (count != 1)}:"
    more = [f"... and {count - _PROBLEMS_SHOWN} more"] if count > _PROBLEMS_SHOWN else []
    return "\n  ".join([head, *problems[:_PROBLEMS_SHOWN], *more])


def write_manifest(path: str | os.PathLike, utterances: Iterable[Utterance], style: Style = "whisfusion") -> int:
    """Write JSON Lines (compressed where `path` ends in .xz or .gz) and return how many lines.

    Paths under the manifest's folder are written relative to it, others absolute. Style "nemo" writes NeMo's
    names. The file appears complete or not at all.
    """
    path = Path(os.path.abspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    count = 0
    try:
        with _OPENERS.get(path.suffix, open)(part, "wt", encoding="utf-8") as out:
            for utterance in utterances:
                record = to_record(relocate(utterance, path.parent), style)
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def to_record(utterance: Utterance, style: Style = "whisfusion") -> dict[str, Any]:
    """Return the JSON object of one manifest line; fields without a value are left out."""
    record: dict[str, Any] = {name: getattr(utterance, name) for name in _FIELDS}
    if style == "nemo":
        record = {_NEMO_NAMES.get(name, name): value for name, value in record.items()}
    known = {name: value for name, value in record.items() if name == "text" or value not in (None, "")}
    return known | {name: value for name, value in utterance.extra.items() if name not in known}


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if path.exists() else []
    found = sorted(path.iterdir())
    return [f for f in found if f.name.endswith(_MANIFEST_SUFFIXES)] or [f for f in found if f.suffix == ".tar"]


def _parse_lines(file: Path, prepare: Prepare | None, utterances: list[Utterance], problems: list[str]) -> None:
    dataset = file.name.split(".")[0]
    number = 0
    try:
        # Bytes, not text: a line that is not UTF-8 is then one problem and not the end of the file.
        with _OPENERS.get(file.suffix, open)(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                try:
                    record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                    utterances.append(_utterance(record, file.parent, dataset, prepare))
                except UnicodeDecodeError:
                    problems.append(f"{file} line {number}: not UTF-8")
                except json.JSONDecodeError as error:
                    problems.append(f"{file} line {number}: not JSON ({error.msg})")
                except (_BadRecordError, WhisfusionError) as error:
                    problems.append(f"{file} line {number}: {error}")
    except (OSError, EOFError, lzma.LZMAError) as error:
        problems.append(f"{file} after line {number}: cannot be read ({error})")


def _parse_tar(file: Path, prepare: Prepare | None, utterances: list[Utterance], problems: list[str]) -> None:
    try:
        names = shard_index(str(file)).in_file_order()
    except AudioError as error:
        problems.append(str(error))
        return
    audio = {_key(name): name for name in names if name.lower().endswith(AUDIO_SUFFIXES)}
    labels = {_key(name): name for name in names if name.endswith(".txt")}
    labels |= {_key(name): name for name in names if name.endswith(".json")}
    problems += [f"{file}: {name} has no .json beside it" for key, name in audio.items() if key not in labels]
    for key, name in labels.items():
        try:
            text = read_member(str(file), name).decode()
            record = json.loads(text) if name.endswith(".json") else {"text": text.strip()}
            if not isinstance(record, dict):
                raise _BadRecordError("not a JSON object")
            if key not in audio:
                raise _BadRecordError("no audio beside it")
            # The tar holds the clip itself: the file it was cut from and its place there no longer count.
            for ours, theirs in ("audio", "audio_filepath"), ("start", "offset"):
                original = _take(record, ours, theirs)
                record |= {f"original_{ours}": original} if original is not None else {}
            record |= {"audio": audio[key], "shard": file.name}
            record.setdefault("id", f"{file.stem}/{key}")
            utterances.append(_utterance(record, file.parent, file.stem, prepare))
        except (UnicodeDecodeError, json.JSONDecodeError):
            problems.append(f"{file} {name}: not JSON in UTF-8")
        except (_BadRecordError, WhisfusionError) as error:
            problems.append(f"{file} {name}: {error}")


def _key(name: str) -> str:
    """WebDataset's rule: files of one sample share the path up to the first dot of the file name."""
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.split('.')[0]}" if folder else base.split(".")[0]


class _BadRecordError(Exception):
    """A record that is no utterance; the message lists everything wrong with it."""


def _utterance(record: Any, root: Path, dataset: str, prepare: Prepare | None) -> Utterance:
    """Turn a parsed line into an utterance; `record` is consumed: what is left of it becomes `extra`."""
    if not isinstance(record, dict):
        raise _BadRecordError("not a JSON object")
    if prepare is not None:
        prepare(record, root)
    audio = _take(record, "audio", "audio_filepath")
    language = _take(record, "language", "lang", "source_lang")
    start = _take(record, "start", "offset")
    duration, text, shard = _take(record, "duration"), _take(record, "text"), _take(record, "shard")
    identity, speaker, name = (
        _take(record, "id"),
        _take(record, "speaker"),
        _take(record, "dataset") or dataset,
    )

    problems = []
    if type(audio) is not str or not audio:
        problems.append("no `audio` (or `audio_filepath`)")
    if type(duration) not in (float, int) or not 0 < duration < math.inf:
        problems.append(f"`duration` must be a positive number of seconds, not {duration!r}")
    if type(text) is not str:
        problems.append(f"`text` must be a string, not {text!r}")
    if type(language) is not str or not language:
        problems.append("no `language` (or `lang`, `source_lang`)")
    if shard is not None and (type(shard) is not str or not shard):
        problems.append(f"`shard` must be the name of a tar file, not {shard!r}")
    if start is not None and (type(start) not in (float, int) or not 0 <= start < math.inf):
        problems.append(f"`start` must be seconds from 0 on, not {start!r}")
    if type(name) is not str:
        problems.append(f"`dataset` must be a string, not {name!r}")
    if "target_lang" in record and record["target_lang"] != language:
        problems.append(f"a translation into {record['target_lang']!r}, not a transcript")
    if problems:
        raise _BadRecordError("; ".join(problems))

    intern = sys.intern
    return Utterance(
        id=str(identity) if identity is not None else audio if start is None else f"{audio}@{start}",
        audio=audio,
        duration=float(duration),
        text=text,
        # The same few strings come back on every line: keep one copy of each.
        language=intern(language),
        speaker=intern(str(speaker)) if speaker is not None else "",
        dataset=intern(name),
        shard=intern(shard) if shard is not None else None,
        start=float(start) if start is not None else None,
        extra=record,
        root=root,
    )


def _take(record: dict[str, Any], *names: str) -> Any:
    for name in names:
        value = record.pop(name, None)
        if value is not None:
            return value
    return None
