"""What a result was made with: versions, machine and device, for `whisfusion info` and beside every measurement."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from whisfusion import __version__

_PACKAGES = ("torch", "numpy", "safetensors", "tiktoken", "soundfile", "av", "soxr", "rapidfuzz", "huggingface_hub")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those that it stands on, as far as they are installed."""
    found = {"whisfusion": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine that this runs on, and the torch `device` that is used."""
    import torch

    place = torch.device(device)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else _processor()
    return {
        "platform": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(place),
        "device_name": name,
    }


def devices() -> dict[str, str]:
    """Every torch device here, and what it is called."""
    import torch

    found = {"cpu": _processor()}
    found |= {f"cuda:{i}": torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return found | ({"mps": "Apple GPU"} if torch.backends.mps.is_available() else {})


def _processor() -> str:
    """The processor's own name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
