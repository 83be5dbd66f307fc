"""Any sound, from a file, a pipe or an array, to 16 kHz mono float32."""

import os
import struct
import sys
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from whisfusion.errors import AudioError

if TYPE_CHECKING:
    import av
    import torch
    from typing_extensions import TypeIs

SAMPLE_RATE = 16_000

# Sizes from here up are what a writer to a pipe puts down, since it cannot know the size.
_UNKNOWN_SIZE = 0x7FFF_0000
_UNKNOWN_FRAMES = 0x7FFF_FFFF_FFFF_FFFF
# A damaged header may give any rate; outside these there is no speech to be had from it.
_RATES = range(1_000, 1_000_001)
_BLOCK = 1 << 20
_MAX_OGG_PAGE = 65_307
# FFmpeg's names of formats that state their duration; that of others it only guesses.
_STATE_DURATION = frozenset({"mp4", "webm"})
# A container rounds its duration, and its last packet may not have one.
_DURATION_TOLERANCE = 0.5


def load_audio(
    source: "str | os.PathLike[str] | bytes | BinaryIO | np.ndarray | torch.Tensor",
    sample_rate: int | None = None,
) -> np.ndarray:
    """Samples of any sound as 1-D float32 at 16 kHz; channels are averaged.

    source: a path, "-" for standard input, the bytes of a file, an open binary file, or samples. Samples are
        1-D, or 2-D with the channels on the shorter axis; uint8, int16 and int32 are scaled to [-1, 1).
    sample_rate: rate of samples in an array or tensor, 16 kHz if not given. Files carry their own.

    Raises AudioError, with a sentence that names the source, if it cannot be read, holds no samples, holds
    samples that are NaN or infinite, or ends before the sound that it announces does.
    """
    name = _name(source)
    if _is_tensor(source):
        source = _to_numpy(source)
    if isinstance(source, np.ndarray):
        mono_N = _mono(name, _channels_first(name, source))
        rate = SAMPLE_RATE if sample_rate is None else sample_rate
    elif sample_rate is not None:
        raise AudioError(f"{name}: sample_rate is for arrays; a sound file carries its own")
    else:
        with _open(name, source) as stream:
            mono_N, rate = _decode(name, stream)
    if rate not in _RATES:
        raise AudioError(f"{name} has a sampling rate of {rate} Hz; it must lie between 1 kHz and 1 MHz")
    finite_N = np.isfinite(mono_N)
    if not finite_N.all():
        seconds = int(np.argmin(finite_N)) / rate
        raise AudioError(f"{name} has samples that are NaN or infinite, the first at {seconds:.3f} s")
    samples_N = _resample(mono_N, rate)
    if len(samples_N) == 0:
        raise AudioError(f"{name} has no samples")
    return samples_N


def _name(source: object) -> str:
    """What to call the source in a sentence."""
    if isinstance(source, str | os.PathLike):
        return "standard input" if source == "-" else str(source)
    if isinstance(source, bytes):
        return f"audio of {len(source)} bytes"
    file_name = getattr(source, "name", None)
    return file_name if isinstance(file_name, str) else f"the {type(source).__name__}"


def _is_tensor(source: object) -> "TypeIs[torch.Tensor]":
    # Whoever holds a tensor has imported torch; whoever reads a file need not wait for it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.Tensor)


def _to_numpy(samples: "torch.Tensor") -> np.ndarray:
    samples = samples.detach().cpu()
    # numpy has no bfloat16.
    return (samples.float() if samples.is_floating_point() else samples).numpy()


def _channels_first(name: str, samples: np.ndarray) -> np.ndarray:
    if samples.ndim not in (1, 2):
        raise AudioError(f"{name} has shape {samples.shape}; samples are 1-D, or 2-D with one axis of channels")
    if samples.size == 0:
        raise AudioError(f"{name} has no samples")
    samples_CN = np.atleast_2d(samples)
    return samples_CN.T if samples_CN.shape[0] > samples_CN.shape[1] else samples_CN


def _mono(name: str, samples_CN: np.ndarray) -> np.ndarray:
    """Mean over the C channels as float32, with integers scaled to [-1, 1)."""
    dtype = samples_CN.dtype
    if dtype == np.uint8:
        samples_CN = (samples_CN.astype(np.float32) - 128) / 128
    elif dtype in (np.int16, np.int32):
        samples_CN = samples_CN.astype(np.float32) / -float(np.iinfo(dtype).min)
    elif dtype.kind != "f":
        raise AudioError(f"{name} has samples of type {dtype}; use float, int16, int32 or uint8")
    # What overflows or is infinite here gets a sentence of its own from load_audio.
    with np.errstate(over="ignore", invalid="ignore"):
        mono_N = samples_CN[0] if len(samples_CN) == 1 else samples_CN.mean(axis=0)
        return np.ascontiguousarray(mono_N, np.float32)


def _open(name: str, source: "str | os.PathLike[str] | bytes | BinaryIO") -> BinaryIO:
    """A seekable stream of a file that is there and not empty."""
    try:
        stream = _stream(source)
        empty = stream.seek(0, os.SEEK_END) == 0
    except FileNotFoundError:
        raise AudioError(f"{name}: there is no such file") from None
    except IsADirectoryError:
        raise AudioError(f"{name} is a folder, not a sound file") from None
    except OSError as error:
        raise AudioError(f"{name} cannot be opened: {error.strerror or error}") from None
    except (AttributeError, TypeError):
        raise AudioError(
            f"{name} cannot be read; give a path, bytes, a file opened in binary mode, an array or a tensor"
        ) from None
    except ValueError as error:
        raise AudioError(f"{name!r} cannot be opened: {error}") from None
    if empty:
        stream.close()
        raise AudioError(f"{name} is empty")
    return stream


def _stream(source: "str | os.PathLike[str] | bytes | BinaryIO") -> BinaryIO:
    if isinstance(source, bytes):
        return BytesIO(source)
    if isinstance(source, str | os.PathLike):
        if source != "-":
            stream = open(source, "rb")  # noqa: SIM115 - load_audio closes it
            if stream.seekable():
                return stream
            with stream:  # A pipe, from <(...) in a shell.
                return BytesIO(stream.read())
        source = sys.stdin.buffer
    return BytesIO(source.read())


def _decode(name: str, stream: BinaryIO) -> tuple[np.ndarray, int]:
    """Mono samples and their rate."""
    stream.seek(0)
    head = stream.read(2)
    # libsndfile reads mp3 too, but prints warnings that cannot be turned off.
    is_mp3 = head == b"ID" or (head[:1] == b"\xff" and head[1:] >= b"\xe0")
    if not is_mp3 and (decoded := _decode_with_soundfile(name, stream)):
        return decoded
    return _decode_with_av(name, stream)


def _decode_with_soundfile(name: str, stream: BinaryIO) -> tuple[np.ndarray, int] | None:
    """Mono samples and their rate, or None for what libsndfile does not know."""
    import soundfile

    stream.seek(0)
    try:
        file = soundfile.SoundFile(stream)
    except (soundfile.LibsndfileError, TypeError):  # TypeError: a name that ends in .raw
        return None
    with file:
        if file.frames == _UNKNOWN_FRAMES:  # FLAC from a pipe, in which libsndfile cannot seek.
            return None
        blocks: list[np.ndarray] = []
        try:
            # Without this, libsndfile leaves in the samples of Opus that its format says to skip at the start.
            file.seek(0)
            # In blocks, since a damaged header may announce more than there is memory for.
            while not blocks or len(blocks[-1]) == _BLOCK:
                blocks.append(_mono(name, file.read(_BLOCK, dtype="float32", always_2d=True).T))
        except soundfile.LibsndfileError:
            raise _cut_short(name) from None
        mono_N = np.concatenate(blocks)
        if len(mono_N) < file.frames or _bytes_missing(stream):
            raise _cut_short(name)
        return mono_N, file.samplerate


def _bytes_missing(stream: BinaryIO) -> bool:
    """Whether a WAV, AIFF or Ogg file ends inside its samples, which libsndfile does not tell."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    kind = stream.read(4)
    if kind == b"OggS":
        stream.seek(max(0, size - _MAX_OGG_PAGE))
        tail = stream.read()
        page = tail[tail.rfind(b"OggS") :]
        # A page is 27 bytes, the last of which counts its segments, then their sizes, then the segments.
        return len(page) < 27 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]])
    if kind not in (b"RIFF", b"FORM"):
        return False
    header, samples = ("<4sI", b"data") if kind == b"RIFF" else (">4sI", b"SSND")
    at = 12
    while at + 8 <= size:
        stream.seek(at)
        chunk, length = struct.unpack(header, stream.read(8))
        at += 8
        if chunk == samples:
            return length < _UNKNOWN_SIZE and at + length > size
        at += length + length % 2
    return False


def _decode_with_av(name: str, stream: BinaryIO) -> tuple[np.ndarray, int]:
    """Mono samples and their rate, by FFmpeg."""
    import av

    mp3_frames = _mp3_frames(stream)
    stream.seek(0)
    try:
        container = av.open(stream, mode="r", metadata_errors="ignore")
    except (av.FFmpegError, ValueError):
        raise AudioError(f"{name} is not a sound file, or is damaged: no decoder knows its format") from None
    with container:
        if not container.streams.audio:
            raise AudioError(f"{name} has no audio stream")
        audio = container.streams.audio[0]
        blocks: list[np.ndarray] = []
        rates: set[int] = set()
        packets = damaged = 0
        end = 0.0
        try:
            # Packets of all streams: a video may go on when its sound has ended.
            for packet in container.demux():
                if packet.pts is not None and packet.time_base is not None:
                    end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
                if packet.stream.index != audio.index:
                    continue
                packets += packet.size > 0
                try:
                    frames = audio.decode(packet)
                except av.FFmpegError:
                    damaged += 1
                    continue
                blocks.extend(_mono(name, _channels(frame)) for frame in frames)
                rates.update(frame.sample_rate for frame in frames)
        except av.FFmpegError:
            raise _cut_short(name) from None
        announced = 0.0
        if _STATE_DURATION.intersection(container.format.name.split(",")) and container.duration:
            announced = (container.duration + max(0, container.start_time or 0)) / av.time_base

    if not blocks:
        raise AudioError(f"{name} holds no sound that can be decoded")
    if len(rates) > 1:
        raise AudioError(f"{name} changes its sampling rate on the way; convert it to WAV first")
    mono_N, rate = np.concatenate(blocks), rates.pop()
    # Some encoders count the header as a frame.
    if packets < mp3_frames - 1 or end < announced - _DURATION_TOLERANCE:
        raise _cut_short(name)
    # A stream that was recorded from its middle may start or end in a broken packet.
    if damaged > 2 + packets // 100:
        raise AudioError(f"{name} is damaged: {damaged} of its {packets} packets do not decode")
    return mono_N, rate


def _channels(frame: "av.AudioFrame") -> np.ndarray:
    """Samples as (channels, samples), whichever way FFmpeg laid them out."""
    samples = frame.to_ndarray()
    return samples if frame.format.is_planar else samples.reshape(-1, frame.layout.nb_channels).T


def _mp3_frames(stream: BinaryIO) -> int:
    """Frames that an mp3's Xing or Info header announces; 0 for an mp3 without one and for other files."""
    stream.seek(0)
    tag = stream.read(10)
    start = 0
    if len(tag) == 10 and tag.startswith(b"ID3"):
        # An ID3 tag writes its size in four bytes of seven bits.
        start = 10 + sum(byte << shift for byte, shift in zip(tag[6:], (21, 14, 7, 0), strict=True))
    stream.seek(start)
    frame = stream.read(64)
    at = max(frame.find(b"Xing"), frame.find(b"Info"))
    if frame[:1] != b"\xff" or not 0 < at <= 36 or len(frame) < at + 12 or not frame[at + 7] & 1:
        return 0
    return int.from_bytes(frame[at + 8 : at + 12], "big")


def _resample(mono_N: np.ndarray, rate: int) -> np.ndarray:
    if rate == SAMPLE_RATE or len(mono_N) == 0:
        return mono_N
    import soxr

    return soxr.resample(mono_N, rate, SAMPLE_RATE)


def _cut_short(name: str) -> AudioError:
    return AudioError(f"{name} is cut short or damaged: it ends before the sound that it announces does")
