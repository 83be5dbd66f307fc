"""Samples to Whisper's log-mel spectrogram, in batches in which no clip knows its neighbours.

Shapes: B clips, N samples, M mel bins, F frames of 10 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from whisfusion.audio import SAMPLE_RATE

N_FFT = 400
HOP = 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
MAX_SAMPLES = 30 * SAMPLE_RATE
MAX_FRAMES = MAX_SAMPLES // HOP
# A clip's own window ends in this much digital silence: the model hears that the speech is over.
TAIL_SAMPLES = 2_560

Window = Literal["padded", "clip"]


@dataclass(frozen=True)
class Mel:
    """Log-mel spectrograms of a batch, and how much of each is its clip's own."""

    mel_BMF: Tensor
    """float32; 0.0 beyond each clip's frames, as the encoder's convolutions pad a clip on its own."""
    frames_B: Tensor
    """int64: frames of each clip's window. Even, as the encoder halves them."""


def log_mel(
    samples: Sequence[np.ndarray | Tensor],
    *,
    n_mels: int,
    window: Window = "padded",
    device: str | torch.device = "cpu",
) -> Mel:
    """Log-mel of several clips, each the same alone as in any batch: to the bit on a CPU, to 1e-6 on a GPU.

    samples: 1-D float clips at 16 kHz, each of at most 30 s.
    n_mels: 80, or 128 for large-v3 and turbo.
    window: "padded" fills each clip with zeros to 30 s, exactly as Whisper does; "clip" gives each its own
        window of `clip_frames`.

    Raises ValueError for no clips, a clip that is not 1-D or is over 30 s, another n_mels, another window.
    """
    _check_clips(samples)
    if window not in ("padded", "clip"):
        raise ValueError(f'window must be "padded" or "clip", not {window!r}')

    frames = [MAX_FRAMES if window == "padded" else clip_frames(len(clip)) for clip in samples]
    samples_BN = torch.zeros(len(samples), max(frames) * HOP, device=device)
    for row_N, clip in zip(samples_BN, samples, strict=True):
        # torch.tensor copies, so that a read-only array is no cause for a warning.
        row_N[: len(clip)] = clip if isinstance(clip, Tensor) else torch.tensor(clip, dtype=torch.float32)
    frames_B = torch.tensor(frames, device=device)
    return Mel(log_mel_of_padded(samples_BN, frames_B, n_mels=n_mels), frames_B)


def clip_frames(n_samples: int) -> int:
    """Frames in a clip's own window: its duration and 0.16 s, rounded up to even, at most 30 s."""
    pairs = -(-(n_samples + TAIL_SAMPLES) // (2 * HOP))
    return min(MAX_FRAMES, 2 * pairs)


def log_mel_of_padded(samples_BN: Tensor, frames_B: Tensor, *, n_mels: int) -> Tensor:
    """Log-mel of clips that already lie in one tensor, on its device and without a loop over clips: mel_BMF.

    samples_BN: float, zero beyond each clip; N is a multiple of 160 and gives F = N / 160.
    frames_B: int64, how many frames are each clip's own. Its maximum is taken over these alone, and frames
        beyond them are 0.0.
    """
    device = samples_BN.device
    # Autocast would round the filter bank's product to half precision.
    with torch.autocast(device.type, enabled=False):
        # K = 201 frequencies. The last frame is centred on the sample after the end: Whisper drops it.
        spectrum_BKF = torch.stft(samples_BN.float(), N_FFT, HOP, window=_hann(device), return_complex=True)
        power_BKF = spectrum_BKF[..., :-1].abs().square()
        log_BMF = (_filters(n_mels, device) @ power_BKF).clamp(min=1e-10).log10()

    frame_F = torch.arange(log_BMF.shape[-1], device=device)
    beyond_B1F = (frame_F >= frames_B[:, None])[:, None]
    loudest_B11 = log_BMF.masked_fill(beyond_B1F, -torch.inf).amax(dim=(1, 2), keepdim=True)
    mel_BMF = (torch.maximum(log_BMF, loudest_B11 - 8.0) + 4.0) / 4.0
    return mel_BMF.masked_fill(beyond_B1F, 0.0)


def _check_clips(samples: Sequence[np.ndarray | Tensor]) -> None:
    if len(samples) == 0:
        raise ValueError("there are no clips to make a spectrogram of")
    for i, clip in enumerate(samples):
        if clip.ndim != 1:
            raise ValueError(f"clip {i} has shape {tuple(clip.shape)}; a clip is 1-D (load_audio makes it so)")
        if len(clip) > MAX_SAMPLES:
            raise ValueError(f"clip {i} has {len(clip)} samples; cut it into windows of at most 30 s")


@lru_cache
def _filters(n_mels: int, device: torch.device) -> Tensor:
    """Whisper's mel filter bank, (n_mels, 201)."""
    with files("whisfusion").joinpath("assets/mel_filters.npz").open("rb") as file, np.load(file) as banks:
        name = f"mel_{n_mels}"
        if name not in banks:
            raise ValueError(f"n_mels must be 80 or 128, not {n_mels}")
        # A tensor born in inference mode would stay barred from training for as long as it is cached.
        with torch.inference_mode(False):
            return torch.from_numpy(banks[name]).to(device)


@lru_cache
def _hann(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.hann_window(N_FFT, device=device)
