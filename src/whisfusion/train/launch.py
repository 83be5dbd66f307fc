"""`whisfusion train`, put together: recipe, data, model, feeder, run."""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace

import torch

from whisfusion import __version__
from whisfusion.data.bank import Bank, build_bank
from whisfusion.data.bank_feeder import BankFeeder
from whisfusion.data.batch import Feeder
from whisfusion.data.feature_bank import build_feature_bank
from whisfusion.data.filters import Filtered
from whisfusion.data.stream import StreamFeeder, StreamOptions
from whisfusion.data.utterance import Utterance
from whisfusion.mel import FRAMES_PER_SECOND
from whisfusion.train.budget import Budget
from whisfusion.train.checkpoints import Checkpoints
from whisfusion.train.dev import DevSet
from whisfusion.train.display import Display, make_display
from whisfusion.train.estimate import render_jobs
from whisfusion.train.log import RunLog
from whisfusion.train.loop import Run
from whisfusion.train.model import StartingPoint, ears, heard_by, inherit, model_config, starting_point
from whisfusion.train.parallel import Ranks, join_ranks
from whisfusion.train.plots import draw_plots
from whisfusion.train.prepare import Job, TrainArgs, run_folder, sampler_options
from whisfusion.train.report import write_report
from whisfusion.train.stages import prepare_stages, write_plan
from whisfusion.train.state import Progress, TrainState
from whisfusion.train.trainer import Trainer

FEATURES = "features"
"""Folder of a run for what the adapter hears, where that is computed once."""


def main(args: TrainArgs) -> bool:
    """Train; returns whether the run came to its end (False: it was asked to stop, and can be resumed).

    Raises OptionError, listing every problem, before anything is trained.
    """
    jobs, plan = prepare_stages(args)
    if args.dry_run:
        print(render_jobs(jobs, int(os.environ.get("WORLD_SIZE", "1"))))
        return True
    if not jobs:
        print("all stages are done", file=sys.stderr)
        return True
    with join_ranks(jobs[0].device) as ranks:
        if plan is not None and ranks.main:
            write_plan(plan, run_folder(args))
        return all(in_turn(jobs, ranks))


def in_turn(jobs: Sequence[Job], ranks: Ranks) -> Iterator[bool]:
    """Run jobs one after another, with what they share made once; says of each whether it came to its end."""
    kept = Kept(ranks)
    for number, job in enumerate(jobs):
        if number:
            _clear_away(ranks)
        yield train(job, ranks, kept)


def train(job: Job, ranks: Ranks, kept: "Kept") -> bool:
    """Run a job that `prepare` found nothing wrong with."""
    began = time.perf_counter()
    recipe = job.recipe
    start = starting_point(recipe, job.init_from)
    facts = {"recipe": job.recipe_name, "version": __version__}
    config = model_config(recipe, start, job.languages, facts)
    checkpoints = Checkpoints(job.folder / "checkpoints", ranks)
    # Before training rounds it.
    encoder = {name: value.clone() for name, value in start.encoder.state_dict().items() if start.bundles_encoder}
    with make_display(job.steps, main=ranks.main) as display:
        for note in job.notes:
            display.say(note)
        if job.home is not None:
            display.say(f"stage {job.folder.name} of {job.home}")
        if recipe.feeder == "bank" and not kept.has_bank(job, start.encoder.config.mels):
            display.say(f"making spectrograms of {len(job.filtered.kept):,} clips")
        feeder = make_feeder(job, start, ranks, kept, display.say)
        trainer = Trainer(start.decoder, start.encoder, recipe, steps=job.steps, ranks=ranks)
        state = TrainState(trainer, feeder, Progress())
        try:
            if job.resume:
                for warning in state.load(checkpoints):
                    display.say(warning)
                display.say(f"going on at step {trainer.step_number}")
            if ranks.main:
                write_config(job)
            # A run that fails leaves no thread behind that writes to its folder.
            with closing(RunLog(job.folder, main=ranks.main, resume_at=trainer.step_number)) as log:
                if not log.has_events:
                    display.say("tensorboard is not installed: the curves are in log.csv and dev.csv alone")
                dev = kept.dev(job)
                if dev is not None and dev.failures:
                    log.skipped(trainer.step_number, dev.failures)
                    display.say(f"{len(dev.failures)} dev clips could not be read: see skipped.jsonl")
                budget = Budget(recipe, state.progress, began, evaluates=dev is not None)
                inherited = None if start.model is None else inherit(start.model, recipe, job.filtered.kept)
                run = Run(state, config, job.folder, checkpoints, log, display, budget, dev, encoder or None, inherited)
                finished = run.fit()
            if ranks.main:
                finish(job, state, display, finished=finished)
        finally:
            feeder.close()
    return finished


def finish(job: Job, state: TrainState, display: Display, *, finished: bool) -> None:
    """Draw the curves, write the report, and say where things are."""
    try:
        draw_plots(job.folder)
    except ImportError:
        display.say("matplotlib is not installed: no plots (pip install whisfusion[plots])")
    if finished and job.recipe.minutes is not None and state.trainer.steps <= job.recipe.warmup_steps:
        display.say(f"only {state.trainer.steps} steps fit, and all were warm-up: lower --warmup_steps")
    report = write_report(job.folder, state, job.recipe_name, finished=finished)
    if finished:
        display.say(f"the model is {job.folder / 'model'}; about the run: {report}")
    else:
        folder = job.home or job.folder
        display.say(f"stopped at step {state.trainer.step_number} and saved: go on with --resume --out {folder}")


def write_config(job: Job) -> None:
    """Write config.json of the run folder: the recipe, and what it is applied to."""
    job.folder.mkdir(parents=True, exist_ok=True)
    steps = job.steps if job.recipe.minutes is None else None
    described = {"version": __version__, **job.description, "steps": steps, "recipe": asdict(job.recipe)}
    temporary = job.folder / ".config.part"
    temporary.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    temporary.replace(job.folder / "config.json")


class Kept:
    """What one stage leaves to the next that agrees on it: the bank of spectrograms, the dev set's samples."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._bank: tuple[Filtered, int, tuple[float, ...], Bank] | None = None
        self._dev: tuple[list[Utterance], DevSet] | None = None

    def has_bank(self, job: Job, mels: int) -> bool:
        """Whether the bank that a job asks for is there."""
        if self._bank is None:
            return False
        filtered, bins, speeds, _ = self._bank
        return filtered is job.filtered and (bins, speeds) == (mels, job.recipe.sampler.speeds)

    def bank(self, job: Job, mels: int) -> Bank:
        """The bank that a job asks for, made if it is not there; another one makes room for it."""
        if self._bank is None or not self.has_bank(job, mels):
            self._bank = None
            speeds = job.recipe.sampler.speeds
            bank = build_bank(
                job.filtered.kept,
                n_mels=mels,
                speeds=speeds,
                device=self._ranks.device,
                # One worker would do no more than this process, and would have to be started.
                workers=job.workers if job.workers > 1 else 0,
            )
            self._bank = job.filtered, mels, speeds, bank
        return self._bank[-1]

    def dev(self, job: Job) -> DevSet | None:
        """A job's dev set, decoded if it was not; all ranks must ask together."""
        if not job.dev:
            return None
        if self._dev is None or self._dev[0] != job.dev:
            self._dev = job.dev, DevSet(job.dev, self._ranks)
        return self._dev[1]


def _clear_away(ranks: Ranks) -> None:
    """Between stages: wait for the model to be written, and free what the stage held on the device."""
    ranks.wait()
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def features(job: Job, start: StartingPoint, device: torch.device, say: Callable[[str], None]) -> Bank:
    """What the adapter hears in a job's clips."""
    config, clips = start.decoder.config, job.filtered.kept
    say(f"hearing {len(clips):,} clips, once: {job.folder / FEATURES} keeps it")

    def progress(done: int, clips: int) -> None:
        if 10 * done // clips > 10 * (done - 1) // clips:
            say(f"heard {done:,} of {clips:,} clips")

    bank = build_feature_bank(
        clips,
        ears(start, device),
        job.folder / FEATURES,
        model=heard_by(start, device),
        width=config.audio_width,
        per_second=FRAMES_PER_SECOND // (2 * config.stride),
        progress=progress,
    )
    return replace(bank, frames_NM=bank.frames_NM.to(device))


def make_feeder(
    job: Job, start: StartingPoint, ranks: Ranks, kept: Kept, say: Callable[[str], None] = lambda _: None
) -> Feeder:
    """The feeder that the recipe names."""
    recipe, mels = job.recipe, start.encoder.config.mels
    if recipe.feeder != "stream":
        return BankFeeder(
            kept.bank(job, mels) if recipe.feeder == "bank" else features(job, start, ranks.device, say),
            sampler_options(recipe),
            canvas=recipe.decoder.canvas,
            text_style=recipe.text_style,
            micro_batches=recipe.accumulate,
            rank=ranks.rank,
            world=ranks.world,
        )
    return StreamFeeder(
        job.filtered.kept,
        job.sampler(ranks.rank, ranks.world),
        StreamOptions(
            mels=mels,
            window=recipe.window,
            canvas=recipe.decoder.canvas,
            text_style=recipe.text_style,
            micro_batches=recipe.accumulate,
            noise=recipe.noise,
            workers=job.workers,
        ),
        device=ranks.device,
    )
