"""int8 on a CPU: exact in whole numbers, near float32, the same in any batch."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import hum
from torch import nn

import whisfusion
from whisfusion import checkpoint, hub, loading, quantise
from whisfusion.blocks import KeysValues, whisper_block
from whisfusion.data.manifest import load_samples, read_manifest
from whisfusion.errors import ModelError, OptionError
from whisfusion.mel import log_mel
from whisfusion.normalise import edit_distance, units
from whisfusion.quantise import Int8Block, Int8Linear, Rows, dequantise, quantise_rows, to_int8
from whisfusion.systems import DiffusionSystem, Int8System
from whisfusion.tokenizer import MASK, PROMPT_LENGTH, get_tokenizer
from whisfusion.transcriber import Transcriber

LINEAR_TOLERANCE = {127: 0.015, 63: 0.022}
"""Relative error of one product whose weights are rounded to 127 steps of their largest, activations to so many."""
MODEL_TOLERANCE = 0.03
"""Relative error of what all layers of a small untrained model make of the audio."""
LOGIT_TOLERANCE = 0.03
TRAINED_LOGIT_TOLERANCE = 0.06
TRAINED_TEXT_TOLERANCE = 0.1
"""Share of words that differ: those of which the model is not sure. What that costs is measured on test sets."""

pytestmark = pytest.mark.skipif(not quantise.is_fast_here(), reason="this processor has no fast int8 products")


def apart(x, reference):
    return ((x - reference).norm() / reference.norm()).item()


def random_linear(inputs, outputs, bias=True):
    torch.manual_seed(outputs)
    linear = nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    return linear, Int8Linear(linear.weight, linear.bias)


@pytest.fixture(params=LINEAR_TOLERANCE)
def top(request, monkeypatch):
    if request.param > quantise.activation_top():
        pytest.skip("this processor adds pairs of products in 16 bits")
    monkeypatch.setattr(quantise, "activation_top", lambda: request.param)
    return request.param


@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(64, 64, True), (512, 300, False), (256, 1537, True)])
def test_a_product_is_exact_in_whole_numbers_and_near_in_floats(top, inputs, outputs, bias):
    linear, quantised = random_linear(inputs, outputs, bias)
    x_RD = torch.randn(50, inputs) * torch.logspace(-3, 3, 50)[:, None]
    y_RN = quantised(x_RD)
    assert apart(y_RN, linear(x_RD)) < LINEAR_TOLERANCE[top]
    rows, (whole_ND, scale_N1) = Rows.of(x_RD), quantise_rows(linear.weight)
    sums_RN = (rows.whole_RD.double() - top - 1) @ whole_ND.double().T
    expected_RN = sums_RN * scale_N1.double().T * rows.scale_R1.double()
    if bias:
        expected_RN += linear.bias.double()
    assert torch.allclose(y_RN.double(), expected_RN, rtol=1e-6, atol=1e-6 * expected_RN.abs().max().item())
    assert rows.whole_RD.min() >= 1
    assert rows.whole_RD.max() <= 2 * top + 1
    residual_RN = torch.randn(50, outputs)
    assert torch.allclose(quantised.add_to(residual_RN, x_RD), residual_RN + y_RN, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_sum_overflows(top, sign):
    quantised = Int8Linear(torch.ones(8, 512))
    torch.testing.assert_close(quantised(torch.full((4, 512), sign)), torch.full((4, 8), sign * 512))


def test_a_row_does_not_depend_on_the_others():
    _, quantised = random_linear(64, 96)
    x_RD = torch.randn(40, 64)
    alone = torch.cat([quantised(row_D[None]) for row_D in x_RD])
    x_RD[7] *= 1e4
    together = quantised(x_RD)
    assert torch.equal(together[:7], alone[:7])
    assert torch.equal(together[8:], alone[8:])


def test_nothing_and_zeros_are_fine():
    linear, quantised = random_linear(64, 96)
    assert quantised(torch.zeros(0, 64)).shape == (0, 96)
    assert torch.equal(quantised(torch.zeros(2, 3, 64)), linear.bias.expand(2, 3, 96))


def test_what_was_stored_as_int8_is_multiplied_by_the_numbers_that_were_stored():
    matrix = torch.randn(300, 64) * torch.logspace(-4, 2, 300)[:, None]
    stored = quantise.quantise({"w": matrix, "b": matrix[0]}, torch.float32)
    whole_ND, scale_N1 = quantise_rows(dequantise(stored)["w"])
    assert torch.equal(whole_ND, stored["w:int8"])
    assert torch.allclose(scale_N1[:, 0], stored["w:scale"], rtol=1e-6)
    assert quantise.is_quantised(stored)
    assert not quantise.is_quantised({"w": matrix})


def test_what_counts_tokens_is_not_rounded_with_the_rest():
    row = torch.randn(1, 256)
    stored = quantise.quantise({"weigh": row, "w": torch.randn(2, 256)}, torch.bfloat16, bits=6)
    assert torch.equal(stored["weigh"], row.bfloat16())
    assert not any(name.startswith("weigh:") for name in stored)


@pytest.mark.parametrize("bits", [8, 7, 6, 5, 4, 3])
def test_what_was_stored_in_few_bits_is_multiplied_by_the_numbers_that_were_stored(bits):
    matrix = torch.randn(300, 64) * torch.logspace(-4, 2, 300)[:, None]
    weight = dequantise(quantise.quantise({"w": matrix}, torch.float32, bits=bits))["w"]
    torch.testing.assert_close(Int8Linear(weight)(torch.eye(64)).T, weight, rtol=1e-5, atol=1e-9)


def test_a_matrix_with_a_few_large_numbers_is_kept_deflated():
    torch.manual_seed(0)
    matrix = torch.randn(40, 600)
    matrix[:, 7] = 30.0
    state = {"w": matrix, "conv": matrix.view(40, 200, 3), "other": torch.randn(40, 600)}
    stored = quantise.quantise(state, torch.float32)
    assert sorted(stored) == sorted(
        f"{n}" for n in ("w:deflated", "w:scale", "conv:int8", "conv:scale", "other:int8", "other:scale")
    )
    assert stored["w:deflated"].nbytes < 0.8 * matrix.numel()
    again = dequantise(stored)
    assert torch.equal(again["w"], again["conv"].view(40, 600))
    with pytest.raises(ModelError, match="weights of w cannot be read"):
        dequantise(stored | {"w:deflated": stored["w:deflated"][:-9]})


def test_of_fewer_bits_numbers_are_smaller_and_deflated():
    torch.manual_seed(0)
    matrix, sizes = torch.randn(400, 600), []
    for bits in (4, 6, 8):
        stored = quantise.quantise(
            {"w": matrix, "conv": matrix.view(400, 200, 3), "b": matrix[0]}, torch.float32, bits=bits
        )
        again, top = dequantise(stored), 2 ** (bits - 1) - 1
        step = matrix.abs().amax(1, keepdim=True) / top
        assert ((again["w"] - matrix).abs() <= 0.5001 * step).all()
        assert torch.equal(again["conv"].view(400, 600), again["w"])
        assert torch.equal(again["b"], matrix[0])
        assert stored["conv:int8"].abs().max() == top
        sizes.append(sum(value.nbytes for name, value in stored.items() if name.startswith("w")))
    assert sizes[0] < 0.75 * sizes[1] < 0.75 * 0.75 * sizes[2]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_block_is_near_the_plain_one(cross, masked):
    torch.manual_seed(0)
    block = whisper_block(128, 4, hidden=256, cross=cross).requires_grad_(False).eval()
    x_GLD, audio_BTD = torch.randn(6, 10, 128), torch.randn(2, 30, 128)
    masks = {}
    if masked:
        masks = {"self_mask": torch.rand(6, 1, 1, 10) < 0.7, "memory_mask": torch.rand(2, 1, 1, 30) < 0.7}
        masks["self_mask"][..., 0] = masks["memory_mask"][..., 0] = True
    fast = Int8Block(block)
    memory: list[KeysValues | None] = [None, None]
    if cross:
        memory = [each.cross_attn.keys_values(audio_BTD) for each in (block, fast)]
        assert apart(memory[1].k_BHTC, memory[0].k_BHTC) < LINEAR_TOLERANCE[quantise.activation_top()]
        assert apart(memory[1].v_BHTC, memory[0].v_BHTC) < LINEAR_TOLERANCE[quantise.activation_top()]
    plain_GLD = block(x_GLD, memory[0], **masks)
    fast_GLD = fast(x_GLD, memory[1], **masks)
    assert apart(fast_GLD - x_GLD, plain_GLD - x_GLD) < MODEL_TOLERANCE


@pytest.mark.parametrize("folder", ["tiny_model", "tiny_clip_model"])
def test_the_logits_of_a_model_are_near_those_in_float32(folder, request):
    plain = checkpoint.load(request.getfixturevalue(folder), dtype=torch.float32)
    fast = copy.deepcopy(plain)
    to_int8(fast.encoder, fast.decoder)
    assert not [
        name for part in (fast.encoder, fast.decoder) for name, m in part.named_modules() if type(m) is nn.Linear
    ]
    torch.manual_seed(0)
    mel_BMF, tokens_GL = torch.randn(1, 80, 200), torch.randint(0, 50_000, (3, 24))
    states, memories = [], []
    with torch.no_grad():
        for model in (plain, fast):
            audio_BTD = model.encoder(mel_BMF)
            memories.append(audio_BTD)
            states.append(model.decoder(tokens_GL, model.decoder.listen(audio_BTD, positions=24)))
    assert apart(memories[1], memories[0]) < MODEL_TOLERANCE
    assert apart(states[1], states[0]) < MODEL_TOLERANCE
    head_VD = plain.decoder.output_weight[:2000]
    logits_RV = states[0].flatten(0, 1) @ head_VD.T
    assert apart(Int8Linear(head_VD)(states[1].flatten(0, 1)), logits_RV) < LOGIT_TOLERANCE


@pytest.fixture(scope="module")
def int8_folder(tiny_clip_model, tmp_path_factory):
    """The same model, stored as int8."""
    model = checkpoint.load(tiny_clip_model, dtype=torch.float32)
    return checkpoint.save(
        tmp_path_factory.mktemp("int8") / "model",
        model.config,
        model.decoder.state_dict(),
        encoder=model.encoder.state_dict(),
        generation=model.generation,
        int8=True,
    )


def test_int8_is_taken_where_it_is_asked_for_or_stored(int8_folder, tiny_clip_model, monkeypatch):
    def kind(folder, dtype):
        return type(whisfusion.load(folder, device="cpu", dtype=dtype).system)

    assert kind(int8_folder, "auto") is kind(int8_folder, "int8") is kind(tiny_clip_model, "int8") is Int8System
    assert kind(int8_folder, "float32") is kind(tiny_clip_model, "auto") is DiffusionSystem
    with pytest.raises(OptionError, match="diffusion decoding"):
        whisfusion.load(device="cpu", dtype="int8", system="whisper")
    monkeypatch.setattr(loading.quantise, "is_fast_here", lambda: False)
    assert kind(int8_folder, "auto") is DiffusionSystem
    with pytest.raises(OptionError, match="AVX2"):
        kind(int8_folder, "int8")
    with pytest.raises(OptionError, match="AVX2"):
        loading.resolve_dtype("int8", torch.device("cuda"))


def test_a_clip_alone_and_in_a_batch_is_exactly_the_same(int8_folder):
    model = whisfusion.load(int8_folder, device="cpu")
    model.system.model.decoder.norm.weight.mul_(30)
    clips = [hum(0.7 + 0.4 * i, i) for i in range(5)]
    together = model.transcribe(clips, temperature=1.0)
    assert [model.transcribe(clip, temperature=1.0).segments for clip in clips] == [t.segments for t in together]
    assert len({transcript.text for transcript in together}) == 5


def test_int8_and_float32_mostly_write_the_same(int8_folder):
    texts = []
    for dtype in ("int8", "float32"):
        model = whisfusion.load(int8_folder, device="cpu", dtype=dtype)
        # As sure of its tokens as a trained model is: else noise decides.
        model.system.model.decoder.norm.weight.mul_(30)
        clips = [hum(1.0 + 0.5 * i, i) for i in range(6)]
        texts.append([t.tokens for t in model.transcribe(clips, language="en", temperature=0.0, steps=1, candidates=1)])
    pairs = [pair for ours, theirs in zip(*texts, strict=True) for pair in zip(ours, theirs, strict=False)]
    assert np.mean([a == b for a, b in pairs]) > 0.8


@pytest.fixture(scope="module")
def bundled_pair():
    """The model that comes with the package, plain and in int8, and what it is asked to hear."""
    if loading.DEFAULT_MODEL not in [entry.name for entry in hub.models()]:
        pytest.skip("this version comes without a model of its own")
    # Six of them, in three languages, are enough and take seconds.
    clips = read_manifest(Path(__file__).parent.parent / "examples" / "examples.jsonl")[1:7]
    pair = [whisfusion.load(device="cpu", dtype=dtype).system for dtype in ("float32", "int8")]
    return *pair, {clip: load_samples(clip) for clip in clips}


@torch.no_grad()
def first_logits(system, clip, samples):
    """What the first step makes of every position, all being masked."""
    model = system.model
    positions = model.config.decoder.canvas.positions(clip.duration)
    tokens_GL = torch.full((1, positions), MASK)
    tokens_GL[0, :PROMPT_LENGTH] = torch.tensor(get_tokenizer().prompt(clip.language))
    audio_BTD = model.encoder(log_mel([samples], n_mels=model.config.encoder.mels, window="clip").mel_BMF)
    states_GLD = model.decoder(tokens_GL, model.decoder.listen(audio_BTD, positions=positions))
    _, head = system._vocabulary([clip.language], model.decoder.output_weight, "decoder")
    return head(states_GLD[0, PROMPT_LENGTH:])


def test_a_trained_model_is_as_sure_of_the_same_tokens(bundled_pair):
    plain, fast, clips = bundled_pair
    for clip, samples in clips.items():
        logits_RV, quantised_RV = (first_logits(system, clip, samples) for system in (plain, fast))
        assert apart(quantised_RV, logits_RV) < TRAINED_LOGIT_TOLERANCE
        sure_R = logits_RV.softmax(1).amax(1) > 0.5
        assert sure_R.any()
        assert torch.equal(quantised_RV.argmax(1)[sure_R], logits_RV.argmax(1)[sure_R])


def test_a_trained_model_writes_nearly_the_same(bundled_pair):
    *systems, clips = bundled_pair
    edits = words = 0
    for clip, samples in clips.items():
        plain, fast = (
            units(Transcriber(system).transcribe(samples, language=clip.language).text, clip.language)
            for system in systems
        )
        edits += edit_distance(fast, plain)
        words += len(plain)
    assert edits / words < TRAINED_TEXT_TOLERANCE
