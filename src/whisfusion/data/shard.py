"""Tar shards: many short clips in one file, any of which is read without reading the others."""

import io
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from whisfusion.errors import AudioError

# Indices stay for the life of the process; open files are a scarcer thing (the usual limit is 1,024).
_OPEN_SHARDS = 128


@dataclass(frozen=True)
class ShardIndex:
    """Where each member of a tar file lies. Arrays, not a dict: a paper-sized corpus has 23 million members.

    names: the members' names as UTF-8 bytes, sorted. offsets, sizes: where their content lies, in bytes.
    """

    names: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    def find(self, name: str) -> tuple[int, int] | None:
        """Return (offset, size) of the member called `name`, or None."""
        key = np.bytes_(_plain(name).encode())
        place = int(np.searchsorted(self.names, key))
        if place == len(self.names) or self.names[place] != key:
            return None
        return int(self.offsets[place]), int(self.sizes[place])

    def in_file_order(self) -> list[str]:
        """Return the names of all members as they follow each other in the tar file."""
        return [self.names[i].decode() for i in np.argsort(self.offsets, kind="stable")]


@cache
def shard_index(path: str) -> ShardIndex:
    """Read the headers of the tar file at `path`, once per process.

    Raises AudioError where the file is missing, cut off, compressed or not a tar file.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            found = sorted((_plain(m.name).encode(), m.offset_data, m.size) for m in tar if m.isfile())
        length = os.path.getsize(path)
    except FileNotFoundError:
        raise AudioError(f"the shard {path} does not exist") from None
    except (tarfile.TarError, OSError) as error:
        raise AudioError(f"the shard {path} is not a plain (uncompressed) tar file: {error}") from error
    if any(offset + size > length for _, offset, size in found):
        raise AudioError(f"the shard {path} is cut off: copy it again")
    return ShardIndex(
        names=np.array([name for name, _, _ in found], dtype=np.bytes_),
        offsets=np.array([offset for _, offset, _ in found], dtype=np.int64),
        sizes=np.array([size for _, _, size in found], dtype=np.int64),
    )


def read_member(path: str, name: str) -> bytes:
    """Return the bytes of member `name` of the tar file at `path`.

    Safe to call from many threads and after a fork: reads name their own offset, so that nobody's place in
    the file is shared. Raises AudioError where the shard or the member is missing.
    """
    found = shard_index(path).find(name)
    if found is None:
        raise AudioError(f"the shard {path} has no member {name}")
    offset, size = found
    shard = _open_shard(path)
    pieces = []
    while size:
        piece = os.pread(shard.descriptor, size, offset)
        if not piece:
            raise AudioError(f"the shard {path} ended in the middle of {name}: copy it again")
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return b"".join(pieces)


def write_shard(path: str | os.PathLike, members: Iterable[tuple[str, bytes]]) -> int:
    """Write (name, content) pairs as a tar file and return how many; the file appears complete or not at all.

    Nothing but names and contents goes in: the same clips give the same bytes on any day.
    """
    part = f"{os.fspath(path)}.part"
    count = 0
    try:
        with tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as tar:
            for name, content in members:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
                count += 1
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)
    return count


class _OpenShard:
    """A file descriptor that closes itself when the cache and the last reading thread have let go of it."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(maxsize=_OPEN_SHARDS)
def _open_shard(path: str) -> _OpenShard:
    return _OpenShard(path)


def _plain(name: str) -> str:
    return name.removeprefix("./")
