"""whisfusion train: a recipe and speech to a model folder."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whisfusion.cli.parser import Arguments, Commands, underscored
from whisfusion.errors import OptionError

if TYPE_CHECKING:
    from whisfusion.train.prepare import Stage

RECIPE_NAMES = (
    *("paper_stage1", "paper_stage2", "paper_stage2_uniform"),
    *("base_hearing", "base_stage1", "base_stage2", "base_stage2_uniform"),
    *("trial", "trial_paper", "speller", "finetune", "tiny"),
)
"""Spelt out here so that the help need not import torch."""

_EPILOG = f"""\
recipes:
  {", ".join(RECIPE_NAMES)}

Every field of a recipe is an option too: --learning_rate 3e-4 --decoder.layers 6; --settings lists them all.

examples:
  whisfusion train --recipe tiny --data tests/data/tiny --out runs/tiny
  whisfusion train --recipe finetune --init_from MODEL --data my_speech.jsonl --out runs/mine
  whisfusion train --recipe paper_stage1 --data DATA --dry_run
  whisfusion train --recipe base_hearing --then base_stage1 --then "base_stage2 --minutes 5" --data DATA --out runs/base
  torchrun --nproc_per_node 8 -m whisfusion train --recipe paper_stage1 --data DATA --out runs/stage1
"""


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add(
        "train",
        "learn a model from manifests of speech",
        run,
        description="Learn a model from manifests of speech: a run folder with logs, checkpoints and a model folder.",
        usage="whisfusion train --recipe NAME --data MANIFEST... --out RUN [options]",
        epilog=_EPILOG,
    )
    parser.set_defaults(takes_more=True)
    parser.add_argument("--recipe", default="finetune", metavar="NAME", help="see below (default finetune)")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="MANIFEST", help="what to learn from: manifests, or folders of them"
    )
    parser.add_argument("--dev", nargs="+", default=[], metavar="MANIFEST", help="what to measure on during training")
    parser.add_argument("--out", type=Path, metavar="RUN", help="the run folder (default runs/last)")
    parser.add_argument("--resume", action="store_true", help="go on where the run in --out was stopped")
    parser.add_argument("--init_from", metavar="MODEL", help="a model to start from, by name or folder")
    parser.add_argument(
        "--then",
        action="append",
        default=[],
        metavar="STAGE",
        help='a run that follows, from the model of the one before: "RECIPE --steps 5000"; may be repeated; '
        "with --init_from 2-base_stage1 in it from the model of that stage",
    )
    parser.add_argument("--dry_run", action="store_true", help="tell what would be done, and train nothing")
    parser.add_argument("--settings", action="store_true", help="list every field of the recipe, and its value")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1")
    parser.add_argument("--workers", type=int, metavar="W", help="threads that decode audio, on each rank")


def run(arguments: Arguments) -> int:
    """Train; a run that was asked to stop has saved itself, which is no failure."""
    settings = pairs(arguments.more)
    then = tuple(_stage(text) for text in arguments.then)

    from whisfusion.train import TrainArgs, main

    if arguments.settings:
        print(_list_settings(arguments.recipe, settings))
        return 0
    main(
        TrainArgs(
            recipe=arguments.recipe,
            data=tuple(arguments.data),
            dev=tuple(arguments.dev),
            out=arguments.out,
            settings=settings,
            resume=arguments.resume,
            init_from=arguments.init_from,
            dry_run=arguments.dry_run,
            device=arguments.device,
            workers=arguments.workers,
            then=then,
        )
    )
    return 0


def _stage(text: str) -> "Stage":
    """A stage from the words of one --then. Raises OptionError where they make none."""
    from whisfusion.train.prepare import Stage

    try:
        recipe, *words = shlex.split(text)
    except ValueError:
        raise OptionError(f"--then {text!r} must be a recipe and its options: 'base_stage1 --steps 5000'") from None
    if recipe.startswith("-"):
        raise OptionError(f"--then {text!r} must begin with the name of a recipe")
    settings = pairs([underscored(word) for word in words])
    return Stage(recipe, settings, settings.pop("init_from", None))


def pairs(words: Sequence[str]) -> dict[str, str]:
    """["--steps", "9", "--decoder.layers=6"] as {"steps": "9", "decoder.layers": "6"}.

    Raises OptionError for a name without a value, or a value without a name.
    """
    found: dict[str, str] = {}
    problems: list[str] = []
    waiting: str | None = None
    for word in words:
        if word.startswith("--"):
            if waiting is not None:
                problems.append(f"--{waiting} has no value")
            name, equals, value = word[2:].partition("=")
            waiting = None if equals else name
            if equals:
                found[name] = value
        elif waiting is None:
            problems.append(f"{word!r} does not belong to an option")
        else:
            found[waiting], waiting = word, None
    if waiting is not None:
        problems.append(f"--{waiting} has no value")
    OptionError.collect(problems)
    return found


def _list_settings(recipe_name: str, settings: dict[str, str]) -> str:
    """Every field of a recipe that a word on the command line can set, and what it would be."""
    from dataclasses import is_dataclass

    from whisfusion.train import RECIPES, Recipe
    from whisfusion.train.overrides import field_names, override

    if recipe_name not in RECIPES:
        raise OptionError(f"there is no recipe {recipe_name!r}: choose one of {', '.join(RECIPES)}")
    recipe = override(RECIPES[recipe_name](), settings)
    lines = []
    for name in field_names(Recipe):
        value = recipe
        for part in name.split("."):
            value = getattr(value, part, None)
        if not is_dataclass(value):
            lines.append(f"--{name} {value}")
    return "\n".join(lines)
