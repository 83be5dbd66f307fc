"""Our Whisper against faster-whisper: the same weights, the same clips, greedy decoding, compared clip by clip.

Prints a table, then one JSON line, which benchmarks/results/whisper_parity.json keeps. Raw hypotheses are written as
JSON Lines, so that a run that was stopped goes on where it was. Fails if fewer than 99 % of the clips have identical
normalised text, or if the error rates are more than 0.1 points apart.

    WHISFUSION_SPEECH=FOLDER python benchmarks/whisper_parity.py
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import whisfusion
from whisfusion import environment, hub
from whisfusion.data.manifest import Utterance, load_samples, read_manifest
from whisfusion.data.table import text_table
from whisfusion.evaluate.rates import Rate
from whisfusion.evaluate.score import ScoreOptions, score
from whisfusion.normalise import normalise

LEAST_IDENTICAL = 0.99
MOST_APART = 0.1  # percentage points of WER
SETTINGS: dict[str, Any] = {
    "beam_size": 1,
    "temperature": 0.0,
    "without_timestamps": True,
    "condition_on_previous_text": False,
    "suppress_tokens": [-1],
    "suppress_blank": True,
    "vad_filter": False,
    # Whatever is heard is written, as ours does.
    "no_speech_threshold": None,
    "log_prob_threshold": None,
    "compression_ratio_threshold": None,
}
Record = dict[str, Any]
Recogniser = Callable[[Sequence[Utterance]], Iterator[Record]]


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare our greedy Whisper with faster-whisper.")
    speech = os.environ.get("WHISFUSION_SPEECH")
    default = Path(speech) / "test" / "librispeech-test-clean-a.jsonl" if speech else None
    parser.add_argument("--manifest", type=Path, default=default, help="default: a set of $WHISFUSION_SPEECH")
    parser.add_argument("--model", default="whisper-base", help="name or folder of a CTranslate2 model")
    parser.add_argument("--limit", type=int, help="only the first so many clips")
    parser.add_argument("--batch", type=int, default=8, help="clips that our decoder takes at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--hypotheses", type=Path, default=hub.cache_folder() / "benchmarks", help="where they are kept"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "whisper_parity.json")
    options = parser.parse_args(arguments)
    if options.manifest is None:
        parser.error("give --manifest, or set WHISFUSION_SPEECH")
    return options


def ours(folder: Path, batch: int) -> Recogniser:
    """What `--system whisper` does, on the CPU in float32."""
    transcriber = whisfusion.load(folder, device="cpu", dtype="float32", system="whisper")

    def recognise(utterances: Sequence[Utterance]) -> Iterator[Record]:
        for language, group in groupby(utterances, key=lambda clip: clip.language):
            same = list(group)
            for first in range(0, len(same), batch):
                clips = same[first : first + batch]
                samples = [load_samples(clip) for clip in clips]
                transcripts = transcriber.transcribe(samples, language=language, batch_size=batch)
                for clip, transcript in zip(clips, transcripts, strict=True):
                    yield {"id": clip.id, "dataset": clip.dataset, "text": transcript.text}

    return recognise


def faster_whisper(folder: Path, threads: int) -> Recogniser:
    """The peer, on the same files, clip by clip."""
    from faster_whisper import WhisperModel

    model = WhisperModel(str(folder), device="cpu", compute_type="float32", cpu_threads=threads, local_files_only=True)

    def recognise(utterances: Sequence[Utterance]) -> Iterator[Record]:
        for clip in utterances:
            segments = list(model.transcribe(load_samples(clip), language=clip.language, **SETTINGS)[0])
            text = "".join(segment.text for segment in segments).strip()
            yield {"id": clip.id, "dataset": clip.dataset, "text": text}

    return recognise


def recognise_all(utterances: Sequence[Utterance], kept: Path, make: Callable[[], Recogniser]) -> dict[str, Record]:
    """Hypotheses by id: those in the file `kept`, and those still to be made, which are added to it."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = kept.read_text("utf-8").splitlines() if kept.exists() else []
    found = {record["id"]: record for record in map(json.loads, lines)}
    todo = [utterance for utterance in utterances if utterance.id not in found]
    if todo:
        print(f"{kept.stem}: {len(todo)} of {len(utterances)} clips to do", file=sys.stderr)
        with kept.open("a", encoding="utf-8", buffering=1) as file:
            for record in make()(todo):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                found[record["id"]] = record
    return {utterance.id: found[utterance.id] for utterance in utterances}


def compare(utterances: Sequence[Utterance], ours: dict[str, Record], theirs: dict[str, Record]) -> dict[str, Any]:
    """Error rates of both, and the clips on which their normalised texts differ."""
    differing = []
    for clip in utterances:
        texts = [normalise(system[clip.id]["text"], clip.language) for system in (ours, theirs)]
        if texts[0] != texts[1]:
            differing.append({"id": clip.id, "whisfusion": texts[0], "faster_whisper": texts[1]})
    identical = len(utterances) - len(differing)
    rates = {"whisfusion": _rate(utterances, ours), "faster_whisper": _rate(utterances, theirs)}
    return {
        "clips": len(utterances),
        "hours": round(sum(clip.duration for clip in utterances) / 3600, 3),
        "identical": identical,
        "identical_share": round(identical / len(utterances), 5),
        "wer": {
            name: {"percent": round(100 * rate.rate, 3), "edits": _edits(rate), "words": rate.units}
            for name, rate in rates.items()
        },
        "wer_apart": round(100 * abs(rates["whisfusion"].rate - rates["faster_whisper"].rate), 4),
        "differing": differing,
    }


def _rate(utterances: Sequence[Utterance], hypotheses: dict[str, Record]) -> Rate:
    report = score(hypotheses.values(), utterances, ScoreOptions(resamples=1))
    return (report.totals or report.scores)[0].selected


def _edits(rate: Rate) -> int:
    return rate.substitutions + rate.deletions + rate.insertions


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark, as one object for JSON."""
    torch.set_num_threads(options.threads)
    folder = hub.resolve(options.model)
    sha256 = hub.file_sha256(folder / "model.bin")
    utterances = read_manifest(options.manifest)[: options.limit]
    kept = f"whisper_parity-{options.manifest.stem}-{sha256[:8]}"
    makers: dict[str, Callable[[], Recogniser]] = {
        "faster_whisper": lambda: faster_whisper(folder, options.threads),
        "whisfusion": lambda: ours(folder, options.batch),
    }
    heard = {
        name: recognise_all(utterances, options.hypotheses / f"{kept}-{name}.jsonl", make)
        for name, make in makers.items()
    }
    peers = {name: version(name) for name in ("faster-whisper", "ctranslate2")}
    return {
        "benchmark": "whisper_parity",
        "command": f"python benchmarks/whisper_parity.py --batch {options.batch} --threads {options.threads}",
        "data": options.manifest.stem,
        "weights_sha256": sha256,
        "dtype": "float32",
        "seed": None,  # nothing here is random
        "batch": {"whisfusion": options.batch, "faster_whisper": 1},
        "settings": SETTINGS,
        **compare(utterances, heard["whisfusion"], heard["faster_whisper"]),
        "machine": environment.machine(),
        "versions": environment.versions() | peers,
    }


def render(result: dict[str, Any]) -> str:
    """A table for people, and the clips that differ."""
    rows = [
        (name, f"{rate['percent']:.2f}", str(rate["edits"]), str(rate["words"])) for name, rate in result["wer"].items()
    ]
    lines = [text_table(("system", "WER %", "edits", "words"), rows), ""]
    lines.append(f"identical normalised text: {result['identical']} of {result['clips']} clips")
    for clip in result["differing"]:
        lines += [f"  {clip['id']}", f"    {clip['whisfusion']}", f"    {clip['faster_whisper']}"]
    return "\n".join(lines)


def main() -> int:
    options = parse_args()
    result = run(options)
    print(render(result))
    print(json.dumps(result, ensure_ascii=False))
    if options.limit is None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", "utf-8")
    passed = result["identical_share"] >= LEAST_IDENTICAL and result["wer_apart"] <= MOST_APART
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
