"""Arithmetic of a training step, counted by hand: multiply-adds of matrix products, two FLOPs each.

Recomputed activations do not count: they are a way to save memory, not work that the model asks for.
"""

import math
import time

import torch

from whisfusion.ctc import CLASSES
from whisfusion.decoder import DecoderConfig
from whisfusion.encoder import EncoderConfig
from whisfusion.memory import SPELLER_REACH

_BACKWARD = 2
"""A backward pass has two products for each of the forward pass."""
_PRODUCTS = 5
"""Matrix products in a row that are timed together."""


def encoder_flops(config: EncoderConfig, utterances: int, frames: int) -> float:
    """Forward pass over windows of `frames` mel frames; there is no backward pass."""
    width, positions = config.width, frames // 2
    convolutions = 3 * config.mels * width * frames + 3 * width * width * positions
    block = positions * 12 * width * width + 2 * positions * positions * width
    return 2.0 * utterances * (convolutions + config.layers * block)


def decoder_flops(
    config: DecoderConfig, utterances: int, positions: int, audio_positions: int, predicted: int
) -> float:
    """Forward and backward pass; `predicted` are the positions, of all utterances, whose loss is computed."""
    width, audio = config.width, -(-audio_positions // config.stride)
    matrices = 2 if config.block == "whisper" else 3
    block = positions * (6 * width * width + matrices * width * config.hidden)
    attention = 2 * positions * (positions + audio) * width
    keys_values = 2 * audio * width * width
    projection = audio * (config.audio_width * width + width * width) if config.block == "paper" else 0
    anchors = 0
    if config.anchors:
        slices = config.anchor_parts * positions
        anchors = audio * config.audio_width * (5 * 256 + slices) + slices * config.audio_width * width
    adapter = 0
    if config.adapter:
        heard = config.audio_width
        adapter = audio * heard * ((2 * config.stride + 2) * heard + config.stride * CLASSES)
        adapter += config.adapter * audio * heard * (12 * heard + 2 * audio)
        if config.reach:
            adapter += config.adapter * audio * heard * (3 * heard + config.reach)
        if config.spells_every:
            earlier = (config.adapter - 1) // config.spells_every
            adapter += earlier * audio * heard * 2 * config.stride * CLASSES
    if config.speller:
        heard = config.audio_width
        adapter += audio * heard * (config.speller * (6 * heard + SPELLER_REACH) + config.stride * CLASSES)
    forward = utterances * (config.layers * (block + attention + keys_values) + projection + anchors + adapter)
    forward += predicted * width * config.vocab_size
    draft = 0
    if config.drafts:
        draft = utterances * (config.layers * (block + attention) + positions * width * config.vocab_size)
        forward += utterances * positions * width * width
    return 2.0 * ((1 + _BACKWARD) * forward + draft)


def matrix_peak(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """FLOP/s that a large matrix product reaches on a GPU; None elsewhere, where nobody asks for it."""
    return measured_peak(device, dtype) if device.type == "cuda" else None


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that a large matrix product reaches on any device, measured in a fraction of a second."""
    size = 8192 if device.type == "cuda" else 512
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    best = math.inf
    for _ in range(10):
        _wait(device)
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            a @ b
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 * _PRODUCTS / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
