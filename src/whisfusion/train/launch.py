"""`whisfusion train`, put together: recipe, data, model, feeder, run."""

import json
import os
from dataclasses import asdict

from whisfusion import __version__
from whisfusion.data.batch import Feeder
from whisfusion.data.stream import StreamFeeder, StreamOptions
from whisfusion.train.checkpoints import Checkpoints
from whisfusion.train.dev import DevSet
from whisfusion.train.display import Display, make_display
from whisfusion.train.estimate import render_job
from whisfusion.train.log import RunLog
from whisfusion.train.loop import Run
from whisfusion.train.model import model_config, starting_point
from whisfusion.train.parallel import Ranks, join_ranks
from whisfusion.train.plots import draw_plots
from whisfusion.train.prepare import Job, TrainArgs, prepare, sampler_options
from whisfusion.train.report import write_report
from whisfusion.train.state import Progress, TrainState
from whisfusion.train.trainer import Trainer


def main(args: TrainArgs) -> bool:
    """Train; returns whether the run came to its end (False: it was asked to stop, and can be resumed).

    Raises OptionError, listing every problem, before anything is trained.
    """
    job = prepare(args)
    if args.dry_run:
        print(render_job(job, int(os.environ.get("WORLD_SIZE", "1"))))
        return True
    with join_ranks(job.device) as ranks:
        return train(job, ranks)


def train(job: Job, ranks: Ranks) -> bool:
    """Run a job that `prepare` found nothing wrong with."""
    recipe = job.recipe
    start = starting_point(recipe, job.init_from)
    facts = {"recipe": job.recipe_name, "version": __version__}
    config = model_config(recipe, start, job.languages, facts)
    checkpoints = Checkpoints(job.folder / "checkpoints", ranks)
    with make_display(job.steps, main=ranks.main) as display:
        for note in job.notes:
            display.say(note)
        if recipe.feeder == "bank":
            display.say(f"making spectrograms of {len(job.filtered.kept):,} clips")
        feeder = make_feeder(job, start.encoder.config.mels, ranks)
        trainer = Trainer(start.decoder, start.encoder, recipe, steps=job.steps, ranks=ranks)
        state = TrainState(trainer, feeder, Progress())
        try:
            if job.resume:
                for warning in state.load(checkpoints):
                    display.say(warning)
                display.say(f"going on at step {trainer.step_number}")
            if ranks.main:
                write_config(job)
            log = RunLog(job.folder, main=ranks.main, resume_at=trainer.step_number)
            if not log.has_events:
                display.say("tensorboard is not installed: the curves are in log.csv and dev.csv alone")
            dev = DevSet(job.dev, ranks) if job.dev else None
            if dev is not None and dev.failures:
                log.skipped(trainer.step_number, dev.failures)
                display.say(f"{len(dev.failures)} dev clips could not be read: see skipped.jsonl")
            run = Run(state, config, job.folder, checkpoints, log, display, dev, start.bundles_encoder)
            finished = run.fit()
            log.close()
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
    report = write_report(job.folder, state, job.recipe_name, finished=finished)
    if finished:
        display.say(f"the model is {job.folder / 'model'}; about the run: {report}")
    else:
        display.say(f"stopped at step {state.trainer.step_number} and saved: go on with --resume --out {job.folder}")


def write_config(job: Job) -> None:
    """Write config.json of the run folder: the recipe, and what it is applied to."""
    job.folder.mkdir(parents=True, exist_ok=True)
    described = {"version": __version__, **job.description, "steps": job.steps, "recipe": asdict(job.recipe)}
    temporary = job.folder / ".config.part"
    temporary.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    temporary.replace(job.folder / "config.json")


def make_feeder(job: Job, mels: int, ranks: Ranks) -> Feeder:
    """The feeder that the recipe names."""
    recipe = job.recipe
    if recipe.feeder == "bank":
        from whisfusion.data.bank import build_bank
        from whisfusion.data.bank_feeder import BankFeeder

        bank = build_bank(
            job.filtered.kept,
            n_mels=mels,
            speeds=recipe.sampler.speeds,
            device=ranks.device,
            # One worker would do no more than this process, and would have to be started.
            workers=job.workers if job.workers > 1 else 0,
        )
        return BankFeeder(
            bank,
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
