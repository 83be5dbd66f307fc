"""`--dry-run`: what a run would hear, how long it would take and what memory it would need."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from whisfusion.data.bank import bank_bytes
from whisfusion.data.sampler import DrawnStep
from whisfusion.data.shares import render_shares, share_rows
from whisfusion.data.table import text_table
from whisfusion.decoder import DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.mel import FRAMES_PER_SECOND, MAX_FRAMES
from whisfusion.skeleton import skeleton
from whisfusion.train.config import Recipe
from whisfusion.train.display import duration
from whisfusion.train.flops import decoder_flops, encoder_flops, measured_peak
from whisfusion.train.prepare import Job

_UTILISATION = 0.4
"""Share of the matrix peak that a step reaches where decoding audio does not hold it up."""
_PLANNED = 200
"""Steps of the first epoch whose shapes are looked at."""
_BYTES_PER_PARAMETER = 4 + 4 + 8 + 4
"""Weight, gradient, two moments, average."""

# Depths of the published encoders by their width, so that an estimate needs no weights.
_LAYERS = {384: 4, 512: 6, 768: 12, 1024: 24, 1280: 32}


@dataclass(frozen=True)
class Estimate:
    """What a run would take, on each of its ranks."""

    steps: int
    steps_per_epoch: int
    padding: float
    """Share of the audio windows that is padding."""
    utterances_per_step: float
    parameters: int
    flops_per_step: float
    """Over all ranks."""
    seconds: float
    """Of the whole run, at 40 % of the device's matrix peak."""
    memory_gb: float
    """On each rank, for the largest of its steps."""
    timed: bool = False
    """Whether the steps follow from the time, and not the other way round."""

    def render(self) -> str:
        """A table for people."""
        pace = f"at {100 * _UTILISATION:.0f} % of this device's matrix peak"
        time = f"about {duration(self.seconds)} {pace}"
        if self.timed:
            time = f"{duration(self.seconds)}, as asked: the steps are those that fit {pace}"
        rows = [
            ("steps", f"{self.steps:,} ({self.steps / self.steps_per_epoch:.1f} epochs of {self.steps_per_epoch:,})"),
            ("utterances a step", f"{self.utterances_per_step:,.0f}"),
            ("padding", f"{100 * self.padding:.0f} % of the audio windows"),
            ("parameters trained", f"{self.parameters / 1e6:,.1f} M"),
            ("arithmetic", f"{self.flops_per_step / 1e12:,.3g} TFLOP a step"),
            ("time", time),
            ("memory", f"about {self.memory_gb:,.1f} GB on each rank"),
        ]
        return text_table(("estimate", ""), rows)


def render_jobs(jobs: Sequence[Job], world: int) -> str:
    """For each run: shares, what was left out, and the estimate. All that a dry run prints."""
    parts = []
    for job in jobs:
        sampler = job.recipe.sampler
        rows = share_rows(job.filtered.kept, language_alpha=sampler.language_alpha, dataset_alpha=sampler.dataset_alpha)
        parts += [f"Stage {job.folder.name}, from {job.init_from or 'its start'}"] if job.home is not None else []
        parts += [*job.notes, render_shares(rows), job.filtered.render(), estimate(job, world).render()]
    return "\n\n".join([*parts, "Nothing was trained: leave out --dry-run to start."])


def estimate(job: Job, world: int = 1) -> Estimate:
    """Work out what a run takes from the shapes of its steps."""
    recipe, sampler = job.recipe, job.sampler()
    steps_per_epoch = sampler.steps_per_epoch()
    planned = list(islice(sampler.steps_from(), min(_PLANNED, steps_per_epoch)))
    encoder = recipe.random_encoder or published_encoder(recipe.decoder.audio_width)
    with skeleton():
        parameters = sum(p.numel() for p in DiffusionDecoder(recipe.decoder).parameters())
        heard = sum(p.numel() for p in WhisperEncoder(encoder).parameters())
    tokens = float(job.filtered.tokens.mean()) + 1
    flops = sum(_flops(recipe, encoder, step, tokens) for step in planned) / len(planned)
    peak = measured_peak(job.device, torch.bfloat16 if recipe.precision == "bf16" else torch.float32)
    fixed = parameters * _BYTES_PER_PARAMETER / world + heard * (2 if recipe.precision == "bf16" else 4)
    if recipe.feeder == "bank":
        fixed += bank_bytes(job.filtered.kept, n_mels=encoder.mels, speeds=recipe.sampler.speeds)
    largest = max(_activation_bytes(recipe, step, tokens) for step in planned) / (world * recipe.accumulate)
    seconds_per_step = flops / (peak * _UTILISATION * world)
    steps = job.steps
    if recipe.minutes is not None:
        steps = max(1, int(60 * recipe.minutes / seconds_per_step))
    return Estimate(
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        padding=sampler.padding(),
        utterances_per_step=sum(step.total_rows for step in planned) / len(planned),
        parameters=parameters,
        flops_per_step=flops,
        seconds=steps * seconds_per_step if recipe.minutes is None else 60 * recipe.minutes,
        memory_gb=(fixed + largest) / 1e9,
        timed=recipe.minutes is not None,
    )


def published_encoder(width: int) -> EncoderConfig:
    """The shape of the published Whisper encoder of this width."""
    nearest = min(_LAYERS, key=lambda known: abs(known - width))
    return EncoderConfig(
        mels=128 if width == 1280 else 80, width=width, layers=_LAYERS[nearest], heads=max(1, width // 64)
    )


def _shape(recipe: Recipe, step: DrawnStep) -> tuple[int, int]:
    """Audio positions and canvas positions of a step's rows."""
    frames = MAX_FRAMES if recipe.window == "padded" else min(MAX_FRAMES, round(step.window * FRAMES_PER_SECOND))
    return frames // 2, recipe.decoder.canvas.positions(step.window)


def _predicted(recipe: Recipe, rows: int, tokens: float) -> int:
    _, low, high = recipe.masks[0]
    return round(rows * tokens * (low + high) / 2)


def _flops(recipe: Recipe, encoder: EncoderConfig, step: DrawnStep, tokens: float) -> float:
    rows = step.total_rows
    audio, positions = _shape(recipe, step)
    trained = decoder_flops(recipe.decoder, rows, positions, audio, _predicted(recipe, rows, tokens))
    return encoder_flops(encoder, rows, 2 * audio) + trained


def _activation_bytes(recipe: Recipe, step: DrawnStep, tokens: float) -> float:
    """What the backward pass needs of the forward pass, roughly, over all ranks."""
    decoder, rows = recipe.decoder, step.total_rows
    audio, positions = _shape(recipe, step)
    wide = 2 if recipe.precision == "bf16" else 4
    # The residual stream is float32; a block that is not recomputed keeps some sixteen of its products too.
    kept = 4 * decoder.width
    if not recipe.checkpoint_activations:
        kept += wide * (14 * decoder.width + 4 * decoder.hidden)
    keys_values = wide * 3 * audio * decoder.width
    encoder_peak = wide * 8 * audio * decoder.audio_width
    logits = _predicted(recipe, rows, tokens) * decoder.vocab_size * (wide + 8)
    return rows * (decoder.layers * (positions * kept + keys_values) + encoder_peak) + logits
