"""Where a run's model comes from: a random start, a Whisper, or a model folder."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whisfusion import checkpoint, hub, quantise
from whisfusion.checkpoint import Model, ModelConfig
from whisfusion.data.feature_bank import Listen
from whisfusion.data.utterance import Utterance
from whisfusion.decoder import DiffusionDecoder, start_from_whisper
from whisfusion.encoder import EncoderConfig, WhisperEncoder, audio_mask
from whisfusion.mel import log_mel
from whisfusion.normalise import normalise
from whisfusion.pdd import PDDOptions
from whisfusion.skeleton import skeleton
from whisfusion.train.config import Recipe
from whisfusion.train.trainer import mix
from whisfusion.vocabulary import Vocabulary, token_list
from whisfusion.weights import fingerprint, load_whisper_weights
from whisfusion.whisper import WhisperDecoder


@dataclass(frozen=True)
class StartingPoint:
    """Both halves of a model, in float32 on the CPU, before the first step."""

    decoder: DiffusionDecoder
    encoder: WhisperEncoder
    encoder_sha256: str | None
    """Hash of the Whisper that the encoder is from; None where exported models hold the encoder themselves."""
    languages: tuple[str, ...] = ()
    """Languages that it already knows."""
    detects_language: bool = False
    """Whether it already tells languages apart."""
    model: Model | None = None
    """The model that it is; None where it begins anew."""

    @property
    def bundles_encoder(self) -> bool:
        """Whether exported models must hold the encoder: it has no name that others know."""
        return self.encoder_sha256 is None


def adopt(recipe: Recipe, model: str) -> Recipe:
    """The recipe with the architecture of a model to start from, as in `follow`."""
    config, files = checkpoint.read_config(hub.resolve(model))
    bundled = any(name.startswith("encoder") for name in files)
    made = replace(
        recipe,
        decoder=config.decoder,
        encoder=config.encoder_name,
        random_encoder=config.encoder if bundled else None,
        start="random",
        window=config.window,
        text_style=config.text_style,
        # It may lack the part that is to learn.
        learns="all",
        consistency_weight=0.0,
        feeder="stream",
    )
    return follow(recipe, made)


def follow(recipe: Recipe, before: Recipe) -> Recipe:
    """The recipe with the architecture that `before` trains; dropout stays its own, and parts can be added."""
    return replace(
        recipe,
        decoder=replace(
            before.decoder,
            dropout=recipe.decoder.dropout,
            drafts=before.decoder.drafts or recipe.decoder.drafts,
            **{
                name: getattr(before.decoder, name) or getattr(recipe.decoder, name)
                for name in ("reach", "spells_every", "speller")
                if before.decoder.adapter
            },
        ),
        encoder=before.encoder,
        random_encoder=before.random_encoder,
        start="random",
        window=before.window,
        text_style=before.text_style,
    )


def starting_point(recipe: Recipe, init_from: str | None) -> StartingPoint:
    """Make or load the model. Raises ModelError or DownloadError where weights are missing or do not fit."""
    if init_from is not None:
        folder = hub.resolve(init_from)
        model = checkpoint.load(folder, dtype=torch.float32)
        decoder = DiffusionDecoder(recipe.decoder)
        decoder.reset_parameters(torch.Generator().manual_seed(mix(recipe.seed, "decoder")))
        # A part that the model does not have yet starts by adding nothing.
        decoder.load_state_dict(decoder.state_dict() | model.decoder.state_dict())
        bundled = any(name.startswith("encoder") for name in checkpoint.read_config(folder)[1])
        return StartingPoint(
            decoder,
            model.encoder,
            None if bundled else model.config.encoder_sha256,
            model.config.languages,
            model.config.detects_language,
            model,
        )
    decoder = DiffusionDecoder(recipe.decoder)
    decoder.reset_parameters(torch.Generator().manual_seed(mix(recipe.seed, "decoder")))
    if recipe.decoder.anchors:
        torch.nn.init.constant_(decoder.anchors.norm.weight, recipe.anchor_size)
    if recipe.random_encoder is not None:
        return StartingPoint(decoder, random_encoder(recipe.random_encoder, recipe.seed), None)
    weights = load_whisper_weights(recipe.encoder)
    if recipe.start == "whisper":
        start_from_whisper(decoder, {name: value.float() for name, value in weights.decoder.items()})
    encoder = _encoder(weights.encoder_config, weights.encoder)
    return StartingPoint(decoder, encoder, None if Path(recipe.encoder).exists() else fingerprint(weights.encoder))


def model_config(
    recipe: Recipe, start: StartingPoint, languages: tuple[str, ...], facts: dict[str, Any]
) -> ModelConfig:
    """What exported models say about themselves; `languages` are those that are trained on.

    Raises OptionError where decoder and encoder do not fit.
    """
    # Of a model of which a part learns alone, the rest stays what it was.
    before = start.model if recipe.learns != "all" else None
    return ModelConfig(
        decoder=recipe.decoder,
        encoder=start.encoder.config,
        encoder_name=recipe.encoder,
        encoder_sha256=start.encoder_sha256,
        window=recipe.window,
        text_style=recipe.text_style,
        languages=tuple(dict.fromkeys([*start.languages, *languages])),
        # What was not learned below is not known above.
        experimental=()
        if before is None
        else tuple(dict.fromkeys([*before.config.experimental, *(c for c in languages if c not in start.languages)])),
        detects_language=recipe.language_share > 0 or start.detects_language,
        whisper=start.model.config.whisper if start.model is not None and _knows(start.model, languages) else None,
        training=facts,
    )


@dataclass(frozen=True)
class Inherited:
    """What a model that is trained on keeps, beside its weights."""

    generation: PDDOptions
    vocabulary: Vocabulary | None
    """The tokens that it could write, and those of what it is trained on."""
    whisper: WhisperDecoder | None
    """As it was: the encoder that it listens to stays the same. None where it may not know what was learned."""


def _knows(before: Model, languages: Iterable[str]) -> bool:
    """Whether these are a model's own: of another language's tokens its Whisper may have been stored without most."""
    return set(languages) <= set(before.config.languages)


def inherit(before: Model, recipe: Recipe, utterances: Sequence[Utterance]) -> Inherited:
    """What stays of a model; its settings for decoding do unless the recipe has some of its own."""
    vocabulary = before.vocabulary
    if vocabulary is not None:
        texts: dict[str, list[str]] = defaultdict(list)
        for utterance in utterances:
            own = utterance.text if recipe.text_style == "written" else normalise(utterance.text, utterance.language)
            texts[utterance.language].append(own)
        # A language without a list may be written in any token.
        more = {code: token_list(own) for code, own in texts.items() if code in vocabulary}
        vocabulary = Vocabulary({code: [*ids_V.tolist(), *more.get(code, ())] for code, ids_V in vocabulary.items()})
    whisper = before.whisper if _knows(before, {utterance.language for utterance in utterances}) else None
    return Inherited(before.generation if recipe.dev == PDDOptions() else recipe.dev, vocabulary, whisper)


def ears(start: StartingPoint, device: torch.device) -> Listen:
    """What encoder and adapter make of one clip, as the model does it when it is used: in int8 on a CPU if kept so."""
    encoder, adapter = deepcopy(start.encoder).to(device), deepcopy(start.decoder.adapter).to(device).eval()
    if _hears_int8(start, device):
        quantise.to_int8(encoder, adapter)

    @torch.inference_mode()
    def listen(samples: np.ndarray) -> Tensor:
        mel = log_mel([samples], n_mels=encoder.config.mels, window="clip", device=device)
        audio_BTD = encoder(mel.mel_BMF, mel.frames_B)
        adapted_BTD, _, _ = adapter(audio_BTD, audio_mask(mel.frames_B, audio_BTD.shape[1]))
        return adapted_BTD[0]

    return listen


def heard_by(start: StartingPoint, device: torch.device) -> str:
    """A name for what decides what is heard."""
    weights = {**start.encoder.state_dict(), **start.decoder.adapter.state_dict(prefix="adapter.")}
    return fingerprint(weights) + (":int8" if _hears_int8(start, device) else "")


def _hears_int8(start: StartingPoint, device: torch.device) -> bool:
    return start.model is not None and start.model.stored_int8 and device.type == "cpu" and quantise.is_fast_here()


def random_encoder(config: EncoderConfig, seed: int) -> WhisperEncoder:
    """A random encoder that is the same everywhere for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed, "encoder"))
        encoder = WhisperEncoder(config)
        # Torch's own start is so quiet that the position table drowns what is heard.
        for convolution in (encoder.conv1, encoder.conv2):
            torch.nn.init.normal_(convolution.weight, std=3 / math.sqrt(convolution.weight[0].numel()))
    return encoder


def _encoder(config: EncoderConfig, state: Mapping[str, Tensor]) -> WhisperEncoder:
    with skeleton():
        encoder = WhisperEncoder(config)
    encoder.load_state_dict({name: value.float() for name, value in state.items()}, assign=True)
    return encoder.requires_grad_(False)
