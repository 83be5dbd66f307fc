"""Speed by the paper's protocol: both engines, batches, candidates and reranking; Whisper by Hugging Face beside it.

    python benchmarks/rtfx.py --peers --lengths [--data MANIFEST...] [--out benchmarks/results/rtfx.json]

Random weights of full size unless told otherwise: speed does not depend on them. Each candidate is then cut at its
reference's token count, and selection runs on reference texts with 10 % random word errors. What matters most comes
first (the cases that have a target, where their time goes, lengths, peers, all other cases), and results are written
as they come: a run that is cut short keeps what it has. Writes JSON to --out, or prints it as one line; prints tables
last.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from whisfusion.data.manifest import read_manifest
from whisfusion.data.table import text_table
from whisfusion.decoder import Canvas
from whisfusion.environment import machine, versions
from whisfusion.evaluate import speed_set
from whisfusion.evaluate.speed import EngineKind, Row, Stage, Subject, breakdown, random_subject
from whisfusion.evaluate.speed_set import SpeedClip
from whisfusion.loading import resolve_device, resolve_dtype
from whisfusion.pdd import PDDOptions
from whisfusion.tokenizer import get_tokenizer
from whisfusion.train.flops import matrix_peak

if TYPE_CHECKING:
    from peers import Peer

FOLLOW = Canvas("follow", 224)
LENGTHS = (8, 16, 32, 64, 96, 128, 160, 184)
"""Tokens of the transcripts in the comparison by length; all of 30 s of audio."""
ROUNDS = 5
"""How often each length is measured, one after another in every round; the median is kept."""


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    engine: EngineKind
    batch: int
    k: int
    rerank: bool = False
    canvas: str = "own"
    window: str = "own"
    every: int = 1
    """Only every so many of the clips: the slow path would take minutes."""


FIRST = (
    Case("eager", 1, 5),
    Case("graph", 1, 5),
    Case("graph", 32, 5),
    Case("graph", 32, 5, canvas="follow"),
    Case("graph", 1, 15),
    Case("graph", 1, 5, rerank=True),
    Case("graph", 32, 5, canvas="follow", window="clip"),
)
"""The lines of the table that have a target or a goal."""


def other_cases(eager_every: int, rest_every: int = 1) -> list[Case]:
    """The other lines, by engine, batch and candidates."""
    engines: list[tuple[EngineKind, int]] = [("graph", rest_every), ("eager", eager_every)]
    known = {(c.engine, c.batch, c.k, c.rerank) for c in FIRST if c.canvas == "own"}
    return [
        Case(engine, batch, k, rerank, every=every)
        for engine, every in engines
        for batch in (1, 8, 32)
        for k in (1, 5, 15)
        for rerank in ((False, True) if k > 1 else (False,))
        if (engine, batch, k, rerank) not in known
    ]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], help="manifests to build the set from; else it is made up")
    parser.add_argument("--shape", default="paper", help="paper (default), trial or tiny")
    parser.add_argument("--per_bin", type=int, default=speed_set.PER_BIN, help="clips in each of the six bins")
    parser.add_argument("--eager_every", type=int, default=4, help="the eager path hears every so many clips")
    parser.add_argument("--rest_every", type=int, default=1, help="so do cases that have no target")
    parser.add_argument(
        "--budget_s", type=float, default=400, help="begin nothing after so many seconds, but for targets"
    )
    parser.add_argument("--peers", action="store_true", help="Whisper by Hugging Face's generate, beside ours")
    parser.add_argument("--peer_every", type=int, default=8, help="the peers hear every so many clips")
    parser.add_argument("--lengths", action="store_true", help="cost against the length of the transcript")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"measurements of each length (default {ROUNDS})")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def make_clips(args: argparse.Namespace) -> tuple[list[SpeedClip], str]:
    """The set, and where it is from."""
    if args.data:
        try:
            chosen = speed_set.choose(read_manifest(*args.data), per_bin=args.per_bin)
            joined = sum(len(pieces) > 1 for pieces in chosen)
            names = ", ".join(sorted({Path(path).name for path in args.data}))
            return speed_set.load(chosen), f"{names}; {joined} of the clips are joined from several"
        except ImportError as error:
            print(f"{error}: a made-up set instead of the manifests", file=sys.stderr)
    return speed_set.made_up(per_bin=args.per_bin), "made up: noise, and random words at 2.7 a second"


def hurried(args: argparse.Namespace) -> bool:
    """Whether the time for what has no target is over."""
    return time.perf_counter() - args.began > args.budget_s


class Ours:
    """Measures cases, and keeps engines whose graphs the next case may use."""

    def __init__(self, args: argparse.Namespace, subject: Subject, clips: list[SpeedClip]) -> None:
        self._args, self._subject, self._clips = args, subject, clips
        self._stages: dict[tuple[str, str, str, int], Stage] = {}

    def measure(self, case: Case) -> tuple[Row, Row] | None:
        """The row with the spectrogram outside the timer, and with it inside; None where memory is short."""
        key = (case.engine, case.canvas, case.window, case.every)
        if key not in self._stages:
            arranged = self._subject.arranged(
                canvas=FOLLOW if case.canvas == "follow" else None,
                window="clip" if case.window == "clip" else None,
            )
            self._stages[key] = Stage(arranged, case.engine, self._clips[:: case.every], capture=self._args.capture)
        pdd = PDDOptions(candidates=case.k)
        try:
            rows = self._stages[key].measure(batch=case.batch, pdd=pdd, rerank=case.rerank)
        except torch.OutOfMemoryError as error:
            print(f"no memory for {case}: {error}", file=sys.stderr)
            return None
        print(json.dumps(rows[0].to_dict()), flush=True)
        return rows


def breakdowns(subject: Subject, clips: list[SpeedClip], peak: float | None) -> list[dict]:
    found = []
    for batch in (1, 32):
        windows = Stage(subject, "eager", clips).batches(batch)[len(clips) // batch // 2]
        stages = breakdown(subject, windows, PDDOptions(), rerank=True, peak=peak)
        found.append({"batch": batch, "k": 5, "stages": stages})
    return found


def lengths(subject: Subject, whispers: "Sequence[Peer]", args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds for 30 s of speech, by how much was said in it, one utterance at a time; medians over rounds."""
    words = speed_set.made_up(per_bin=1)[-1].text.split()
    samples = speed_set.made_up(per_bin=1)[-1].samples
    clips = []
    for tokens in LENGTHS:
        text = words * 9
        while len(get_tokenizer().encode(" ".join(text))) > tokens:
            text.pop()
        clips.append(SpeedClip(samples, " ".join(text), "en"))
    stage = Stage(subject, "graph", clips, capture=args.capture)
    stage.clips = clips[-1:]
    stage.measure(batch=1, pdd=PDDOptions(), rerank=False)
    for peer in whispers:
        # Libraries set themselves up for every length that they have not met: once on the way to the longest.
        peer.milliseconds(clips[-1:], LENGTHS[-1:])
    spent: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for tokens, clip in zip(LENGTHS, clips, strict=True):
            stage.clips = [clip]
            row, _ = stage.measure(batch=1, pdd=PDDOptions(), rerank=False)
            spent.setdefault((subject.name, tokens), []).append(row.ms)
            for peer in whispers:
                spent.setdefault((peer.name, tokens), []).append(peer.milliseconds([clip], [tokens]))
        if hurried(args):
            break
    return [
        {"model": model, "tokens": tokens, "ms": round(statistics.median(ms), 2), "rounds": len(ms)}
        for (model, tokens), ms in spent.items()
    ]


def table(rows: list[Row], with_mel: list[Row | None]) -> str:
    header = ("model", "engine", "batch", "K", "N", "canvas", "window", "rerank", "ms", "RTFx", "ms with mel")
    return text_table(
        header,
        [
            (
                *(str(x) for x in (row.model, row.engine, row.batch, row.k, row.n, row.canvas, row.window_s)),
                "yes" if row.rerank else "",
                f"{row.ms:.2f}",
                f"{row.rtfx:,.0f}",
                "" if inside is None else f"{inside.ms:.2f}",
            )
            for row, inside in zip(rows, with_mel, strict=True)
        ],
    )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.began = time.perf_counter()
    device = resolve_device(args.device)
    args.capture = device.type == "cuda"
    subject = random_subject(args.shape, device, resolve_dtype(args.dtype, device))
    clips, source = make_clips(args)
    peak = matrix_peak(device)
    result: dict[str, Any] = {
        "benchmark": "rtfx",
        "clips": len(clips),
        "mean_seconds": round(statistics.fmean(clip.seconds for clip in clips), 2),
        "set": source,
        "weights": "random",
        "eager_hears_every": args.eager_every,
        "rest_hears_every": args.rest_every,
        "matrix_peak_tflops": None if peak is None else round(peak / 1e12, 1),
        "rows": [],
        "rows_with_mel": [],
        "machine": machine(str(device)),
        "versions": versions(),
        "seed": 0,
        "command": "python benchmarks/rtfx.py " + " ".join(_shown(argv)),
    }

    def keep() -> None:
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    rows: list[Row] = []
    with_mel: list[Row | None] = []
    measured = Ours(args, subject, clips)

    def measure(case: Case) -> None:
        if (both := measured.measure(case)) is not None:
            rows.append(both[0])
            with_mel.append(both[1])
            result["rows"].append(both[0].to_dict())
            result["rows_with_mel"].append(both[1].to_dict())
            keep()

    for case in FIRST:
        measure(case)
    result["breakdown"] = breakdowns(subject, clips, peak)
    keep()
    whispers = []
    if args.peers or args.lengths:
        import peers

        whispers = [peers.Peer(name, subject.model, args.shape) for name in peers.NAMES]
    if args.lengths:
        result["lengths"] = lengths(subject, whispers, args)
        print(json.dumps(result["lengths"]), flush=True)
        keep()
    beside: list[Row] = []
    if args.peers:
        result["peers"], result["peers_hear_every"] = [], args.peer_every
        for row in peers.measure(whispers, clips[:: args.peer_every], device):
            beside.append(row)
            result["peers"].append(row.to_dict())
            keep()
            if hurried(args):
                break
    del whispers
    for case in other_cases(args.eager_every, args.rest_every):
        if hurried(args):
            print(f"no time left for {case}", file=sys.stderr)
        else:
            measure(case)
    keep()
    if not args.out:
        print(json.dumps(result))
    for part in result.get("breakdown", []):
        stages = [(s["stage"], f"{s['ms']:.3f}", f"{s['tflop']:.3f}", str(s["of_matrix_peak"])) for s in part["stages"]]
        print(f"\nbatch {part['batch']}, K = {part['k']}\n" + text_table(("stage", "ms", "TFLOP", "of peak"), stages))
    print(f"\n{len(clips)} clips of {result['mean_seconds']} s on average ({source})")
    print(table([*rows, *beside], [*with_mel, *[None] * len(beside)]))


def _shown(argv: list[str] | None) -> list[str]:
    """The arguments without folders, which are nobody else's."""
    return [Path(word).name if "/" in word else word for word in (sys.argv[1:] if argv is None else argv)]


if __name__ == "__main__":
    main()
