"""Whisper's decoder: greedy decoding, language detection and likelihoods, against slow and plain versions of each."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from whisfusion import whisper
from whisfusion.blocks import Cache, KeysValues
from whisfusion.errors import LanguageError
from whisfusion.mel import log_mel
from whisfusion.tokenizer import ENDOFTEXT, LANGUAGES, MASK, TIMESTAMP_BEGIN, TRANSCRIBE, get_tokenizer, whisper_id
from whisfusion.whisper import (
    WhisperDecoder,
    WhisperDecoderConfig,
    detect_language,
    greedy,
    log_likelihood,
    window_mel,
)

OLD_VOCABULARY, NEW_VOCABULARY = 51_865, 51_866
CACHED = 1e-4  # logits of about 10, one token at a time against all at once
SCORED = 1e-5  # mean log-probabilities, batched against alone

# The published list of Whisper sizes before large-v3 (suppress_tokens of their generation configs).
# fmt: off
PUBLISHED = [
    1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542, 873, 893,
    902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667, 6585, 6647, 7273,
    9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635, 15265, 15618, 16553, 16604, 18362, 18956,
    20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650, 32302, 32470, 36865, 42863, 47425, 49870, 50254,
    50258, 50358, 50359, 50360, 50361, 50362,
]
# fmt: on


def random_decoder(vocab_size: int = OLD_VOCABULARY, positions: int = 64) -> WhisperDecoder:
    torch.manual_seed(0)
    decoder = WhisperDecoder(WhisperDecoderConfig(vocab_size, width=64, layers=2, heads=1, positions=positions))
    for parameter in decoder.parameters():
        parameter.normal_(0, 0.3)
    return decoder


@pytest.fixture(scope="module")
def decoder() -> WhisperDecoder:
    return random_decoder()


@pytest.fixture(scope="module")
def audio_BTD() -> Tensor:  # noqa: N802
    return torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(1))


def test_the_cache_changes_nothing(decoder: WhisperDecoder, audio_BTD: Tensor):
    tokens_BL = torch.randint(0, 50_000, (3, 9), generator=torch.Generator().manual_seed(2))
    memory, cache = decoder.listen(audio_BTD), Cache()
    steps = [decoder(tokens_BL[:, :4], memory, cache=cache)]
    steps += [decoder(tokens_BL[:, i : i + 1], memory, cache=cache, offset=i) for i in range(4, 9)]
    torch.testing.assert_close(torch.cat(steps, 1), decoder(tokens_BL, memory), rtol=0, atol=CACHED)


def test_greedy_takes_the_likeliest_token(decoder: WhisperDecoder, audio_BTD: Tensor):
    """Without a cache, without a batch, all positions again for every token."""
    languages = ["en", "ja", "pt"]
    hypotheses = greedy(decoder, audio_BTD, languages, max_tokens=12)
    for audio_TD, language, hypothesis in zip(audio_BTD, languages, hypotheses, strict=True):
        memory = decoder.listen(audio_TD[None])
        tokens = [whisper_id(token, OLD_VOCABULARY) for token in get_tokenizer().prompt(language)]
        no_speech = decoder(torch.tensor([tokens]), memory)[0, 0].softmax(-1)[50_362]
        assert hypothesis.no_speech_prob == pytest.approx(float(no_speech), rel=1e-3)
        logprobs = []
        while len(logprobs) < 12 and tokens[-1] != ENDOFTEXT:
            logits_V = decoder(torch.tensor([tokens]), memory)[0, -1]
            logits_V[PUBLISHED if logprobs else [*PUBLISHED, 220, ENDOFTEXT]] = -torch.inf
            logprob, token = logits_V.log_softmax(-1).max(-1)
            tokens.append(int(token))
            logprobs.append(float(logprob))
        written = [token for token in tokens[4:] if token != ENDOFTEXT]
        assert [whisper_id(token, OLD_VOCABULARY) for token in hypothesis.tokens] == written
        assert hypothesis.avg_logprob == pytest.approx(np.mean(logprobs), abs=CACHED)


class ScriptedDecoder:
    """Writes what it is told to: row `b` of the batch writes `lines[b]`, which its keys carry."""

    def __init__(self, lines: Sequence[Sequence[int]], vocab_size: int = OLD_VOCABULARY):
        self.config = SimpleNamespace(vocab_size=vocab_size, positions=448)
        self.lines = lines
        self.batches: list[int] = []

    def listen(self, audio_BTD: Tensor) -> list[KeysValues]:
        rows_B111 = torch.arange(len(audio_BTD)).reshape(-1, 1, 1, 1)
        return [KeysValues(rows_B111, rows_B111)]

    def __call__(self, tokens_BL: Tensor, memory: list[KeysValues], *, cache: Cache, offset: int = 0, **_: object):
        rows = memory[0].k_BHTC.flatten().tolist()
        assert len(rows) == len(tokens_BL)
        cached = cache.extend(0, memory[0]).k_BHTC
        assert (cached.flatten(1) == memory[0].k_BHTC.flatten(1)).all(), "cache and memory hold other rows"
        self.batches.append(len(rows))
        logits_BLV = torch.zeros(*tokens_BL.shape, self.config.vocab_size)
        for i, row in enumerate(rows):
            logits_BLV[i, -1, self.lines[row][max(0, offset - 3)]] = 9.0
        return logits_BLV


def scripted(lines: Sequence[Sequence[int]], **options: object) -> tuple[list[list[int]], list[int]]:
    decoder = ScriptedDecoder(lines, **options)
    hypotheses = greedy(decoder, torch.zeros(len(lines), 1, 1), "en")
    return [hypothesis.tokens for hypothesis in hypotheses], decoder.batches


def test_what_has_ended_leaves_the_batch():
    tokens, batches = scripted([[5, ENDOFTEXT], [6, 6, 6, 6, ENDOFTEXT], [12, ENDOFTEXT], [11, 13, ENDOFTEXT]])
    assert tokens == [[5], [6, 6, 6, 6], [12], [11, 13]]
    assert batches == [4, 4, 2, 1, 1]


def test_a_transcript_has_at_most_half_of_the_positions():
    tokens, batches = scripted([[5] * 300, [6] * 3 + [ENDOFTEXT]])
    assert [len(line) for line in tokens] == [224, 3]
    assert len(batches) == 224
    decoder = random_decoder(positions=6)
    assert len(greedy(decoder, torch.zeros(1, 2, 64), "en", max_tokens=50)[0].tokens) <= 2
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        greedy(decoder, torch.zeros(1, 2, 64), "en", max_tokens=0)


@pytest.mark.parametrize("token", [1, 50_258, 50_358, 50_362])
def test_suppressed_tokens_are_not_written(token: int):
    tokens, _ = scripted([[6, token, ENDOFTEXT]])
    assert token not in tokens[0]


def test_a_transcript_does_not_begin_with_a_blank():
    for blank in (220, ENDOFTEXT):
        tokens, _ = scripted([[blank, ENDOFTEXT]])
        assert len(tokens[0]) == 1
        assert tokens[0][0] != blank


def test_ids_come_out_as_those_of_large_v3():
    assert scripted([[50_364, ENDOFTEXT]])[0] == [[TIMESTAMP_BEGIN]]
    assert scripted([[50_365, ENDOFTEXT]], vocab_size=NEW_VOCABULARY)[0] == [[TIMESTAMP_BEGIN]]


def test_the_suppressed_tokens_are_the_published_ones():
    never, at_start = whisper._suppressed(OLD_VOCABULARY, torch.device("cpu"))
    assert sorted(never.tolist()) == PUBLISHED
    assert at_start.tolist() == [220, ENDOFTEXT]
    never, _ = whisper._suppressed(NEW_VOCABULARY, torch.device("cpu"))
    assert sorted(never.tolist()) == [token + (token >= 50_358) for token in PUBLISHED]


@pytest.mark.parametrize(("vocab_size", "languages"), [(OLD_VOCABULARY, 99), (NEW_VOCABULARY, 100)])
def test_languages_are_ranked(vocab_size: int, languages: int, audio_BTD: Tensor):
    decoder = random_decoder(vocab_size)
    detected = detect_language(decoder, audio_BTD)
    logits_BV = decoder(torch.full((3, 1), 50_258), decoder.listen(audio_BTD))[:, 0]
    expected_BN = logits_BV[:, 50_259 : 50_259 + languages].softmax(-1)
    codes = list(LANGUAGES)[:languages]
    for ranked, expected_N in zip(detected, expected_BN, strict=True):
        assert ranked == pytest.approx(dict(zip(codes, expected_N.tolist(), strict=True)))
        assert sum(ranked.values()) == pytest.approx(1)
        assert list(ranked.values()) == sorted(ranked.values(), reverse=True)


def test_cantonese_needs_a_model_that_knows_it(audio_BTD: Tensor):
    with pytest.raises(LanguageError, match="Cantonese"):
        greedy(random_decoder(), audio_BTD, "yue", max_tokens=1)
    assert len(greedy(random_decoder(NEW_VOCABULARY), audio_BTD, "yue", max_tokens=1)) == 3


CANDIDATES = [
    [[440, 1027, 13], [440], [440, 1027, 11, 293, 300, 390]],
    [[]],
    [[3001, 2], [3001, 2, ENDOFTEXT, 17, ENDOFTEXT], [50_364]],
]


def plain_likelihood(decoder: WhisperDecoder, audio_TD: Tensor, tokens: list[int], language: str) -> float:
    ids = [*get_tokenizer().prompt(language), *tokens, ENDOFTEXT]
    ids = [whisper_id(token, decoder.config.vocab_size) for token in ids]
    logprobs_LV = decoder(torch.tensor([ids[:-1]]), decoder.listen(audio_TD[None]))[0].log_softmax(-1)
    return sum(float(logprobs_LV[i - 1, ids[i]]) for i in range(4, len(ids))) / (len(ids) - 4)


@pytest.mark.parametrize("vocab_size", [OLD_VOCABULARY, NEW_VOCABULARY])
@pytest.mark.parametrize("rows", [3, 512])
def test_likelihoods_are_those_of_each_candidate_alone(
    vocab_size: int, rows: int, audio_BTD: Tensor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(whisper, "_SCORED_ROWS", rows)
    decoder, languages = random_decoder(vocab_size), ["en", "de", "zh"]
    scores = log_likelihood(decoder, audio_BTD, CANDIDATES, languages)
    assert [len(of_one) for of_one in scores] == [3, 1, 3]
    for audio_TD, language, candidates, of_one in zip(audio_BTD, languages, CANDIDATES, scores, strict=True):
        for tokens, score in zip(candidates, of_one, strict=True):
            text = tokens[: tokens.index(ENDOFTEXT)] if ENDOFTEXT in tokens else tokens
            assert score == pytest.approx(plain_likelihood(decoder, audio_TD, text, language), abs=SCORED)


def test_audio_is_heard_once_for_all_candidates(audio_BTD: Tensor, monkeypatch: pytest.MonkeyPatch):
    decoder, heard = random_decoder(), []
    monkeypatch.setattr(
        decoder, "listen", lambda x_BTD: heard.append(x_BTD.shape) or WhisperDecoder.listen(decoder, x_BTD)
    )
    log_likelihood(decoder, audio_BTD, [[[1]] * 5] * 3, "en")
    assert heard == [(3, 20, 64)]


def test_masked_audio_is_not_heard(decoder: WhisperDecoder, audio_BTD: Tensor):
    mask_BT = torch.arange(20) < torch.tensor([20, 7, 1])[:, None]
    noise_BTD = audio_BTD.masked_fill(~mask_BT[..., None], 50.0)
    scores = log_likelihood(decoder, noise_BTD, CANDIDATES, "en", audio_mask_BT=mask_BT)
    assert scores[1] == pytest.approx(log_likelihood(decoder, audio_BTD[1:2, :7], CANDIDATES[1:2], "en")[0], abs=SCORED)
    masked = greedy(decoder, noise_BTD, "en", audio_mask_BT=mask_BT, max_tokens=6)
    alone = greedy(decoder, audio_BTD[1:2, :7], "en", max_tokens=6)
    assert masked[1].tokens == alone[0].tokens
    masked = detect_language(decoder, noise_BTD, audio_mask_BT=mask_BT)
    assert masked[2] == pytest.approx(detect_language(decoder, audio_BTD[2:, :1])[0], rel=1e-4)


def test_candidates_that_cannot_be_scored(decoder: WhisperDecoder, audio_BTD: Tensor):
    assert log_likelihood(decoder, audio_BTD, [[], [], []], "en") == [[], [], []]
    assert len(log_likelihood(decoder, audio_BTD[:1], [[[5] * 60]], "en")[0]) == 1
    with pytest.raises(ValueError, match="a candidate has 61 tokens; Whisper reads 60"):
        log_likelihood(decoder, audio_BTD[:1], [[[5] * 61]], "en")
    with pytest.raises(ValueError, match="no token for our id"):
        log_likelihood(decoder, audio_BTD[:1], [[[MASK]]], "en")
    with pytest.raises(ValueError, match="2 languages for 3 utterances"):
        log_likelihood(decoder, audio_BTD, CANDIDATES, ["en", "de"])


def test_windows_hold_the_clip_and_then_nothing():
    rng = np.random.default_rng(0)
    clips = [rng.normal(0, 0.1, size).astype(np.float32) for size in (16_000, 480_000, 5_555)]
    mel_BMF = window_mel(clips, n_mels=80)
    padded = log_mel(clips, n_mels=80).mel_BMF
    for mel_MF, expected_MF, clip in zip(mel_BMF, padded, clips, strict=True):
        frames = len(clip) // 160
        torch.testing.assert_close(mel_MF[:, :frames], expected_MF[:, :frames], rtol=0, atol=1e-5)
        assert not mel_MF[:, frames:].any()


def test_prompts_use_the_ids_of_the_model():
    prompt = whisper.prompts(["en", "ja"], 2, OLD_VOCABULARY).tolist()
    assert prompt == [[50_258, 50_259, TRANSCRIBE - 1, 50_363], [50_258, 50_266, TRANSCRIBE - 1, 50_363]]
    assert whisper.prompts("en", 1, NEW_VOCABULARY).tolist() == [[50_258, 50_259, TRANSCRIBE, 50_364]]
