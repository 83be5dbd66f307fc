"""Programs that speak: which voices they have, and how a sentence becomes samples."""

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.parallel import memory_folder
from whisfusion.errors import AudioError, LanguageError, OptionError

EngineName = Literal["pico", "espeak", "jtalk", "rhvoice"]
# Of a program that has one voice, pitch and size make several.
_PITCHES = (0.8, 0.9, 1.0, 1.12)
_SIZES = (0.86, 0.93, 1.0, 1.07, 1.14)
_SECONDS_TO_SPEAK = 60
_ROOM = 2**24
# The top of the band fades out over this share of it: an edge as sharp as the transform allows would ring.
_FADE = 0.05
# Transforms of a multiple of this many times the ratio's denominator have small prime factors, and are fast.
_GRAIN = 16
# Silence after a clip that keeps its end from ringing into its beginning.
_GUARD_SECONDS = 0.1


@dataclass(frozen=True)
class Voice:
    """Someone to speak.

    name: what the manifest calls the speaker. accent: what the program calls the voice. pitch: relative to the
    program's own. size: by how much formants are raised, as in a smaller head; the tempo stays.
    """

    name: str
    accent: str
    pitch: float = 1.0
    size: float = 1.0


class Engine(Protocol):
    """A program that speaks into a WAV file."""

    program: str
    package: str

    @property
    def languages(self) -> Collection[str]:
        """Codes of what it speaks."""
        ...

    def voices(self, language: str) -> list[Voice]:
        """The voices of a language; none where it has none."""
        ...

    def command(self, text: str, voice: Voice, tempo: float, wav: Path) -> list[str]:
        """What to run, with the text on its standard input too; tempo is relative to the program's own."""
        ...


class Pico:
    """SVOX Pico: one voice an accent, of which pitch and size make several."""

    program = "pico2wave"
    package = "libttspico-utils (Debian and Ubuntu; on Debian it is in the component non-free)"
    accents: ClassVar[dict[str, tuple[str, ...]]] = {
        "en": ("en-US", "en-GB"),
        "de": ("de-DE",),
        "es": ("es-ES",),
        "fr": ("fr-FR",),
        "it": ("it-IT",),
    }
    languages = tuple(accents)

    def voices(self, language: str) -> list[Voice]:
        return [voice for accent in self.accents.get(language, ()) for voice in _guises(f"pico-{accent}", accent)]

    def command(self, text: str, voice: Voice, tempo: float, wav: Path) -> list[str]:
        marked = f'<pitch level="{100 * voice.pitch:.0f}"><speed level="{100 * tempo:.0f}">{text}</speed></pitch>'
        return [self.program, "-l", voice.accent, "-w", str(wav), marked]


class Espeak:
    """eSpeak NG: formant synthesis, every accent in many variants. Of Japanese it reads kana alone, so not here."""

    program = "espeak-ng"
    package = "espeak-ng"
    accents: ClassVar[dict[str, tuple[str, ...]]] = {
        "en": ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp"),
        "de": ("de",),
        "fr": ("fr-fr", "fr-be", "fr-ch"),
        "es": ("es", "es-419"),
        "it": ("it",),
        "nl": ("nl",),
        "pl": ("pl",),
        "pt": ("pt", "pt-br"),
        "ko": ("ko",),
        "zh": ("cmn",),
    }
    # Its more natural ones: none that whispers, croaks or imitates a robot.
    variants = (
        *("m1", "m2", "m3", "m4", "m6", "m7", "m8", "f1", "f2", "f3", "f4", "f5"),
        *("Alex", "Alicia", "Andrea", "Andy", "Annie", "Denis", "Lee", "Michael", "Mike", "linda", "steph", "steph2"),
    )
    languages = tuple(accents)
    words_per_minute = 140
    middle_pitch = 50

    def voices(self, language: str) -> list[Voice]:
        return [
            Voice(f"espeak-{accent}-{variant}", f"{accent}+{variant}")
            for accent, variant in product(self.accents.get(language, ()), self.variants)
        ]

    def command(self, text: str, voice: Voice, tempo: float, wav: Path) -> list[str]:
        speed, pitch = round(self.words_per_minute * tempo), round(self.middle_pitch * voice.pitch)
        return [self.program, "-v", voice.accent, "-s", str(speed), "-p", str(pitch), "-w", str(wav), "--", text]


class OpenJtalk:
    """Open JTalk: Japanese, with the voices (*.htsvoice) that lie below a folder."""

    program = "open_jtalk"
    package = "open-jtalk, and with it open-jtalk-mecab-naist-jdic and a voice in /usr/share/hts-voice"
    languages = ("ja",)

    def voices(self, language: str) -> list[Voice]:
        folder = Path(os.environ.get("OPEN_JTALK_VOICES", "/usr/share/hts-voice"))
        files = sorted(folder.rglob("*.htsvoice")) if language in self.languages else []
        return [voice for file in files for voice in _guises(f"jtalk-{file.stem}", str(file))]

    def command(self, text: str, voice: Voice, tempo: float, wav: Path) -> list[str]:
        dictionary = os.environ.get("OPEN_JTALK_DICTIONARY", "/var/lib/mecab/dic/open-jtalk/naist-jdic")
        half_tones = f"{12 * math.log2(voice.pitch):.2f}"
        spoken = ["-m", voice.accent, "-r", f"{tempo:.3f}", "-fm", half_tones, "-ow", str(wav)]
        return [self.program, "-x", dictionary, *spoken]


class RHVoice:
    """RHVoice: voices of people, each turned into a few; those alone whose licence lets a model be released.

    Left out of the Polish ones are cezary and magda (CC BY-NC-ND), and natan, which version 1.8 has on the same terms.
    """

    program = "RHVoice-test"
    package = (
        "rhvoice, and with it rhvoice-brazilian-portuguese, or Alicja or Michał (pl) or Mateo (es) from rhvoice.org"
    )
    people: ClassVar[dict[str, tuple[str, ...]]] = {
        "pl": ("alicja", "michal"),
        "pt": ("leticia-f123",),
        "es": ("mateo",),
    }
    languages = tuple(people)

    def voices(self, language: str) -> list[Voice]:
        # Asked for a voice that is not there, the program takes another, of any language.
        folder = Path(os.environ.get("RHVOICE_VOICES", "/usr/share/RHVoice/voices"))
        there = {found.name.lower() for found in folder.iterdir()} if folder.is_dir() else set()
        return [
            voice
            for person in self.people.get(language, ())
            if person in there
            for voice in _guises(f"rhvoice-{person}", person, _PITCHES[1:], _SIZES[1:-1])
        ]

    def command(self, text: str, voice: Voice, tempo: float, wav: Path) -> list[str]:
        rate, pitch = f"{100 * tempo:.0f}", f"{100 * voice.pitch:.0f}"
        return [self.program, "-q", "max", "-p", voice.accent, "-r", rate, "-t", pitch, "-o", str(wav)]


ENGINES: dict[EngineName, Engine] = {
    "pico": Pico(),
    "espeak": Espeak(),
    "jtalk": OpenJtalk(),
    "rhvoice": RHVoice(),
}


def _guises(
    name: str, accent: str, pitches: Sequence[float] = _PITCHES, sizes: Sequence[float] = _SIZES
) -> list[Voice]:
    """The people that one voice becomes."""
    return [
        Voice(f"{name}-p{100 * pitch:.0f}-s{100 * size:.0f}", accent, pitch, size)
        for pitch, size in product(pitches, sizes)
    ]


def find_voices(engine: Engine, language: str) -> list[Voice]:
    """Return the voices of a language.

    Raises LanguageError where the engine has none, OptionError where its program is not installed.
    """
    if language not in engine.languages:
        spoken = [name for name, other in ENGINES.items() if language in other.languages]
        instead = f"; {' and '.join(spoken)} can" if spoken else ""
        raise LanguageError(f"{engine.program} does not speak {language!r}{instead}")
    if shutil.which(engine.program) is None:
        raise OptionError(f"the program {engine.program} is not on PATH: install the package {engine.package}")
    voices = engine.voices(language)
    if not voices:
        raise OptionError(f"{engine.program} has no voice: install the package {engine.package}")
    return voices


def speak(engine: Engine, text: str, voice: Voice, tempo: float) -> np.ndarray:
    """Return the samples of a sentence, float32 at 16 kHz.

    Raises AudioError where the program fails or writes nothing.
    """
    with tempfile.TemporaryDirectory(prefix="whisfusion-", dir=memory_folder(_ROOM)) as folder:
        samples, rate = _run(engine, text, voice, tempo, Path(folder) / "spoken.wav")
    if samples.ndim != 1 or not samples.any():
        raise AudioError(f"{engine.program} wrote silence")
    return resample(samples, Fraction(SAMPLE_RATE, rate) / Fraction(voice.size).limit_denominator(100))


def _run(engine: Engine, text: str, voice: Voice, tempo: float, wav: Path) -> tuple[np.ndarray, int]:
    import soundfile

    # Played `size` times as fast afterwards, so that it has to be spoken as much slower.
    command = engine.command(text, voice, tempo / voice.size, wav)
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=_SECONDS_TO_SPEAK, check=False)
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            raise AudioError(f"{engine.program} ended with status {done.returncode}: {said[-200:]}")
        return soundfile.read(wav, dtype="float32")
    except subprocess.TimeoutExpired:
        raise AudioError(f"{engine.program} did not end within {_SECONDS_TO_SPEAK} s") from None
    except (soundfile.SoundFileError, OSError) as error:
        raise AudioError(f"{engine.program} wrote no sound: {error}") from None


def resample(samples: np.ndarray, ratio: Fraction) -> np.ndarray:
    """Return `samples` as `ratio` times as many, band-limited: through the spectrum, with nothing but numpy."""
    if ratio == 1:
        return samples
    grains = -(-(len(samples) + round(_GUARD_SECONDS * SAMPLE_RATE)) // (_GRAIN * ratio.denominator))
    before, after = (_GRAIN * grains * part for part in (ratio.denominator, ratio.numerator))
    band = min(before, after) // 2 + 1
    fade = np.minimum(np.linspace(1, 0, band) / _FADE, 1)
    spectrum = np.fft.rfft(samples, before)[:band] * (0.5 - 0.5 * np.cos(np.pi * fade)) * (after / before)
    changed = np.fft.irfft(spectrum, after)[: round(len(samples) * ratio)]
    return np.clip(changed, -1, 1).astype(np.float32)
