"""Whisfusion: speech recognition by masked diffusion. `load()` a model, then `.transcribe()` anything."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whisfusion.errors import WhisfusionError
    from whisfusion.pdd import PDDOptions
    from whisfusion.transcriber import Transcriber
    from whisfusion.transcript import Segment, Transcript
    from whisfusion.words import Word

__version__ = "0.1.0"
__all__ = ["PDDOptions", "Segment", "Transcriber", "Transcript", "WhisfusionError", "Word", "__version__", "load"]

_HOMES = {
    "PDDOptions": "whisfusion.pdd",
    "Segment": "whisfusion.transcript",
    "Transcriber": "whisfusion.transcriber",
    "Transcript": "whisfusion.transcript",
    "WhisfusionError": "whisfusion.errors",
    "Word": "whisfusion.words",
    "load": "whisfusion.loading",
}


def __getattr__(name: str) -> Any:
    # Importing the package does not import torch: `whisfusion --help` answers at once.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'whisfusion' has no attribute {name!r}")
