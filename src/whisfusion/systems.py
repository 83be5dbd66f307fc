"""The system behind a Transcriber: masked diffusion. Its peer, Whisper's own greedy decoder, is in whisper_system.py.

Letters: B windows, K candidates, L canvas positions, T audio positions, D width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion.checkpoint import Model
from whisfusion.decoder import DiffusionDecoder, Draft
from whisfusion.detector import places
from whisfusion.encoder import audio_mask
from whisfusion.engine import Decoding, GraphEngine
from whisfusion.errors import LanguageError, OptionError
from whisfusion.look import Canvases, Look, LookAt, looks, masked, predicted, read
from whisfusion.mel import Mel, log_mel
from whisfusion.memory import AudioMemory
from whisfusion.outcome import heard_of, mended, own_thoughts, pool_of
from whisfusion.pdd import Step, Thoughts, parallel_decode
from whisfusion.quantise import Int8Linear, to_int8
from whisfusion.repair import CHOICES
from whisfusion.selection import (
    HighestConfidence,
    MinimumBayesRisk,
    Oracle,
    Pool,
    Selector,
    SpelledConsensus,
    WhisperRerank,
)
from whisfusion.tokenizer import MASK, PROMPT_LENGTH, SAMPLEABLE, get_tokenizer
from whisfusion.transcriber import DecodingOptions, Stopwatch, Window
from whisfusion.transcript import Heard
from whisfusion.vocabulary import Columns, Vocabulary
from whisfusion.words import time_words

_LANGUAGE_POSITION = 1
_LOOKED_AT_ONCE = 1024
"""Positions of texts that are looked at for which logits over the vocabulary exist at a time."""


Head = Callable[[Tensor], Tensor]
"""States (R, D) to logits (R, V)."""


@dataclass(frozen=True)
class DecoderPredictor:
    """A diffusion decoder listening to a batch of utterances, as decoding sees it."""

    decoder: DiffusionDecoder
    memory: AudioMemory
    canvas_BL: Tensor | None
    head: Head

    def states(self, tokens_BKL: Tensor, draft: Draft | None = None) -> Tensor:
        """Hidden states (B, K, L, D) of partly masked canvases."""
        if draft is not None:
            draft = draft.of_sequences()
        states_GLD = self.decoder(tokens_BKL.flatten(0, 1), self.memory, self.canvas_BL, draft=draft)
        return states_GLD.unflatten(0, tokens_BKL.shape[:2])

    def logits(self, states_RD: Tensor) -> Tensor:
        """Logits over the ids that may be written."""
        return self.head(states_RD)


class DiffusionSystem:
    """A frozen Whisper encoder and a masked-diffusion decoder, with Parallel Diffusion Decoding."""

    def __init__(self, model: Model, engine: GraphEngine | None = None) -> None:
        """`engine` does all up to selection, instead of the plain code below."""
        self.model = model
        self.default = model.generation
        self.times_words = model.config.decoder.adapter > 0
        self._engine = engine
        if engine is None and self._device.type == "cuda":
            # What the plain path takes is mostly launches. On a CPU there is nothing to gain.
            for block in model.decoder.blocks:
                block.lay_together()
        self._rerank: WhisperRerank | None = None
        self._heads: dict[str | None, Head] = {}

    @property
    def _device(self) -> torch.device:
        return self.model.encoder.positions.device

    def check(self, options: DecodingOptions, language: str | None) -> None:
        """Raise before any work if this model cannot do what is asked."""
        config = self.model.config
        if language is None and not config.tells_language:
            raise LanguageError(
                "this model does not detect the language: give one with --language (language=...), "
                f"one of {', '.join(config.languages)}"
            )
        if language is not None and language not in config.languages:
            raise LanguageError(f"this model was not trained on {language!r}, only on {', '.join(config.languages)}")
        self._selector(options)
        options = self._settled(options)
        if options.looks and (options.looks < 0 or not options.repair):
            raise OptionError("looks must be 0, or more where a model with an adapter repairs")
        if options.words and not self.times_words:
            raise OptionError("words are timed by a model with an adapter: leave out word_timestamps")

    def detect(self, batch: Sequence[Window]) -> list[str]:
        """The language of each window, among those of the model."""
        found: list[str] = []
        for part in self._parts(batch):
            audio_BTD, heard_BT = self._encode(part, Stopwatch({}, self._device))
            found += self._detect(part, audio_BTD, heard_BT)
        return found

    def start(
        self, batch: Sequence[Window], options: DecodingOptions, timings: dict[str, float]
    ) -> Callable[[], list[Heard]]:
        """With an engine, selection of one batch on the CPU goes on while the GPU decodes the next."""
        if self._engine is None:
            heard = [one for part in self._parts(batch) for one in self.recognise(part, options, timings)]
            return lambda: heard
        options = self._settled(options)
        scorer = self._reranker().decoder if options.selection == "rerank" else None
        wait = self._engine.start(batch, options, scorer)
        return lambda: self._finish(wait(timings), batch, options, timings)

    def _parts(self, batch: Sequence[Window]) -> list[Sequence[Window]]:
        """What is decoded at once: on a CPU one window, which fits its caches better than a batch, and has no padding.

        In int8 it matters too that what other windows do to a number is nothing: rounding would make it visible.
        """
        return [[window] for window in batch] if self._device.type == "cpu" else [batch]

    def _finish(
        self, decoding: Decoding, batch: Sequence[Window], options: DecodingOptions, timings: dict[str, float]
    ) -> list[Heard]:
        watch = Stopwatch(timings)
        nothing = [None] * len(batch)
        pools = [
            pool_of(
                candidates,
                language,
                likelihoods=scores,
                bytes_TV=bytes_TV,
                thoughts=thoughts,
                reference=window.reference,
            )
            for candidates, language, scores, bytes_TV, thoughts, window in zip(
                decoding.candidates,
                decoding.languages,
                decoding.likelihoods or nothing,
                decoding.bytes_B or nothing,
                own_thoughts(decoding.thoughts, decoding.canvas_B),
                batch,
                strict=True,
            )
        ]
        heard = self._select(pools, decoding.steps, decoding.canvas_B, options, decoding.look)
        watch.lap("select")
        return heard

    @torch.inference_mode()
    def recognise(self, batch: Sequence[Window], options: DecodingOptions, timings: dict[str, float]) -> list[Heard]:
        """Encode, listen, decode K candidates in N steps, select."""
        options = self._settled(options)
        watch = Stopwatch(timings, self._device)
        audio_BTD, heard_BT = self._encode(batch, watch)
        predictor, canvas_B = self._listen(batch, audio_BTD, heard_BT)
        languages = [window.language for window in batch]
        if None in languages:
            detected = self._detect(batch, audio_BTD, heard_BT, predictor)
            languages = [given or found for given, found in zip(languages, detected, strict=True)]
        spoken = [language for language in languages if language is not None]
        prompts_BP = torch.tensor([get_tokenizer().prompt(language) for language in spoken], device=self._device)
        columns, head = self._vocabulary(spoken)
        decoded = parallel_decode(
            replace(predictor, head=head),
            prompts_BP,
            canvas_B,
            [window.seed for window in batch],
            options.pdd,
            columns=columns,
            trace=options.trace,
            choices=CHOICES * bool(options.repair),
        )
        watch.lap("decode")
        lengths = [audio_BTD.shape[1]] * len(batch) if heard_BT is None else heard_BT.sum(1).tolist()
        spells = options.selection == "spelling" or options.words or options.repair
        bytes_B = predictor.memory.own_bytes() if spells else [None] * len(batch)
        thoughts_B = own_thoughts(decoded.thoughts, canvas_B)
        pools = [
            pool_of(
                candidates,
                language,
                audio_TD=audio_BTD[row, : lengths[row]],
                reference=batch[row].reference,
                bytes_TV=bytes_B[row],
                thoughts=thoughts_B[row],
            )
            for row, (candidates, language) in enumerate(zip(decoded.candidates, spoken, strict=True))
        ]

        def look(texts: Sequence[tuple[int, ...]]) -> list[Look]:
            return self._look(replace(predictor, head=head), columns, prompts_BP, texts)

        heard = self._select(pools, decoded.trace, canvas_B, options, look)
        watch.lap("select")
        return heard

    def _select(
        self,
        pools: Sequence[Pool],
        steps: Sequence[Step],
        canvas_B: Sequence[int],
        options: DecodingOptions,
        look: LookAt | None = None,
    ) -> list[Heard]:
        selections = self._selector(options)(pools)
        chosen = [pool.candidates[selection.index] for pool, selection in zip(pools, selections, strict=True)]
        if options.repair:
            room = self.model.config.decoder.canvas.size - PROMPT_LENGTH - 1
            known = self.model.lexicon or {}, self.model.grammar or {}
            texts = mended(pools, chosen, *known, look=look, looks=options.looks or 0, room=room)
        else:
            texts = [candidate.tokens for candidate in chosen]
        traces = [
            tuple(step.of(row, slice(PROMPT_LENGTH, positions)) for step in steps)
            for row, positions in enumerate(canvas_B)
        ]
        words = [
            time_words(text, pool.bytes_TV, pool.language) if options.words and pool.bytes_TV is not None else ()
            for pool, text in zip(pools, texts, strict=True)
        ]
        return [heard_of(*parts) for parts in zip(pools, selections, texts, words, traces, strict=True)]

    def _encode(self, batch: Sequence[Window], watch: Stopwatch) -> tuple[Tensor, Tensor | None]:
        config, encoder = self.model.config, self.model.encoder
        mel = log_mel(
            [window.samples for window in batch],
            n_mels=config.encoder.mels,
            window=config.window,
            device=self._device,
        )
        watch.lap("mel")
        frames_B = self._frames(mel)
        audio_BTD = encoder(mel.mel_BMF.to(encoder.positions.dtype), frames_B)
        heard_BT = None if frames_B is None else audio_mask(frames_B, audio_BTD.shape[1])
        watch.lap("encode")
        return audio_BTD, heard_BT

    def _frames(self, mel: Mel) -> Tensor | None:
        """The frames of each window, if what lies beyond them is to be left out; of one alone there is nothing."""
        return mel.frames_B if self.model.config.window == "clip" and len(mel.frames_B) > 1 else None

    def _listen(
        self, batch: Sequence[Window], audio_BTD: Tensor, heard_BT: Tensor | None
    ) -> tuple[DecoderPredictor, list[int]]:
        canvas = self.model.config.decoder.canvas
        canvas_B = [canvas.positions(window.seconds) for window in batch]
        # Where all are of one length, none has to be told its own: uploading it would be waited for.
        own_B = torch.tensor(canvas_B, device=self._device) if min(canvas_B) < max(canvas_B) else None
        with torch.no_grad():
            memory = self.model.decoder.listen(
                audio_BTD,
                heard_BT,
                positions=max(canvas_B),
                canvas_B=own_B,
            )
        canvas_BL = None
        if own_B is not None:
            canvas_BL = torch.arange(max(canvas_B), device=self._device) < own_B[:, None]
        return DecoderPredictor(self.model.decoder, memory, canvas_BL, self.model.decoder.logits), canvas_B

    def _vocabulary(self, languages: Sequence[str]) -> tuple[Columns, Head]:
        """What may be written in a batch, and the rows of the output head for it."""
        columns = (self.model.vocabulary or Vocabulary({})).columns(languages, self._device)
        # Of one language, or of all: heads are copies, and combinations without number would fill the memory.
        everything = len(columns.ids_V) == SAMPLEABLE
        key = None if everything else languages[0]
        if key not in self._heads:
            rows = slice(SAMPLEABLE) if everything else columns.ids_V
            self._heads[key] = self._head(self.model.decoder.output_weight[rows])
        return columns, self._heads[key]

    def _head(self, weight_VD: Tensor) -> Head:
        return lambda states_RD: F.linear(states_RD, weight_VD)

    @torch.no_grad()
    def _look(
        self, predictor: DecoderPredictor, columns: Columns, prompts_BP: Tensor, texts: Sequence[tuple[int, ...]]
    ) -> list[Look]:
        """What the decoder makes of finished texts."""
        canvases = Canvases.of(prompts_BP.cpu(), texts, positions=PROMPT_LENGTH + 1 + max(map(len, texts)))
        written_BL, counts_B = canvases.written_BL.to(self._device), canvases.counts_B.to(self._device)
        tokens_B2L, own_BL = masked(written_BL, counts_B)
        memory = self.model.decoder.cut(predictor.memory, positions=written_BL.shape[1], counts_B=counts_B)
        alike = len({len(text) for text in texts}) == 1
        predictor = replace(predictor, memory=memory, canvas_BL=None if alike else own_BL)
        states_BLD = predicted(predictor.states(tokens_B2L))[:, PROMPT_LENGTH:]
        row_R = torch.arange(len(texts), device=self._device).repeat_interleave(states_BLD.shape[1])

        def logits(rows: slice) -> Tensor:
            logits_RV = predictor.logits(states_BLD.flatten(0, 1)[rows])
            if columns.allowed_BV is None:
                return logits_RV
            return logits_RV.masked_fill(~columns.allowed_BV[row_R[rows]], -math.inf)

        written_R = written_BL[:, PROMPT_LENGTH:].flatten().contiguous()
        places_R = torch.searchsorted(columns.ids_V, written_R).clamp(max=len(columns.ids_V) - 1)
        columns_RM, logprobs_RM, own_R = read(logits, places_R, CHOICES, at_once=_LOOKED_AT_ONCE)
        # A word of the lexicon may have tokens that the language's list has not.
        own_R = own_R.masked_fill(columns.ids_V[places_R] != written_R, -math.inf)
        shape = states_BLD.shape[:2]
        thoughts = Thoughts(columns.ids_V[columns_RM].unflatten(0, shape), logprobs_RM.unflatten(0, shape))
        return looks(texts, thoughts, own_R.unflatten(0, shape))

    @torch.no_grad()
    def _detect(
        self,
        batch: Sequence[Window],
        audio_BTD: Tensor,
        heard_BT: Tensor | None,
        predictor: DecoderPredictor | None = None,
    ) -> list[str]:
        """By the detector; without one, by the decoder's look at an empty canvas whose language is masked too."""
        config, detector = self.model.config, self.model.detector
        if detector is not None:
            logits_BX = detector(audio_BTD, heard_BT)[:, places(config.languages)]
            return [config.languages[i] for i in logits_BX.argmax(1).tolist()]
        if not config.detects_language:
            raise LanguageError("this model does not detect the language: give one with --language (language=...)")
        if predictor is None:
            predictor, _ = self._listen(batch, audio_BTD, heard_BT)
        tokenizer = get_tokenizer()
        prompt = tokenizer.prompt(config.languages[0])
        prompt[_LANGUAGE_POSITION] = MASK
        positions = config.decoder.canvas.positions(max(window.seconds for window in batch))
        tokens_BKL = torch.full((len(audio_BTD), 1, positions), MASK, device=self._device)
        tokens_BKL[..., : len(prompt)] = torch.tensor(prompt, device=self._device)
        states_BD = predictor.states(tokens_BKL)[:, 0, _LANGUAGE_POSITION]
        ids = [tokenizer.language_id(language) for language in config.languages]
        logits_BX = self.model.decoder.logits(states_BD, slice(None))[:, ids]
        return [config.languages[i] for i in logits_BX.argmax(1).tolist()]

    def _selector(self, options: DecodingOptions) -> Selector:
        if options.selection == "rerank":
            return self._reranker()
        simple = {
            "mbr": MinimumBayesRisk,
            "confidence": HighestConfidence,
            "spelling": SpelledConsensus,
            "oracle": Oracle,
        }
        if options.selection not in simple:
            names = "mbr, confidence, spelling, rerank or oracle"
            raise OptionError(f"selection must be {names}, not {options.selection!r}")
        if options.selection == "spelling" and not self.model.config.decoder.adapter:
            raise OptionError("selection by spelling needs a model with an adapter: choose mbr")
        return simple[options.selection]()

    def _settled(self, options: DecodingOptions) -> DecodingOptions:
        """What was left to the model: where it can, chosen candidates are mended, and what was mended is looked at."""
        can, repair, looks = self.model.config.decoder.adapter > 0, options.repair, options.looks
        if repair and not can:
            raise OptionError("repair needs a model with an adapter")
        if repair is None:
            # What the oracle chooses is a bound on choosing, not a transcript.
            repair = can and options.selection != "oracle"
        return replace(options, repair=repair, looks=int(repair) if looks is None else looks)

    def _reranker(self) -> WhisperRerank:
        """Whisper's decoder, read from the cache on first use."""
        if self._rerank is None:
            from whisfusion.weights import load_whisper

            whisper = load_whisper(self.model.config.encoder_name, self._device, self.model.encoder.positions.dtype)
            self._rerank = WhisperRerank(whisper.decoder)
        return self._rerank


class Int8System(DiffusionSystem):
    """The same on a CPU, with products in int8."""

    def __init__(self, model: Model) -> None:
        """Changes the model's modules."""
        super().__init__(model)
        to_int8(model.encoder, model.decoder)

    def _head(self, weight_VD: Tensor) -> Head:
        return Int8Linear(weight_VD)
