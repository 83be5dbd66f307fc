"""Speed of a training step: the paper's decoder over an encoder of large-v3's shape, through the loop's own step.

    python benchmarks/train_step.py --data MANIFEST... [--out benchmarks/results/train_step.json]

Random weights: speed does not depend on them. Measured twice, with the batch resident on the device and fed from audio
that is decoded while training. FLOPs are counted by hand (whisfusion/train/flops.py), without recomputation. Prints a
table, then one JSON line.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import torch

from whisfusion.data.batch import Batch, Step, make_targets
from whisfusion.data.manifest import read_manifest
from whisfusion.data.sampler import Sampler
from whisfusion.data.stream import StreamFeeder, StreamOptions
from whisfusion.decoder import DecoderConfig, DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.environment import machine, versions
from whisfusion.train.config import Recipe
from whisfusion.train.flops import decoder_flops, encoder_flops, matrix_peak
from whisfusion.train.parallel import Ranks
from whisfusion.train.recipes import paper_stage1
from whisfusion.train.trainer import Trainer

FRAMES = 3000
TEXT_TOKENS = 48
"""Tokens of a transcript in the resident batch: about the mean of read speech of 12 to 15 s."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", nargs="*", default=[], help="manifests to feed from; without them only the first half"
    )
    parser.add_argument("--utterances", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30, help="timed steps; the median counts")
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--layers", type=int, default=24, help="fewer to try the script on a CPU")
    parser.add_argument("--encoder_layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--checkpoint_activations", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def make_recipe(args: argparse.Namespace) -> Recipe:
    paper = paper_stage1()
    heads = max(1, args.width // 64)
    return dataclasses.replace(
        paper,
        decoder=DecoderConfig(
            layers=args.layers, width=args.width, heads=heads, hidden=16 * args.width // 5, audio_width=args.width
        ),
        random_encoder=EncoderConfig(mels=128, width=args.width, layers=args.encoder_layers, heads=heads),
        sampler=dataclasses.replace(paper.sampler, utterances=args.utterances),
        checkpoint_activations=args.checkpoint_activations,
        compile=args.device != "cpu",
        precision="fp32" if args.device == "cpu" else "bf16",
    )


def resident_steps(recipe: Recipe, utterances: int, device: torch.device) -> Iterator[Step]:
    """One random batch of full windows, again and again."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 50_000, (utterances, TEXT_TOKENS), generator=generator).tolist()
    canvas = recipe.decoder.canvas.positions(30.0)
    batch = Batch(
        mel_BMF=torch.randn(utterances, 128, FRAMES, device=device, dtype=torch.float16) / 2,
        frames_B=torch.full((utterances,), FRAMES, device=device),
        targets=make_targets(labels, ["en"] * utterances, [canvas] * utterances, canvas),
        rows_B=torch.arange(utterances),
        total_rows=utterances,
        seconds=30.0 * utterances,
        ids=tuple(str(row) for row in range(utterances)),
    )
    return repeat((batch,))


def stream_steps(recipe: Recipe, args: argparse.Namespace, device: torch.device) -> Iterator[Step]:
    """Real clips, decoded and padded to 30 s while training."""
    utterances = [u for u in read_manifest(*args.data) if 1 <= u.duration <= 30]
    sampler = Sampler(utterances, recipe.sampler)
    options = StreamOptions(128, "padded", recipe.decoder.canvas, "normalised", workers=args.workers)
    return iter(StreamFeeder(utterances, sampler, options, device=device))


def timed(steps: Iterator[Step], act: Callable[[Step], object], args: argparse.Namespace) -> list[float]:
    """Milliseconds of each timed step, from asking for its batch to the end of its work."""
    times = []
    for number in range(args.warmup + args.steps):
        _wait(args.device)
        start = time.perf_counter()
        act(next(steps))
        _wait(args.device)
        if number >= args.warmup:
            times.append(1000 * (time.perf_counter() - start))
    return times


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = torch.device(args.device)
    recipe = make_recipe(args)
    torch.manual_seed(0)
    with device:
        decoder = DiffusionDecoder(recipe.decoder)
        encoder = WhisperEncoder(recipe.random_encoder or EncoderConfig())
    trainer = Trainer(decoder, encoder, recipe, steps=10_000, ranks=Ranks(device))
    numbers = trainer.recipe.spec_augment.numbers
    nothing_BN = torch.zeros(args.utterances, numbers, device=device)

    feeds = {"resident": lambda: resident_steps(recipe, args.utterances, device)}
    if args.data:
        feeds["opus shards"] = lambda: stream_steps(recipe, args, device)
    flops_encoder = encoder_flops(encoder.config, args.utterances, FRAMES)
    predicted = round(0.5 * args.utterances * (TEXT_TOKENS + 1))
    positions = recipe.decoder.canvas.positions(30.0)
    flops_decoder = decoder_flops(recipe.decoder, args.utterances, positions, FRAMES // 2, predicted)
    peak = matrix_peak(device)

    rows = []
    for feed, make in feeds.items():
        step_ms = statistics.median(timed(make(), trainer.step, args))
        encoder_ms = statistics.median(
            timed(
                resident_steps(recipe, args.utterances, device),
                lambda s: trainer.hear(s[0].mel_BMF, s[0].frames_B, nothing_BN),
                args,
            )
        )
        tflops = (flops_encoder + flops_decoder) / step_ms / 1e9
        rows.append(
            {
                "feed": feed,
                "ms_per_step": round(step_ms, 1),
                "encoder_ms": round(encoder_ms, 1),
                "decoder_ms": round(step_ms - encoder_ms, 1),
                "utterances_per_s": round(1000 * args.utterances / step_ms, 1),
                "tflops_per_s": round(tflops, 1),
                "mfu": None if peak is None else round(1e12 * tflops / peak, 4),
                "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if peak else None,
            }
        )
    print(f"{'feed':12} {'ms/step':>9} {'encoder':>9} {'decoder':>9} {'utt/s':>8} {'TFLOP/s':>8} {'MFU':>6} {'GB':>6}")
    for row in rows:
        print(
            f"{row['feed']:12} {row['ms_per_step']:9} {row['encoder_ms']:9} {row['decoder_ms']:9} "
            f"{row['utterances_per_s']:8} {row['tflops_per_s']:8} {row['mfu'] or '':6} {row['peak_memory_gb'] or '':6}"
        )
    result = {
        "benchmark": "train_step",
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "encoder_parameters": sum(p.numel() for p in encoder.parameters()),
        "utterances_per_step": args.utterances,
        "canvas": positions,
        "window_s": 30,
        "text_tokens": TEXT_TOKENS,
        "weights": "random",
        "timed_steps": args.steps,
        "tflop_per_step": {"encoder": round(flops_encoder / 1e12, 2), "decoder": round(flops_decoder / 1e12, 2)},
        "matrix_peak_tflops": None if peak is None else round(peak / 1e12, 1),
        "checkpoint_activations": recipe.checkpoint_activations,
        "rows": rows,
        "machine": machine(args.device),
        "versions": versions(),
        "seed": recipe.seed,
        "command": "python benchmarks/train_step.py " + " ".join(_shown(argv)),
    }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _shown(argv: list[str] | None) -> list[str]:
    """The arguments without folders, which are nobody else's."""
    return [Path(word).name if "/" in word else word for word in (sys.argv[1:] if argv is None else argv)]


if __name__ == "__main__":
    main()
