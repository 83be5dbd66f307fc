"""The system behind a Transcriber: masked diffusion. Its peer, Whisper's own greedy decoder, is in whisper_system.py.

Letters: B windows, K candidates, L canvas positions, T audio positions, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion.checkpoint import Model
from whisfusion.decoder import DiffusionDecoder, Draft
from whisfusion.encoder import audio_mask
from whisfusion.engine import Decoding, GraphEngine
from whisfusion.errors import LanguageError, OptionError
from whisfusion.mel import Mel, log_mel
from whisfusion.memory import AudioMemory
from whisfusion.outcome import heard_of, pool_of
from whisfusion.pdd import Step, parallel_decode
from whisfusion.proofread import proofread
from whisfusion.quantise import Int8Linear, to_int8
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
from whisfusion.transcriber import DecodingOptions, Stopwatch, Window, wants_spelling
from whisfusion.transcript import Heard
from whisfusion.vocabulary import Columns, Vocabulary
from whisfusion.whisper import WhisperDecoder, language_logits, prompts
from whisfusion.words import time_words

_LANGUAGE_POSITION = 1


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
        self._whisper = model.whisper
        self._heads: dict[tuple[str, str | None], Head] = {}

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
        if options.proofread:
            self._whisper_decoder()
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
        scorer = self._whisper_decoder() if options.selection == "rerank" else None
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
        # Not the device's: it is at work on the next batch.
        watch = Stopwatch(timings)
        nothing = [None] * len(batch)
        pools = [
            pool_of(
                candidates,
                language,
                likelihoods=scores,
                bytes_TV=bytes_TV,
                reference=window.reference,
            )
            for candidates, language, scores, bytes_TV, window in zip(
                decoding.candidates,
                decoding.languages,
                decoding.likelihoods or nothing,
                decoding.bytes_B or nothing,
                batch,
                strict=True,
            )
        ]
        heard = self._select(
            pools, decoding.steps, decoding.canvas_B, options, decoding.audio_BTD, decoding.heard_BT, watch
        )
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
        columns, head = self._vocabulary(spoken, self.model.decoder.output_weight, "decoder")
        decoded = parallel_decode(
            replace(predictor, head=head),
            prompts_BP,
            canvas_B,
            [window.seed for window in batch],
            options.pdd,
            columns=columns,
            trace=options.trace,
        )
        watch.lap("decode")
        lengths = [audio_BTD.shape[1]] * len(batch) if heard_BT is None else heard_BT.sum(1).tolist()
        spells = wants_spelling(options) and predictor.memory.bytes_BTV is not None
        bytes_B = predictor.memory.own_bytes() if spells else [None] * len(batch)
        pools = [
            pool_of(
                candidates,
                language,
                audio_TD=audio_BTD[row, : lengths[row]],
                reference=batch[row].reference,
                bytes_TV=bytes_B[row],
            )
            for row, (candidates, language) in enumerate(zip(decoded.candidates, spoken, strict=True))
        ]

        return self._select(pools, decoded.trace, canvas_B, options, audio_BTD, heard_BT, watch)

    def _select(
        self,
        pools: Sequence[Pool],
        steps: Sequence[Step],
        canvas_B: Sequence[int],
        options: DecodingOptions,
        audio_BTD: Tensor | None,
        heard_BT: Tensor | None,
        watch: Stopwatch,
    ) -> list[Heard]:
        selections = self._selector(options)(pools)
        chosen = [pool.candidates[selection.index] for pool, selection in zip(pools, selections, strict=True)]
        texts = [candidate.tokens for candidate in chosen]
        watch.lap("select")
        if options.proofread:
            assert audio_BTD is not None
            texts = self._proofread(texts, pools, audio_BTD, heard_BT)
            watch.lap("proofread")
        traces = [
            tuple(step.of(row, slice(PROMPT_LENGTH, positions)) for step in steps)
            for row, positions in enumerate(canvas_B)
        ]
        words = [
            time_words(text, pool.bytes_TV, pool.language) if options.words and pool.bytes_TV is not None else ()
            for pool, text in zip(pools, texts, strict=True)
        ]
        heard = [heard_of(*parts) for parts in zip(pools, selections, texts, words, traces, strict=True)]
        watch.lap("select")
        return heard

    @torch.no_grad()
    def _proofread(
        self, texts: Sequence[tuple[int, ...]], pools: Sequence[Pool], audio_BTD: Tensor, heard_BT: Tensor | None
    ) -> list[tuple[int, ...]]:
        decoder, languages = self._whisper_decoder(), [pool.language for pool in pools]
        columns, head = self._vocabulary(languages, decoder.embed.weight, "whisper")
        prompts_BP = prompts(languages, len(pools), decoder.config.vocab_size).to(self._device)
        spelled = [pool.bytes_TV for pool in pools]
        return proofread(decoder, head, columns, texts, prompts_BP, audio_BTD, heard_BT, spelled)

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

    def _vocabulary(self, languages: Sequence[str], weight_VD: Tensor, of: str) -> tuple[Columns, Head]:
        """What may be written in a batch, and the rows of an output head for it; `of` names the head."""
        columns = (self.model.vocabulary or Vocabulary({})).columns(languages, self._device)
        # Of one language, or of all: heads are copies, and combinations without number would fill the memory.
        everything = len(columns.ids_V) == SAMPLEABLE
        key = of, None if everything else languages[0]
        if key not in self._heads:
            rows = slice(SAMPLEABLE) if everything else columns.ids_V
            self._heads[key] = self._head(weight_VD[rows])
        return columns, self._heads[key]

    def _head(self, weight_VD: Tensor) -> Head:
        return lambda states_RD: F.linear(states_RD, weight_VD)

    @torch.no_grad()
    def _detect(
        self,
        batch: Sequence[Window],
        audio_BTD: Tensor,
        heard_BT: Tensor | None,
        predictor: DecoderPredictor | None = None,
    ) -> list[str]:
        """By Whisper's decoder; without it, by the decoder's look at an empty canvas whose language is masked too."""
        config, whisper = self.model.config, self.model.whisper
        if whisper is not None:
            logits_BX = language_logits(whisper, audio_BTD, config.languages, heard_BT)
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
            return WhisperRerank(self._whisper_decoder())
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
        """What was left to the model: where Whisper's decoder comes with it, it proofreads what was chosen."""
        if options.proofread is not None:
            return options
        # What the oracle chooses is a bound on choosing, not a transcript.
        return replace(options, proofread=self.model.whisper is not None and options.selection != "oracle")

    def _whisper_decoder(self) -> WhisperDecoder:
        """Whisper's decoder: the model's own, or read from the cache on first use."""
        if self._whisper is None:
            from whisfusion.weights import load_whisper

            config = self.model.config
            self._whisper = load_whisper(config.encoder_name, self._device, self.model.encoder.positions.dtype).decoder
        return self._whisper


class Int8System(DiffusionSystem):
    """The same on a CPU, with products in int8."""

    def __init__(self, model: Model) -> None:
        """Changes the model's modules."""
        super().__init__(model)
        to_int8(model.encoder, model.decoder, *([] if model.whisper is None else [model.whisper]))

    def _head(self, weight_VD: Tensor) -> Head:
        return Int8Linear(weight_VD)
