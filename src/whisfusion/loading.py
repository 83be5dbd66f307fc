"""From a model's name to a Transcriber."""

import os
from typing import Literal

import torch

from whisfusion import checkpoint, hub, quantise
from whisfusion.engine import GraphEngine
from whisfusion.errors import ModelError, OptionError
from whisfusion.systems import DiffusionSystem, Int8System
from whisfusion.transcriber import Transcriber
from whisfusion.weights import load_whisper
from whisfusion.whisper_system import WhisperSystem

DEFAULT_MODEL = "base"
DEFAULT_WHISPER = "whisper-base"
SystemName = Literal["whisfusion", "whisper"]
EngineName = Literal["auto", "eager", "graph"]


def load(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    system: SystemName = "whisfusion",
    engine: EngineName = "auto",
) -> Transcriber:
    """Load a model by the name that `whisfusion models` lists, or from a folder.

    device: "auto" (the first of CUDA, Apple's mps and the CPU that is there) or any torch device name.
    dtype: "float32", "bfloat16", "float16", "int8" (on a CPU: products of whole numbers, several times as fast) or
        "auto": bfloat16 on CUDA, elsewhere float32; int8 on a CPU for a model that is stored so.
    system: "whisfusion", or "whisper" for a published Whisper with its own greedy decoder.
    engine: "graph" replays decoding as CUDA graphs, several times as fast; it takes seconds to get ready for a new
        shape of batch, and keeps the 256 graphs used last. "eager" runs step by step. The same transcripts. "auto" is
        "graph" on CUDA.

    Raises ModelError for a model that is missing or altered, OptionError for an unknown device or dtype.
    """
    place = resolve_device(device)
    number = resolve_dtype(dtype, place)
    if engine not in ("auto", "eager", "graph"):
        raise OptionError(f"engine must be auto, eager or graph, not {engine!r}")
    if engine == "graph" and (place.type != "cuda" or system == "whisper"):
        raise OptionError("the graph engine is for diffusion decoding on a CUDA device: use engine auto or eager")
    if system == "whisper" and dtype == "int8":
        raise OptionError("int8 is for diffusion decoding: use dtype auto or float32 with --system whisper")
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
    if dtype == "int8" or (dtype == "auto" and place.type == "cpu" and model.stored_int8 and quantise.is_fast_here()):
        return Transcriber(Int8System(model))
    graphs = engine != "eager" and place.type == "cuda"
    return Transcriber(DiffusionSystem(model, GraphEngine(model) if graphs else None))


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
    """The torch dtype of weights for this name; "auto" is what runs well on the device, int8 is made of float32."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "int8":
        if device.type != "cpu" or not quantise.is_fast_here():
            raise OptionError("int8 is for x86 processors with AVX2: use dtype auto or float32")
        return torch.float32
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in known:
        raise OptionError(f"dtype must be auto, {', '.join(known)}, int8, not {name!r}")
    return known[name]


def _path(name_or_path: str | os.PathLike[str] | None, default: str) -> str:
    return default if name_or_path is None else os.fspath(name_or_path)
