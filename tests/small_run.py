"""A training run that takes a second: what the tests of training share."""

from pathlib import Path
from typing import Any

import torch

from whisfusion.train import RECIPES, Recipe, TrainArgs
from whisfusion.train.launch import Kept, make_feeder
from whisfusion.train.model import starting_point
from whisfusion.train.overrides import override
from whisfusion.train.parallel import Ranks
from whisfusion.train.prepare import Job, prepare
from whisfusion.train.state import Progress, TrainState
from whisfusion.train.trainer import Trainer

CLIPS = Path(__file__).parent / "data" / "tiny"
SMALL = {
    "decoder.layers": "1",
    "decoder.width": "32",
    "decoder.heads": "2",
    "decoder.hidden": "32",
    "random_encoder.layers": "1",
    "random_encoder.width": "32",
    "decoder.audio_width": "32",
    "sampler.utterances": "8",
    "steps": "6",
    "warmup_steps": "2",
    "log_every": "1",
    "save_every": "2",
}


def small_recipe(**settings: str) -> Recipe:
    """The recipe `tiny`, made smaller; settings with a dot are given as decoder__dropout."""
    return override(RECIPES["tiny"](), SMALL | {name.replace("__", "."): text for name, text in settings.items()})


def small_args(out: Path, *, resume: bool = False, **settings: str) -> TrainArgs:
    """A run of it on the shipped clips."""
    given = {} if resume else SMALL | {name.replace("__", "."): text for name, text in settings.items()}
    return TrainArgs(recipe="tiny", data=(str(CLIPS),), out=out, settings=given, resume=resume, device="cpu", workers=1)


def small_state(out: Path, ranks: Ranks | None = None, **settings: str) -> tuple[Job, TrainState]:
    """Everything that such a run changes, before its first step."""
    ranks = ranks or Ranks(torch.device("cpu"))
    job = prepare(small_args(out, **settings))
    start = starting_point(job.recipe, None)
    trainer = Trainer(start.decoder, start.encoder, job.recipe, steps=job.steps, ranks=ranks)
    feeder = make_feeder(job, start, ranks, Kept(ranks))
    return job, TrainState(trainer, feeder, Progress())


def tensors_of(state: TrainState) -> dict[str, Any]:
    """Copies of weights, averages and moments, by name."""
    trainer = state.trainer
    names = {parameter: name for name, parameter in trainer.decoder.named_parameters()}
    copies = {f"weights {name}": parameter.detach().clone() for parameter, name in names.items()}
    copies |= {f"average {name}": value.clone() for name, value in trainer.ema.averages.items()}
    for parameter, moments in trainer.optimizer.state.items():
        copies |= {f"{kind} {names[parameter]}": value.clone() for kind, value in moments.items()}
    return copies
