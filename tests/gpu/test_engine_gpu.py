"""What only a GPU can show of the fast engine: kernels that are compiled, work that is captured."""

import dataclasses

import numpy as np
import pytest
import torch
from test_proofread import model_with, opinionated_whisper

from whisfusion import attention
from whisfusion.engine import GraphEngine
from whisfusion.evaluate.speed import Rehearsal, Subject, random_subject
from whisfusion.pdd import PDDOptions
from whisfusion.systems import DiffusionSystem
from whisfusion.transcriber import DecodingOptions, Window

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Relative error of features and states against float32: bf16 keeps 8 bits, through dozens of layers. The eager path has
# the same; the engine may have this much more of it.
MORE_THAN_EAGER = 1.3
# Share of candidates with the very same text in float32, where only the order of sums differs.
SAME_TEXTS = 0.95


def subject_of(shape: str, dtype: torch.dtype) -> Subject:
    """With opinions, and with candidates of its own."""
    subject = random_subject(shape, torch.device("cuda"), dtype)
    subject.model.decoder.norm.weight.mul_(40)
    return dataclasses.replace(subject, random=False)


def windows(*seconds: float) -> list[Window]:
    rng = np.random.default_rng(0)
    return [Window(rng.normal(0, 0.1, int(s * 16_000)).astype(np.float32), i, "en") for i, s in enumerate(seconds)]


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("shape", ["tiny", "trial"])
@pytest.mark.parametrize(
    "options",
    [
        DecodingOptions(PDDOptions()),
        DecodingOptions(PDDOptions(temperature=0.0)),
        DecodingOptions(PDDOptions(remask="confidence", steps=4)),
        DecodingOptions(PDDOptions(candidates=2, share_first_step=False), trace=True),
        DecodingOptions(PDDOptions(), "rerank"),
    ],
)
def test_graphs_write_what_the_plain_path_writes(shape, options):
    subject = subject_of(shape, torch.float32)
    plain, fast = Rehearsal(subject, None, []), Rehearsal(subject, GraphEngine(subject.model), [])
    same, count = 0, 0
    for batch in (windows(3.0), windows(7.0, 2.0, 5.0), windows(4.0, 2.5, 1.0)):
        expected, found = plain.recognise(batch, options, {}), fast.start(batch, options, {})()
        for one, other in zip(expected, found, strict=True):
            pairs = zip(one.candidates, other.candidates, strict=True)
            same += sum(a.text == b.text for a, b in pairs)
            count += len(one.candidates)
    assert same >= SAME_TEXTS * count


def test_a_graph_that_finds_the_language_finds_it_after_reranking_too():
    subject = subject_of("trial", torch.float32)
    config = dataclasses.replace(subject.model.config, whisper=subject.whisper.config)
    model = dataclasses.replace(subject.model, config=config, whisper=subject.whisper)
    subject = dataclasses.replace(subject, model=model)
    plain, fast = Rehearsal(subject, None, []), Rehearsal(subject, GraphEngine(model), [])
    batch = [dataclasses.replace(window, language=None) for window in windows(3.0, 2.0)]
    options = DecodingOptions(PDDOptions(candidates=1, steps=1), proofread=False)
    expected = [heard.language for heard in plain.recognise(batch, options, {})]
    for selection in ("mbr", "rerank", "mbr"):
        found = fast.start(batch, dataclasses.replace(options, selection=selection), {})()
        assert [heard.language for heard in found] == expected


@torch.no_grad()
def test_bf16_features_are_as_near_to_float32_as_the_plain_paths():
    exact = random_subject("trial", torch.device("cuda"), torch.float32).model
    model = random_subject("trial", torch.device("cuda"), torch.bfloat16).model
    engine = GraphEngine(model, capture=False)
    mel_BMF = torch.randn(4, 80, 1024, device="cuda")
    expected = exact.encoder(mel_BMF)
    plain, fast = (hear(mel_BMF.bfloat16(), None) for hear in (model.encoder, engine._encoder))
    assert relative(fast, expected) <= MORE_THAN_EAGER * relative(plain, expected)


def test_a_replay_repeats_itself_and_batches_may_overlap():
    subject = subject_of("trial", torch.bfloat16)
    system = Rehearsal(subject, GraphEngine(subject.model), [])
    options = DecodingOptions(PDDOptions())
    batches = [windows(3.0, 2.0), windows(3.0, 2.9)]
    apart = [system.start(batch, options, {})() for batch in batches]
    begun = [system.start(batch, options, {}) for batch in batches]
    assert [finish() for finish in begun] == apart


# Sequences, queries, keys and whether there is a bias: the encoder, canvases of five candidates, and those listening.
@pytest.mark.parametrize(
    ("sequences", "queries", "keys", "biased"),
    [(1, 1500, 1500, False), (5, 192, 192, False), (1, 192, 1500, False), (1, 960, 1500, False), (3, 200, 448, True)],
)
def test_every_way_to_attend_is_as_near_to_float32_as_torchs(sequences, queries, keys, biased):
    from whisfusion import attention_triton

    torch.manual_seed(0)
    q, k, v = (torch.randn(sequences, n, 20, 64, device="cuda").bfloat16() for n in (queries, keys, keys))
    bias_GT = None
    if biased:
        lengths = torch.randint(1, keys, (sequences, 1), device="cuda")
        bias_GT = torch.zeros(sequences, keys, device="cuda").masked_fill(
            torch.arange(keys, device="cuda") >= lengths, -torch.inf
        )
        bias_GT = bias_GT.bfloat16()
    exact = attention.plain(q.float(), k.float(), v.float(), None if bias_GT is None else bias_GT.float())
    least = relative(attention.plain(q, k, v, bias_GT), exact)
    for tiles in attention.candidates(queries, keys, heads=20 * sequences, processors=132):
        found = attention_triton.attention(q, k, v, bias_GT, causal=False, tiles=tiles)
        assert relative(found, exact) <= MORE_THAN_EAGER * least, tiles
    attend = attention.Fastest()
    assert relative(attend(q, k, v, bias_GT), exact) <= MORE_THAN_EAGER * least
    assert len(attend.chosen) == 1


def test_graphs_tell_the_language_and_proofread_as_the_plain_path_does():
    model = model_with(opinionated_whisper().to("cuda"))
    plain, fast = DiffusionSystem(model), DiffusionSystem(model, GraphEngine(model))
    same, count = 0, 0
    for first in range(0, 48, 8):
        batch = [
            dataclasses.replace(window, seed=first + i, language=None if i % 2 else "de")
            for i, window in enumerate(windows(*(1 + 0.25 * i for i in range(8))))
        ]
        expected = plain.start(batch, DecodingOptions(PDDOptions()), {})()
        found = fast.start(batch, DecodingOptions(PDDOptions()), {})()
        assert [one.language for one in found] == [one.language for one in expected]
        same += sum(one.tokens == other.tokens for one, other in zip(found, expected, strict=True))
        count += len(batch)
    assert same >= SAME_TEXTS * count
