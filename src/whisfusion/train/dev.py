"""How well the averaged weights read the dev set: decoded as users will, scored as everything is."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from whisfusion.checkpoint import Model, ModelConfig
from whisfusion.data.batch import Failure
from whisfusion.data.utterance import Utterance, load_samples
from whisfusion.decoder import DiffusionDecoder
from whisfusion.encoder import WhisperEncoder
from whisfusion.errors import AudioError
from whisfusion.normalise import edit_distance, units
from whisfusion.pdd import PDDOptions
from whisfusion.systems import DiffusionSystem
from whisfusion.train.ema import Ema
from whisfusion.train.parallel import Ranks
from whisfusion.transcriber import Transcriber

_BATCH = 32


@dataclass(frozen=True)
class DevResult:
    """Errors on the dev set; WER, or CER for languages that are scored by character."""

    edits: int
    length: int
    """Words (or characters) of the references."""
    transcripts: tuple[tuple[str, str, str], ...]
    """(id, reference, hypothesis) of every clip."""

    @property
    def rate(self) -> float:
        """All edits over all words."""
        return self.edits / max(1, self.length)


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

    def evaluate(self, config: ModelConfig, encoder: WhisperEncoder, ema: Ema, options: PDDOptions) -> DevResult:
        """Read every clip with the averaged weights; all ranks must call it together."""
        averages = ema.full()
        with torch.device("meta"):
            decoder = DiffusionDecoder(config.decoder)
        dtype = encoder.positions.dtype
        decoder.load_state_dict({name: value.to(dtype) for name, value in averages.items()}, assign=True)
        model = Model(config, decoder.requires_grad_(False).eval(), encoder, options)
        # Windows of the dev set have shapes of their own: compiling the encoder for each would take minutes.
        with torch.compiler.set_stance("force_eager"):
            rows = self._read(Transcriber(DiffusionSystem(model)))
        every = [row for part in self._ranks.gather(rows) for row in part]
        return DevResult(
            edits=sum(row[0] for row in every),
            length=sum(row[1] for row in every),
            transcripts=tuple(row[2] for row in every),
        )

    def _read(self, transcriber: Transcriber) -> list[tuple[int, int, tuple[str, str, str]]]:
        by_language: dict[str, list[tuple[Utterance, np.ndarray]]] = defaultdict(list)
        for clip in self._clips:
            by_language[clip[0].language].append(clip)
        rows = []
        for language, clips in by_language.items():
            heard = transcriber.transcribe([samples for _, samples in clips], language=language, batch_size=_BATCH)
            for (utterance, _), transcript in zip(clips, heard, strict=True):
                reference, hypothesis = units(utterance.text, language), units(transcript.text, language)
                line = (utterance.id, utterance.text, transcript.text)
                rows.append((edit_distance(hypothesis, reference), len(reference), line))
        return rows
