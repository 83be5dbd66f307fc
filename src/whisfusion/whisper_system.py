"""Whisper's own greedy decoder behind a Transcriber: the peer.

Letters: B windows, M mel bins, F mel frames, T audio positions, D width.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from whisfusion.errors import OptionError
from whisfusion.pdd import PDDOptions
from whisfusion.tokenizer import get_tokenizer
from whisfusion.transcriber import DecodingOptions, Stopwatch, Window
from whisfusion.transcript import Heard
from whisfusion.whisper import Whisper, detect_language, greedy, window_mel


class WhisperSystem:
    """Whisper with its own greedy decoder over the same encoder code."""

    default = PDDOptions()
    times_words = False

    def __init__(self, whisper: Whisper) -> None:
        self.whisper = whisper

    def check(self, options: DecodingOptions, language: str | None) -> None:
        """Options of diffusion decoding are not looked at."""
        if options.words:
            raise OptionError("words are timed with --system whisfusion alone: leave out word_timestamps")

    def start(
        self, batch: Sequence[Window], options: DecodingOptions, timings: dict[str, float]
    ) -> Callable[[], list[Heard]]:
        """All is done before this returns."""
        heard = self.recognise(batch, options, timings)
        return lambda: heard

    def detect(self, batch: Sequence[Window]) -> list[str]:
        """The likeliest language of each window, by Whisper's own language tokens."""
        return self._detect(self._encode(batch, Stopwatch({}, self.whisper.encoder.positions.device)))

    def recognise(self, batch: Sequence[Window], options: DecodingOptions, timings: dict[str, float]) -> list[Heard]:
        """Encode, then write token by token."""
        watch = Stopwatch(timings, self.whisper.encoder.positions.device)
        audio_BTD = self._encode(batch, watch)
        given = [window.language for window in batch]
        detected = self._detect(audio_BTD) if None in given else given
        languages = [language or found or "" for language, found in zip(given, detected, strict=True)]
        hypotheses = greedy(self.whisper.decoder, audio_BTD, languages)
        watch.lap("decode")
        return [
            Heard(
                language=language,
                text=get_tokenizer().decode(hypothesis.tokens),
                tokens=tuple(hypothesis.tokens),
                avg_logprob=hypothesis.avg_logprob,
                no_speech_prob=hypothesis.no_speech_prob,
            )
            for hypothesis, language in zip(hypotheses, languages, strict=True)
        ]

    def _encode(self, batch: Sequence[Window], watch: Stopwatch) -> Tensor:
        encoder = self.whisper.encoder
        mel_BMF = window_mel(
            [window.samples for window in batch], n_mels=encoder.config.mels, device=encoder.positions.device
        )
        watch.lap("mel")
        audio_BTD = encoder(mel_BMF.to(encoder.positions.dtype))
        watch.lap("encode")
        return audio_BTD

    def _detect(self, audio_BTD: Tensor) -> list[str]:
        return [next(iter(ranked)) for ranked in detect_language(self.whisper.decoder, audio_BTD)]
