import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import threading
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch

from whisfusion.audio import SAMPLE_RATE, load_audio
from whisfusion.errors import AudioError

SECONDS = 3.0
TONE = 440
# Any codec's delay and padding, and the resampler's edges.
LENGTH_TOLERANCE = 0.1
# Frequency of the strongest bin of a spectrum of 3 s.
FREQUENCY_TOLERANCE = 2.0


def tone(rate: int, channels: int = 1) -> np.ndarray:
    """(samples,) or (samples, channels); half scale."""
    mono = 0.5 * np.sin(2 * np.pi * TONE * np.arange(int(SECONDS * rate)) / rate)
    return (mono if channels == 1 else np.stack([mono] * channels, axis=1)).astype(np.float32)


def assert_is_the_tone(samples: np.ndarray) -> None:
    assert samples.dtype == np.float32
    assert samples.ndim == 1
    assert len(samples) / 16_000 == pytest.approx(SECONDS, abs=LENGTH_TOLERANCE)
    spectrum = np.abs(np.fft.rfft(samples))
    assert np.argmax(spectrum) * 16_000 / len(samples) == pytest.approx(TONE, abs=FREQUENCY_TOLERANCE)
    assert np.sqrt((samples**2).mean()) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)


def encode(samples: np.ndarray, rate: int, format: str, subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def encode_with_av(format: str, codec: str | None, *, video: float = 0, path: Path | None = None) -> bytes:
    """A container with the tone in it (unless codec is None) and so many seconds of black video.

    With a path, it is written there, with its index first, as for the web.
    """
    file = io.BytesIO()
    options = {"movflags": "+faststart"} if path else {}
    with av.open(str(path) if path else file, "w", format=format, options=options) as container:
        if codec:
            audio = container.add_stream(codec, rate=48_000, layout="stereo")
        if video:
            picture = container.add_stream("libvpx" if format == "webm" else "mpeg4", rate=10)
            picture.width = picture.height = 64
            picture.pix_fmt = "yuv420p"
            for i in range(int(10 * video)):
                frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))
                frame.pts = i
                container.mux(picture.encode(frame))
            container.mux(picture.encode())
        if codec:
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(tone(48_000, 2).T), "fltp", "stereo")
            frame.sample_rate = 48_000
            frame.pts = 0
            resampler = av.AudioResampler(audio.format, "stereo", 48_000, audio.frame_size)
            for part in [*resampler.resample(frame), *resampler.resample(None)]:
                container.mux(audio.encode(part))
            container.mux(audio.encode())
    return path.read_bytes() if path else file.getvalue()


ENCODERS = {
    "wav": lambda: encode(tone(44_100, 2), 44_100, "WAV"),
    "wav of floats": lambda: encode(tone(16_000), 16_000, "WAV", "FLOAT"),
    "wav of bytes": lambda: encode(tone(8_000), 8_000, "WAV", "PCM_U8"),
    "wav of 24 bits, six channels": lambda: encode(tone(48_000, 6), 48_000, "WAV", "PCM_24"),
    "aiff": lambda: encode(tone(22_050), 22_050, "AIFF"),
    "flac": lambda: encode(tone(96_000, 2), 96_000, "FLAC"),
    "mp3": lambda: encode(tone(44_100, 2), 44_100, "MP3"),
    "mp3 with a tag": lambda: b"ID3\x04\x00\x00\x00\x00\x01\x00" + bytes(128) + sound("mp3"),
    "ogg vorbis": lambda: encode(tone(32_000), 32_000, "OGG", "VORBIS"),
    "ogg opus": lambda: encode(tone(16_000), 16_000, "OGG", "OPUS"),
    "m4a": lambda: encode_with_av("ipod", "aac"),
    "mp4 with video": lambda: encode_with_av("mp4", "aac", video=3),
    "webm": lambda: encode_with_av("webm", "libopus"),
    "webm with video": lambda: encode_with_av("webm", "libopus", video=3),
    "mkv with packed samples": lambda: encode_with_av("matroska", "pcm_s16le"),
}


@cache
def sound(kind: str) -> bytes:
    return ENCODERS[kind]()


@pytest.mark.parametrize("kind", ENCODERS)
def test_every_format_rate_and_channel_count(kind, tmp_path: Path):
    data = sound(kind)
    assert_is_the_tone(load_audio(data))
    # The content counts, whatever the name says.
    path = tmp_path / "tone.raw"
    path.write_bytes(data)
    assert_is_the_tone(load_audio(path))


def test_16_khz_mono_passes_unchanged(tmp_path: Path):
    samples = tone(16_000)
    soundfile.write(tmp_path / "tone.wav", samples, 16_000, subtype="FLOAT")
    np.testing.assert_array_equal(load_audio(str(tmp_path / "tone.wav")), samples)
    np.testing.assert_array_equal(load_audio(samples), samples)


def test_open_files_and_pipes(tmp_path: Path):
    data = sound("m4a")
    assert_is_the_tone(load_audio(io.BytesIO(data)))
    path = tmp_path / "tone.m4a"
    path.write_bytes(data)
    with path.open("rb") as file:
        assert_is_the_tone(load_audio(file))

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    assert_is_the_tone(load_audio(pipe))
    writer.join()


def test_standard_input():
    program = "from whisfusion.audio import load_audio; print(len(load_audio('-')))"
    run = subprocess.run(
        [sys.executable, "-c", program], input=sound("wav"), capture_output=True, check=True, timeout=60
    )
    assert int(run.stdout) == SECONDS * 16_000


def test_a_wav_written_to_a_pipe_may_not_know_its_size():
    data = sound("wav")
    at = data.index(b"data") + 4
    assert_is_the_tone(load_audio(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :]))


def test_a_flac_written_to_a_pipe_may_not_know_its_length():
    data = bytearray(sound("flac"))
    # STREAMINFO's count of samples is the lower half of byte 21 and the next four; zero says unknown.
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    assert_is_the_tone(load_audio(bytes(data)))


@pytest.mark.parametrize(
    ("dtype", "scale", "offset"),
    [
        (np.int16, 2**15, 0),
        (np.int32, 2**31, 0),
        (np.uint8, 2**7, 2**7),
        (np.float64, 1, 0),
        (np.float16, 1, 0),
    ],
)
def test_arrays_of_every_type_are_scaled(dtype, scale, offset):
    samples = load_audio((tone(16_000).astype(np.float64) * scale + offset).astype(dtype))
    assert samples.dtype == np.float32
    # One step of eight bits.
    np.testing.assert_allclose(samples, tone(16_000), atol=1 / 128)


@pytest.mark.parametrize("make", [np.asarray, torch.tensor], ids=["array", "tensor"])
def test_channels_lie_on_the_shorter_axis_and_are_averaged(make):
    left, right = tone(16_000), np.zeros_like(tone(16_000))
    stereo = np.stack([left, right])
    np.testing.assert_allclose(load_audio(make(stereo)), left / 2)
    np.testing.assert_allclose(load_audio(make(stereo.T)), left / 2)
    np.testing.assert_array_equal(load_audio(make(left[None])), left)
    np.testing.assert_array_equal(load_audio(make(left[:, None])), left)


def test_arrays_at_another_rate_are_resampled():
    assert_is_the_tone(load_audio(tone(44_100), sample_rate=44_100))
    assert_is_the_tone(load_audio(torch.from_numpy(tone(8_000)), 8_000))


def test_tensors_that_numpy_does_not_know():
    samples = load_audio(torch.from_numpy(tone(16_000)).bfloat16().requires_grad_())
    np.testing.assert_allclose(samples, tone(16_000), atol=2**-9)


def cut(kind: str, share: float) -> bytes:
    data = sound(kind)
    return data[: int(len(data) * share)]


@pytest.mark.parametrize("share", [0.8, 0.5])
@pytest.mark.parametrize(
    "kind",
    ["wav", "aiff", "flac", "mp3", "mp3 with a tag", "ogg vorbis", "ogg opus", "webm", "webm with video"],
)
def test_a_file_that_ends_too_soon_is_not_read_as_if_whole(kind, share):
    with pytest.raises(AudioError, match="is cut short or damaged"):
        load_audio(cut(kind, share))


def test_an_m4a_that_ends_too_soon_is_not_read_as_if_whole(tmp_path: Path):
    index_first = encode_with_av("mp4", "aac", path=tmp_path / "tone.m4a")
    assert_is_the_tone(load_audio(index_first))
    with pytest.raises(AudioError, match="is cut short or damaged"):
        load_audio(index_first[: len(index_first) // 2])
    # With its index last, nothing can be read at all.
    with pytest.raises(AudioError, match="is not a sound file, or is damaged"):
        load_audio(cut("m4a", 0.5))


def test_what_decodes_is_read_where_nothing_was_announced():
    """An mp3 recorded from a stream has no header that counts its frames."""
    data = sound("mp3")
    second_frame = data.index(data[:2], 100)
    samples = load_audio(data[second_frame : len(data) // 2])
    assert 0.4 * SECONDS < len(samples) / 16_000 < 0.6 * SECONDS


def test_a_few_bytes_of_an_mp3_are_a_clear_error():
    with pytest.raises(AudioError):
        load_audio(sound("mp3")[:100])


def test_an_mp3_damaged_all_over_is_a_clear_error():
    data = bytearray(sound("mp3"))
    data[600:-600] = np.random.default_rng(0).bytes(len(data) - 1200)
    with pytest.raises(AudioError):
        load_audio(bytes(data))


def test_libraries_print_nothing(capfd):
    for data in (cut("mp3", 0.5), cut("m4a", 0.5), cut("flac", 0.5), b"no sound " * 100):
        with pytest.raises(AudioError):
            load_audio(data)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.wav", b"", "is empty"),
        ("text.wav", b"This was never a sound.\n" * 50, "is not a sound file"),
        ("text.mp3", b"This was never a sound.\n" * 50, "is not a sound file"),
        ("text.raw", b"This was never a sound.\n" * 50, "has no audio stream"),
        ("one byte.ogg", b"O", "is not a sound file"),
        ("zero.wav", encode(np.zeros(0), 16_000, "WAV"), "has no samples"),
        ("silent.mp4", encode_with_av("mp4", None, video=1), "has no audio stream"),
        (
            "nan.wav",
            encode(np.array([0, 0, np.nan]), 16_000, "WAV", "FLOAT"),
            "NaN or infinite, the first at 0.000",
        ),
        ("slow.wav", encode(tone(16_000), 10, "WAV"), "sampling rate of 10 Hz"),
    ],
    # Encoded files hold the time, and names of tests must not.
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_files_get_a_sentence_that_names_them(name, content, sentence, tmp_path: Path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(AudioError, match=sentence) as error:
        load_audio(path)
    assert str(path) in str(error.value)
    assert error.value.__cause__ is None


def test_paths_that_lead_nowhere(tmp_path: Path):
    with pytest.raises(AudioError, match=r"lost\.wav: there is no such file"):
        load_audio(tmp_path / "lost.wav")
    with pytest.raises(AudioError, match="is a folder, not a sound file"):
        load_audio(tmp_path)
    with pytest.raises(AudioError, match="cannot be opened"):
        load_audio("nul\0.wav")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (np.zeros(0, np.float32), "has no samples"),
        (np.zeros((2, 0), np.float32), "has no samples"),
        (torch.zeros(0), "has no samples"),
        (np.array([0, np.nan, 0], np.float32), "NaN or infinite"),
        (np.array([[0.0, np.inf], [0.0, -np.inf]]), "NaN or infinite"),
        (torch.tensor([0.0, float("inf")]), "NaN or infinite"),
        (np.array([1e300]), "NaN or infinite"),
        (np.zeros((2, 3, 4), np.float32), r"shape \(2, 3, 4\)"),
        (np.array(1.0), r"shape \(\)"),
        (np.zeros(9, np.int64), "samples of type int64; use"),
        (np.zeros(9, bool), "samples of type bool; use"),
        (np.array(["a"]), "samples of type <U1; use"),
        (b"", "is empty"),
        (io.BytesIO(), "is empty"),
        (io.StringIO("words"), "cannot be read; give a path"),
        ([0.0, 0.1], "cannot be read; give a path"),
        (None, "cannot be read; give a path"),
    ],
)
def test_bad_samples_and_sources_get_a_sentence(source, sentence):
    with pytest.raises(AudioError, match=sentence):
        load_audio(source)


@pytest.mark.parametrize("rate", [0, -16_000])
def test_a_rate_that_cannot_be(rate):
    with pytest.raises(AudioError, match=f"sampling rate of {rate} Hz"):
        load_audio(tone(16_000), sample_rate=rate)


def test_a_rate_for_a_file_is_refused_rather_than_ignored():
    with pytest.raises(AudioError, match="sample_rate is for arrays"):
        load_audio(sound("wav"), sample_rate=8_000)


def test_a_header_that_announces_more_than_memory_holds():
    data = bytearray(sound("flac"))
    data[22:26] = struct.pack(">I", 0xFFFF_FFFF)
    with pytest.raises(AudioError, match="is cut short or damaged"):
        load_audio(bytes(data))


ROOT = Path(__file__).parent.parent


def test_the_example_clips_are_what_their_manifest_says():
    for line in (ROOT / "examples" / "examples.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        samples = load_audio(ROOT / "examples" / record["audio"])
        assert len(samples) / 16_000 == pytest.approx(record["duration"], abs=1e-3)


def test_the_tiny_clips_are_what_their_manifest_says():
    folder = ROOT / "tests" / "data" / "tiny"
    records = [json.loads(line) for line in (folder / "tiny-en.jsonl").read_text().splitlines()]
    assert len({record["text"] for record in records}) == len(records) == 72
    with tarfile.open(folder / "tiny-en-000.tar") as shard:
        for record in records:
            member = shard.extractfile(record["audio"])
            assert member is not None
            samples = load_audio(member)
            assert 1.0 <= record["duration"] <= 2.0
            assert len(samples) / 16_000 == pytest.approx(record["duration"], abs=1e-3)


@pytest.mark.parametrize("seconds", [1.3, 70.0])
def test_opus_is_neither_late_nor_cut(tmp_path, seconds):
    """The codec's lead-in is skipped: a click stays where it was, also beyond the first block that is read."""
    path = tmp_path / "click.opus"
    samples = np.zeros(int(seconds * SAMPLE_RATE), dtype=np.float32)
    clicks = [int(0.5 * SAMPLE_RATE), len(samples) - int(0.3 * SAMPLE_RATE)]
    samples[clicks] = 0.9
    soundfile.write(path, samples, SAMPLE_RATE, format="OGG", subtype="OPUS")
    heard = load_audio(path)
    assert np.array_equal(heard, soundfile.read(path, dtype="float32")[0])
    for click in clicks:
        around = np.abs(heard[click - 400 : click + 400])
        assert abs(int(around.argmax()) - 400) <= 2
