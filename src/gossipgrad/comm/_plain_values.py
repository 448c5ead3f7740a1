"""Trees of plain values and tensors, as JSON text and a list of tensors."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["flatten", "unflatten"]


def flatten(tree: Any) -> tuple[str, list[Tensor]]:
    """A tree as text that names the tensors in it by number, and these.

    Args:
        tree: Of dicts, lists, tuples, tensors, numbers, text, bool and None.

    Raises:
        ValueError: Something else is in it.

    Example:
        >>> text, tensors = flatten({"epoch": 3, (1, 2): [None]})
        >>> unflatten(text, tensors)
        {'epoch': 3, (1, 2): [None]}
    """
    tensors: list[Tensor] = []
    return json.dumps(_coded(tree, tensors)), tensors


def unflatten(text: str | bytes, tensors: Sequence[Tensor]) -> Any:
    """What `flatten` was given."""
    return _decoded(json.loads(text), tensors)


def _coded(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": [[_coded(k, tensors), _coded(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_coded(each, tensors) for each in value]}
    if isinstance(value, list):
        return [_coded(each, tensors) for each in value]
    raise ValueError(
        f"a {type(value).__name__} is no plain value: use tensors, numbers, text, None, and lists "
        "and dicts of these"
    )


def _decoded(coded: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(coded, list):
        return [_decoded(each, tensors) for each in coded]
    if not isinstance(coded, dict):
        return coded
    ((kind, held),) = coded.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "tuple":
        return tuple(_decoded(each, tensors) for each in held)
    return {_decoded(k, tensors): _decoded(v, tensors) for k, v in held}
