"""Transcripts as files: text, JSON and subtitles, named after what was transcribed."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whisfusion.subtitles import to_srt, to_vtt

if TYPE_CHECKING:
    from whisfusion.transcript import Transcript


def to_txt(transcript: "Transcript") -> str:
    """One line for each segment in which something was said."""
    return "".join(f"{segment.text}\n" for segment in transcript.segments if segment.text)


def to_json(transcript: "Transcript") -> str:
    """All that is known, with Whisper's names: an indented JSON object."""
    return json.dumps(transcript.to_dict(), ensure_ascii=False, indent=2) + "\n"


FORMATS: dict[str, Callable[["Transcript"], str]] = {"txt": to_txt, "json": to_json, "srt": to_srt, "vtt": to_vtt}
"""Each format's name, which is also its suffix, and its writer."""


def write(transcript: "Transcript", folder: Path, name: str, formats: Iterable[str]) -> list[Path]:
    """Write `folder/name.FORMAT` for each of `formats`, replacing what is there; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for suffix in formats:
        path = folder / f"{name}.{suffix}"
        path.write_text(FORMATS[suffix](transcript), encoding="utf-8")
        paths.append(path)
    return paths


def output_names(sources: Sequence[str]) -> list[str]:
    """A name for the output of each source: its stem, "stdin" for "-".

    Where two sources share a stem they keep their suffix (a.wav, a.mp3), and where they share that too they are
    numbered (a.wav, a.wav-2), so that no output of one call replaces another. Case is looked past, as some file systems
    do.
    """
    paths = [Path("stdin" if source == "-" else source) for source in sources]
    stems = Counter(path.stem.casefold() for path in paths)
    names: list[str] = []
    taken: set[str] = set()
    for path in paths:
        base = path.stem if stems[path.stem.casefold()] == 1 else path.name
        name, number = base, 1
        while name.casefold() in taken:
            number += 1
            name = f"{base}-{number}"
        taken.add(name.casefold())
        names.append(name)
    return names
