import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import TINY_ENCODER, hum

from whisfusion import proofread as module
from whisfusion.blocks import Cache
from whisfusion.checkpoint import Model, ModelConfig
from whisfusion.ctc import BLANK
from whisfusion.decoder import Canvas, DecoderConfig, DiffusionDecoder
from whisfusion.encoder import WhisperEncoder
from whisfusion.engine import GraphEngine
from whisfusion.pdd import PDDOptions
from whisfusion.proofread import proofread
from whisfusion.quantise import is_fast_here, to_int8
from whisfusion.systems import DiffusionSystem
from whisfusion.tokenizer import ENDOFTEXT, PROMPT_LENGTH, get_tokenizer
from whisfusion.transcriber import DecodingOptions, Window
from whisfusion.vocabulary import Columns, Vocabulary
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig, prompts

# Sums in another order, of log-probabilities in float32.
TOLERANCE = 2e-4
# int8's rounding of states of about 1, through two layers.
INT8_TOLERANCE = 0.05
SMALL = WhisperDecoderConfig(vocab_size=51_865, width=64, layers=2, heads=1, positions=96)


def opinionated_whisper() -> WhisperDecoder:
    """Random, but some tokens are much likelier than others."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        decoder = WhisperDecoder(SMALL)
        for name, parameter in decoder.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.3 if parameter.dim() > 1 else 0.1)
        decoder.norm.weight.mul_(2)
    return decoder


@pytest.fixture(scope="module")
def whisper() -> WhisperDecoder:
    return opinionated_whisper()


@pytest.fixture(scope="module")
def columns() -> Columns:
    """Few enough tokens for Whisper to come back to a text."""
    return Vocabulary({"en": range(200, 260)}).columns(["en"], torch.device("cpu"))


def head(whisper, columns):
    weight_VD = whisper.embed.weight[columns.ids_V]
    return lambda states: states @ weight_VD.T


def heard(utterances: int, frames: int = 30) -> torch.Tensor:
    return torch.randn(utterances, frames, SMALL.width, generator=torch.Generator().manual_seed(5))


def texts_of(columns, *lengths: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(1)
    return [tuple(rng.choice(columns.ids_V[:-1].numpy(), length).tolist()) for length in lengths]


def asked(count: int) -> torch.Tensor:
    return prompts("en", count, SMALL.vocab_size)


def logprobs(whisper, columns, audio_BTD, text) -> np.ndarray:
    """Of each token of a text and of its end, from one plain pass."""
    target = torch.tensor([*text, ENDOFTEXT])
    tokens = torch.cat((asked(1), target[None, :-1]), 1)
    states = whisper.states(tokens, whisper.listen(audio_BTD))[0, PROMPT_LENGTH - 1 :]
    logits = head(whisper, columns)(states).log_softmax(-1)
    found = logits.gather(1, torch.searchsorted(columns.ids_V, target)[:, None])[:, 0].numpy()
    # What is all but impossible is not told apart.
    return found.clip(module._UNKNOWN)


def test_what_whisper_gains_by_an_edit_is_what_a_plain_pass_over_the_new_text_says(whisper, columns):
    audio_BTD, texts = heard(2), texts_of(columns, 9, 5)
    reader = module._Reader(whisper, head(whisper, columns), columns, asked(2), whisper.listen(audio_BTD), None)
    found = reader.edits(texts, [np.ones(len(text) + 1, dtype=bool) for text in texts])
    lengths = set()
    for row, (text, edits) in enumerate(zip(texts, found, strict=True)):
        before = logprobs(whisper, columns, audio_BTD[row : row + 1], text)
        for edit in edits:
            new = (*text[: edit.first], *edit.tokens, *text[edit.end :])
            after = logprobs(whisper, columns, audio_BTD[row : row + 1], new)
            # Through the first token after the edit.
            gained = (
                after[edit.first : edit.first + len(edit.tokens) + 1].sum() - before[edit.first : edit.end + 1].sum()
            )
            assert edit.gain == pytest.approx(gained, abs=TOLERANCE)
            lengths.add((edit.end - edit.first, len(edit.tokens)))
    assert {(0, 1), (1, 0), (1, 1), (2, 1), (1, 2), (3, 4)} <= lengths


def test_a_text_becomes_likelier_to_whisper(whisper, columns):
    audio_BTD, texts = heard(1), texts_of(columns, 12)
    (better,) = proofread(whisper, head(whisper, columns), columns, texts, asked(1), audio_BTD, None, [None])
    assert better != texts[0]
    before, after = (logprobs(whisper, columns, audio_BTD, text).sum() for text in (texts[0], better))
    assert after > before + 1


def test_what_is_read_beside_a_text_changes_nothing(whisper, columns):
    audio_BTD, texts = heard(4), texts_of(columns, 12, 3, 0, 7)
    heard_BT = torch.arange(30) < torch.tensor([30, 12, 20, 25])[:, None]
    together = proofread(whisper, head(whisper, columns), columns, texts, asked(4), audio_BTD, heard_BT, [None] * 4)
    alone = [
        proofread(
            whisper, head(whisper, columns), columns, [text], asked(1), audio_BTD[row : row + 1, : heard_BT[row].sum()],
            None, [None],
        )[0]
        for row, text in enumerate(texts)
    ]  # fmt: skip
    assert together == alone
    assert together[2] == ()
    assert together[0] != texts[0]


def test_utterances_of_several_languages_keep_their_own_tokens(whisper):
    vocabulary = Vocabulary({"en": range(200, 260), "de": range(230, 300)})
    columns = vocabulary.columns(["en", "de"], torch.device("cpu"))
    texts = [(200, 201, 202, 203, 204, 205), (290, 291, 292, 293, 294, 295)]
    asked_each = prompts(["en", "de"], 2, SMALL.vocab_size)
    found = proofread(whisper, head(whisper, columns), columns, texts, asked_each, heard(2), None, [None, None])
    assert found != texts
    assert all(set(text) <= set(vocabulary[code].tolist()) for text, code in zip(found, ("en", "de"), strict=True))


def spelled(text, frames: int, sureness: float) -> torch.Tensor:
    """CTC logits that hear a text, evenly spread."""
    target = [1 + byte for token in text for byte in get_tokenizer().token_bytes()[token]]
    logits = torch.zeros(frames, 257)
    logits[:, BLANK] = sureness
    for i, letter in enumerate(target):
        frame = int((i + 0.5) * frames / len(target))
        logits[frame] = 0
        logits[frame, letter] = sureness
    return logits


def test_what_ctc_hears_stays_where_it_is_sure(whisper, columns):
    audio_BTD, texts = heard(1), texts_of(columns, 12)
    sure, guessing = (spelled(texts[0], 120, sureness) for sureness in (400.0, 3.0))

    def read(bytes_TV):
        return proofread(whisper, head(whisper, columns), columns, texts, asked(1), audio_BTD, None, [bytes_TV])

    assert read(sure) == texts
    assert read(guessing) == read(None) != texts


def test_a_text_with_no_room_to_change_stays_as_it_is(whisper, columns):
    texts = texts_of(columns, SMALL.positions - PROMPT_LENGTH)
    assert proofread(whisper, head(whisper, columns), columns, texts, asked(1), heard(1), None, [None]) == texts


def test_texts_never_outgrow_whispers_positions(whisper, columns):
    texts = texts_of(columns, SMALL.positions - PROMPT_LENGTH - module._ONWARD)
    (found,) = proofread(whisper, head(whisper, columns), columns, texts, asked(1), heard(1), None, [None])
    assert len(found) <= len(texts[0])


@pytest.mark.skipif(not is_fast_here(), reason="no fast int8 on this processor")
def test_int8_sees_the_same_tokens_of_a_cache(whisper):
    exact, fast = WhisperDecoder(SMALL), WhisperDecoder(SMALL)
    for decoder in (exact, fast):
        decoder.load_state_dict(
            {name: 0.3 * value if value.dim() > 1 else value for name, value in whisper.state_dict().items()}
        )
    to_int8(fast)
    states = []
    for decoder in (exact, fast):
        cache, memory = Cache(), decoder.listen(heard(1))
        first = decoder.states(asked(1), memory, cache=cache)
        mask = torch.tensor([[True, True, False, True, True, False], [True, True, True, True, False, True]])
        places = torch.tensor([[3, 4]])
        more = decoder.states(torch.tensor([[220, 230]]), memory, cache=cache, places_GL=places, mask=mask[None, None])
        states.append(torch.cat((first, more), 1))
    assert (states[0] - states[1]).norm() / states[0].norm() < INT8_TOLERANCE


def model_with(whisper: WhisperDecoder) -> Model:
    """Random and small, on Whisper's device and in its type."""
    decoder = DecoderConfig(
        layers=2, width=64, heads=1, hidden=128, audio_width=64, block="whisper", tied=True, anchors=True, adapter=1,
        stride=2, canvas=Canvas("follow", 64),
    )  # fmt: skip
    config = ModelConfig(decoder, TINY_ENCODER, window="clip", languages=("en", "de"), whisper=SMALL)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        parts = DiffusionDecoder(decoder), WhisperEncoder(TINY_ENCODER)
        for part in parts:
            for parameter in part.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
    vocabulary = Vocabulary({"en": range(200, 260), "de": range(230, 300)})
    halves = (part.to(whisper.positions).requires_grad_(False).eval() for part in parts)
    return Model(config, *halves, PDDOptions(), vocabulary, whisper=whisper)


def test_the_fast_engine_proofreads_as_the_plain_path_does():
    model = model_with(opinionated_whisper().double())
    windows = [
        Window(hum(seconds), i, code) for i, (seconds, code) in enumerate([(2.0, "en"), (1.1, "de"), (1.6, None)])
    ]
    options = DecodingOptions(PDDOptions(candidates=3, temperature=0.5))
    plain = DiffusionSystem(model)
    expected = [one for part in (windows[:2], windows[2:]) for one in plain.recognise(part, options, {})]
    fast = DiffusionSystem(model, GraphEngine(model, capture=False))
    found = fast.start(windows, options, timings := {})()
    assert [one.language for one in found] == [one.language for one in expected]
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert timings["proofread"] > 0
    as_drawn = plain.recognise(windows[:2], dataclasses.replace(options, proofread=False), {})
    assert [one.tokens for one in as_drawn] != [one.tokens for one in expected[:2]]


def test_how_far_ctc_is_believed_follows_from_how_sure_it_is_of_its_letters():
    logp_TV = torch.full((4, 257), math.log(0.2 / 256)).double()
    logp_TV[:, 65] = math.log(0.8)
    assert module._credibility(logp_TV) == 1
    logp_TV[:, 65] = math.log(0.625)
    assert module._credibility(logp_TV) == pytest.approx(0.5)
    logp_TV[:, 65] = math.log(0.4)
    assert module._credibility(logp_TV) == 0
