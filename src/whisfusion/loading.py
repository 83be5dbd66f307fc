"""From a model's name to a Transcriber."""

import os
from typing import Literal

import torch

from whisfusion import checkpoint, hub
from whisfusion.errors import ModelError, OptionError
from whisfusion.systems import DiffusionSystem, WhisperSystem
from whisfusion.transcriber import Transcriber
from whisfusion.weights import load_whisper

DEFAULT_MODEL = "base"
DEFAULT_WHISPER = "whisper-base"
SystemName = Literal["whisfusion", "whisper"]


def load(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    system: SystemName = "whisfusion",
) -> Transcriber:
    """Load a model by the name that `whisfusion models` lists, or from a folder.

    device: "auto" (the first of CUDA, Apple's mps and the CPU that is there) or any torch device name.
    dtype: "float32", "bfloat16", "float16" or "auto": bfloat16 on CUDA, float32 elsewhere.
    system: "whisfusion", or "whisper" for a published Whisper with its own greedy decoder.

    Raises ModelError for a model that is missing or altered, OptionError for an unknown device or dtype.
    """
    place = resolve_device(device)
    number = resolve_dtype(dtype, place)
    if system == "whisper":
        whisper = load_whisper(_path(name_or_path, DEFAULT_WHISPER), place, number)
        return Transcriber(WhisperSystem(whisper))
    if system != "whisfusion":
        raise OptionError(f"system must be whisfusion or whisper, not {system!r}")
    if name_or_path is None and DEFAULT_MODEL not in [entry.name for entry in hub.models()]:
        raise ModelError(
            "this version comes without a model of its own: name a model folder with --model, or use a published "
            f"Whisper with --system whisper (after whisfusion pull {DEFAULT_WHISPER})"
        )
    model = checkpoint.load(hub.resolve(_path(name_or_path, DEFAULT_MODEL)), device=place, dtype=number)
    return Transcriber(DiffusionSystem(model))


def resolve_device(name: str) -> torch.device:
    """A torch device that exists here."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(f"unknown device {name!r}: use auto, cpu, cuda, cuda:1 or mps") from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device.type, False) or (device.index or 0) >= max(1, torch.cuda.device_count()):
        raise OptionError(f"there is no device {name!r} on this machine: use --device cpu or auto")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of this name; "auto" is what runs well on the device."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in known:
        raise OptionError(f"dtype must be auto, {', '.join(known)}, not {name!r}")
    return known[name]


def _path(name_or_path: str | os.PathLike[str] | None, default: str) -> str:
    return default if name_or_path is None else os.fspath(name_or_path)
