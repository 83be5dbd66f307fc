"""Speed on a CPU: a small model against faster-whisper base in int8, from samples to text, on the same clips.

    python benchmarks/cpu_speed.py --model FOLDER --whisper FOLDER --data MANIFEST...

Each system is a process of its own, so that no library meets the threads and the memory of another, and they take turns
clip by clip, so that whatever else the machine does meets all of them. Prints a table, then one JSON line, which
--output keeps. With --random the model has the trial recipe's shapes and random weights: good for
nothing but its speed, and not even quite for that, as its transcripts never end.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import whisfusion
from whisfusion import checkpoint, environment, hub
from whisfusion.data.manifest import Utterance, load_samples, read_manifest
from whisfusion.data.table import text_table
from whisfusion.decoder import DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.evaluate.rates import Rate
from whisfusion.evaluate.score import ScoreOptions, score
from whisfusion.train.dev import spread
from whisfusion.train.recipes import trial

SECONDS = (3.0, 10.0)
LEAST_SPEEDUP = 3.0
MOST_LOST = 0.3  # percentage points of WER, int8 against float32
PEER, OURS, REFERENCE = "faster-whisper int8", "whisfusion int8", "whisfusion float32"
PEER_SETTINGS: dict[str, Any] = {
    "beam_size": 1,
    "temperature": 0.0,
    "without_timestamps": True,
    "condition_on_previous_text": False,
    "vad_filter": False,
}
# Idle threads of a pool wait actively for about a millisecond; the next system should not meet them.
PAUSE = 0.02
Recogniser = Callable[[np.ndarray, str], tuple[str, dict[str, float]]]
"""Samples and language to text, and the seconds of each stage where they are known."""
Timed = tuple[str, dict[str, float], float]
"""What a recogniser gives, and the seconds that it took."""


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="name or folder of a diffusion model")
    model.add_argument("--random", action="store_true", help="random weights of the trial recipe's shapes")
    parser.add_argument("--whisper", default="whisper-base", help="name or folder of a CTranslate2 Whisper-base")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="manifests")
    parser.add_argument("--limit", type=int, default=200, help="clips of 3 to 10 s, evenly spread (default 200)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--candidates", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm_up", type=int, default=5, help="clips before the clock runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where the JSON is kept")
    return parser.parse_args(arguments)


def choose(utterances: Sequence[Utterance], limit: int) -> list[Utterance]:
    """Clips of the durations that are asked about, evenly spread over the manifests."""
    fitting = [u for u in utterances if SECONDS[0] <= u.duration <= SECONDS[1]]
    return spread(fitting, limit)


def random_model(folder: Path, seed: int) -> Path:
    """A model folder of the trial recipe's shapes, stored as int8."""
    recipe, encoder = trial(), EncoderConfig(mels=80, width=512, layers=6, heads=8)
    torch.manual_seed(seed)
    config = checkpoint.ModelConfig(
        decoder=recipe.decoder, encoder=encoder, encoder_name="whisper-base", window=recipe.window, languages=("en",)
    )
    decoder = DiffusionDecoder(recipe.decoder).state_dict()
    return checkpoint.save(folder, config, decoder, encoder=WhisperEncoder(encoder).state_dict(), int8=True)


def ours(folder: Path, dtype: str, options: argparse.Namespace) -> Recogniser:
    transcriber = whisfusion.load(folder, device="cpu", dtype=dtype)

    def recognise(samples: np.ndarray, language: str) -> tuple[str, dict[str, float]]:
        transcript = transcriber.transcribe(
            samples, language=language, candidates=options.candidates, steps=options.steps, seed=options.seed
        )
        return transcript.text, transcript.timings

    return recognise


def faster_whisper(folder: Path, threads: int) -> Recogniser:
    from faster_whisper import WhisperModel

    model = WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=threads, local_files_only=True)

    def recognise(samples: np.ndarray, language: str) -> tuple[str, dict[str, float]]:
        segments = model.transcribe(samples, language=language, **PEER_SETTINGS)[0]
        return "".join(segment.text for segment in segments).strip(), {}

    return recognise


class Worker:
    """A system in a process of its own."""

    def __init__(self, make: Callable[..., Recogniser], *arguments: Any, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, threads, make, *arguments), daemon=True)
        self._process.start()
        self._pipe.recv()

    def __call__(self, samples: np.ndarray, language: str) -> Timed:
        self._pipe.send((samples, language))
        return self._pipe.recv()

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Any, threads: int, make: Callable[..., Recogniser], *arguments: Any) -> None:
    torch.set_num_threads(threads)
    recognise = make(*arguments)
    pipe.send("ready")
    while (clip := pipe.recv()) is not None:
        samples, language = clip
        started = time.perf_counter()
        text, stages = recognise(samples, language)
        pipe.send((text, stages, time.perf_counter() - started))


def measure(
    systems: Mapping[str, Callable[[np.ndarray, str], Timed]], utterances: Sequence[Utterance], warm_up: int
) -> tuple[dict[str, list[float]], dict[str, list[str]], dict[str, dict[str, float]]]:
    """Seconds and texts of every clip, and seconds of every stage, by system."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    texts: dict[str, list[str]] = {name: [] for name in systems}
    stages: dict[str, dict[str, float]] = {name: defaultdict(float) for name in systems}
    names = list(systems)
    for number, clip in enumerate([*utterances[:warm_up], *utterances]):
        samples = load_samples(clip)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            time.sleep(PAUSE)
            text, spent, elapsed = systems[name](samples, clip.language)
            if number < warm_up:
                continue
            seconds[name].append(elapsed)
            texts[name].append(text)
            for stage, part in spent.items():
                stages[name][stage] += part
        if number >= warm_up and (number - warm_up + 1) % 20 == 0:
            print(f"{number - warm_up + 1} of {len(utterances)} clips", file=sys.stderr)
    return seconds, texts, stages


def busy_seconds() -> float | None:
    """CPU seconds that this machine has worked since it was started; None where the system does not tell."""
    try:
        first = Path("/proc/stat").read_text("utf-8").splitlines()[0].split()
    except OSError:
        return None
    user, nice, system = map(int, first[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and of those that it has started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def error_rate(utterances: Sequence[Utterance], texts: Sequence[str]) -> Rate:
    records = [
        {"id": clip.id, "dataset": clip.dataset, "text": text} for clip, text in zip(utterances, texts, strict=True)
    ]
    report = score(records, utterances, ScoreOptions(resamples=1000))
    return (report.totals or report.scores)[0].selected


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark, as one object for JSON."""
    torch.set_num_threads(options.threads)  # for the record: this process only waits
    started, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
    utterances = choose(read_manifest(*options.data), options.limit)
    whisper = hub.resolve(options.whisper)
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch) / "model", options.seed) if options.random else hub.resolve(options.model)
        _, files = checkpoint.read_config(folder)
        systems = {
            PEER: Worker(faster_whisper, whisper, options.threads, threads=options.threads),
            OURS: Worker(ours, folder, "int8", options, threads=options.threads),
            REFERENCE: Worker(ours, folder, "float32", options, threads=options.threads),
        }
    seconds, texts, stages = measure(systems, utterances, options.warm_up)
    for system in systems.values():
        system.stop()
    elapsed, busy_now = time.perf_counter() - started, busy_seconds()
    others = None if busy is None or busy_now is None else busy_now - busy - (own_seconds() - own)
    audio = sum(clip.duration for clip in utterances)
    rows = {}
    for name in systems:
        rate = error_rate(utterances, texts[name])
        rows[name] = {
            "ms": round(1000 * statistics.fmean(seconds[name]), 1),
            "median_ms": round(1000 * statistics.median(seconds[name]), 1),
            "rtfx": round(audio / sum(seconds[name]), 2),
            "speedup": round(sum(seconds[PEER]) / sum(seconds[name]), 2),
            "wer": None if options.random and name != PEER else round(100 * rate.rate, 2),
            "stages_ms": {stage: round(1000 * s / len(utterances), 1) for stage, s in stages[name].items()},
        }
    data = " ".join(path.name for path in options.data)
    # Names, not the places of files on one machine.
    model = "--random" if options.random else f"--model {Path(options.model).name}"
    return {
        "benchmark": "cpu_speed",
        "command": f"python benchmarks/cpu_speed.py {model} --data {data} "
        f"--limit {options.limit} --threads {options.threads} --candidates {options.candidates} "
        f"--steps {options.steps} --seed {options.seed}",
        "weights": "random" if options.random else files,
        "peer_settings": PEER_SETTINGS,
        "peer_sha256": hub.file_sha256(whisper / "model.bin"),
        "clips": len(utterances),
        "mean_seconds": round(audio / len(utterances), 2),
        "candidates": options.candidates,
        "steps": options.steps,
        "selection": "mbr",
        "threads": options.threads,
        "seed": options.seed,
        "systems": rows,
        "int8_and_float32_agree": sum(a == b for a, b in zip(texts[OURS], texts[REFERENCE], strict=True)),
        "cores_used_by_others": None if others is None else round(max(0.0, others) / elapsed, 3),
        "machine": environment.machine(),
        "versions": environment.versions() | {name: version(name) for name in ("faster-whisper", "ctranslate2")},
    }


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    header = ("system", "ms a clip", "median", "RTFx", "speed", "WER %", "mel", "encode", "decode", "select")
    rows = []
    for name, row in result["systems"].items():
        stages = [str(row["stages_ms"].get(stage, "")) for stage in header[6:]]
        wer = "" if row["wer"] is None else f"{row['wer']:.2f}"
        rows.append(
            (name, str(row["ms"]), str(row["median_ms"]), f"{row['rtfx']:.1f}", f"{row['speedup']:.2f}", wer, *stages)
        )
    about = (
        f"{result['clips']} clips of {result['mean_seconds']} s on average, {result['threads']} threads, "
        f"K = {result['candidates']}, N = {result['steps']}; int8 and float32 write the same on "
        f"{result['int8_and_float32_agree']}; cores used by others: {result['cores_used_by_others']}"
    )
    return f"{text_table(header, rows)}\n\n{about}"


def passed(result: dict[str, Any]) -> bool:
    """Whether the speed and the price of int8 are what they should be."""
    ours, reference = result["systems"][OURS], result["systems"][REFERENCE]
    lost = 0.0 if ours["wer"] is None else ours["wer"] - reference["wer"]
    return ours["speedup"] >= LEAST_SPEEDUP and lost <= MOST_LOST


def main() -> int:
    options = parse_args()
    result = run(options)
    print(render(result))
    print(json.dumps(result, ensure_ascii=False))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return 0 if passed(result) else 1


if __name__ == "__main__":
    sys.exit(main())
