import torch

from whisfusion.ctc import byte_targets
from whisfusion.data.augment import SpecAugment, spec_augment
from whisfusion.data.batch import Batch, make_targets
from whisfusion.diffusion import MaskRatios
from whisfusion.tokenizer import ENDOFTEXT, MASK, PROMPT_LENGTH, get_tokenizer
from whisfusion.train.masking import BINS, LANGUAGE_POSITION, mask_step, spell

CPU = torch.device("cpu")
SPELLED = get_tokenizer().token_bytes()
LABELS = [[11, 12, 13], [21], [31, 32, 33, 34, 35], None, [51, 52], [61, 62, 63]]
CANVASES = [16, 12, 16, 16, 12, 16]


def batch_of(rows: list[int]) -> Batch:
    return Batch(
        mel_BMF=torch.zeros(len(rows), 80, 20),
        frames_B=torch.full((len(rows),), 20),
        targets=make_targets([LABELS[r] for r in rows], ["en"] * len(rows), [CANVASES[r] for r in rows], 16),
        rows_B=torch.tensor(rows),
        total_rows=len(LABELS),
        seconds=1.0,
        ids=tuple(map(str, rows)),
    )


def mask(*batches: Batch, low: float = 0.0, high: float = 1.0, language_share: float = 0.0, seed: int = 3, **shares):
    generator = torch.Generator().manual_seed(seed)
    return mask_step(
        batches,
        MaskRatios(low, high),
        language_share=language_share,
        **({"draft_share": 0.0, "own_share": 0.0} | shares),
        augment_numbers=4,
        letters=True,
        generator=generator,
        device=CPU,
    )


def test_targets_are_prompt_text_end_and_padding():
    targets = make_targets([[7, 8], None], ["de", "en"], [10, 8], 10)
    prompt = get_tokenizer().prompt("de")
    assert targets.tokens_BL[0].tolist() == [*prompt, 7, 8, *[ENDOFTEXT] * 4]
    assert targets.scored_BL[0].tolist() == [False] * 4 + [True] * 3 + [False] * 3
    assert targets.canvas_BL.sum(1).tolist() == [10, 8]
    assert targets.counts_B.tolist() == [3, 1]
    assert not targets.scored_BL[1].any()


def test_ranks_and_micro_batches_mask_the_same_positions():
    [whole] = mask(batch_of([0, 1, 2, 3, 4, 5]), language_share=0.5)
    parts = [
        *mask(batch_of([0, 2, 4]), language_share=0.5),
        *mask(batch_of([1]), batch_of([3]), batch_of([5]), language_share=0.5),
    ]
    order = [0, 2, 4, 1, 3, 5]
    assert torch.equal(torch.cat([part.tokens_BL for part in parts]), whole.tokens_BL[order])
    assert torch.equal(torch.cat([part.language_masked_B for part in parts]), whole.language_masked_B[order])
    assert torch.equal(torch.cat([part.augment_BN for part in parts]), whole.augment_BN[order])
    assert torch.equal(sum(part.bin_counts for part in parts), whole.bin_counts)


def test_what_is_predicted_is_what_was_masked_of_the_transcript():
    batch = batch_of([0, 1, 2, 3, 4, 5])
    for seed in range(20):
        [masked] = mask(batch, seed=seed)
        was = batch.targets.tokens_BL.flatten()
        assert (masked.tokens_BL.flatten()[masked.where_R] == MASK).all()
        assert batch.targets.scored_BL.flatten()[masked.where_R].all()
        assert torch.equal(masked.targets_R, was[masked.where_R])
        # Each readable utterance has weight 1 in all, the unreadable one none.
        rows = masked.where_R // 16
        totals = torch.zeros(6).index_add(0, rows, masked.weights_R)
        assert torch.allclose(totals, torch.tensor([1.0, 1, 1, 0, 1, 1]))
        assert masked.bin_counts.sum() == 5


def test_transcripts_are_spelled_in_bytes():
    texts = ["größer 今天", "a", "one two three"]
    labels = [get_tokenizer().encode(text) for text in texts]
    targets = make_targets([*labels, None, []], ["de"] * 5, [32] * 5, 32)
    letters_BS, counts_B, written_BS = spell(targets.tokens_BL, targets.scored_BL)
    for text, row, count in zip(texts, letters_BS, counts_B.tolist(), strict=False):
        assert row[:count].tolist() == byte_targets(" " + text)
        assert not row[count:].any()
    assert counts_B[3:].tolist() == [0, 0]
    assert written_BS.shape == letters_BS.shape
    assert not written_BS[letters_BS == 0].any()
    for label, row in zip(labels, written_BS, strict=False):
        ends = torch.tensor([len(SPELLED[token]) for token in label]).cumsum(0)
        torch.testing.assert_close(row[ends - 1], torch.arange(1.0, len(label) + 1))
        assert (row[: ends[-1]].diff() > 0).all()
    assert letters_BS.shape[1] % 128 == 0
    [masked] = mask(batch_of([0, 3]))
    assert masked.letter_counts_B.tolist() == [len(b"".join(map(SPELLED.__getitem__, LABELS[0]))), 0]


def test_only_the_canvas_is_masked_and_the_prompt_is_kept():
    [masked] = mask(batch_of([0, 1, 2, 3, 4, 5]), low=1.0)
    canvas_BL = batch_of([0, 1, 2, 3, 4, 5]).targets.canvas_BL.clone()
    canvas_BL[:, :PROMPT_LENGTH] = False
    assert torch.equal(masked.tokens_BL == MASK, canvas_BL)


def test_language_tokens_are_masked_in_their_share_of_the_rows():
    rows = [row for row in range(6) if LABELS[row] is not None]
    [none] = mask(batch_of(rows), language_share=0.0)
    [every] = mask(batch_of(rows), language_share=1.0)
    assert not none.language_masked_B.any()
    assert every.language_masked_B.all()
    assert (every.tokens_BL[:, LANGUAGE_POSITION] == MASK).all()
    assert (every.languages_B == get_tokenizer().language_id("en")).all()
    # It has its own term: the transcript's weights are the same.
    assert torch.equal(every.weights_R, none.weights_R)


def test_bins_are_those_of_the_mask_ratio():
    for place in range(BINS):
        [masked] = mask(batch_of([0, 1, 2, 4, 5]), low=(place + 0.01) / BINS, high=(place + 0.99) / BINS)
        assert (masked.bins_R == place).all()
        assert masked.bin_counts[place] == 5


def test_spec_augment_blanks_bands_and_spans_inside_the_clip():
    options = SpecAugment(bands=2, band_bins=5, spans=2, span_frames=10, span_share=0.2)
    mel_BMF = torch.ones(200, 40, 60)
    frames_B = torch.full((200,), 30)
    uniforms_BN = torch.rand(200, options.numbers, generator=torch.Generator().manual_seed(0))
    blanked_BMF = spec_augment(mel_BMF, frames_B, options, uniforms_BN) == 0
    bins_BM, frames_BF = blanked_BMF.all(2), blanked_BMF.all(1)
    assert not frames_BF[:, 30:].any()
    # A fifth of 30 frames and two more is 8: less than the 10 that a span may have.
    assert frames_BF.sum(1).max() == 16
    assert bins_BM.sum(1).max() == 10
    assert bins_BM.any(0).all()
    assert frames_BF[:, :30].any(0).all()
    assert 4 < float(bins_BM.sum(1).float().mean()) < 5.1


def test_no_bands_and_no_spans_change_nothing():
    mel_BMF = torch.rand(2, 40, 60)
    assert spec_augment(mel_BMF, torch.tensor([60, 50]), SpecAugment(), torch.zeros(2, 0)) is mel_BMF


def changed(mel_BMF: torch.Tensor, frames: list[int], uniforms: list[float], **options: float) -> torch.Tensor:
    uniforms_BN = torch.tensor([uniforms] * len(frames))
    return spec_augment(mel_BMF, torch.tensor(frames), SpecAugment(**options), uniforms_BN)


def test_a_warp_reads_bins_from_further_up_or_down():
    mel_BMF = torch.arange(10.0)[None, :, None].expand(2, 10, 7)
    up_BMF = changed(mel_BMF, [7, 7], [1.0, 0.5, 0.5, 0.5], warp=0.2)
    down_BMF = changed(mel_BMF, [7, 7], [0.0, 0.5, 0.5, 0.5], warp=0.2)
    assert torch.allclose(up_BMF[0, :, 0], (1.2 * torch.arange(10.0)).clamp(max=9))
    assert torch.allclose(down_BMF[0, :, 0], 0.8 * torch.arange(10.0))
    assert torch.equal(changed(mel_BMF, [7, 7], [0.5, 0.5, 0.5, 0.5], warp=0.2), mel_BMF)


def test_a_tilt_is_in_decibel():
    mel_BMF = torch.zeros(1, 11, 4)
    tilted_BMF = changed(mel_BMF, [4], [0.5, 1.0, 0.5, 0.5], tilt=8)
    # Whisper's spectrograms are a quarter of the power of ten.
    assert torch.allclose(40 * tilted_BMF[0, :, 0], torch.linspace(-4, 4, 11), atol=1e-5)


def test_a_background_is_another_clip_so_far_below_and_ends_with_it():
    power_BMF = torch.full((3, 2, 5), 1e-6)
    power_BMF[0, 0, 1], power_BMF[1, 1, 3], power_BMF[2, 0, 0] = 1.0, 10.0, 100.0
    mel_BMF = power_BMF.log10() / 4 + 1
    # 12 dB below, and at a uniform of a half 21.
    mixed_BMF = changed(mel_BMF, [5, 5, 0], [0.5, 0.5, 0.0, 0.5], mix=1.0)
    mixed = 10 ** (4 * mixed_BMF.double() - 4)
    below = 10**-2.1
    assert torch.allclose(mixed[1, 0, 1], torch.tensor(1e-6 + 10 * below, dtype=torch.float64), rtol=1e-4)
    # The last one could not be read: it is heard behind nobody, and nobody's numbers are spoilt.
    assert torch.allclose(mixed[0], power_BMF[0].double(), rtol=1e-4)
    assert mixed_BMF.isfinite().all()
    assert torch.allclose(changed(mel_BMF, [5, 5, 5], [0.5, 0.5, 0.9, 0.5], mix=0.5), mel_BMF, atol=1e-6)
