"""Every clip's log-mel frames at every speed, on the device, as one table that training steps index into.

Frames are float16: a spectrogram lies between -1.5 and about 2, where bfloat16 rounds eight times as coarsely.

Letters: C clips, V speeds, N frames of the bank (samples of a clip while it is decoded), M mel bins, B clips of a
group, F frames of a clip.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion.audio import SAMPLE_RATE
from whisfusion.data.batch import Failure
from whisfusion.data.decode import Decoded, decode_all
from whisfusion.data.filters import Progress
from whisfusion.data.speed import change_speed, length_at_speed
from whisfusion.data.utterance import Utterance
from whisfusion.mel import FRAMES_PER_SECOND, HOP, MAX_SAMPLES, TAIL_SAMPLES, clip_frames, log_mel_of_padded

DTYPE = torch.float16
SPEEDS = (0.9, 1.0, 1.1)


@dataclass(frozen=True)
class Bank:
    """Frames of C clips at V speeds: log-mel, each clip's as in `log_mel` of its own window, or what is heard in it."""

    frames_NM: Tensor
    """float16, on the device. Frame 0 is zeros: what lies beyond a clip."""
    speeds: tuple[float, ...]
    utterances: tuple[Utterance, ...]
    """The C clips that could be read; their durations are those of the decoded samples."""
    firsts_VC: np.ndarray
    """int64: where each clip's frames begin."""
    counts_VC: np.ndarray
    """int64: how many they are, the tail of silence included; 0 where the clip is over 30 s at that speed."""
    peaks_VC: np.ndarray
    """float32: the largest value of each clip, from which Whisper's floor follows."""
    failures: tuple[Failure, ...]
    """Clips that could not be read, or are too long."""
    per_second: int = FRAMES_PER_SECOND
    """Frames of a second."""

    @property
    def tail(self) -> int:
        """Frames of the silence after each clip."""
        return self.per_second * TAIL_SAMPLES // SAMPLE_RATE

    def only(self, clips: Sequence[int]) -> "Bank":
        """The bank of some of its clips, over the same frames."""
        chosen = list(clips)
        return replace(
            self,
            utterances=tuple(self.utterances[clip] for clip in chosen),
            firsts_VC=self.firsts_VC[:, chosen],
            counts_VC=self.counts_VC[:, chosen],
            peaks_VC=self.peaks_VC[:, chosen],
        )


def bank_bytes(utterances: Sequence[Utterance], *, n_mels: int, speeds: Sequence[float] = SPEEDS) -> int:
    """Device memory that a bank of `utterances` takes."""
    return (1 + _expected_frames(utterances, _with_one(speeds))) * n_mels * DTYPE.itemsize


def build_bank(
    utterances: Sequence[Utterance],
    *,
    n_mels: int,
    speeds: Sequence[float] = SPEEDS,
    device: str | torch.device = "cpu",
    workers: int = 0,
    progress: Progress | None = None,
) -> Bank:
    """Decode all clips in `workers` processes (0: in this one) and make their spectrograms on `device`.

    Speed 1 is always among `speeds`: it serves what fits no other. Clips that do not decode, or last over 30 s, are
    left out and named in `failures`. `progress` is told of clips.
    Worker processes import the main module anew, so a script that asks for them needs the usual
    `if __name__ == "__main__":`.
    """
    builder = _Builder(utterances, n_mels, _with_one(speeds), torch.device(device))
    done = 0
    for group in decode_all(utterances, workers=workers):
        builder.add(group)
        done += len(group.clips_B) + len(group.failures)
        if progress is not None:
            progress(done, len(utterances))
    return builder.bank()


def _with_one(speeds: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted({1.0, *speeds}))


def _expected_frames(utterances: Sequence[Utterance], speeds: Sequence[float]) -> int:
    lengths = [round(utterance.duration * SAMPLE_RATE) for utterance in utterances]
    return sum(clip_frames(length_at_speed(n, speed)) for n in lengths for speed in speeds)


class _Builder:
    """Takes groups of decoded clips and fills the bank."""

    def __init__(
        self, utterances: Sequence[Utterance], n_mels: int, speeds: tuple[float, ...], device: torch.device
    ) -> None:
        self.utterances, self.n_mels, self.speeds = utterances, n_mels, speeds
        size = 1 + _expected_frames(utterances, speeds)
        self.frames_NM = torch.zeros(size, n_mels, dtype=DTYPE, device=device)
        self.end = 1
        shape = len(speeds), len(utterances)
        self.firsts_VC = np.zeros(shape, dtype=np.int64)
        self.counts_VC = np.zeros(shape, dtype=np.int64)
        self.peaks_VC = np.zeros(shape, dtype=np.float32)
        self.lengths_C = np.zeros(len(utterances), dtype=np.int64)
        self.failures: list[Failure] = []

    def add(self, group: Decoded) -> None:
        self.failures += [Failure(*failure) for failure in group.failures]
        for clip, n in zip(group.clips_B.tolist(), group.lengths_B.tolist(), strict=True):
            if n > MAX_SAMPLES:
                reason = f"lasts {n / SAMPLE_RATE:.1f} s: cut it into windows of at most 30 s"
                self.failures.append(Failure(self.utterances[clip].id, reason))
            else:
                self.lengths_C[clip] = n
        # Room for the tail, and for what a change of speed lets ring.
        samples_BN = F.pad(torch.from_numpy(group.samples_BN).to(self.frames_NM.device), (0, TAIL_SAMPLES))
        for row, speed in enumerate(self.speeds):
            fits = [i for i, n in enumerate(group.lengths_B.tolist()) if length_at_speed(n, speed) <= MAX_SAMPLES]
            if fits:
                self._add(row, group.clips_B[fits], group.lengths_B[fits].tolist(), samples_BN[fits])

    def _add(self, row: int, clips_B: np.ndarray, lengths: list[int], samples_BN: Tensor) -> None:
        device, speed = samples_BN.device, self.speeds[row]
        counts_B = np.array([clip_frames(length_at_speed(n, speed)) for n in lengths])
        changed_BN = change_speed(samples_BN, lengths, speed)
        width = int(counts_B.max()) * HOP
        changed_BN = F.pad(changed_BN, (0, max(0, width - changed_BN.shape[1])))[:, :width]
        frames_B = torch.from_numpy(counts_B).to(device)
        mel_BFM = log_mel_of_padded(changed_BN, frames_B, n_mels=self.n_mels).transpose(1, 2)
        own_BF = torch.arange(mel_BFM.shape[1], device=device) < frames_B[:, None]
        peaks_B = mel_BFM.masked_fill(~own_BF[..., None], -torch.inf).amax((1, 2))

        ends_B = self.end + np.cumsum(counts_B)
        self._make_room(int(ends_B[-1]))
        self.frames_NM[self.end : ends_B[-1]] = mel_BFM[own_BF].to(DTYPE)
        self.firsts_VC[row, clips_B] = ends_B - counts_B
        self.counts_VC[row, clips_B] = counts_B
        self.peaks_VC[row, clips_B] = peaks_B.cpu().numpy()
        self.end = int(ends_B[-1])

    def _make_room(self, end: int) -> None:
        """Clips may last longer than their manifest says."""
        missing = end - len(self.frames_NM)
        if missing > 0:
            more_NM = self.frames_NM.new_zeros(missing + len(self.frames_NM) // 8, self.n_mels)
            self.frames_NM = torch.cat((self.frames_NM, more_NM))

    def bank(self) -> Bank:
        everything = Bank(
            frames_NM=self.frames_NM[: self.end],
            speeds=self.speeds,
            utterances=tuple(
                replace(utterance, duration=n / SAMPLE_RATE)
                for utterance, n in zip(self.utterances, self.lengths_C.tolist(), strict=True)
            ),
            firsts_VC=self.firsts_VC,
            counts_VC=self.counts_VC,
            peaks_VC=self.peaks_VC,
            failures=tuple(self.failures),
        )
        return everything.only(np.flatnonzero(self.lengths_C).tolist())
