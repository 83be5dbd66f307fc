"""The fast engine's own code, run without capture on a CPU, against the plain path: the same noise, the same tokens.

In float64, so that what differs is not rounding: a draw near the border of two tokens would show it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from conftest import TINY_ENCODER, hum
from torch import Tensor

from whisfusion.blocks import Rotation
from whisfusion.checkpoint import Model, ModelConfig
from whisfusion.decoder import Canvas, DecoderConfig, DiffusionDecoder
from whisfusion.encoder import EncoderConfig, WhisperEncoder, audio_mask
from whisfusion.engine import GraphEngine
from whisfusion.errors import OptionError
from whisfusion.fused import FusedEncoder, FusedStack
from whisfusion.loading import load
from whisfusion.pdd import PDDOptions
from whisfusion.systems import DiffusionSystem
from whisfusion.tokenizer import LANGUAGES
from whisfusion.transcriber import DecodingOptions, Stopwatch, Transcriber, Window
from whisfusion.vocabulary import Vocabulary
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig, detect_language

# Sums in another order: of features of about 1 in float32, and of log-probabilities, which are float32 in any case.
STATES_TOLERANCE = 2e-5
LOGPROB_TOLERANCE = 2e-5

PAPER = DecoderConfig(layers=2, width=64, heads=2, hidden=96, audio_width=64, canvas=Canvas("fixed", 24))
OURS = DecoderConfig(
    layers=2,
    width=64,
    heads=1,
    hidden=128,
    audio_width=64,
    block="whisper",
    tied=True,
    anchors=True,
    canvas=Canvas("follow", 64),
)
MODELS = {
    "paper": ModelConfig(decoder=PAPER, encoder=TINY_ENCODER),
    "paper, its canvas follows": ModelConfig(
        decoder=dataclasses.replace(PAPER, canvas=Canvas("follow", 64)), encoder=TINY_ENCODER
    ),
    "paper, tied, anchors, clip": ModelConfig(
        decoder=dataclasses.replace(PAPER, tied=True, anchors=True), encoder=TINY_ENCODER, window="clip"
    ),
    "ours": ModelConfig(
        decoder=OURS,
        encoder=TINY_ENCODER,
        window="clip",
        text_style="written",
        languages=("en", "de", "ja"),
        detects_language=True,
    ),
    "ours, adapter": ModelConfig(
        decoder=dataclasses.replace(OURS, adapter=2, stride=2, spells_every=1, drafts=True, tied=False),
        encoder=TINY_ENCODER,
        window="clip",
    ),
    "ours, convolutions": ModelConfig(
        decoder=dataclasses.replace(OURS, adapter=1, stride=2, reach=3), encoder=TINY_ENCODER, window="clip"
    ),
    "ours, speller": ModelConfig(
        decoder=dataclasses.replace(OURS, adapter=1, stride=2, speller=1), encoder=TINY_ENCODER, window="clip"
    ),
    "ours, adapter, padded": ModelConfig(
        decoder=dataclasses.replace(OURS, adapter=1, canvas=Canvas("fixed", 32)), encoder=TINY_ENCODER
    ),
}


def unsettle(module: torch.nn.Module) -> None:
    """Give biases, norms and what starts at 0 values that matter, and an opinion to the last norm."""
    generator = torch.Generator().manual_seed(11)
    for name, parameter in module.named_parameters():
        if name.endswith("bias") or "norm" in name or not parameter.any():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def make_whisper(vocab_size: int) -> WhisperDecoder:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        whisper = WhisperDecoder(WhisperDecoderConfig(vocab_size, width=64, layers=2, heads=1, positions=448))
        torch.nn.init.normal_(whisper.positions)
    unsettle(whisper)
    return whisper.double()


def make_model(
    config: ModelConfig, vocabulary: Vocabulary | None = None, whisper: WhisperDecoder | None = None
) -> Model:
    torch.manual_seed(7)
    decoder, encoder = DiffusionDecoder(config.decoder), WhisperEncoder(config.encoder)
    for module in (decoder, encoder):
        unsettle(module)
    decoder.norm.weight.data *= 60
    if config.decoder.anchors:
        decoder.anchors.weigh.bias.data += 1
    decoder, encoder = decoder.double().requires_grad_(False).eval(), encoder.double()
    if whisper is not None:
        config = dataclasses.replace(config, whisper=whisper.config)
    return Model(config, decoder, encoder, PDDOptions(candidates=3), vocabulary, whisper=whisper)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[Transcriber, Transcriber]:
    """The plain path and the engine, over one model."""
    model = make_model(MODELS[request.param])
    return both(model)


class Batched(DiffusionSystem):
    """The plain path as on a GPU: a batch is decoded at once."""

    def _parts(self, batch: Sequence[Window]) -> list[Sequence[Window]]:
        return [batch]


def both(model: Model) -> tuple[Transcriber, Transcriber]:
    return Transcriber(Batched(model)), Transcriber(DiffusionSystem(model, GraphEngine(model, capture=False)))


def assert_same(pair: tuple[Transcriber, Transcriber], clips: list[np.ndarray], **options) -> None:
    plain, fast = (transcriber.transcribe(clips, **{"language": "en", **options}) for transcriber in pair)
    for expected, found in zip(plain, fast, strict=True):
        assert found.language == expected.language
        for one, other in zip(expected.segments, found.segments, strict=True):
            assert other.tokens == one.tokens
            assert other.complete == one.complete
            assert [c.text for c in other.candidates] == [c.text for c in one.candidates]
            for kind in ("confidence", "risk", "score"):
                assert [getattr(c, kind) for c in other.candidates] == pytest.approx(
                    [getattr(c, kind) for c in one.candidates], abs=LOGPROB_TOLERANCE
                )
            assert len(other.trace) == len(one.trace)
            for step, again in zip(one.trace, other.trace, strict=True):
                assert (again.masked, again.tokens) == (step.masked, step.tokens)
                np.testing.assert_allclose(again.logprobs, step.logprobs, atol=LOGPROB_TOLERANCE)
    assert len({token for one in plain for token in one.tokens}) > 1


CLIPS = [hum(1.0), hum(3.4, 1), hum(0.3, 2)]


def test_windows_one_by_one_and_in_a_batch_give_the_same():
    model = make_model(MODELS["ours, adapter"])
    assert_same((Transcriber(DiffusionSystem(model)), Transcriber(Batched(model))), CLIPS, temperature=0.5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5, "trace": True},
        {"temperature": 0.0},
        {"remask": "confidence", "temperature": 0.7, "trace": True},
        {"candidates": 1, "steps": 1},
        {"candidates": 2, "trajectory": [1.0, 0.5, 0.5, 0.2]},
        {"selection": "confidence", "batch_size": 1},
    ],
)
def test_the_same_transcripts_whatever_the_options(pair, options):
    assert_same(pair, CLIPS, **options)


def test_a_first_step_that_is_not_shared(pair):
    options = PDDOptions(candidates=2, share_first_step=False, temperature=0.5)
    for transcriber in pair:
        transcriber.system.default = options
    try:
        assert_same(pair, CLIPS[:2])
    finally:
        for transcriber in pair:
            transcriber.system.default = PDDOptions(candidates=3)


def test_languages_are_found_on_the_way():
    pair = both(make_model(MODELS["ours"]))
    assert_same(pair, CLIPS, language=None, temperature=0.5)
    assert_same(pair, CLIPS, language=["de", None, "ja"], temperature=0.5)


@pytest.mark.parametrize("vocab_size", [51_865, 51_866])
def test_languages_are_found_by_whispers_decoder_where_it_is_there(vocab_size):
    known = tuple(code for code in LANGUAGES if code not in ("en", "yue"))
    config = dataclasses.replace(MODELS["ours"], languages=known, detects_language=False)
    whisper, clips = make_whisper(vocab_size), [hum(0.3 + 1.3 * i, i) for i in range(8)]
    for block in whisper.blocks:
        block.cross_attn.out.weight *= 20
    pair = both(make_model(config, whisper=whisper))
    options = {"candidates": 1, "steps": 1, "proofread": False}
    assert_same(pair, clips, language=None, **options)
    found = [transcript.language for transcript in pair[0].transcribe(clips, **options)]
    assert len(set(found)) > 1
    system = pair[0].system
    for clip, language in zip(clips, found, strict=True):
        audio_BTD, heard_BT = system._encode([Window(clip, 0, None)], Stopwatch({}))
        (of_all,) = detect_language(whisper, audio_BTD, audio_mask_BT=heard_BT)
        assert next(code for code in of_all if code in config.languages) == language


def test_reranking_leaves_weights_where_graphs_have_found_them():
    """A graph that tells the language has the addresses of Whisper's weights."""
    model = make_model(MODELS["ours"], whisper=make_whisper(51_865))
    _, fast = both(model)
    places = [parameter.data_ptr() for parameter in model.whisper.parameters()]
    for selection in ("mbr", "rerank"):
        fast.transcribe(CLIPS[0], selection=selection, proofread=False)
    assert [parameter.data_ptr() for parameter in model.whisper.parameters()] == places


def test_tokens_of_other_languages_are_not_written():
    vocabulary = Vocabulary({"en": range(0, 40_000, 3), "de": range(500)})
    pair = both(make_model(MODELS["ours"], vocabulary))
    assert_same(pair, CLIPS, language=["en", "de", "ja"], temperature=0.5)
    assert_same(pair, CLIPS[:2], language="de", temperature=0.5)
    (segment,) = pair[1].transcribe(CLIPS[0], language="de", temperature=0.5).segments
    assert max(segment.tokens) < 500


@pytest.mark.parametrize("name", ["paper", "ours"])
@pytest.mark.parametrize("vocab_size", [51_865, 51_866])
def test_reranking_on_the_way_gives_whispers_likelihoods(name, vocab_size):
    pair = both(make_model(MODELS[name], whisper=make_whisper(vocab_size)))
    assert_same(pair, CLIPS, selection="rerank", temperature=0.5, proofread=False)


@pytest.mark.parametrize("name", ["ours, adapter", "ours, convolutions", "ours, adapter, padded"])
def test_spelling_weighs_the_same_bytes(name):
    assert_same(both(make_model(MODELS[name])), CLIPS, selection="spelling", temperature=0.5)


def test_batches_are_filled_up_and_shapes_are_few():
    model = make_model(MODELS["ours"])
    engine = GraphEngine(model, capture=False)
    options = DecodingOptions(PDDOptions())

    def plan(*seconds: float):
        return engine.plan([Window(hum(s), 0, "en") for s in seconds], options)

    assert [plan(*[1.0] * n).rows for n in (1, 2, 3, 5, 8)] == [1, 2, 4, 8, 8]
    assert plan(1.0) == plan(1.05)
    assert plan(1.0).frames % 128 == 0
    assert plan(30.0).frames == 3000
    assert plan(1.0, 9.0).positions == model.config.decoder.canvas.positions(9.0)
    assert not plan(1.0).detect
    assert engine.plan([Window(hum(1), 0, None)], options).detect


def test_a_batch_is_finished_after_the_next_has_begun():
    events = []

    class Slow:
        default = PDDOptions()
        times_words = False

        def check(self, options, language):
            pass

        def start(self, batch, options, timings):
            number = len(events)
            events.append(("start", number))

            def finish():
                events.append(("finish", number))
                timings["decode"] = 1.0
                return [fake(window) for window in batch]

            return finish

    def fake(window: Window):
        from whisfusion.transcript import Heard

        return Heard("en", f"{len(window.samples)}", (), 0.0, 0.0)

    clips = [hum(seconds) for seconds in (1.0, 2.0, 3.0)]
    transcripts = Transcriber(Slow()).transcribe(clips, language="en", batch_size=1)
    assert [t.text for t in transcripts] == ["16000", "32000", "48000"]
    assert [t.timings for t in transcripts] == [{"decode": 1.0}] * 3
    assert [kind for kind, _ in events] == ["start", "start", "finish", "start", "finish", "finish"]


def test_the_encoder_is_whispers():
    torch.manual_seed(5)
    encoder = WhisperEncoder(EncoderConfig(mels=80, width=64, layers=3, heads=2))
    unsettle(encoder)
    mel_BMF = torch.randn(2, 80, 96)
    frames_B = torch.tensor([96, 60])
    fused = FusedEncoder(encoder)
    expected = encoder(mel_BMF), encoder(mel_BMF, frames_B)
    found = fused(mel_BMF, None), fused(mel_BMF, audio_mask(frames_B, 48))
    torch.testing.assert_close(found, expected, rtol=0, atol=STATES_TOLERANCE)


def test_weights_are_shared_with_the_modules():
    encoder = WhisperEncoder(EncoderConfig(mels=80, width=64, layers=1, heads=2))
    names = set(encoder.state_dict())
    stack = FusedStack(encoder.blocks, encoder.norm)
    assert set(encoder.state_dict()) == names
    attention = next(iter(encoder.blocks)).self_attn
    joined = stack._layers[0].qkv[0]
    assert attention.k.weight.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
    assert torch.equal(joined, torch.cat([attention.q.weight, attention.k.weight, attention.v.weight]))


@torch.no_grad()
def test_norms_in_the_weights_change_nothing():
    torch.manual_seed(6)
    decoder = DiffusionDecoder(PAPER)
    unsettle(decoder)
    audio_BTD, tokens_GL = 3 * torch.randn(2, 24, PAPER.audio_width), torch.randint(0, 50_000, (4, 20))
    rotation = Rotation.of(20, PAPER.width // PAPER.heads, PAPER.rope_base, torch.device("cpu"))

    def plain() -> Tensor:
        return decoder(tokens_GL, decoder.listen(audio_BTD, positions=20))

    expected = plain()
    stack = FusedStack(decoder.blocks, decoder.norm)
    assert all((block.self_norm.weight == 1).all() for block in decoder.blocks)
    memory_BTD, _ = decoder.prepare(audio_BTD, positions=20)
    found = stack(decoder.inputs(tokens_GL, None), stack.listen(memory_BTD, None), rotation=rotation)
    torch.testing.assert_close((plain(), found), (expected, expected), rtol=0, atol=STATES_TOLERANCE)


def test_engines_are_chosen_by_name(tiny_model):
    assert load(tiny_model, device="cpu").system._engine is None
    with pytest.raises(OptionError, match="CUDA"):
        load(tiny_model, device="cpu", engine="graph")
    with pytest.raises(OptionError, match="engine must be"):
        load(tiny_model, device="cpu", engine="warp")  # ty: ignore
