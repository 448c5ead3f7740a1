"""JSON that every reader accepts, and JSON lines as a killed process leaves them."""

import json
import math
from pathlib import Path
from typing import Any

_SCRIPT_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def dumps(value: object) -> str:
    """Encode `value` as strict, compact, ASCII JSON.

    `NaN` and the infinities, which JSON has no word for, become `null`. What JSON does not know
    at all is written as its `str`, because an odd attribute must not cost a whole trace.
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=str)


def dumps_for_script(value: object) -> str:
    """Encode `value` so that it may stand inside a `<script>` element of an HTML page.

    No `<`, `>` or `&` is left: the text cannot close the element or open a comment.
    """
    text = dumps(value)
    for character, escape in _SCRIPT_ESCAPES.items():
        text = text.replace(character, escape)
    return text


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the objects of a JSON-lines file and count the lines that are none.

    A process that is killed while it writes leaves a truncated last line, perhaps within a
    character: such lines are left out and counted, never raised, as is what nests too deep.

    Returns:
        The objects in file order, and how many lines were left out.
    """
    objects: list[dict[str, Any]] = []
    skipped = 0
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                objects.append(value)
            else:
                skipped += 1
    return objects, skipped


def _finite(value: object) -> object:
    """Replace every float without a JSON form by None, through dicts, lists and tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
