"""How exact word times are: words spoken one by one by SVOX Pico, put together with known pauses, and timed again.

    python benchmarks/word_times.py MODEL --text en=SENTENCES.txt.xz de=... [--clips 40] [--seed 0] [--out FILE.json]

Where a word begins and ends is known to the sample, since each is synthesised alone and cut where its sound is.
Counted are the words that were recognised. Wants pico2wave. Prints a table, then one JSON line.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import whisfusion
from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.engines import ENGINES, find_voices, speak
from whisfusion.data.sentences import choose_sentences, read_sentences
from whisfusion.data.table import text_table
from whisfusion.environment import machine, versions
from whisfusion.errors import AudioError
from whisfusion.normalise import normalise
from whisfusion.transcriber import Transcriber

_QUIET = 0.02
"""Share of the loudest sample below which a word's sound has not begun, or is over."""
_PAUSES = (0.05, 0.4)
_FADE = SAMPLE_RATE // 200
Spoken = tuple[str, float, float]
"""A word, and the seconds at which it begins and ends."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or folder")
    parser.add_argument("--text", nargs="+", required=True, metavar="LANGUAGE=FILE", help="sentences, one a line")
    parser.add_argument("--clips", type=int, default=40, help="sentences of each language")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def trimmed(samples: np.ndarray) -> np.ndarray:
    """The part that sounds, faded in and out over 5 ms."""
    loud = np.flatnonzero(np.abs(samples) > _QUIET * np.abs(samples).max())
    part = samples[loud[0] : loud[-1] + 1].copy()
    ramp = np.linspace(0, 1, min(_FADE, len(part)))
    part[: len(ramp)] *= ramp
    part[-len(ramp) :] *= ramp[::-1]
    return part


def spoken(sentence: str, language: str, rng: np.random.Generator) -> tuple[np.ndarray, list[Spoken]]:
    """A sentence word by word, and where each word is."""
    engine = ENGINES["pico"]
    voices = find_voices(engine, language)
    voice = voices[rng.integers(len(voices))]
    pieces, words = [np.zeros(SAMPLE_RATE // 4, dtype=np.float32)], []
    at = len(pieces[0])
    for word in sentence.split():
        sound = trimmed(speak(engine, word, voice, 1.0))
        pause = np.zeros(int(rng.uniform(*_PAUSES) * SAMPLE_RATE), dtype=np.float32)
        words.append((word, at / SAMPLE_RATE, (at + len(sound)) / SAMPLE_RATE))
        pieces += [sound, pause]
        at += len(sound) + len(pause)
    return np.concatenate(pieces), words


def lateness(
    model: Transcriber, samples: np.ndarray, words: list[Spoken], language: str
) -> Iterator[tuple[float, float]]:
    """By how many seconds each recognised word begins and ends too late."""
    transcript = model.transcribe(samples, language=language, word_timestamps=True)
    heard = [word for segment in transcript.segments for word in segment.words]
    said, found = (
        [normalise(text, language) for text in texts] for texts in ([w for w, *_ in words], [w.word for w in heard])
    )
    for block in difflib.SequenceMatcher(a=said, b=found, autojunk=False).get_matching_blocks():
        for place in range(block.size):
            _, start, end = words[block.a + place]
            timed = heard[block.b + place]
            yield timed.start - start, timed.end - end


def measure(model: Transcriber, language: str, sentences: list[str], rng: np.random.Generator) -> dict[str, Any]:
    """The row of a language."""
    late, count = [], 0
    for sentence in sentences:
        try:
            samples, words = spoken(sentence, language, rng)
        except AudioError:
            continue
        count += len(words)
        late += lateness(model, samples, words, language)
    late_N2 = 1000 * np.array(late).reshape(-1, 2)
    row: dict[str, Any] = {"language": language, "words": count, "recognised": len(late)}
    for name, late_N in zip(("start", "end"), late_N2.T, strict=True):
        if not late:
            break
        row[f"{name}_median_ms"] = round(float(np.median(late_N)), 1)
        row[f"{name}_off_median_ms"] = round(float(np.median(np.abs(late_N))), 1)
        row[f"{name}_off_90_ms"] = round(float(np.quantile(np.abs(late_N), 0.9)), 1)
    return row


def run(args: argparse.Namespace) -> dict[str, Any]:
    model = whisfusion.load(args.model)
    rows = []
    for given in args.text:
        language, _, path = given.partition("=")
        rng = np.random.default_rng([args.seed, len(rows)])
        chosen, _ = choose_sentences(read_sentences([path]), language)
        sentences = [chosen[i] for i in rng.permutation(len(chosen))[: args.clips]]
        rows.append(measure(model, language, sentences, rng))
    # The command names files, not where they lie on this machine.
    texts = [f"{given.partition('=')[0]}={Path(given.partition('=')[2]).name}" for given in args.text]
    words = ["python", "benchmarks/word_times.py", Path(args.model).name, "--text", *texts, "--clips", str(args.clips)]
    return {
        "benchmark": "word_times",
        "command": " ".join([*words, "--seed", str(args.seed)]),
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
        "seed": args.seed,
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
