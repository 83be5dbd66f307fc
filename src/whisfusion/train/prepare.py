"""From what the user asked for to a job that can run. Whatever is wrong is found here, and said all at once."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from whisfusion import hub
from whisfusion.checkpoint import read_config
from whisfusion.data.epoch import SamplerOptions
from whisfusion.data.filters import Filtered, FilterOptions, filter_utterances
from whisfusion.data.manifest import missing_audio, parse_manifest
from whisfusion.data.sampler import Sampler
from whisfusion.data.utterance import Utterance
from whisfusion.decoder import Canvas
from whisfusion.errors import OptionError, WhisfusionError
from whisfusion.loading import resolve_device
from whisfusion.tokenizer import LANGUAGES
from whisfusion.train.config import Recipe
from whisfusion.train.dev import spread
from whisfusion.train.model import adopt, follow
from whisfusion.train.overrides import apply, from_json
from whisfusion.train.recipes import RECIPES

DEFAULT_RUN = Path("runs/last")
STAGES_FILE = "stages.json"
"""What a folder of several stages has in place of config.json."""
FREE_ON_RESUME = frozenset(
    {
        "accumulate",
        "compile",
        "graphs",
        "checkpoint_activations",
        "log_every",
        "eval_every",
        "save_every",
        "dev_clips",
        "dev",
    }
)
"""Fields that a resumed run may change: they are about the machine and about watching, not about what is learned."""
_SHOWN = 20
"""Problems that are spelt out; the rest is counted."""


@dataclass(frozen=True)
class Stage:
    """A run that follows another one, from its model."""

    recipe: str
    """A name in `RECIPES`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Fields of the recipe by name, on top of those that all stages have."""
    init_from: str | None = None
    """The folder of the stage whose model it starts from, such as "2-base_stage1"; None for the one before."""


@dataclass(frozen=True)
class TrainArgs:
    """What `whisfusion train` was asked to do."""

    recipe: str = "finetune"
    """A name in `RECIPES`; a resumed run has its own."""
    data: tuple[str, ...] = ()
    """Manifests, or folders of them, to train on; a resumed run knows its own."""
    dev: tuple[str, ...] = ()
    """Manifests, or folders of them, to evaluate on during training; likewise."""
    out: str | os.PathLike[str] | None = None
    """The run folder; `runs/last` if not given."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Fields of the recipe by name, such as {"learning_rate": "3e-4", "decoder.layers": "6"}."""
    resume: bool = False
    """Go on with the run in `out` where its last checkpoint left it."""
    init_from: str | None = None
    """A model to start from: its weights and architecture, with optimizer and schedule from the start."""
    dry_run: bool = False
    """Say what would be done, and do nothing."""
    device: str = "auto"
    """"auto", "cpu", "cuda" or "cuda:1"."""
    workers: int | None = None
    """Threads that decode audio on each rank; the machine's cores are shared out if not given."""
    then: tuple[Stage, ...] = ()
    """Runs that follow, each from the model of the one before; `settings` are for all of them (see stages.py)."""


@dataclass(frozen=True)
class Job:
    """A run that is ready to start."""

    recipe_name: str
    recipe: Recipe
    folder: Path
    data: tuple[str, ...]
    dev_data: tuple[str, ...]
    resume: bool
    init_from: str | None
    device: torch.device
    workers: int
    filtered: Filtered
    """The training utterances, and what was left out."""
    dev: list[Utterance]
    steps: int
    """Optimizer steps of the whole run; 1 where the recipe gives minutes, until the first step was timed."""
    known: frozenset[str] = frozenset()
    """The languages of the model that comes out."""
    home: Path | None = None
    """The folder to resume, where this is one of several stages."""
    notes: tuple[str, ...] = ()
    """What the user should know before it starts."""

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that are trained on, the most frequent first."""
        return tuple(code for code, _ in Counter(u.language for u in self.filtered.kept).most_common())

    @property
    def description(self) -> dict[str, Any]:
        """What config.json of the run folder keeps beside the recipe, for resuming."""
        return {"recipe_name": self.recipe_name, "data": self.data, "dev": self.dev_data, "init_from": self.init_from}

    def sampler(self, rank: int = 0, world: int = 1) -> Sampler:
        """The sampler of one rank."""
        return _sampler(self.recipe, self.filtered, rank, world)


def prepare(args: TrainArgs) -> Job:
    """Check everything that can be checked before training. Raises one OptionError that lists every problem."""
    problems: list[str] = []
    if args.resume:
        # It knows what it started from.
        args = replace(args, init_from=None)
    elif not args.dry_run:
        problems += taken(run_folder(args))
    job = prepare_one(args, Corpus(), problems)
    report(problems)
    return job


def run_folder(args: TrainArgs) -> Path:
    """Where the run is, or will be."""
    return Path(args.out) if args.out is not None else DEFAULT_RUN


def taken(folder: Path) -> list[str]:
    """A sentence if there is a run in the folder."""
    if not any((folder / name).exists() for name in ("config.json", STAGES_FILE)):
        return []
    return [f"{folder} already holds a run: go on with --resume, or choose another --out"]


class Corpus:
    """Manifests and what is left of them, read and filtered once for all stages that agree on how."""

    def __init__(self) -> None:
        self.parse = cache(parse_manifest)
        """`parse_manifest`, each set of manifests once."""
        self.filter = cache(self._filter)
        """The utterances of manifests that pass the filters and fit the canvas. Raises ManifestError."""
        self.missing = cache(self._missing)
        """A sentence for every file of such utterances that is not there."""

    def _filter(self, paths: tuple[str, ...], filters: FilterOptions, canvas: Canvas) -> Filtered:
        return filter_utterances(self.parse(*paths)[0], filters, positions=canvas.positions)

    def _missing(self, paths: tuple[str, ...], filters: FilterOptions, canvas: Canvas) -> list[str]:
        return missing_audio(self.filter(paths, filters, canvas).kept)


def prepare_one(args: TrainArgs, corpus: Corpus, problems: list[str], before: Job | None = None) -> Job:
    """A job, or as near to one as the mistakes allow, of which each adds a sentence to `problems`.

    before: the run that will make the model `init_from`, where there is none yet.
    """
    folder = run_folder(args)
    if args.resume:
        args = _resumed(args, folder)
    recipe_problems: list[str] = []
    recipe = _recipe(args, folder, recipe_problems, before)
    problems += recipe_problems
    device = _attempt(lambda: resolve_device(args.device), torch.device("cpu"), problems)
    if recipe.precision == "auto":
        recipe = replace(recipe, precision="bf16" if device.type == "cuda" else "fp32")
    world, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if device.type == "cuda" and local > torch.cuda.device_count():
        problems.append(f"{local} processes on a machine with {torch.cuda.device_count()} GPUs: start fewer")
    if world > 1 and recipe.feeder == "features":
        problems.append("what the features feeder needs is heard by one process: start it without torchrun")
    if recipe.learns == "speller" and not args.resume and before is None and args.init_from is None:
        problems.append("learns 'speller' needs a model to stand on: give --init_from")
    known = _known(args, before)
    filtered, dev, notes = _read_data(args, recipe, corpus, known, problems)
    # A recipe with mistakes is not the one whose steps would be counted.
    steps = 0 if recipe_problems or not filtered.kept else _steps(recipe, filtered, world, problems)
    return Job(
        recipe_name=args.recipe,
        recipe=recipe,
        folder=folder,
        data=tuple(os.path.abspath(path) for path in args.data),
        dev_data=tuple(os.path.abspath(path) for path in args.dev),
        resume=args.resume,
        init_from=args.init_from,
        device=device,
        workers=args.workers or max(1, (os.cpu_count() or 1) // local),
        filtered=filtered,
        dev=dev,
        steps=steps,
        notes=tuple(notes),
        known=known | {utterance.language for utterance in filtered.kept},
    )


def _resumed(args: TrainArgs, folder: Path) -> TrainArgs:
    """What a run that is resumed was first asked for."""
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return replace(
            args,
            recipe=described["recipe_name"],
            data=args.data or tuple(described["data"]),
            dev=args.dev or tuple(described["dev"]),
            init_from=args.init_from or described["init_from"],
        )
    except (OSError, ValueError, KeyError) as error:
        raise OptionError(f"there is no run to resume in {folder}: config.json cannot be read ({error})") from None


def _recipe(args: TrainArgs, folder: Path, problems: list[str], before: Job | None) -> Recipe:
    """The recipe that was asked for, or as near to it as its mistakes allow."""
    if args.recipe not in RECIPES:
        problems.append(f"there is no recipe {args.recipe!r}: choose one of {', '.join(RECIPES)}")
        return Recipe()
    recipe = RECIPES[args.recipe]()
    if args.resume:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        recipe = _attempt(lambda: from_json(described["recipe"]), recipe, problems)
    elif before is not None:
        base, made = recipe, before.recipe
        recipe = _attempt(lambda: follow(base, made), base, problems)
    elif args.init_from is not None:
        model, base = args.init_from, recipe
        recipe = _attempt(lambda: adopt(base, model), base, problems)
    changed = apply(recipe, args.settings, problems)
    fixed = {field.name for field in fields(Recipe)} - FREE_ON_RESUME
    kept = [name for name in sorted(fixed) if getattr(changed, name) != getattr(recipe, name)]
    if args.resume and kept:
        problems.append(f"a resumed run keeps its {', '.join(kept)}: leave them out, or start anew with --init_from")
    return changed


def _known(args: TrainArgs, before: Job | None) -> frozenset[str]:
    """The languages of the model to start from."""
    if before is not None:
        return before.known
    if args.init_from is None:
        return frozenset()
    model = args.init_from
    return frozenset(_attempt(lambda: read_config(hub.resolve(model))[0].languages, LANGUAGES, []))


def _read_data(
    args: TrainArgs, recipe: Recipe, corpus: Corpus, known: frozenset[str], problems: list[str]
) -> tuple[Filtered, list[Utterance], list[str]]:
    """What to train on, what to evaluate on, and what the user should know of it."""
    if not args.data:
        problems.append("there is nothing to train on: give manifests or folders with --data")
    utterances, bad = corpus.parse(*args.data)
    dev, bad_dev = corpus.parse(*args.dev)
    problems += bad + bad_dev
    filters = replace(recipe.filters, text_style=recipe.text_style)
    problems += _unknown_languages([*utterances, *dev], filters)
    wanted = args.data, filters, recipe.decoder.canvas
    filtered = _attempt(lambda: corpus.filter(*wanted), None, problems)
    if filtered is None:
        return Filtered([], np.zeros(0, dtype=np.int64)), [], []
    dev, notes = _readable(known, filtered, dev)
    dev = spread([u for u in dev if u.duration <= filters.max_seconds], recipe.dev_clips)
    problems += dict.fromkeys([*corpus.missing(*wanted), *missing_audio(dev)])
    if utterances and not filtered.kept:
        problems.append(f"none of the utterances can be used:\n{filtered.render()}")
    return filtered, dev, notes


def _unknown_languages(utterances: Sequence[Utterance], filters: FilterOptions) -> list[str]:
    unknown = [u.language for u in utterances if u.language not in LANGUAGES and filters.wants(u.language, u.dataset)]
    return [
        f"{count} utterances are in {language!r}, which has no token: correct their manifest, or leave them out "
        f'with --filters.exclude "{language}/*"'
        for language, count in Counter(unknown).items()
    ]


def _readable(known: frozenset[str], filtered: Filtered, dev: Sequence[Utterance]) -> tuple[list[Utterance], list[str]]:
    """The dev clips in languages that the model learns or starts with, and a sentence on the others."""
    known |= {utterance.language for utterance in filtered.kept}
    foreign = sorted({utterance.language for utterance in dev} - known)
    note = f"dev clips in {', '.join(foreign)} are left out: nothing is trained on these languages"
    return [utterance for utterance in dev if utterance.language in known], [note] if foreign else []


def _steps(recipe: Recipe, filtered: Filtered, world: int, problems: list[str]) -> int:
    rows, parts = recipe.sampler.utterances or recipe.sampler.rows_multiple, world * recipe.accumulate
    if rows % parts:
        name = "utterances" if recipe.sampler.utterances else "rows_multiple"
        problems.append(
            f"sampler.{name} of {rows} does not divide into {recipe.accumulate} micro-batches on {world} ranks"
        )
    sampler = _attempt(lambda: _sampler(recipe, filtered, 0, world), None, problems)
    if sampler is None:
        return 0
    if recipe.minutes is not None:
        return 1
    steps = recipe.steps or max(1, round((recipe.epochs or 1) * sampler.steps_per_epoch()))
    if recipe.warmup_steps >= steps:
        problems.append(f"warmup_steps {recipe.warmup_steps} must be fewer than the {steps} steps of this run")
    return steps


def _sampler(recipe: Recipe, filtered: Filtered, rank: int, world: int) -> Sampler:
    return Sampler(
        filtered.kept,
        sampler_options(recipe),
        rank=rank,
        world=world,
        tokens_N=filtered.tokens,
        positions=recipe.decoder.canvas.positions,
    )


def sampler_options(recipe: Recipe) -> SamplerOptions:
    """The recipe's sampler with what follows from its other fields."""
    return replace(recipe.sampler, seed=recipe.seed, margin=recipe.margin)


def _attempt(action: Any, otherwise: Any, problems: list[str]) -> Any:
    """The result of `action`, or `otherwise` where a user's mistake is in the way, which is then written down."""
    try:
        return action()
    except WhisfusionError as error:
        problems.append(str(error))
        return otherwise


def report(problems: Sequence[str]) -> None:
    """Raise one OptionError that lists every problem, if there are any."""
    if not problems:
        return
    head = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    raise OptionError("\n  ".join([f"{head}, nothing was trained:", *problems[:_SHOWN], *more]))
