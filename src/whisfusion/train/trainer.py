"""One optimizer step: hear, mask, predict, reduce, clip, update, average. Nothing in it waits for the device.

All randomness of a step follows from the recipe's seed and the step's number, so there is no random state to keep.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from whisfusion.data.augment import spec_augment
from whisfusion.data.batch import Batch
from whisfusion.decoder import DiffusionDecoder
from whisfusion.encoder import WhisperEncoder, audio_mask
from whisfusion.train import schedule
from whisfusion.train.capture import Captured
from whisfusion.train.config import Recipe
from whisfusion.train.ema import Ema
from whisfusion.train.masking import BINS, Masked, mask_step, to_device
from whisfusion.train.objective import Objective, Terms
from whisfusion.train.parallel import Ranks, shard

FRESH = ("adapter.", "speller.", "anchors.", "draft.")
"""Parts of a decoder that no published model has."""


@dataclass(frozen=True)
class Readings:
    """Means over the utterances of the steps since the last reading, over all ranks."""

    loss: float
    """The paper's objective: mean over masked positions, then over utterances."""
    quantity: float
    """Relative error of the anchors' token count; 0 without anchors."""
    language: float
    """Cross-entropy of masked language tokens; nan where there were none."""
    ctc: float
    """The adapter's CTC loss a letter, the mean over the layers that spell; 0 without an adapter."""
    placing: float
    """How far the anchors are from where CTC hears the tokens, in tokens; 0 where that is not asked for."""
    consistency: float
    """How far what is spelled of two draws of augmentation is apart, a letter; 0 where that is not asked for."""
    gradient_norm: float
    """Mean over the steps, before clipping."""
    by_bin: tuple[float, ...]
    """Loss by bins of the mask ratio; nan where a bin was empty."""
    utterances: int
    """Utterances in these steps."""


class Trainer:
    """Owns everything that a step changes: decoder, optimizer, average, step number."""

    def __init__(
        self, decoder: DiffusionDecoder, encoder: WhisperEncoder, recipe: Recipe, *, steps: int, ranks: Ranks
    ) -> None:
        """Move both modules to the device and spread the decoder over the ranks; a run has `steps` steps."""
        self.recipe, self.steps, self.ranks = recipe, steps, ranks
        self.step_number = 0
        self.dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
        self.encoder = encoder.to(ranks.device, self.dtype)
        self.decoder = decoder.to(ranks.device).train()
        if recipe.learns != "all":
            decoder.requires_grad_(False).get_submodule(recipe.learns).requires_grad_(True)
        if recipe.learns == "speller":
            # Below it all is as it will be when it is used.
            decoder.adapter.eval()
        prepare_blocks(self.encoder.blocks, compiled=recipe.compile)
        adapter = [decoder.adapter.blocks, decoder.adapter.nearby] if decoder.config.adapter else []
        for blocks in [decoder.blocks, *adapter]:
            prepare_blocks(blocks, compiled=recipe.compile, checkpointed=recipe.checkpoint_activations)
        self.objective = Objective(
            decoder,
            learns=recipe.learns,
            adapted=recipe.feeder == "features",
            label_smoothing=recipe.label_smoothing,
            languages=recipe.language_share > 0,
            placing=recipe.placing_weight > 0 and decoder.config.anchors,
            consistency=recipe.consistency_weight > 0,
            compiled=recipe.compile,
        )
        shard(self.objective, ranks, recipe.precision)
        self.optimizer = make_optimizer(decoder, recipe)
        self.ema = Ema(decoder.named_parameters())
        self._work = self._compute
        self._graphs = recipe.graphs and ranks.world == 1 and ranks.device.type == "cuda"
        if self._graphs:
            self._work = Captured(self._compute, list(decoder.parameters()))
        self._draws = 2 if recipe.consistency_weight else 1
        self._totals = torch.zeros(8 + 2 * BINS, device=ranks.device)
        self._steps_read = 0

    def step(self, batches: Sequence[Batch]) -> None:
        """Train on the micro-batches of one step; what came of it is added up on the device until `read`."""
        recipe, number = self.recipe, self.step_number
        torch.manual_seed(mix(recipe.seed, number, "dropout", self.ranks.rank))
        masked = mask_step(
            batches,
            schedule.mask_ratios(recipe, number, self.steps),
            language_share=recipe.language_share,
            draft_share=recipe.draft_share,
            own_share=recipe.own_share,
            augment_numbers=self._draws * recipe.spec_augment.numbers,
            letters=recipe.decoder.adapter > 0,
            generator=torch.Generator().manual_seed(mix(recipe.seed, number, "masks")),
            device=self.ranks.device,
        )
        # Utterances in the loss, and those of them whose language is predicted, over all ranks.
        counts = self.ranks.sum(
            torch.stack(
                [
                    torch.stack([part.valid_B.sum() for part in masked]).sum(),
                    torch.stack([part.language_masked_B.sum() for part in masked]).sum(),
                ]
            ).float()
        )
        for place, (batch, part) in enumerate(zip(batches, masked, strict=True), start=1):
            if isinstance(self.objective, FSDPModule):
                self.objective.set_requires_gradient_sync(place == len(batches))
            terms = self._backward(batch, part, counts)
            self._add(terms, part)
        norm = nn.utils.clip_grad_norm_(self.decoder.parameters(), recipe.clip)
        self._totals[4] += norm.full_tensor() if isinstance(norm, DTensor) else norm
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * schedule.learning_rate(recipe, number, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self._graphs)
        self.ema.update(schedule.ema_decay(recipe, number))
        self.step_number += 1

    def hear(self, mel_BMF: Tensor, frames_B: Tensor, augment_BN: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is heard and which of it is a clip's own (None: all): the encoder's features, or a bank's."""
        mel_BMF = spec_augment(mel_BMF, frames_B, self.recipe.spec_augment, augment_BN).to(self.dtype)
        if self.recipe.feeder == "features":
            return mel_BMF.transpose(1, 2), torch.arange(mel_BMF.shape[2], device=mel_BMF.device) < frames_B[:, None]
        if self.recipe.window == "padded":
            return self.encoder(mel_BMF), None
        audio_BTD = self.encoder(mel_BMF, frames_B)
        return audio_BTD, audio_mask(frames_B, audio_BTD.shape[1])

    def read(self) -> Readings:
        """Wait for the device and return the means since the last reading; all ranks must call it together."""
        totals = self._totals.clone()
        # The norm is already that of all ranks.
        totals[4] /= self.ranks.world
        loss, quantity, language, languages, norm, ctc, placing, apart, *bins = self.ranks.sum(totals).tolist()
        by_bin, counts = bins[:BINS], bins[BINS:]
        utterances, steps = sum(counts), self.step_number - self._steps_read
        self._totals.zero_()
        self._steps_read = self.step_number
        return Readings(
            loss=_ratio(loss, utterances),
            quantity=_ratio(quantity, utterances),
            language=_ratio(language, languages),
            ctc=_ratio(ctc, utterances),
            placing=_ratio(placing, utterances),
            consistency=_ratio(apart, utterances),
            gradient_norm=_ratio(norm, steps),
            by_bin=tuple(_ratio(total, count) for total, count in zip(by_bin, counts, strict=True)),
            utterances=round(utterances),
        )

    def skip_to(self, step: int) -> None:
        """Go on at `step`, as after loading a checkpoint."""
        self.step_number = self._steps_read = step

    def _backward(self, batch: Batch, masked: Masked, counts: Tensor) -> Terms:
        """Add to the gradients what this micro-batch asks for."""
        inputs = {"mel_BMF": batch.mel_BMF, "frames_B": batch.frames_B, "counts": counts}
        if self.recipe.ahead:
            inputs["ahead"] = to_device(
                torch.tensor(schedule.ahead(self.recipe, self.step_number, self.steps)), self.ranks.device
            )
        return Terms(*self._work(inputs | vars(masked)))

    def _compute(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The device work of a micro-batch, from tensors to tensors, so that it can be captured."""
        recipe = self.recipe
        masked = Masked(**{field.name: inputs[field.name] for field in fields(Masked)})
        # Draws of augmentation follow each other as if they were more utterances.
        mel_BMF, frames_B = (torch.cat((inputs[name],) * self._draws) for name in ("mel_BMF", "frames_B"))
        audio_BTD, heard_BT = self.hear(mel_BMF, frames_B, torch.cat(masked.augment_BN.chunk(self._draws, 1)))
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            terms = self.objective(audio_BTD, heard_BT, masked, inputs.get("ahead"))
        # Sharding averages gradients over the ranks, so a sum over them takes their number as a factor.
        utterances, languages = (self.ranks.world / inputs["counts"].clamp(min=1)).unbind()
        loss = terms.diffusion + recipe.quantity_weight * terms.quantity + recipe.ctc_weight * terms.ctc
        loss = loss + recipe.placing_weight * terms.placing + recipe.consistency_weight * terms.consistency
        loss = loss * utterances + recipe.language_weight * terms.language * languages
        loss.backward()
        return tuple(getattr(terms, field.name).detach() for field in fields(Terms))

    @torch.no_grad()
    def _add(self, terms: Terms, masked: Masked) -> None:
        self._totals[:3] += torch.stack((terms.diffusion, terms.quantity, terms.language))
        self._totals[3] += masked.language_masked_B.sum()
        self._totals[5:8] += torch.stack((terms.ctc, terms.placing, terms.consistency))
        self._totals[8 : 8 + BINS] += terms.by_bin
        self._totals[8 + BINS :] += masked.bin_counts


def make_optimizer(module: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW with decay on matrices and embeddings alone: to pull norms and biases to 0 regularises nothing.

    A group's `rate` is how many times the schedule's learning rate it learns at.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name.startswith(FRESH), parameter.dim() > 1), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": recipe.weight_decay if matrix else 0.0,
                "rate": recipe.fresh_rate if fresh else 1.0,
            }
            for (fresh, matrix), parameters in groups.items()
        ],
        lr=recipe.learning_rate,
        betas=recipe.betas,
        fused=True,
    )


def prepare_blocks(blocks: nn.ModuleList, *, compiled: bool, checkpointed: bool = False) -> None:
    """Make each block recompute its activations in the backward pass, or run compiled; names stay as they are."""
    if compiled:
        # All blocks share the code of `Block.forward`: every shape of encoder and decoder counts to one limit, and so
        # does every stage of a run, of which the later ones find much of theirs compiled already.
        setattr(torch._dynamo.config, "recompile_limit", 200)  # noqa: B010 - typed as the literal 8
    for block in blocks:
        if checkpointed:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if compiled:
            block.compile(dynamic=False)


def mix(*key: int | str) -> int:
    """A seed of 63 bits from parts that must not be confused with each other."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
