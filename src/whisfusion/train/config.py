"""A recipe: everything that decides what a training run computes. Where it runs and on what is not in it."""

from dataclasses import dataclass, field
from typing import Literal

from whisfusion.data.augment import SpecAugment
from whisfusion.data.epoch import SamplerOptions
from whisfusion.data.filters import FilterOptions
from whisfusion.decoder import DecoderConfig
from whisfusion.diffusion import MaskRatios
from whisfusion.encoder import EncoderConfig
from whisfusion.errors import OptionError
from whisfusion.mel import TAIL_SAMPLES, Window
from whisfusion.pdd import PDDOptions

MaskStage = tuple[float, float, float]
"""(start, low, high): from this share of the run on, mask ratios are drawn from U(low, high)."""


@dataclass(frozen=True)
class Recipe:
    """What a run computes. The defaults are the paper's first stage; recipes.py has the named ones."""

    # The model.
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    """Shape of the decoder, with its dropout. A model to start from brings its own."""
    encoder: str = "whisper-large-v3"
    """The Whisper whose encoder hears, as `whisfusion pull` knows it, or a folder of its weights."""
    random_encoder: EncoderConfig | None = None
    """A seeded random encoder of this shape in its place: for tests and for measuring speed."""
    start: Literal["random", "whisper"] = "random"
    """"random": the paper's initialisation. "whisper": what fits of the same Whisper's decoder is copied."""
    anchor_size: float = 0.02
    """How large anchors start; a token embedding is 0.02."""
    window: Window = "padded"
    """Whether the encoder hears clips padded to 30 s or their own duration."""
    text_style: Literal["normalised", "written"] = "normalised"
    """Whether labels pass the scorer's normaliser, as in the paper, or stay sentences."""

    # What is heard.
    filters: FilterOptions = field(default_factory=FilterOptions)
    """Which utterances are used; its text_style is the recipe's."""
    sampler: SamplerOptions = field(default_factory=lambda: SamplerOptions(utterances=2048))
    """How large a step is and what is drawn into it; its seed and margin follow from the recipe."""
    accumulate: int = 1
    """Micro-batches that a rank computes one after the other for a step."""
    feeder: Literal["stream", "bank", "features"] = "stream"
    """"stream": audio is decoded while training. "bank": all spectrograms lie on the device. "features": so does what
    the adapter hears in every clip, once and for all; for a speller that learns alone."""
    noise: float = 0.0
    """Share of the utterances that get white noise, 10 to 40 dB below the speech; stream only."""
    spec_augment: SpecAugment = field(default_factory=SpecAugment)
    """Bands and spans of the spectrogram that are blanked out."""

    # The objective.
    learns: Literal["all", "adapter", "speller"] = "all"
    """"adapter", "speller": it alone learns, by its CTC loss, and the decoder is not run; the dev set is read as it
    spells."""
    masks: tuple[MaskStage, ...] = ((0.0, 0.0, 1.0),)
    """(start, low, high): from this share of the run on, mask ratios are drawn from U(low, high)."""
    ahead: float = 0.0
    """Added to attention scores of later positions at the start of a run: -6 starts as causal as Whisper was."""
    ahead_share: float = 0.3
    """Share of the run over which that fades to 0."""
    draft_share: float = 0.6
    """Share of the utterances that see what the decoder makes of an empty canvas, where it takes drafts."""
    own_share: float = 0.5
    """Share of those whose unmasked tokens are the draft's own, mistakes and all."""
    label_smoothing: float = 0.0
    """Share of the target probability that is spread over the vocabulary."""
    quantity_weight: float = 1.0
    """Weight of the anchors' token count in the loss, where the decoder has anchors."""
    ctc_weight: float = 0.3
    """Weight of the adapter's CTC loss, where the decoder has an adapter."""
    placing_weight: float = 0.0
    """Weight of how far the anchors' tokens are from where the adapter's CTC hears them."""
    consistency_weight: float = 0.0
    """Weight of how far what CTC spells is apart in two draws of augmentation (CR-CTC, where it is 0.2), each of which
    is heard: for an adapter or a speller that learns alone."""
    language_share: float = 0.0
    """Share of the utterances whose language token is masked too, and predicted."""
    language_weight: float = 1.0
    """Weight of that prediction in the loss."""

    # The optimiser.
    epochs: float | None = 12
    """Length of the run in epochs, each as many draws as there are utterances; or give `steps` or `minutes`."""
    steps: int | None = None
    """Length of the run in optimizer steps; or give `epochs` or `minutes`."""
    minutes: float | None = None
    """The run takes so long, all in all: as many steps as fit; or give `epochs` or `steps`."""
    learning_rate: float = 2e-4
    """The peak, reached after the warm-up."""
    fresh_rate: float = 1.0
    """How many times as fast adapter and anchors learn: they start from nothing where the rest may start trained."""
    warmup_steps: int = 2000
    """Steps over which the learning rate rises linearly from 0."""
    floor: float = 0.1
    """Share of the peak that the cosine ends at."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's two decay rates."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices and embeddings; norms, biases and other vectors have none."""
    clip: float = 1.0
    """The longest that a step's gradient may be, in L2 norm."""
    ema_decay: float = 0.999
    """Share of the weight average that a step keeps."""
    ema_ramp: int = 0
    """With r > 0 step s keeps min(ema_decay, s / (s + r)): the average forgets the start of a short run."""
    seed: int = 42
    """Everything random follows from it and the step."""

    # The machine.
    precision: Literal["auto", "bf16", "fp32"] = "bf16"
    """"bf16": matrix products in bfloat16 over float32 weights. "fp32": float32 throughout. "auto": bf16 on a GPU."""
    compile: bool = False
    """Compile encoder and decoder blocks; pays where shapes repeat."""
    graphs: bool = False
    """Replay the work of a step as a CUDA graph, for batches of few shapes; on one GPU alone."""
    checkpoint_activations: bool = False
    """Recompute each decoder block in the backward pass instead of keeping its activations."""

    # What is watched.
    log_every: int = 50
    """Steps between lines of the log; the device is read then and at no other time."""
    eval_every: int = 2000
    """Steps between evaluations on the dev set; there is one at the end in any case."""
    save_every: int = 1000
    """Steps between checkpoints; there is one at the end in any case."""
    dev_clips: int = 200
    """The most clips of the dev set that an evaluation reads."""
    dev: PDDOptions = field(default_factory=PDDOptions)
    """How the dev set is decoded."""

    def __post_init__(self) -> None:
        """Report every field that is out of range."""
        problems = [
            f"{name} must be at least {least}, not {getattr(self, name)}"
            for name, least in _LEAST.items()
            if not getattr(self, name) >= least
        ]
        problems += [
            f"{name} must be between 0 and 1, not {getattr(self, name)}"
            for name in (
                "floor",
                "ema_decay",
                "ahead_share",
                "language_share",
                "draft_share",
                "own_share",
                "noise",
                "label_smoothing",
            )
            if not 0 <= getattr(self, name) <= 1
        ]
        problems += [
            f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
            for name, allowed in _CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        lengths = [length for length in (self.epochs, self.steps, self.minutes) if length is not None]
        if len(lengths) != 1:
            problems.append("give the length of a run as one of epochs, steps and minutes")
        if not all(length > 0 for length in lengths):
            problems.append("a run must have a positive number of epochs, steps or minutes")
        if not (self.learning_rate > 0 and self.fresh_rate > 0 and self.clip > 0):
            problems.append("learning_rate, fresh_rate and clip must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            problems.append(f"betas must be two numbers in [0, 1), not {self.betas}")
        problems += _mask_problems(self.masks)
        if not -100 <= self.ahead <= 0:
            problems.append(f"ahead must be 0 or less, and at least -100, not {self.ahead}")
        if self.steps is not None and self.warmup_steps >= self.steps > 0:
            problems.append(f"warmup_steps {self.warmup_steps} must be fewer than the {self.steps} steps")
        if self.random_encoder is not None and self.start == "whisper":
            problems.append("start 'whisper' needs a real encoder: leave out random_encoder")
        if self.random_encoder is not None and self.random_encoder.width != self.decoder.audio_width:
            problems.append(
                f"decoder.audio_width {self.decoder.audio_width} is not the random encoder's "
                f"width {self.random_encoder.width}"
            )
        if self.learns == "adapter" and not self.decoder.adapter:
            problems.append("learns 'adapter' needs a decoder with an adapter: give decoder.adapter")
        if self.learns == "speller" and not self.decoder.adapter:
            problems.append("learns 'speller' needs a model with an adapter")
        elif self.learns == "speller" and not self.decoder.speller:
            problems.append("learns 'speller' needs a decoder with a speller: give decoder.speller")
        if self.consistency_weight and self.learns == "all":
            problems.append("consistency_weight is for an adapter or a speller that learns alone: give learns")
        if self.consistency_weight and not self.spec_augment.changes:
            problems.append("consistency_weight needs draws of augmentation that differ: give spec_augment")
        if self.feeder == "features":
            problems += self._feature_problems()
        if self.feeder == "bank" and self.noise:
            problems.append("noise is for the stream feeder: a bank holds spectrograms")
        if self.feeder == "bank" and self.window != "clip":
            problems.append("the bank feeder has clip windows alone: give window clip, or feeder stream")
        OptionError.collect(problems)

    def _feature_problems(self) -> list[str]:
        problems = []
        if self.learns != "speller":
            problems.append("the features feeder is for a speller that learns alone: give learns speller")
        if self.window != "clip":
            problems.append("the features feeder has clip windows alone: give window clip, or feeder stream")
        augment = self.spec_augment
        if self.noise or augment.bands or augment.warp or augment.tilt or augment.mix or self.sampler.speeds != (1.0,):
            problems.append("the features feeder hears clips as they are: of spec_augment give spans alone")
        return problems

    @property
    def margin(self) -> float:
        """Seconds of silence that the encoder's window adds to a clip."""
        return TAIL_SAMPLES / 16_000 if self.window == "clip" else 0.0


_LEAST = {
    "accumulate": 1,
    "warmup_steps": 0,
    "quantity_weight": 0,
    "language_weight": 0,
    "ctc_weight": 0,
    "placing_weight": 0,
    "consistency_weight": 0,
    "weight_decay": 0,
    "ema_ramp": 0,
    "seed": 0,
    "log_every": 1,
    "eval_every": 1,
    "save_every": 1,
    "dev_clips": 0,
}
_CHOICES = {
    "start": ("random", "whisper"),
    "learns": ("all", "adapter", "speller"),
    "window": ("padded", "clip"),
    "text_style": ("normalised", "written"),
    "feeder": ("stream", "bank", "features"),
    "precision": ("auto", "bf16", "fp32"),
}


def _mask_problems(masks: tuple[MaskStage, ...]) -> list[str]:
    if not masks or any(len(stage) != 3 for stage in masks):
        return [f"masks must be (start, low, high) for each stage, not {masks}"]
    problems = []
    starts = [stage[0] for stage in masks]
    if starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1:
        problems.append(f"the stages of masks must start at 0 and rise below 1, not {starts}")
    for _, low, high in masks:
        try:
            MaskRatios(low, high)
        except OptionError as error:
            problems.append(str(error))
    return problems
