"""Several runs one after another, each from the model of the one before or of an earlier one: what `--then` asks for.

The folder of such a run has stages.json and a folder for each stage, which is a run like any other: 1-base_hearing,
2-base_stage1, ...
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from whisfusion import __version__
from whisfusion.errors import OptionError
from whisfusion.train.config import Recipe
from whisfusion.train.overrides import on_top
from whisfusion.train.prepare import (
    FREE_ON_RESUME,
    STAGES_FILE,
    Corpus,
    Job,
    Stage,
    TrainArgs,
    prepare,
    prepare_one,
    report,
    run_folder,
    taken,
)


@dataclass(frozen=True)
class Plan:
    """What stages.json keeps, for resuming."""

    data: tuple[str, ...]
    dev: tuple[str, ...]
    init_from: str | None
    """The model that the first stage starts from."""
    stages: tuple[Stage, ...]
    """Each with all of its settings."""


def prepare_stages(args: TrainArgs) -> tuple[list[Job], Plan | None]:
    """The runs that are left to do, in order, and the plan they are of; a lone run has none.

    Raises one OptionError that lists every problem of every stage.
    """
    folder = run_folder(args)
    if args.resume and (folder / STAGES_FILE).exists():
        plan = _read_plan(args, folder)
    elif args.then:
        plan = _new_plan(args, folder)
    else:
        return [prepare(args)], None
    jobs: list[Job] = []
    names: list[str] = []
    found: dict[str, list[str]] = {}
    corpus = Corpus()
    made: dict[str, Job | None] = {}
    """Runs that make a model for others, by folder; None where the model is there."""
    for number, stage in enumerate(plan.stages, start=1):
        out = folder / f"{number}-{stage.recipe}"
        after = stage.init_from or next(reversed(made), None)
        job = None
        if not (args.resume and (out / "model").exists()):
            problems: list[str] = []
            if after is not None and after not in made:
                problems.append(f"--init_from {after} is no stage before it: choose one of {', '.join(made)}")
                after = next(reversed(made), None)
            start = plan.init_from if after is None else os.path.abspath(folder / after / "model")
            asked = replace(args, data=plan.data, dev=plan.dev, out=out, init_from=start, then=())
            job = prepare_one(_for_stage(asked, stage, problems), corpus, problems, made[after] if after else None)
            jobs.append(replace(job, home=folder))
            names.append(out.name)
            for problem in problems:
                found.setdefault(problem, []).append(out.name)
        made[out.name] = job
    problems = [] if args.resume or args.dry_run else taken(folder)
    for problem, where in found.items():
        problems.append(problem if where == names else f"{', '.join(where)}: {problem}")
    report(problems)
    return jobs, plan


def write_plan(plan: Plan, folder: Path) -> None:
    """Write stages.json."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".stages.part"
    text = json.dumps({"version": __version__, **asdict(plan)}, indent=2)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(folder / STAGES_FILE)


def _new_plan(args: TrainArgs, folder: Path) -> Plan:
    if args.resume:
        raise OptionError(f"there is no run of several stages to resume in {folder}: leave out --resume, or --then")
    later = (replace(stage, settings=on_top(args.settings, stage.settings)) for stage in args.then)
    return Plan(
        data=tuple(os.path.abspath(path) for path in args.data),
        dev=tuple(os.path.abspath(path) for path in args.dev),
        init_from=args.init_from,
        stages=(Stage(args.recipe, dict(args.settings)), *later),
    )


def _read_plan(args: TrainArgs, folder: Path) -> Plan:
    """The plan of a run that is resumed; data may have moved."""
    if args.then:
        raise OptionError(f"the run in {folder} has its stages: leave out --then to go on with it")
    try:
        described = json.loads((folder / STAGES_FILE).read_text(encoding="utf-8"))
        return Plan(
            data=tuple(os.path.abspath(path) for path in args.data or described["data"]),
            dev=tuple(os.path.abspath(path) for path in args.dev or described["dev"]),
            init_from=described["init_from"],
            stages=tuple(Stage(s["recipe"], s["settings"], s.get("init_from")) for s in described["stages"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"there is no run to resume in {folder}: {STAGES_FILE} cannot be read ({error})") from None


def _for_stage(args: TrainArgs, stage: Stage, problems: list[str]) -> TrainArgs:
    """What one stage is asked to do; `args` has its folder. A stage that has begun knows its own settings."""
    begun = args.resume and (run_folder(args) / "config.json").exists()
    settings = args.settings
    if not begun:
        if args.resume:
            problems += _kept(args.settings)
        settings = on_top(stage.settings, args.settings) if args.resume else stage.settings
    return replace(args, recipe=stage.recipe, settings=settings, resume=begun)


def _kept(settings: Mapping[str, str]) -> list[str]:
    """A sentence if a stage that has not begun would be changed by what its run is resumed with."""
    fixed = {field.name for field in fields(Recipe)} - FREE_ON_RESUME
    kept = sorted(fixed & {name.split(".")[0] for name in settings})
    if not kept:
        return []
    return [f"a resumed run keeps its {', '.join(kept)}: leave them out, or start anew with --init_from"]
