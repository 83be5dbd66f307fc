"""Clips in which nobody speaks: silence, noise and music with an empty text, so that they decode to nothing.

All of it is computed, from numbers drawn at random; no recording goes in.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.corpus import CODINGS, Coding, MadeClip, encode, write_corpus
from whisfusion.data.filters import Progress
from whisfusion.data.manifest import Utterance
from whisfusion.data.parallel import in_processes
from whisfusion.errors import OptionError
from whisfusion.tokenizer import LANGUAGES, PAPER_LANGUAGES

DATASET = "nothing"
_SECONDS = (1.0, 20.0)
_LOUDEST, _QUIETEST = -3.0, -60.0
# Some sounds lie over a second one.
_MIXED_SHARE = 0.3
_NYQUIST = SAMPLE_RATE / 2


@dataclass(frozen=True)
class NothingOptions:
    """What to make."""

    hours: float = 1.0
    """How much in all."""
    languages: tuple[str, ...] = PAPER_LANGUAGES
    """Nothing is the same in all of them, but a clip has a prompt: they take turns."""
    coding: Coding = "flac"
    """How the audio is stored."""
    seed: int = 42
    """What is drawn."""
    workers: int = 0
    """Processes; 0 is one for each core."""

    def __post_init__(self) -> None:
        """Report every option that is out of range."""
        problems = [f"the tokenizer has no language {code!r}" for code in self.languages if code not in LANGUAGES]
        if not self.languages:
            problems.append("`languages` must name at least one")
        if not self.hours > 0:
            problems.append(f"`hours` must be more than 0, not {self.hours:g}")
        if self.coding not in CODINGS:
            problems.append(f"`coding` is one of {', '.join(CODINGS)}, not {self.coding!r}")
        if self.seed < 0 or self.workers < 0:
            problems.append("`seed` and `workers` must not be negative")
        OptionError.collect(problems)


@dataclass(frozen=True)
class NothingReport:
    """What was made."""

    manifest: Path
    utterances: list[Utterance]

    def render(self) -> str:
        """Return a summary for people."""
        hours = sum(u.duration for u in self.utterances) / 3600
        kinds = Counter(u.speaker for u in self.utterances)
        listed = ", ".join(f"{kind} {count:,}" for kind, count in sorted(kinds.items()))
        return f"{self.manifest}: {len(self.utterances):,} clips, {hours:,.2f} h ({listed})"


def make_nothing(
    out: str | os.PathLike, options: NothingOptions | None = None, *, progress: Progress | None = None
) -> NothingReport:
    """Write clips of 1 to 20 s without speech into the folder `out`, as tar shards and nothing.jsonl.

    The manifest's speaker is the kind of sound. `progress` is told of seconds. What is made follows from the options
    alone, not from the number of workers; a script that asks for more than one needs `if __name__ == "__main__":`.
    """
    options = options or NothingOptions()
    folder = Path(os.path.abspath(out))
    make = partial(_make, languages=options.languages, coding=options.coding, seed=options.seed)
    made = in_processes(make, count(), workers=options.workers or os.cpu_count() or 1)
    utterances = write_corpus(folder, DATASET, options.coding, _up_to(made, options.hours * 3600, progress))
    return NothingReport(folder / f"{DATASET}.jsonl", utterances)


def _up_to(clips: Iterator[MadeClip], wanted: float, progress: Progress | None) -> Iterator[MadeClip]:
    seconds = 0.0
    for clip in clips:
        yield clip
        seconds += clip.seconds
        if progress is not None:
            progress(min(round(seconds), round(wanted)), round(wanted))
        if seconds >= wanted:
            return


def _make(number: int, *, languages: tuple[str, ...], coding: Coding, seed: int) -> MadeClip:
    rng = np.random.default_rng([seed, number])
    # As many octaves of duration are equally likely: short pauses are the most common kind of nothing.
    seconds = float(np.exp(rng.uniform(*np.log(_SECONDS))))
    kind, samples = make_sound(round(seconds * SAMPLE_RATE), rng=rng)
    language = languages[number % len(languages)]
    return MadeClip(encode(samples, coding), len(samples) / SAMPLE_RATE, "", language, kind)


def make_sound(n_samples: int, *, rng: np.random.Generator) -> tuple[str, np.ndarray]:
    """Return a kind of sound, drawn from `SOUNDS`, and its samples: float32 in [-1, 1] at 16 kHz."""
    kind = str(rng.choice(list(SOUNDS)))
    samples = SOUNDS[kind](n_samples, rng)
    if kind != "silence" and rng.random() < _MIXED_SHARE:
        other = SOUNDS[str(rng.choice(list(SOUNDS)))](n_samples, rng)
        samples = _to_peak(samples) + _decibels(rng.uniform(-30, 0)) * _to_peak(other)
    level = _decibels(rng.uniform(_QUIETEST, _LOUDEST))
    return kind, (_to_peak(samples) * level).astype(np.float32)


def _silence(n: int, rng: np.random.Generator) -> np.ndarray:
    return np.zeros(n)


def _hiss(n: int, rng: np.random.Generator) -> np.ndarray:
    """White, pink or brown noise, and what lies between."""
    slope = rng.uniform(0, 2)
    return _shaped(n, lambda hertz: np.maximum(hertz, 20) ** (-slope / 2), rng)


def _hum(n: int, rng: np.random.Generator) -> np.ndarray:
    """Mains: 50 or 60 Hz with harmonics, over a little hiss."""
    mains = rng.choice([50.0, 60.0]) * rng.uniform(0.995, 1.005)
    partials = [(k * mains, rng.uniform(0, 1) / k) for k in range(1, rng.integers(3, 20))]
    return _tones(n, partials, rng) + _decibels(rng.uniform(-50, -15)) * _to_peak(_hiss(n, rng))


def _crackle(n: int, rng: np.random.Generator) -> np.ndarray:
    """Clicks of a bad contact or an old record: short bursts at random times."""
    impulses = np.zeros(n)
    count = max(1, rng.poisson(rng.uniform(0.5, 40) * n / SAMPLE_RATE))
    impulses[rng.integers(0, n, count)] = rng.exponential(1, count) * rng.choice([-1, 1], count)
    length = int(rng.uniform(0.0005, 0.02) * SAMPLE_RATE)
    ring = rng.standard_normal(length) * np.exp(-5 * np.arange(length) / length)
    return _convolve(impulses, ring) + _decibels(rng.uniform(-60, -25)) * _to_peak(_hiss(n, rng))


def _air(n: int, rng: np.random.Generator) -> np.ndarray:
    """Wind, a fan, traffic, a far crowd: bands of noise that swell, slowly or as fast as syllables."""
    total = np.zeros(n)
    for _ in range(rng.integers(1, 5)):
        centre = np.exp(rng.uniform(np.log(80), np.log(6000)))
        width = rng.uniform(0.15, 1.2)
        band = _shaped(n, lambda hertz, c=centre, w=width: np.exp(-((np.log2(np.maximum(hertz, 1) / c) / w) ** 2)), rng)
        total += rng.uniform(0.2, 1) * _to_peak(band) * _swell(n, np.exp(rng.uniform(np.log(0.1), np.log(8))), rng)
    return total


def _tone(n: int, rng: np.random.Generator) -> np.ndarray:
    """Whistles, beeps, dialling and sirens: one or two tones, steady, gliding or switched on and off."""
    time = np.arange(n) / SAMPLE_RATE
    total = np.zeros(n)
    for _ in range(rng.integers(1, 3)):
        start = np.exp(rng.uniform(np.log(100), np.log(4000)))
        glide = rng.choice([0.0, rng.uniform(-1, 1)])
        wobble = rng.choice([0.0, rng.uniform(0, 0.2)]) * np.sin(2 * np.pi * rng.uniform(0.2, 6) * time)
        hertz = start * 2 ** (glide * time / time[-1] + wobble)
        total += rng.uniform(0.3, 1) * np.sin(2 * np.pi * np.cumsum(np.minimum(hertz, 7000)) / SAMPLE_RATE)
    if rng.random() < 0.5:
        period, share = rng.uniform(0.15, 3), rng.uniform(0.2, 0.8)
        total *= _smooth((time % period) < share * period, 0.005)
    return total


def _music(n: int, rng: np.random.Generator) -> np.ndarray:
    """Chords, arpeggio, bass and drums at a steady beat, in a key, with instruments that are sums of sines."""
    beat = 60 / rng.uniform(60, 170)
    beats = int(n / SAMPLE_RATE / beat) + 1
    key = rng.uniform(40, 56)
    scale = np.array(rng.choice([[0, 2, 4, 5, 7, 9, 11], [0, 2, 3, 5, 7, 8, 10], [0, 2, 4, 7, 9, 12, 14]]))
    degrees = rng.integers(0, len(scale), 4)
    chords = [key + np.array([_degree(scale, d + third) for third in (0, 2, 4)]) for d in degrees]
    parts = rng.random(4) < 0.6
    parts[rng.integers(4)] = True
    total = np.zeros(n)
    timbres = [rng.uniform(0, 1, 6) / np.arange(1, 7) ** rng.uniform(0.5, 2) for _ in range(3)]
    fade = rng.uniform(0.5, 6)
    kick, snare, hat = _drums(rng)
    for number in range(beats):
        chord, at = chords[number // 4 % 4], number * beat
        if parts[0] and number % 4 == 0:
            for note in chord:
                _add(total, at, 0.3 * _note(12 + note, 4 * beat, timbres[0], fade / 4))
        if parts[1]:
            for half in range(2):
                note = chord[(2 * number + half) % 3] + rng.choice([12, 24])
                _add(total, at + half * beat / 2, 0.4 * _note(note, beat / 2, timbres[1], fade))
        if parts[2]:
            _add(total, at, 0.6 * _note(chord[0] - 12 * (chord[0] > 45), beat, timbres[2], fade))
        if parts[3]:
            _add(total, at, snare if number % 2 else kick)
            _add(total, at + beat / 2, hat)
    return total


def _drums(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    time = np.arange(int(0.25 * SAMPLE_RATE)) / SAMPLE_RATE
    kick = np.sin(2 * np.pi * (50 * time + 6 * (1 - np.exp(-30 * time)))) * np.exp(-rng.uniform(10, 25) * time)
    noise = rng.standard_normal(len(time))
    snare = 0.4 * noise * np.exp(-rng.uniform(15, 40) * time)
    hat = 0.2 * np.diff(noise, prepend=0) * np.exp(-rng.uniform(40, 90) * time)
    return kick, snare, hat


def _degree(scale: np.ndarray, degree: int) -> float:
    octave, place = divmod(int(degree), len(scale))
    return float(scale[place] + 12 * octave)


def _note(pitch: float, seconds: float, timbre: np.ndarray, fade: float) -> np.ndarray:
    """A note of MIDI number `pitch`: harmonics as strong as `timbre` says, that die away `fade` times a second."""
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    hertz = 440 * 2 ** ((pitch - 69) / 12)
    wave = sum(
        strength * np.sin(2 * np.pi * k * hertz * time)
        for k, strength in enumerate(timbre, start=1)
        if k * hertz < _NYQUIST
    )
    return wave * np.exp(-fade * time) * np.minimum(1, 100 * np.minimum(time, seconds - time).clip(0))


def _add(total: np.ndarray, seconds: float, sound: np.ndarray) -> None:
    """Add `sound` from there on, as far as there is room."""
    start = int(seconds * SAMPLE_RATE)
    room = total[start : start + len(sound)]
    room += sound[: len(room)]


def _tones(n: int, partials: list[tuple[float, float]], rng: np.random.Generator) -> np.ndarray:
    time = np.arange(n) / SAMPLE_RATE
    return sum(
        (strength * np.sin(2 * np.pi * (hertz * time + rng.random())) for hertz, strength in partials), np.zeros(n)
    )


def _shaped(n: int, strength: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Noise of a spectrum: `strength` of frequencies in hertz."""
    # A length with small prime factors, for which the transform is fast.
    length = -(-n // 2048) * 2048
    hertz = np.fft.rfftfreq(length, 1 / SAMPLE_RATE)
    spectrum = strength(hertz) * (rng.standard_normal(len(hertz)) + 1j * rng.standard_normal(len(hertz)))
    return np.fft.irfft(spectrum, length)[:n]


def _swell(n: int, hertz: float, rng: np.random.Generator) -> np.ndarray:
    """A strength that wanders between 0 and 1, about `hertz` times a second."""
    points = rng.random(int(n / SAMPLE_RATE * hertz) + 2)
    floor = rng.random()
    return floor + (1 - floor) * np.interp(np.arange(n) * hertz / SAMPLE_RATE, np.arange(len(points)), points)


def _smooth(gate: np.ndarray, seconds: float) -> np.ndarray:
    width = int(seconds * SAMPLE_RATE)
    return np.convolve(gate, np.full(width, 1 / width), mode="same")


def _convolve(samples: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    length = -(-(len(samples) + len(kernel)) // 2048) * 2048
    return np.fft.irfft(np.fft.rfft(samples, length) * np.fft.rfft(kernel, length), length)[: len(samples)]


def _to_peak(samples: np.ndarray) -> np.ndarray:
    peak = np.abs(samples).max()
    return samples / peak if peak > 0 else samples


def _decibels(level: float) -> float:
    return 10 ** (level / 20)


Sound = Callable[[int, np.random.Generator], np.ndarray]
SOUNDS: dict[str, Sound] = {
    "silence": _silence,
    "hiss": _hiss,
    "hum": _hum,
    "crackle": _crackle,
    "air": _air,
    "tone": _tone,
    "music": _music,
}
"""Kinds of sound without speech, each of so many samples and any scale."""
