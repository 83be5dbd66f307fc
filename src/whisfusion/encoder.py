"""Whisper's audio encoder in plain torch. It is frozen: it hears, and never learns here.

Letters: B clips, M mel bins, F mel frames, T encoder positions (F / 2), D width.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisfusion.blocks import Stack, whisper_block


@dataclass(frozen=True)
class EncoderConfig:
    """Shape of a Whisper encoder; the defaults are large-v3's."""

    mels: int = 128
    width: int = 1280
    layers: int = 32
    heads: int = 20
    positions: int = 1500


class WhisperEncoder(nn.Module):
    """Log-mel frames to audio features: two convolutions (the second halves the rate), then transformer blocks."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.mels, config.width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, kernel_size=3, stride=2, padding=1)
        self.positions = nn.Parameter(sinusoids(config.positions, config.width))
        self.blocks = Stack(
            whisper_block(config.width, config.heads, hidden=4 * config.width, cross=False)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> "WhisperEncoder":
        """Stay in evaluation mode, whatever the model around it does."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, mel_BMF: Tensor, frames_B: Tensor | None = None) -> Tensor:
        """Features (B, T, D) of `mel_BMF`, T = F / 2.

        With `frames_B`, each clip's own (even) number of frames, a clip's features are those it would have alone: what
        lies beyond is not attended to, and comes out as zeros.
        """
        x_BDT = F.gelu(self.conv2(F.gelu(self.conv1(mel_BMF))))
        # Contiguous, or every sum and norm from here on would work on the convolution's layout, several times slower.
        x_BTD = x_BDT.transpose(1, 2).contiguous() + self.positions[: x_BDT.shape[-1]]
        heard_BT = None if frames_B is None else audio_mask(frames_B, x_BTD.shape[1])
        mask = None if heard_BT is None else heard_BT[:, None, None, :]
        for block in self.blocks:
            x_BTD = block(x_BTD, self_mask=mask)
        x_BTD = self.norm(x_BTD)
        return x_BTD if heard_BT is None else x_BTD * heard_BT[..., None]


def audio_mask(frames_B: Tensor, positions: int) -> Tensor:
    """Which of the encoder's first `positions` belong to clips of `frames_B` mel frames: (B, T), boolean."""
    return torch.arange(positions, device=frames_B.device) < frames_B[:, None] // 2


def sinusoids(length: int, width: int, longest: float = 10_000.0) -> Tensor:
    """Whisper's fixed position table: sines in the first half of the channels, cosines in the second."""
    steps = width // 2
    scale = torch.exp(-math.log(longest) / (steps - 1) * torch.arange(steps, dtype=torch.float32))
    angle = torch.arange(length, dtype=torch.float32)[:, None] * scale
    return torch.cat((angle.sin(), angle.cos()), dim=1)
