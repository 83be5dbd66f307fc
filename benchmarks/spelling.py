"""What a speller brings: models on the same clips, as CTC spells by itself, and as they write with its help.

    python benchmarks/spelling.py MODEL... --data MANIFEST... [--limit 150] [--note TEXT] [--out FILE.json]

Prints a table, then one JSON line.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import whisfusion
from whisfusion.ctc import greedy_text
from whisfusion.data.manifest import load_samples, read_manifest
from whisfusion.data.table import text_table
from whisfusion.data.utterance import Utterance
from whisfusion.encoder import audio_mask
from whisfusion.environment import machine, versions
from whisfusion.mel import log_mel
from whisfusion.normalise import edit_distance, units
from whisfusion.systems import DiffusionSystem
from whisfusion.train.dev import spread
from whisfusion.transcriber import Transcriber


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="names or folders")
    parser.add_argument("--data", nargs="+", required=True, help="manifests, each a set")
    parser.add_argument("--limit", type=int, default=150, help="clips of each set, spread over it")
    parser.add_argument("--note", default="")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


@torch.inference_mode()
def spelled(system: DiffusionSystem, utterance: Utterance) -> str:
    """What CTC spells."""
    model = system.model
    mel = log_mel([load_samples(utterance)], n_mels=model.config.encoder.mels, window=model.config.window)
    audio_BTD = model.encoder(mel.mel_BMF, mel.frames_B)
    [logits_TV] = model.decoder.hear(audio_BTD, audio_mask(mel.frames_B, audio_BTD.shape[1])).own_bytes()
    return greedy_text(logits_TV, len(logits_TV))


def percent(texts: Sequence[str], utterances: Sequence[Utterance]) -> float:
    """Errors over all words, or characters, of a set."""
    edits = length = 0
    for text, utterance in zip(texts, utterances, strict=True):
        reference = units(utterance.text, utterance.language)
        edits += edit_distance(units(text, utterance.language), reference)
        length += len(reference)
    return round(100 * edits / max(1, length), 2)


def measure(name: str, model: Transcriber, utterances: Sequence[Utterance]) -> dict[str, Any]:
    """The row of a model and a set."""
    assert isinstance(model.system, DiffusionSystem)
    written = [model.transcribe(load_samples(u), language=u.language).text for u in utterances]
    return {
        "model": name,
        "set": utterances[0].dataset,
        "clips": len(utterances),
        "ctc": percent([spelled(model.system, utterance) for utterance in utterances], utterances),
        "written": percent(written, utterances),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    sets = {path: spread(read_manifest(path), args.limit) for path in args.data}
    rows = []
    for name in args.models:
        model = whisfusion.load(name)
        rows += [measure(Path(name).name, model, utterances) for utterances in sets.values()]
    # The command names files, not where they lie on this machine.
    names = [Path(name).name for name in args.models]
    files = [Path(path).name for path in args.data]
    return {
        "benchmark": "spelling",
        "command": " ".join(["python benchmarks/spelling.py", *names, "--data", *files, "--limit", str(args.limit)]),
        "note": args.note,
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
        "seed": 0,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    result = run(args)
    names = list(result["rows"][0])
    print(text_table(names, [[str(row[name]) for name in names] for row in result["rows"]]), file=sys.stderr)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
