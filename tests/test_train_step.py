import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from small_run import small_recipe

from whisfusion.data.batch import Batch, make_targets
from whisfusion.diffusion import MaskRatios
from whisfusion.encoder import audio_mask
from whisfusion.errors import OptionError
from whisfusion.memory import AudioMemory
from whisfusion.tokenizer import MASK
from whisfusion.train import schedule
from whisfusion.train.config import Recipe
from whisfusion.train.masking import mask_step
from whisfusion.train.model import starting_point
from whisfusion.train.objective import _of_two_draws
from whisfusion.train.parallel import Ranks
from whisfusion.train.trainer import Trainer, make_optimizer

CPU = torch.device("cpu")
# Sums are taken in another order.
SUMMATION_TOLERANCE = 2e-5


def trainer_of(recipe: Recipe) -> Trainer:
    start = starting_point(recipe, None)
    return Trainer(start.decoder, start.encoder, recipe, steps=10, ranks=Ranks(CPU))


def batch_of(rows: list[int], total: int = 6, unreadable: tuple[int, ...] = ()) -> Batch:
    generator = torch.Generator().manual_seed(5)
    mel_SMF = torch.randn(total, 80, 40, generator=generator)
    labels = [torch.randint(0, 50_000, (2 + row,), generator=generator).tolist() for row in range(total)]
    frames = [40 - 2 * row for row in range(total)]
    for row, clip_MF in enumerate(mel_SMF):
        clip_MF[:, frames[row] :] = 0
    return Batch(
        mel_BMF=mel_SMF[rows],
        frames_B=torch.tensor([frames[row] for row in rows]),
        targets=make_targets(
            [None if row in unreadable else labels[row] for row in rows],
            ["en"] * len(rows),
            [16 if row % 2 else 20 for row in rows],
            20,
        ),
        rows_B=torch.tensor(rows),
        total_rows=total,
        seconds=1.0,
        ids=tuple(map(str, rows)),
    )


def gradients(trainer: Trainer, *batches: Batch) -> dict[str, torch.Tensor]:
    """The gradients of a step, which leaves the weights alone."""
    kept: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        kept.update({name: p.grad.clone() for name, p in trainer.decoder.named_parameters() if p.grad is not None})

    handle = trainer.optimizer.register_step_pre_hook(keep)
    trainer.step(batches)
    handle.remove()
    return kept


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value, other[name], atol=SUMMATION_TOLERANCE, rtol=1e-4), name


def test_the_loss_is_the_papers():
    """Mean over the masked transcript positions of an utterance, then over utterances; nothing else."""
    recipe = small_recipe(quantity_weight="0", decoder__anchors="false")
    trainer, batch = trainer_of(recipe), batch_of([0, 1, 2, 3, 4, 5])
    seen: dict[str, torch.Tensor] = {}
    trainer.objective.register_forward_pre_hook(lambda _, args: seen.update(tokens=args[2].tokens_BL, audio=args[0]))
    decoder = trainer.decoder
    before = {name: value.clone() for name, value in decoder.state_dict().items()}
    trainer.step((batch,))
    loss = trainer.read().loss

    decoder.load_state_dict(before)
    expected = 0.0
    for row in range(6):
        length = int(batch.targets.canvas_BL[row].sum())
        tokens_1L = seen["tokens"][row : row + 1, :length]
        heard_1T = audio_mask(batch.frames_B[row : row + 1], 20)
        memory = decoder.listen(seen["audio"][row : row + 1], heard_1T, positions=length)
        logits_LV = decoder.logits(decoder(tokens_1L, memory)[0], slice(None))
        truth_L = batch.targets.tokens_BL[row, :length]
        in_loss_L = (tokens_1L[0] != truth_L) & batch.targets.scored_BL[row, :length]
        expected += F.cross_entropy(logits_LV[in_loss_L], truth_L[in_loss_L]).item() / 6
    assert loss == pytest.approx(expected, abs=SUMMATION_TOLERANCE)


@pytest.mark.parametrize("parts", [([0, 1, 2], [3, 4, 5]), ([5, 1], [3, 0], [2, 4])])
def test_micro_batches_add_up_to_the_step(parts):
    recipe = small_recipe(language_share="0.5", spec_augment__bands="2", spec_augment__spans="1")
    whole, split = trainer_of(recipe), trainer_of(recipe)
    one = gradients(whole, batch_of([0, 1, 2, 3, 4, 5]))
    other = gradients(split, *[batch_of(list(rows)) for rows in parts])
    assert_same(one, other)
    a, b = whole.read(), split.read()
    assert (a.loss, a.quantity, a.language) == pytest.approx((b.loss, b.quantity, b.language), rel=1e-5)
    assert a.by_bin == pytest.approx(b.by_bin, rel=1e-5, nan_ok=True)


def test_a_draft_is_what_a_first_step_would_write_and_some_keep_of_it_what_is_not_masked():
    recipe = small_recipe(decoder__drafts="true", draft_share="1", own_share="0.5", decoder__dropout="0")
    trainer, batch = trainer_of(recipe), batch_of([0, 1, 2, 3, 4, 5])
    seen: list[tuple] = []
    trainer.objective.register_forward_pre_hook(lambda _, args: seen.append(args))
    shown: list[tuple] = []
    forward = trainer.decoder.forward
    trainer.decoder.forward = lambda *args: shown.append(args) or forward(*args)
    assert gradients(trainer, batch)["draft.weight"].abs().max() > 0

    masked = seen[0][2]
    (first_BL, *_, nothing), (tokens_BL, *_, draft) = ((*args, None)[:5] for args in shown)
    own_BL = masked.own_B[:, None] & (torch.arange(20) >= 4) & masked.canvas_BL
    written_BL = masked.tokens_BL != MASK
    assert nothing is None
    assert (first_BL[:, 4:] == MASK).sum() == (masked.canvas_BL[:, 4:]).sum()
    assert 0 < masked.own_B.sum() < 6
    assert torch.equal(tokens_BL, torch.where(own_BL & written_BL, draft.tokens_GL, masked.tokens_BL))
    assert not torch.equal(tokens_BL, masked.tokens_BL)
    assert torch.equal(tokens_BL == MASK, masked.tokens_BL == MASK)


def test_without_a_draft_nothing_is_different():
    plain, other = (
        trainer_of(small_recipe(decoder__drafts=drafts, draft_share="0", decoder__dropout="0"))
        for drafts in ("false", "true")
    )
    batch = batch_of([0, 1, 2, 3, 4, 5])
    one, two = gradients(plain, batch), gradients(other, batch)
    assert not two.pop("draft.weight").any()
    assert_same(one, two)


def test_an_unreadable_clip_does_not_count():
    recipe = small_recipe(language_share="0.5")
    with_it, without = trainer_of(recipe), trainer_of(recipe)
    one = gradients(with_it, batch_of([0, 1, 2, 3, 4, 5], unreadable=(3,)))
    other = gradients(without, batch_of([0, 1, 2, 4, 5]))
    assert_same(one, other)
    assert with_it.read().utterances == 5


def test_recomputed_activations_give_the_same_gradients():
    plain, recomputed = (
        trainer_of(small_recipe(decoder__dropout="0.2", checkpoint_activations=flag)) for flag in ("false", "true")
    )
    batch = batch_of([0, 1, 2, 3, 4, 5])
    one, other = gradients(plain, batch), gradients(recomputed, batch)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_every_loss_term_reaches_its_parameters():
    trainer = trainer_of(small_recipe(language_share="1.0"))
    found = gradients(trainer, batch_of([0, 1, 2, 3, 4, 5]))
    assert set(found) == {name for name, _ in trainer.decoder.named_parameters()}
    assert all(value.abs().sum() > 0 for value in found.values())
    readings = trainer.read()
    assert readings.language > 0
    assert readings.quantity > 0


@pytest.mark.parametrize("stride", ["1", "2"])
@pytest.mark.parametrize("early", [False, True])
def test_an_adapter_learns_to_spell(stride, early):
    recipe = {"decoder.adapter": "2", "decoder.stride": stride, "learning_rate": "3e-3", "warmup_steps": "0"}
    trainer = trainer_of(small_recipe(**recipe, **({"decoder.spells_every": "1"} if early else {})))
    batch = batch_of([0, 1])
    found = gradients(trainer, batch)
    assert found["adapter.ctc.weight"].abs().sum() > 0
    assert ("adapter.told.weight" in found) == early
    assert not early or found["adapter.told.weight"].abs().sum() > 0
    first = trainer.read().ctc
    for _ in range(30):
        trainer.skip_to(5)  # the schedule stands still
        trainer.step((batch,))
    assert 0 < trainer.read().ctc < first
    assert trainer_of(small_recipe()).decoder.config.adapter == 0


def test_the_adapter_can_learn_alone():
    recipe = {"decoder.adapter": "2", "decoder.stride": "2", "decoder.reach": "3", "decoder.spells_every": "1"}
    trainer = trainer_of(small_recipe(**recipe, learns="adapter", learning_rate="3e-3", warmup_steps="0"))
    before = {name: value.clone() for name, value in trainer.decoder.state_dict().items()}
    batch = batch_of([0, 1])
    trainer.step((batch,))
    first = trainer.read().ctc
    for _ in range(30):
        trainer.skip_to(5)
        trainer.step((batch,))
    readings = trainer.read()
    assert 0 < readings.ctc < first
    assert readings.loss == readings.quantity == 0
    after = trainer.decoder.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if name.startswith("adapter.")}


def test_two_draws_of_augmentation_come_to_spell_the_same():
    recipe = {"decoder.adapter": "2", "decoder.stride": "2", "decoder.spells_every": "1", "learns": "adapter"}
    recipe |= {
        "spec_augment.spans": "2",
        "spec_augment.span_share": "0.5",
        "learning_rate": "3e-3",
        "warmup_steps": "0",
    }

    def apart_after(weight: str) -> float:
        torch.manual_seed(0)
        trainer = trainer_of(small_recipe(**recipe, consistency_weight=weight))
        batch = batch_of([0, 1, 3])
        for _ in range(25):
            trainer.skip_to(5)
            trainer.step((batch,))
            readings = trainer.read()
        assert readings.ctc > 0
        return readings.consistency

    assert 0 < apart_after("30.0") < 0.5 * apart_after("1e-6")


def test_the_consistency_loss_is_the_divergence_of_the_draws_a_letter():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 3, 8, 257, generator=generator)
    heard_BT = torch.arange(8) < torch.tensor([8, 6, 4])[:, None]
    memory = AudioMemory([], torch.cat((heard_BT, heard_BT)), bytes_BTV=torch.cat((one, other)))
    (masked,) = mask_step(
        [batch_of([0, 1, 3])],
        MaskRatios(),
        language_share=0.0,
        draft_share=0.0,
        own_share=0.0,
        augment_numbers=0,
        letters=True,
        generator=generator,
        device=CPU,
    )
    masked = dataclasses.replace(masked, letter_counts_B=torch.tensor([5, 2, 0]))
    both, apart = _of_two_draws(memory, masked)
    assert torch.equal(both.earlier[0], one)
    assert both.bytes_BTV is not None
    assert torch.equal(both.bytes_BTV, other)
    p, q = one.softmax(-1), other.softmax(-1)
    each_BT = ((p * (p / q).log()).sum(-1) + (q * (q / p).log()).sum(-1)) / 2
    # An utterance where nothing is said counts its frames instead of letters.
    expected = sum(each_BT[row, :frames].sum() / terms for row, (frames, terms) in enumerate([(8, 5), (6, 2), (4, 4)]))
    torch.testing.assert_close(apart, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"learns": "adapter"}])
def test_consistency_is_of_draws_that_differ_and_of_what_learns_alone(settings):
    with pytest.raises(OptionError, match="consistency_weight"):
        small_recipe(consistency_weight="0.2", **{"decoder.adapter": "1"}, **settings)


def test_there_must_be_an_adapter_to_learn_alone():
    with pytest.raises(OptionError, match=r"decoder\.adapter"):
        small_recipe(learns="adapter")


@pytest.mark.parametrize("stride", ["1", "2"])
def test_anchors_learn_where_ctc_hears_the_tokens(stride):
    recipe = {"decoder.adapter": "2", "decoder.stride": stride, "learning_rate": "3e-3", "warmup_steps": "0"}
    trainer = trainer_of(small_recipe(**recipe, placing_weight="3.0"))
    batch = batch_of([0, 1, 3])
    found = gradients(trainer, batch)
    assert found["anchors.weigh.weight"].abs().sum() > 0
    first = trainer.read().placing
    for _ in range(40):
        trainer.skip_to(5)
        trainer.step((batch,))
    trainer.read()
    trainer.step((batch,))
    assert 0 < trainer.read().placing < 0.8 * first
    untold = trainer_of(small_recipe(**recipe))
    untold.step((batch,))
    assert untold.read().placing == 0


def test_gradients_are_clipped_to_their_length():
    loose, tight = trainer_of(small_recipe(clip="1e9")), trainer_of(small_recipe(clip="0.01"))
    batch = batch_of([0, 1, 2, 3, 4, 5])
    long, short = gradients(loose, batch), gradients(tight, batch)

    def length(found: dict[str, torch.Tensor]) -> float:
        return math.sqrt(sum(float(value.square().sum()) for value in found.values()))

    assert length(long) > 0.1
    assert length(short) == pytest.approx(0.01, rel=1e-3)
    assert tight.read().gradient_norm == pytest.approx(length(long), rel=1e-4)


def test_attention_to_what_comes_later_fades_in():
    recipe = small_recipe(ahead="-6", ahead_share="0.5")
    assert [schedule.ahead(recipe, step, 100) for step in (0, 25, 50, 99)] == [-6, -3, 0, 0]
    assert schedule.ahead(small_recipe(), 0, 100) == 0
    batch = batch_of([0, 1, 2, 3, 4, 5])
    losses = []
    for trainer in (trainer_of(recipe), trainer_of(small_recipe())):
        trainer.step((batch,))
        losses.append(trainer.read().loss)
    assert losses[0] != losses[1]


def test_decay_is_for_matrices_alone_and_fresh_parts_learn_faster():
    trainer = trainer_of(small_recipe(weight_decay="0.1", fresh_rate="3"))
    groups = make_optimizer(trainer.decoder, trainer.recipe).param_groups
    names = {parameter: name for name, parameter in trainer.decoder.named_parameters()}
    assert sum(len(group["params"]) for group in groups) == len(names)
    for group in groups:
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.dim() > 1 else 0.0)
            assert group["rate"] == (3 if names[parameter].startswith("anchors.") else 1)
    trainer.step((batch_of([0, 1]),))
    rates = {group["rate"]: group["lr"] for group in trainer.optimizer.param_groups}
    assert rates[3] == pytest.approx(3 * rates[1])


def test_the_average_follows_the_weights():
    trainer = trainer_of(small_recipe(ema_decay="0.75", ema_ramp="0"))
    name = "blocks.0.ffn.up.weight"
    average = trainer.decoder.get_parameter(name).detach().clone()
    for _ in range(3):
        trainer.step((batch_of([0, 1, 2, 3, 4, 5]),))
        average = 0.75 * average + 0.25 * trainer.decoder.get_parameter(name).detach()
    assert torch.allclose(trainer.ema.averages[name], average, atol=1e-7)


def test_a_bfloat16_step_is_near_a_float32_one():
    batch = batch_of([0, 1, 2, 3, 4, 5])
    losses = []
    for precision in ("fp32", "bf16"):
        trainer = trainer_of(small_recipe(precision=precision))
        trainer.step((batch,))
        losses.append(trainer.read().loss)
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert losses[0] != losses[1]
