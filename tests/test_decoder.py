import math

import pytest
import torch

from whisfusion.decoder import Canvas, DecoderConfig, DiffusionDecoder, Draft, start_from_whisper
from whisfusion.encoder import EncoderConfig, WhisperEncoder
from whisfusion.errors import ModelError, OptionError
from whisfusion.memory import Anchors, Nearby
from whisfusion.tokenizer import MASK, PROMPT_LENGTH, VOCAB_SIZE, embedding_rows
from whisfusion.whisper import WhisperDecoder, WhisperDecoderConfig

FLOAT32_TOLERANCE = 2e-5


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def small(**changes):
    settings = {"layers": 2, "width": 32, "heads": 4, "hidden": 64, "audio_width": 32, "vocab_size": VOCAB_SIZE}
    torch.manual_seed(0)
    return DiffusionDecoder(DecoderConfig(**(settings | changes))).eval()


WHISPER = {"block": "whisper", "tied": True, "anchors": True, "canvas": Canvas("follow", 224)}
KINDS = [
    {},
    {"anchors": True},
    {"tied": True},
    WHISPER,
    WHISPER | {"adapter": 2},
    WHISPER | {"adapter": 1, "stride": 2, "anchor_parts": 3},
    WHISPER | {"adapter": 1, "stride": 2, "every_frame": True},
    WHISPER | {"adapter": 3, "stride": 2, "spells_every": 1},
    WHISPER | {"adapter": 2, "stride": 2, "reach": 5},
    WHISPER | {"adapter": 1, "stride": 2, "speller": 2},
]


def test_the_default_is_the_papers_decoder():
    with torch.device("meta"):
        decoder = DiffusionDecoder(DecoderConfig())
    assert count(decoder) == 828_216_064
    assert decoder.embed.weight.shape == decoder.head.weight.shape == (51_867, 1280)
    assert not any(name.endswith("bias") for name, _ in decoder.named_parameters())


def test_the_large_v3_encoder_has_the_papers_size():
    with torch.device("meta"):
        encoder = WhisperEncoder(EncoderConfig())
    assert count(encoder) == 636_968_960
    assert count(encoder) - encoder.positions.numel() == 635_048_960


def test_initialisation_scales_the_output_projections():
    torch.manual_seed(0)
    decoder = DiffusionDecoder(DecoderConfig(layers=8, width=128, heads=4, hidden=256, audio_width=128))
    scaled = 0.02 / math.sqrt(16)
    for block in decoder.blocks:
        for linear in (block.self_attn.out, block.cross_attn.out, block.ffn.down):
            assert linear.weight.std().item() == pytest.approx(scaled, rel=0.05)
        for linear in (block.self_attn.q, block.cross_attn.v, block.ffn.up):
            assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for matrix in (decoder.embed.weight, decoder.head.weight, decoder.project[0].weight):
        assert matrix.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("changes", KINDS)
def test_candidates_folded_into_the_query_equal_candidates_with_copied_audio(changes):
    decoder = small(**changes)
    audio = torch.randn(2, 30, 32)
    tokens = torch.randint(0, 50_000, (2, 3, 16))
    tokens[..., 6:] = MASK
    with torch.no_grad():
        folded = decoder(tokens.flatten(0, 1), decoder.listen(audio, positions=16))
        copied = decoder(tokens.flatten(0, 1), decoder.listen(audio.repeat_interleave(3, 0), positions=16))
    assert (folded - copied).abs().max() < FLOAT32_TOLERANCE


@pytest.mark.parametrize("changes", KINDS)
def test_an_utterance_alone_equals_the_same_one_in_a_longer_batch(changes):
    decoder = small(**changes)
    audio = torch.randn(1, 20, 32)
    tokens = torch.randint(0, 50_000, (1, 16))
    heard = torch.arange(50) < torch.tensor([[20], [50]])
    canvas = torch.arange(32) < torch.tensor([[16], [32]])
    with torch.no_grad():
        alone = decoder(tokens, decoder.listen(audio, positions=16))
        padded = torch.cat((torch.nn.functional.pad(audio, (0, 0, 0, 30)), torch.randn(1, 50, 32)))
        both = torch.cat((torch.nn.functional.pad(tokens, (0, 16), value=7), torch.randint(0, 50_000, (1, 32))))
        batched = decoder(both, decoder.listen(padded, heard, positions=32), canvas)
    start = 1 if decoder.reads_ahead else 0  # nothing is read at position 0 there
    assert (alone[0, start:] - batched[0, start:16]).abs().max() < FLOAT32_TOLERANCE


def test_anchors_keep_to_an_utterances_own_canvas():
    decoder = small(**WHISPER)
    torch.nn.init.constant_(decoder.anchors.weigh.bias, 2.0)  # hears more tokens than there is room for
    audio, tokens = torch.randn(1, 40, 32), torch.randint(0, 50_000, (1, 16))
    with torch.no_grad():
        alone = decoder(tokens, decoder.listen(audio, positions=16))
        both = torch.cat((torch.nn.functional.pad(tokens, (0, 16), value=7), torch.randint(0, 50_000, (1, 32))))
        memory = decoder.listen(audio.repeat(2, 1, 1), positions=32, canvas_B=torch.tensor([16, 32]))
        batched = decoder(both, memory, torch.arange(32) < torch.tensor([[16], [32]]))
    assert (alone[0, 1:] - batched[0, 1:16]).abs().max() < FLOAT32_TOLERANCE


def test_every_position_sees_every_other_and_the_audio():
    decoder = small()
    audio, tokens = torch.randn(1, 20, 32), torch.randint(0, 50_000, (1, 16))
    with torch.no_grad():
        base = decoder(tokens, decoder.listen(audio, positions=16))
        late = tokens.clone()
        late[0, 15] = 3
        assert (decoder(late, decoder.listen(audio, positions=16))[0, 0] - base[0, 0]).abs().max() > 1e-6
        other = audio.clone()
        other[0, 19] += 1
        assert (decoder(tokens, decoder.listen(other, positions=16)) - base).abs().amax(-1).min() > 1e-7


def together(decoder):
    for block in decoder.blocks:
        block.lay_together()
    return decoder


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32_TOLERANCE), (torch.bfloat16, 0.05)])
def test_launches_that_are_spared_change_nothing(dtype, tolerance):
    decoder, tokens_GL, audio_BTD = small().to(dtype), torch.randint(0, 50_000, (4, 12)), torch.randn(2, 9, 32)

    def states():
        return decoder(tokens_GL, decoder.listen(audio_BTD.to(dtype), positions=12)).detach()

    weights = {name: value.clone() for name, value in decoder.state_dict().items()}
    expected = states()
    with torch.no_grad():
        apart = states()
        together(decoder)
        found = states()
    torch.testing.assert_close((apart, found), (expected, expected), rtol=0, atol=tolerance)
    torch.testing.assert_close(dict(decoder.state_dict()), weights, rtol=0, atol=0)


@torch.no_grad()
def test_of_weights_that_lay_together_those_given_later_count():
    decoder, other = together(small()), small()
    for value in other.parameters():
        value += 0.1 * torch.randn_like(value)
    decoder.load_state_dict(other.state_dict(), assign=True)
    tokens_GL, audio_BTD = torch.randint(0, 50_000, (4, 12)), torch.randn(2, 9, 32)
    expected, found = (each(tokens_GL, each.listen(audio_BTD, positions=12)) for each in (other, decoder))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_weights_that_lie_together_learn():
    decoder = together(small()).requires_grad_(True)
    memory = decoder.listen(torch.randn(2, 9, 32), positions=12)
    decoder(torch.randint(0, 50_000, (2, 12)), memory).sum().backward()
    assert [name for name, value in decoder.named_parameters() if value.grad is None] == ["head.weight"]


def test_positions_matter_on_the_text_side_and_not_on_the_audio_side():
    decoder = small()
    audio, tokens = torch.randn(1, 20, 32), torch.randint(0, 50_000, (1, 16))
    with torch.no_grad():
        base = decoder(tokens, decoder.listen(audio, positions=16))
        shuffled_audio = decoder(tokens, decoder.listen(audio[:, torch.randperm(20)], positions=16))
        turned_text = decoder(tokens.flip(1), decoder.listen(audio, positions=16)).flip(1)
    assert (shuffled_audio - base).abs().max() < FLOAT32_TOLERANCE
    assert (turned_text - base).abs().max() > 1e-3


def test_anchors_cut_the_audio_where_the_running_sum_passes_whole_numbers():
    anchors = Anchors(4, 4)
    torch.nn.init.zeros_(anchors.weigh.weight)  # the same weight for every frame
    audio = torch.arange(12.0)[None, :, None].expand(1, 12, 4)
    slices, amounts = anchors.cut(audio, None, positions=5, counts_B=torch.tensor([4]))
    # 12 frames in 4 slices: the means of frames 0-2, 3-5, 6-8, 9-11, and nothing for the fifth position.
    assert slices[0, :, 0].tolist() == pytest.approx([1.0, 4.0, 7.0, 10.0, 0.0], abs=1e-4)
    assert amounts[0].tolist() == pytest.approx([torch.sigmoid(anchors.weigh.bias).item()] * 12, rel=1e-5)


def test_anchors_hear_a_slice_in_parts_one_after_another():
    torch.manual_seed(0)
    whole, parts = Anchors(4, 4), Anchors(4, 4, parts=3)
    parts.load_state_dict(
        {name: value for name, value in whole.state_dict().items() if "project" not in name}, strict=False
    )
    torch.nn.init.zeros_(whole.weigh.weight)
    torch.nn.init.zeros_(parts.weigh.weight)
    audio = torch.randn(1, 12, 4)
    slices, amounts = parts.cut(audio, None, positions=3, counts_B=torch.tensor([2]))
    means, same = whole.cut(audio, None, positions=3, counts_B=torch.tensor([2]))
    assert slices.shape == (1, 3, 12)
    assert torch.equal(amounts, same)
    # Two slices of six frames, each in three parts of two.
    assert (slices[0, :2].reshape(6, 4) - audio.reshape(6, 2, 4).mean(1)).abs().max() < FLOAT32_TOLERANCE
    assert (slices.reshape(1, 3, 3, 4).mean(2) - means).abs().max() < FLOAT32_TOLERANCE


def test_anchors_estimate_a_whole_number_of_tokens():
    decoder = small(**WHISPER)
    memory = decoder.listen(torch.randn(2, 100, 32), positions=64)
    assert memory.amounts_BT is not None
    quantity_B = memory.amounts_BT.sum(1)
    assert memory.anchors_BLD is not None
    assert 4 < quantity_B[0].item() < 12  # sigmoid(-2.6) of 100 frames
    used = memory.anchors_BLD.abs().sum(-1) > 0
    assert used.sum(1).tolist() == quantity_B.round().int().tolist()
    # Read ahead: the anchor of the first text position lies on the last position of the prompt.
    assert used[:, PROMPT_LENGTH - 1].all()
    assert not used[:, : PROMPT_LENGTH - 1].any()


@pytest.mark.parametrize("loudness", [1.0, 30.0, 300.0])
def test_anchors_start_as_large_as_token_embeddings_whatever_the_audio(loudness):
    decoder = small(anchors=True)
    memory = decoder.listen(loudness * torch.randn(2, 100, 32), positions=32)
    assert memory.anchors_BLD is not None
    size = memory.anchors_BLD[:, PROMPT_LENGTH].norm(dim=-1)
    assert size.tolist() == pytest.approx([decoder.embed.weight.norm(dim=-1).mean().item()] * 2, rel=0.1)


@pytest.mark.parametrize("more", [{}, {"stride": 2, "every_frame": True}, {"spells_every": 1}, {"reach": 3}])
def test_an_adapter_starts_by_changing_nothing(more):
    audio, tokens = torch.randn(2, 30, 32), torch.randint(0, 50_000, (2, 16))
    with torch.no_grad():
        plain, adapted = small(**WHISPER), small(**(WHISPER | {"adapter": 2} | more))
        missing, unknown = adapted.load_state_dict(plain.state_dict(), strict=False)
        assert all(name.startswith("adapter.") for name in missing)
        assert not unknown
        memory = adapted.listen(audio, positions=16)
        same = plain(tokens, plain.listen(audio, positions=16))
        assert (adapted(tokens, memory) - same).abs().max() < FLOAT32_TOLERANCE
    assert memory.bytes_BTV is not None
    assert memory.bytes_BTV.shape == (2, 30, 257)


def test_what_is_spelled_early_is_told_to_the_layers_above():
    adapted = small(**(WHISPER | {"adapter": 4, "stride": 2, "spells_every": 2})).requires_grad_(False)
    audio = torch.randn(1, 30, 32)
    before = adapted.listen(audio, positions=16)
    assert [spelled.shape for spelled in before.earlier] == [(1, 30, 257)]
    torch.nn.init.normal_(adapted.adapter.told.weight)
    after = adapted.listen(audio, positions=16)
    assert before.bytes_BTV is not None
    assert after.bytes_BTV is not None
    assert torch.equal(after.earlier[0], before.earlier[0])
    assert (after.bytes_BTV - before.bytes_BTV).abs().max() > 1e-3


def test_a_speller_starts_by_spelling_what_the_adapter_does_and_is_not_heard_by_the_decoder():
    spelling = small(**(WHISPER | {"adapter": 2, "stride": 2, "speller": 2})).requires_grad_(False)
    audio, heard = torch.randn(2, 30, 32), torch.arange(30) < torch.tensor([30, 18])[:, None]
    before = spelling.listen(audio, heard, positions=16)
    assert before.bytes_BTV is not None
    assert torch.equal(before.bytes_BTV, before.earlier[-1])
    for parameter in spelling.speller.parameters():
        parameter.normal_()
    after = spelling.listen(audio, heard, positions=16)
    assert after.bytes_BTV is not None
    assert (after.bytes_BTV - before.bytes_BTV).abs().max() > 1e-3
    assert torch.equal(after.earlier[-1], before.bytes_BTV)
    for new, old in zip(after.layers, before.layers, strict=True):
        assert torch.equal(new.k_BHTC, old.k_BHTC)
        assert torch.equal(new.v_BHTC, old.v_BHTC)
    alone = spelling.listen(audio[1:, :18], positions=16)
    assert (after.own_bytes()[1] - alone.own_bytes()[0]).abs().max() < FLOAT32_TOLERANCE * 10


def test_a_convolution_hears_as_far_as_it_reaches_and_no_further_than_the_clip():
    adapted = small(**(WHISPER | {"adapter": 1, "reach": 5})).requires_grad_(False)
    adapted.adapter.nearby[0].out.weight.copy_(torch.eye(32))
    near = adapted.adapter.nearby[0]
    audio, heard = torch.randn(1, 30, 32), torch.arange(30)[None] < 20
    other = audio.clone()
    other[0, 10] = torch.randn(32)
    changed = (near(audio, heard) != near(other, heard)).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [8, 9, 10, 11, 12]
    beyond = audio.clone()
    beyond[0, 20:] = 7.0
    assert torch.equal(near(audio, heard)[:, :20], near(beyond, heard)[:, :20])
    assert (near(audio, heard)[:, :20] - near(audio[:, :20], None)).abs().max() < FLOAT32_TOLERANCE


def test_a_stride_hears_the_mean_of_the_frames_that_are_there():
    adapted = small(**(WHISPER | {"adapter": 1, "stride": 2}))
    audio, heard = torch.randn(2, 31, 32), torch.arange(31) < torch.tensor([31, 9])[:, None]
    memory = adapted.listen(audio * heard[..., None], heard, positions=16)
    assert memory.heard_BT is not None
    assert memory.bytes_BTV is not None
    assert memory.heard_BT.sum(1).tolist() == [16, 5]
    assert memory.bytes_BTV.shape == (2, 32, 257)
    features, _, _ = adapted.adapter(audio * heard[..., None], heard)
    assert (features[0, 0] - audio[0, :2].mean(0)).abs().max() < FLOAT32_TOLERANCE
    assert (features[0, 15] - audio[0, 30]).abs().max() < FLOAT32_TOLERANCE
    assert (features[1, 4] - audio[1, 8]).abs().max() < FLOAT32_TOLERANCE
    assert not features[1, 5:].any()


def test_positions_far_enough_ahead_are_not_seen():
    decoder = small(**WHISPER).requires_grad_(False)
    memory = decoder.listen(torch.randn(1, 30, 32), positions=16)
    tokens = torch.randint(0, 50_000, (1, 16))
    other = tokens.clone()
    other[:, 12:] = 7
    canvas = torch.ones(1, 16, dtype=torch.bool)
    blind, seeing = torch.tensor(-100.0), torch.tensor(0.0)
    for mask in (None, canvas):
        states = [decoder(canvas_tokens, memory, mask, blind)[:, :13] for canvas_tokens in (tokens, other)]
        assert (states[0] - states[1])[:, 1:].abs().max() < FLOAT32_TOLERANCE
        assert (decoder(other, memory, mask, blind) - decoder(other, memory, mask))[:, 1:12].abs().max() > 1e-3
        assert (decoder(other, memory, mask, seeing) - decoder(other, memory, mask)).abs().max() < FLOAT32_TOLERANCE


def test_what_an_adapter_learns_reaches_every_position():
    adapted = small(**(WHISPER | {"adapter": 1}))
    tokens = torch.randint(0, 50_000, (1, 16))
    adapted(tokens, adapted.listen(torch.randn(1, 30, 32), positions=16)).square().sum().backward()
    assert adapted.adapter.mix.weight.grad is not None
    assert adapted.adapter.mix.weight.grad.abs().max() > 0


def whisper_decoder(width=32, layers=2):
    torch.manual_seed(1)
    config = WhisperDecoderConfig(vocab_size=51_865, width=width, layers=layers, heads=4, positions=448)
    decoder = WhisperDecoder(config)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return decoder


def test_a_draft_is_seen_at_masked_positions_as_surely_as_it_was_written():
    decoder = small(drafts=True)
    tokens_1L = torch.tensor([[50258, 7, MASK, MASK, MASK]])
    memory = decoder.listen(torch.randn(1, 6, 32), positions=5)

    def states(draft_L: list[int], sure_L: list[float]) -> torch.Tensor:
        return decoder(tokens_1L, memory, draft=Draft(torch.tensor([draft_L]), torch.tensor([sure_L])))

    plain = decoder(tokens_1L, memory)
    assert torch.equal(states([1, 2, 3, 4, 5], [1.0] * 5), plain)  # it starts by adding nothing
    torch.nn.init.normal_(decoder.draft.weight)
    assert torch.equal(states([1, 2, 3, 4, 5], [1.0, 1.0, 0.0, 0.0, 0.0]), plain)
    told = states([1, 2, 3, 4, 5], [1.0] * 5)
    assert torch.equal(states([8, 9, 3, 4, 5], [1.0] * 5), told)
    assert not torch.allclose(told, plain, atol=1e-3)
    assert not torch.allclose(states([1, 2, 3, 4, 6], [1.0] * 5), told, atol=1e-3)
    assert not torch.allclose(states([1, 2, 3, 4, 5], [0.5] * 5), told, atol=1e-3)


def test_warm_start_predicts_what_whisper_does_where_nothing_lies_ahead():
    """Without the causal mask, the last position still sees exactly what Whisper's last position sees."""
    whisper = whisper_decoder(layers=1)
    decoder = small(**(WHISPER | {"anchors": False, "layers": 1, "hidden": 128}))
    start_from_whisper(decoder, whisper.state_dict())
    audio = torch.randn(1, 20, 32)
    tokens = torch.randint(0, 50_000, (1, 9))
    with torch.no_grad():
        # One layer: the state at the last position depends on earlier embeddings alone.
        ours = decoder.norm(decoder.blocks[0](*_inputs(decoder, tokens, audio)))[:, -1]
        theirs = whisper.states(tokens, whisper.listen(audio))[:, -1]
    assert (ours - theirs).abs().max() < FLOAT32_TOLERANCE


def _inputs(decoder, tokens, audio):
    return decoder.embed(tokens) + decoder.positions[: tokens.shape[1]], decoder.listen(audio, positions=16).layers[0]


def test_warm_start_maps_tokens_and_gives_the_mask_the_mean():
    whisper = whisper_decoder()
    decoder = small(**(WHISPER | {"hidden": 128}))
    start_from_whisper(decoder, whisper.state_dict())
    source = whisper.embed.weight
    assert torch.equal(decoder.embed.weight[50_364], source[50_363])  # notimestamps is one lower there
    assert torch.equal(decoder.embed.weight[1234], source[1234])
    assert torch.allclose(decoder.embed.weight[MASK], source.mean(0))
    assert embedding_rows(51_865)[MASK] is None
    assert torch.equal(decoder.blocks[1].ffn.up.weight, whisper.blocks[1].ffn.up.weight)


def test_paper_blocks_take_the_token_embeddings_alone():
    whisper = whisper_decoder()
    decoder = small()
    before = decoder.blocks[0].self_attn.q.weight.clone()
    start_from_whisper(decoder, whisper.state_dict())
    assert torch.equal(decoder.embed.weight[7], whisper.embed.weight[7])
    assert torch.equal(decoder.head.weight[7], whisper.embed.weight[7])
    assert torch.equal(decoder.blocks[0].self_attn.q.weight, before)
    with pytest.raises(ModelError, match="width"):
        start_from_whisper(small(), whisper_decoder(width=64).state_dict())


def test_the_canvas_is_fixed_or_follows_the_audio():
    assert Canvas().positions(3.0) == Canvas().positions(30.0) == 192
    follow = Canvas("follow", 224)
    assert [follow.positions(s) for s in (0.1, 0.7, 5.0, 10.0, 30.0)] == [16, 32, 48, 80, 208]
    assert Canvas("follow", 128).positions(30.0) == 128


def test_bad_shapes_are_named_all_at_once():
    with pytest.raises(OptionError) as caught:
        DecoderConfig(layers=0, width=100, heads=3, block="gpt", dropout=1.0)  # ty: ignore
    assert all(word in str(caught.value) for word in ("layers", "heads", "block", "dropout"))


def test_a_compiled_convolution_hears_what_the_plain_one_does():
    torch.manual_seed(0)
    nearby = Nearby(16, 5, dropout=0.0)
    x_BTD = torch.randn(2, 9, 16)
    present_BT = torch.arange(9) < torch.tensor([[9], [4]])
    found = []
    for forward in (nearby, torch.compile(nearby, backend="aot_eager")):
        nearby.zero_grad()
        input_BTD = x_BTD.clone().requires_grad_()
        y_BTD = forward(input_BTD, present_BT)
        y_BTD.square().sum().backward()
        found.append([y_BTD, input_BTD.grad, *(parameter.grad.clone() for parameter in nearby.parameters())])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain)
