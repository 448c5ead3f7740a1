"""Checks of options against their annotations."""

import dataclasses
import types
import typing
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
    Path: "a path",
}


def make_plain(owner: Any) -> None:
    """Make numbers of other libraries Python's own, and text a path in the fields that take one."""
    hints = typing.get_type_hints(type(owner))
    for field in dataclasses.fields(owner):
        value = plain = getattr(owner, field.name)
        if isinstance(value, Real) and not isinstance(value, bool):
            plain = int(value) if isinstance(value, Integral) else float(value)
        elif isinstance(value, str) and Path in _parts(hints[field.name]):
            plain = Path(value)
        object.__setattr__(owner, field.name, plain)


def check_at_least(owner: object, least: int, *names: str) -> None:
    """Raise `ValueError` for a field of `owner` that is less than `least`; None is no number."""
    check_rule(owner, f"at least {least}", lambda value: value >= least, *names)


def check_rule(owner: object, rule: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Raise `ValueError` for a field of `owner` that is not None, and for which `holds` is not."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not holds(value):
            raise ValueError(f"{name} is {value!r}, but must be {rule}.")


def check_fields(owner: Any) -> None:
    """Raise `ValueError` for a field of `owner` with a value that its annotation does not allow."""
    names = [field.name for field in dataclasses.fields(owner)]
    check_values(type(owner), {name: getattr(owner, name) for name in names})


def check_values(kind: Any, values: dict[str, Any]) -> None:
    """Raise `ValueError` for a value that the annotation of the field of `kind` does not allow."""
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        parts = _parts(hints[name])
        if not any(_fits(value, part) for part in parts):
            raise ValueError(f"{name} is {value!r}, but must be {_rule(parts)}.")


def from_plain(kind: type, values: Any, name: str) -> dict[str, Any]:
    """Values read from JSON as `kind` takes them: JSON does not tell 1 from 1.0."""
    if not isinstance(values, dict):
        raise ValueError(f"{name} is {values!r}, but must hold options by their names.")
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"option {unknown[0]!r} is not known to {kind.__name__}.")
    check_values(kind, values)
    return {
        key: float(value) if type(value) is int and float in _parts(hints[key]) else value
        for key, value in values.items()
    }


def _fits(value: object, part: Any) -> bool:
    if typing.get_origin(part) is Literal:
        return any(type(value) is type(one) and value == one for one in typing.get_args(part))
    if part is bool or not isinstance(value, bool):
        return isinstance(value, int | float if part is float else part)
    return False


def _rule(parts: tuple[Any, ...]) -> str:
    choices = [str(one) for part in parts for one in typing.get_args(part)]
    kinds = [part for part in parts if typing.get_origin(part) is not Literal]
    words = [_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds]
    if choices:
        words.insert(0, f"{'one of ' * (len(choices) > 1)}{', '.join(choices)}")
    return " or ".join(words)


def _parts(hint: Any) -> tuple[Any, ...]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint if origin in (None, Literal) else origin,)
