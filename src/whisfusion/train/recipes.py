"""The named recipes. Each is a function that returns a whole `Recipe`; what is not said is the default."""

from collections.abc import Callable
from dataclasses import replace

from whisfusion.data.augment import SpecAugment
from whisfusion.data.epoch import SamplerOptions
from whisfusion.data.filters import PAPER_FILTERS, FilterOptions
from whisfusion.decoder import Canvas, DecoderConfig
from whisfusion.encoder import EncoderConfig
from whisfusion.pdd import PDDOptions
from whisfusion.train.config import Recipe

HIGH_MASKS = (0.7, 1.0)
"""The range that the paper's second stage narrows to."""


def paper_stage1() -> Recipe:
    """The paper's first stage: 828 M parameters, t ~ U(0, 1), 12 epochs of 2,048 utterances a step."""
    return Recipe(
        filters=PAPER_FILTERS,
        sampler=SamplerOptions(utterances=2048),
        epochs=12,
        learning_rate=2e-4,
        warmup_steps=2000,
        compile=True,
        checkpoint_activations=True,
    )


def paper_stage2() -> Recipe:
    """The paper's second stage, from the first one's averaged weights: t ~ U(0.7, 1), 10 epochs."""
    return replace(paper_stage1(), masks=((0.0, *HIGH_MASKS),), epochs=10, learning_rate=6e-5, warmup_steps=1000)


def paper_stage2_uniform() -> Recipe:
    """The paper's control: the second stage with the mask ratios of the first."""
    return replace(paper_stage2(), masks=paper_stage1().masks)


def tiny() -> Recipe:
    """Learns a few dozen short clips by heart in a minute on two cores: for tests, and to try things out."""
    return Recipe(
        decoder=DecoderConfig(
            layers=2,
            width=64,
            heads=2,
            hidden=128,
            audio_width=64,
            tied=True,
            anchors=True,
            canvas=Canvas(rule="follow", size=64),
        ),
        random_encoder=EncoderConfig(mels=80, width=64, layers=2, heads=2),
        window="clip",
        sampler=SamplerOptions(utterances=16),
        masks=((0.0, 0.3, 1.0),),
        epochs=None,
        steps=220,
        learning_rate=3e-3,
        warmup_steps=20,
        weight_decay=0.0,
        ema_decay=0.95,
        ema_ramp=5,
        precision="fp32",
        log_every=20,
        eval_every=220,
        save_every=110,
        dev_clips=64,
        dev=PDDOptions(candidates=2, steps=3),
    )


def trial() -> Recipe:
    """Six Whisper blocks over Whisper-base's encoder, warm-started: 25 h of English in a few minutes on a GPU."""
    return Recipe(
        decoder=DecoderConfig(
            layers=6,
            width=512,
            heads=8,
            hidden=2048,
            audio_width=512,
            block="whisper",
            tied=True,
            anchors=True,
            canvas=Canvas(rule="follow", size=224),
            dropout=0.1,
        ),
        encoder="whisper-base",
        start="whisper",
        window="clip",
        filters=FilterOptions(include=("en/*",)),
        # One language and 25 h: clips are drawn as often as each other.
        sampler=SamplerOptions(
            seconds=2000,
            shapes=(5.0, 7.0, 10.0, 15.0, 20.0, 30.0),
            join=0.25,
            speeds=(0.9, 1.0, 1.1),
            language_alpha=1.0,
            dataset_alpha=1.0,
        ),
        feeder="bank",
        spec_augment=SpecAugment(bands=2, band_bins=14, spans=2, span_frames=40, span_share=0.1),
        masks=((0.0, 0.0, 1.0), (0.65, *HIGH_MASKS)),
        label_smoothing=0.05,
        epochs=None,
        steps=3000,
        learning_rate=3e-4,
        warmup_steps=300,
        floor=0.03,
        weight_decay=0.01,
        ema_decay=0.9995,
        ema_ramp=20,
        compile=True,
        graphs=True,
        eval_every=500,
        save_every=1000,
        dev=PDDOptions(candidates=5, steps=3, temperature=0.1),
    )


def trial_paper() -> Recipe:
    """The trial with eight of the paper's blocks, started from Whisper's token embeddings alone."""
    return replace(
        trial(),
        decoder=replace(trial().decoder, layers=8, hidden=1408, block="paper", tied=False),
        learning_rate=1e-3,
        weight_decay=0.1,
    )


def base_hearing() -> Recipe:
    """What the bundled model's adapter learns before the decoder joins in: to spell, by CTC alone."""
    joint = base_stage1()
    return replace(
        joint,
        learns="adapter",
        # Every clip is heard twice in a step, each time with much of it blanked out, and is to be spelled alike.
        consistency_weight=0.2,
        spec_augment=replace(joint.spec_augment, spans=10, span_share=0.05),
        sampler=replace(joint.sampler, seconds=1000),
        ctc_weight=1.0,
        fresh_rate=3.0,
        steps=8000,
        floor=0.05,
    )


def base_stage1() -> Recipe:
    """The bundled model's first stage: the trial's decoder above an adapter, eleven languages, written text."""
    return replace(
        trial(),
        decoder=replace(trial().decoder, adapter=4, stride=2, reach=15, spells_every=2, drafts=True),
        # Two hundred hours are learned by heart after a few dozen times: no draw should sound like the last one.
        spec_augment=SpecAugment(
            bands=2, band_bins=16, spans=6, span_frames=40, span_share=0.06, warp=0.08, tilt=6.0, mix=0.15
        ),
        text_style="written",
        filters=FilterOptions(),
        # English first: the others have far less speech, most of it synthetic.
        sampler=replace(trial().sampler, language_alpha=0.8, dataset_alpha=0.7),
        masks=((0.0, 0.0, 1.0),),
        ctc_weight=2.0,
        placing_weight=1.0,
        language_share=0.1,
        steps=10_000,
        learning_rate=3e-4,
        warmup_steps=500,
        floor=0.1,
        eval_every=2000,
        save_every=2000,
        dev_clips=800,
    )


def base_stage2() -> Recipe:
    """Its second stage, from the first one's averaged weights: t ~ U(0.7, 1)."""
    return replace(
        base_stage1(), masks=((0.0, *HIGH_MASKS),), steps=5000, learning_rate=1e-4, warmup_steps=250, floor=0.03
    )


def base_stage2_uniform() -> Recipe:
    """Its control: the second stage with the mask ratios of the first."""
    return replace(base_stage2(), masks=base_stage1().masks)


def speller() -> Recipe:
    """A speller above a model with an adapter (--init_from), on a CPU: everything below is frozen, and heard once."""
    return Recipe(
        decoder=DecoderConfig(adapter=1, speller=3, dropout=0.1),
        window="clip",
        text_style="written",
        learns="speller",
        feeder="features",
        sampler=SamplerOptions(
            seconds=100,
            shapes=(3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 17.0, 20.0, 25.0, 30.0),
            rows_multiple=1,
            join=0.1,
            language_alpha=0.8,
            dataset_alpha=0.7,
        ),
        spec_augment=SpecAugment(spans=3, span_frames=10, span_share=0.08),
        ctc_weight=1.0,
        epochs=8,
        learning_rate=1e-3,
        warmup_steps=100,
        floor=0.02,
        weight_decay=0.01,
        ema_decay=0.999,
        ema_ramp=20,
        precision="auto",
        eval_every=2000,
        save_every=1000,
    )


def finetune() -> Recipe:
    """A model to an hour of one's own speech, with --init_from; the model brings its own architecture."""
    return Recipe(
        sampler=SamplerOptions(utterances=32, speeds=(0.9, 1.0, 1.1)),
        spec_augment=SpecAugment(bands=2, spans=2),
        masks=((0.0, *HIGH_MASKS),),
        epochs=10,
        learning_rate=3e-5,
        warmup_steps=50,
        weight_decay=0.01,
        ema_decay=0.999,
        ema_ramp=20,
        precision="auto",
        log_every=10,
        eval_every=100,
        save_every=100,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        paper_stage1,
        paper_stage2,
        paper_stage2_uniform,
        base_hearing,
        base_stage1,
        base_stage2,
        base_stage2_uniform,
        speller,
        trial,
        trial_paper,
        finetune,
        tiny,
    )
}
"""What `--recipe NAME` knows."""
