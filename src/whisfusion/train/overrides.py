"""Recipes from words: any field by name from the command line, and whole recipes from JSON.

All mistakes are reported at once: names that do not exist, values of the wrong type, values out of range.
"""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from whisfusion.errors import OptionError
from whisfusion.train.config import Recipe

_Options = TypeVar("_Options")


def override(recipe: Recipe, given: Mapping[str, str]) -> Recipe:
    """The recipe with fields replaced: {"learning_rate": "3e-4", "decoder.layers": "6", "steps": "none"}.

    Tuples are JSON or words with commas between. Giving one of `steps`, `epochs` and `minutes` unsets the
    others, and so with sampler.utterances and sampler.seconds. Raises one OptionError that names every mistake.
    """
    problems: list[str] = []
    result = apply(recipe, given, problems)
    OptionError.collect(problems)
    return result


def apply(recipe: Recipe, given: Mapping[str, str], problems: list[str]) -> Recipe:
    """Like `override`, but add a sentence on each mistake to `problems`; with any, the recipe is returned as it was."""
    found: list[str] = []
    raw = dataclasses.asdict(recipe)
    names = field_names(Recipe)
    for name, text in given.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            found.append(f"there is no setting {name!r}" + (f": did you mean {close[0]!r}?" if close else ""))
            continue
        try:
            _put(raw, name.split("."), _from_text(text, names[name]), names)
        except ValueError as error:
            found.append(f"{name} {error}")
    for group in _ONE_OF:
        if any(name in given for name in group):
            for name in group:
                if name not in given:
                    _put(raw, name.split("."), None, names)
    result = _build(Recipe, raw, found, stand_in=recipe)
    problems += found
    return recipe if found or result is None else result


def on_top(given: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """Both together, `more` where they disagree: a run of so many minutes does not keep the steps it was given."""
    replaced = {name for group in _ONE_OF if any(name in more for name in group) for name in group}
    return {name: text for name, text in given.items() if name not in replaced} | dict(more)


def from_json(raw: Mapping[str, Any]) -> Recipe:
    """The recipe whose `dataclasses.asdict` was written as JSON. Raises OptionError naming every mistake."""
    problems: list[str] = []
    result = _build(Recipe, raw, problems)
    OptionError.collect(problems)
    return typing.cast(Recipe, result)


def field_names(kind: type, prefix: str = "") -> dict[str, Any]:
    """Every field of a dataclass, and of those inside it as "decoder.layers", with its type."""
    names: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(typing.cast(Any, kind))):
        hint = names[prefix + name] = hints[name]
        inner = _dataclass_in(hint)
        if inner is not None:
            names |= field_names(inner, f"{prefix}{name}.")
    return names


_ONE_OF = (("steps", "epochs", "minutes"), ("sampler.utterances", "sampler.seconds"))


def _put(raw: dict[str, Any], path: Sequence[str], value: Any, names: Mapping[str, Any]) -> None:
    for depth, name in enumerate(path[:-1]):
        if raw[name] is None:
            kind = _dataclass_in(names[".".join(path[: depth + 1])])
            raw[name] = dataclasses.asdict(typing.cast(Any, kind)())
        raw = raw[name]
    raw[path[-1]] = value


def _build(
    kind: type[_Options], raw: Any, problems: list[str], prefix: str = "", stand_in: Any = None
) -> _Options | None:
    """A dataclass from JSON-like values; None, with sentences added to `problems`, where that fails.

    Where a part of it fails, that part of `stand_in` (or the default) is used to check the rest.
    """
    if not isinstance(raw, Mapping):
        problems.append(f"{prefix.rstrip('.') or 'the recipe'} must be an object of settings, not {raw!r}")
        return None
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in raw.items():
        inner = _dataclass_in(hints.get(name))
        try:
            if name not in hints:
                problems.append(f"there is no setting {prefix + name!r}")
            elif inner is not None and value is not None:
                before = getattr(stand_in, name, None)
                built = _build(inner, value, problems, f"{prefix}{name}.", before) or before
                values |= {} if built is None else {name: built}
            else:
                values[name] = _typed(value, hints[name])
        except ValueError as error:
            problems.append(f"{prefix}{name} {error}")
    try:
        return kind(**values)
    except OptionError as error:
        problems.append(f"{prefix.rstrip('.')}: {error}" if prefix else str(error))
    except TypeError as error:
        problems.append(f"{prefix or 'the recipe '}{error}")
    return None


def _from_text(text: str, hint: Any) -> Any:
    """The JSON-like value that a word on the command line stands for."""
    kinds = _alternatives(hint)
    if type(None) in kinds and text.lower() == "none":
        return None
    if str in kinds or typing.get_origin(hint) is typing.Literal:
        return text
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"must be true or false, not {text!r}")
        return text.lower() == "true"
    if any(typing.get_origin(kind) is tuple for kind in kinds) and not text.startswith("["):
        return [_number_or_word(word) for word in text.split(",") if word.strip()]
    return _number_or_word(text)


def _number_or_word(word: str) -> Any:
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        return word.strip()


def _typed(value: Any, hint: Any) -> Any:
    """`value` as type `hint` has it: lists become tuples, whole numbers floats. Raises ValueError otherwise."""
    for kind in _alternatives(hint):
        if kind is type(None) and value is None:
            return None
        if kind is float and type(value) in (int, float):
            return float(value)
        if kind in (int, bool, str) and type(value) is kind:
            return value
        if kind is int and type(value) is float and value.is_integer():
            return int(value)
        if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
            return value
        if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
            return _typed_tuple(value, typing.get_args(kind))
    raise ValueError(f"must be {_describe(hint)}, not {value!r}")


def _typed_tuple(values: list[Any] | tuple[Any, ...], hints: tuple[Any, ...]) -> tuple[Any, ...]:
    if hints[-1] is Ellipsis:
        return tuple(_typed(value, hints[0]) for value in values)
    if len(values) != len(hints):
        raise ValueError(f"must have {len(hints)} parts, not {len(values)}")
    return tuple(_typed(value, hint) for value, hint in zip(values, hints, strict=True))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _dataclass_in(hint: Any) -> type | None:
    return next((kind for kind in _alternatives(hint) if dataclasses.is_dataclass(kind)), None)


def _describe(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}
    parts = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is typing.Literal:
            parts += [repr(choice) for choice in typing.get_args(kind)]
        else:
            parts.append(words.get(kind, "a list"))
    return " or ".join(parts)
