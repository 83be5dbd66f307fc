"""Checkpoints of a run: written whole or not at all, checked before they are read, the one before kept.

A checkpoint is a folder `step-00001000` of torch's distributed checkpoint files, which load into any number of
ranks, and meta.json: what is no tensor, and the hash of every file. It is written under another name and renamed.
"""

import json
import re
import shutil
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from whisfusion.checkpoint import sha256_of
from whisfusion.errors import ModelError
from whisfusion.train.parallel import Ranks

KEEP = 2
"""Checkpoints kept: the last, and the one before it should the last be damaged."""

_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints in `folder`, as all ranks see them."""

    folder: Path
    ranks: Ranks

    def save(self, step: int, tensors: dict[str, Any], meta: dict[str, Any]) -> Path:
        """Write a checkpoint and remove those that are no longer needed; all ranks must call it together."""
        final = self.folder / f"step-{step:08}"
        temporary = self.folder / f".{final.name}.part"
        if self.ranks.main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.ranks.wait()
        with _alone():
            dcp.save(tensors, checkpoint_id=temporary, no_dist=self.ranks.world == 1)
        own = sorted(temporary.glob(f"__{self.ranks.rank}_*")) + [temporary / ".metadata"] * self.ranks.main
        hashes = self.ranks.gather({path.name: sha256_of(path) for path in own})
        if self.ranks.main:
            files = {name: digest for part in hashes for name, digest in part.items()}
            text = json.dumps({"step": step, "files": files, **meta}, indent=2)
            (temporary / "meta.json").write_text(text + "\n", encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            for old in self._found()[:-KEEP]:
                shutil.rmtree(old)
        self.ranks.wait()
        return final

    def newest(self) -> tuple[Path, dict[str, Any], list[str]] | None:
        """The newest checkpoint that is whole, its meta, and a sentence on each damaged one that came before it.

        None where there never was one. Raises ModelError where all are damaged.
        """
        return self.ranks.share(self._newest() if self.ranks.main else None)

    def load(self, checkpoint: Path, tensors: dict[str, Any]) -> None:
        """Read a checkpoint into `tensors`, in place, however many ranks wrote it."""
        with _alone():
            dcp.load(tensors, checkpoint_id=checkpoint, no_dist=self.ranks.world == 1)

    def _newest(self) -> tuple[Path, dict[str, Any], list[str]] | None:
        damaged = []
        for checkpoint in reversed(self._found()):
            meta, problem = _verify(checkpoint)
            if not problem:
                return checkpoint, meta, damaged
            damaged.append(f"the checkpoint {checkpoint} is damaged ({problem}): going back to the one before it")
        if damaged:
            raise ModelError(
                f"no checkpoint in {self.folder} is whole: start the run anew, or from a model with --init_from"
            )
        return None

    def _found(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))


@contextmanager
def _alone() -> Generator[None]:
    """A lone process is what is meant: torch warns of it even when told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _verify(checkpoint: Path) -> tuple[dict[str, Any], str]:
    """The meta of a checkpoint, and what is wrong with it ("" if nothing)."""
    try:
        meta = json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))
        files = meta["files"]
    except (OSError, ValueError, KeyError):
        return {}, "meta.json is missing or cannot be read"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            return {}, f"{name} is missing"
        if sha256_of(path) != expected:
            return {}, f"{name} is not what was written"
    return meta, ""
