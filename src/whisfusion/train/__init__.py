"""Learning: a recipe, manifests of speech, and a run folder with a model in it at the end."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whisfusion.train.config import Recipe
    from whisfusion.train.launch import main
    from whisfusion.train.prepare import TrainArgs
    from whisfusion.train.recipes import RECIPES

__all__ = ["RECIPES", "Recipe", "TrainArgs", "main"]

_HOMES = {"RECIPES": "recipes", "Recipe": "config", "TrainArgs": "prepare", "main": "launch"}


def __getattr__(name: str) -> Any:
    # Torch is imported when training starts, not when the command line asks for help.
    if name in _HOMES:
        return getattr(import_module(f"whisfusion.train.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'whisfusion.train' has no attribute {name!r}")
