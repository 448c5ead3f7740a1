"""Checks of options against their annotations."""

import types
import typing
from typing import Any


def check_at_least(owner: object, least: int, *names: str) -> None:
    """Raise `ValueError` for a field of `owner` that is less than `least`; None is no number."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}, but must be at least {least}.")


def check_choices(kind: type, values: dict[str, Any]) -> None:
    """Raise `ValueError` for a value that the `Literal` annotation of its field does not list.

    Fields that take other values as well, like `int | Literal["all"]`, are left alone.
    """
    for name, hint in typing.get_type_hints(kind).items():
        parts = _parts(hint)
        if name not in values or any(
            isinstance(part, type) and part is not types.NoneType for part in parts
        ):
            continue
        choices = [choice for part in parts for choice in typing.get_args(part) or (None,)]
        if values[name] not in choices:
            shown = ", ".join(str(choice) for choice in choices)
            raise ValueError(f"{name} is {values[name]!r}, but must be one of {shown}.")


def from_plain(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Values read from JSON as `kind` takes them: JSON does not tell 1 from 1.0.

    Raises:
        ValueError: A name is not known to `kind`, or a choice is not in its list.
    """
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"option {unknown[0]!r} is not known to {kind.__name__}.")
    check_choices(kind, values)
    return {
        name: float(value) if type(value) is int and float in _parts(hints[name]) else value
        for name, value in values.items()
    }


def _parts(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)
