"""How well the averaged weights read the dev set: decoded as users will, not proofread, and scored as everything is."""

import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from whisfusion.checkpoint import Model, ModelConfig
from whisfusion.ctc import greedy_texts
from whisfusion.data.batch import Failure
from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.decoder import DiffusionDecoder
from whisfusion.encoder import WhisperEncoder, audio_mask
from whisfusion.errors import AudioError
from whisfusion.mel import log_mel
from whisfusion.normalise import edit_distance, units
from whisfusion.skeleton import skeleton
from whisfusion.systems import DiffusionSystem
from whisfusion.train.config import Recipe
from whisfusion.train.ema import Ema
from whisfusion.train.parallel import Ranks
from whisfusion.transcriber import Transcriber

_BATCH = 32
_Thing = TypeVar("_Thing")


@dataclass(frozen=True)
class DevClip:
    """One clip of the dev set, as it was read."""

    id: str
    language: str
    dataset: str
    said: str
    heard: str
    edits: int
    length: int
    """Words of what was said, or characters for languages that are scored by them."""


@dataclass(frozen=True)
class DevResult:
    """Errors on the dev set; WER, or CER for languages that are scored by character."""

    clips: tuple[DevClip, ...]

    @property
    def rate(self) -> float:
        """All edits over all words of a language, as a mean over the languages."""
        return statistics.fmean(_rates(self.clips, lambda clip: clip.language).values())

    @property
    def by_dataset(self) -> dict[str, float]:
        """The same for each dataset of each language, such as "en/librispeech"."""
        return _rates(self.clips, lambda clip: f"{clip.language}/{clip.dataset}")


def _rates(clips: Sequence[DevClip], kind: Callable[[DevClip], str]) -> dict[str, float]:
    edits, lengths = Counter[str](), Counter[str]()
    for clip in clips:
        edits[kind(clip)] += clip.edits
        lengths[kind(clip)] += clip.length
    return {name: edits[name] / max(1, length) for name, length in sorted(lengths.items())}


def spread(things: Sequence[_Thing], count: int) -> list[_Thing]:
    """At most `count` of them, evenly spread over the list."""
    if len(things) <= count:
        return list(things)
    return [things[len(things) * place // count] for place in range(count)]


class DevSet:
    """The clips of a dev set, decoded once; each rank reads its share of them."""

    def __init__(self, utterances: Sequence[Utterance], ranks: Ranks) -> None:
        """Decode the rank's clips; all ranks must make theirs together."""
        self._ranks = ranks
        self._clips: list[tuple[Utterance, np.ndarray]] = []
        failures = []
        for utterance in utterances[ranks.rank :: ranks.world]:
            try:
                self._clips.append((utterance, load_samples(utterance)))
            except AudioError as error:
                failures.append(Failure(utterance.id, str(error)))
        self.failures = [failure for part in ranks.gather(failures) for failure in part]
        """Clips that could not be read, and are left out."""

    def evaluate(self, config: ModelConfig, encoder: WhisperEncoder, ema: Ema, recipe: Recipe) -> DevResult:
        """Read every clip with the averaged weights as the recipe says; all ranks must call it together."""
        averages = ema.full()
        with skeleton():
            decoder = DiffusionDecoder(config.decoder)
        dtype = encoder.positions.dtype
        decoder.load_state_dict({name: value.to(dtype) for name, value in averages.items()}, assign=True)
        model = Model(config, decoder.requires_grad_(False).eval(), encoder, recipe.dev)
        read = functools.partial(_spelled, model) if recipe.learns != "all" else functools.partial(_written, model)
        # Windows of the dev set have shapes of their own: compiling the encoder for each would take minutes.
        with torch.compiler.set_stance("force_eager"):
            rows = self._read(read)
        return DevResult(tuple(clip for part in self._ranks.gather(rows) for clip in part))

    def _read(self, read: Callable[[list[np.ndarray], str], list[str]]) -> list[DevClip]:
        by_language: dict[str, list[tuple[Utterance, np.ndarray]]] = defaultdict(list)
        for clip in self._clips:
            by_language[clip[0].language].append(clip)
        clips = []
        for language, pairs in by_language.items():
            for (utterance, _), heard in zip(pairs, read([samples for _, samples in pairs], language), strict=True):
                reference, hypothesis = units(utterance.text, language), units(heard, language)
                clips.append(
                    DevClip(
                        id=utterance.id,
                        language=language,
                        dataset=utterance.dataset,
                        said=utterance.text,
                        heard=heard,
                        edits=edit_distance(hypothesis, reference),
                        length=len(reference),
                    )
                )
        return clips


def _written(model: Model, clips: list[np.ndarray], language: str) -> list[str]:
    """As they are drawn: what becomes of them later is no work for a GPU that trains."""
    transcriber = Transcriber(DiffusionSystem(model))
    heard = transcriber.transcribe([*clips], language=language, batch_size=_BATCH, proofread=False)
    return [transcript.text for transcript in heard]


@torch.inference_mode()
def _spelled(model: Model, clips: list[np.ndarray], _: str) -> list[str]:
    """As adapter or speller spell them by themselves."""
    encoder, texts = model.encoder, []
    for first in range(0, len(clips), _BATCH):
        mel = log_mel(
            clips[first : first + _BATCH],
            n_mels=encoder.config.mels,
            window=model.config.window,
            device=encoder.positions.device,
        )
        audio_BTD = encoder(mel.mel_BMF.to(encoder.positions.dtype), mel.frames_B)
        memory = model.decoder.hear(audio_BTD, audio_mask(mel.frames_B, audio_BTD.shape[1]))
        assert memory.bytes_BTV is not None
        texts += greedy_texts(memory.bytes_BTV, memory.spelled_positions())
    return texts
