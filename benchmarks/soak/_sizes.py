"""What a process and a session hold: memory, handles, threads, entries of containers."""

import resource
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

__all__ = ["MEASURES", "entries", "sizes"]

MEASURES = ("rss_bytes", "handles", "threads", "blocks", "entries")
_PAGE_BYTES = resource.getpagesize()
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)


def sizes(session: object) -> dict[str, int]:
    """Of this process and its session, now.

    `blocks` are those of Python's own allocator, which hold every small object there is; `entries`
    those of all containers that the session has, its links, ledgers and queues with it.
    """
    status = Path("/proc/self/status").read_text()
    return {
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES,
        "handles": sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1,  # less the one that looks
        "threads": int(status.split("Threads:")[1].split()[0]),
        "blocks": sys.getallocatedblocks(),
        "entries": sum(entries(session).values()),
    }


def entries(root: object) -> Counter[str]:
    """How many entries the containers of an object have, by place; of the library's own objects.

    Example:
        >>> entries([[1, 2], [3]])
        Counter({'[]': 3, '': 2})
    """
    found: Counter[str] = Counter()
    seen: dict[int, object] = {}  # held, that no other gets the same number
    todo = [("", root)]
    while todo:
        place, value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, _CONTAINERS):
            parts = _parts(value)
            found[place] += len(parts)
            todo += [(f"{place}[]", part) for part in parts]
        elif isinstance(value, MethodType):
            todo.append((place, value.__self__))
        elif type(value).__module__.startswith("gossipgrad"):
            todo += [(f"{place}.{name}", part) for name, part in _attributes(value)]
    return found


def _parts(container: Any) -> list[object]:
    """Also of one that another thread adds to just now."""
    while True:
        try:
            return list(container.values() if isinstance(container, dict) else container)
        except RuntimeError:
            continue


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
