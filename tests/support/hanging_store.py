"""A rendezvous store whose host may be stopped, or fail."""

import threading
from typing import Any

import torch.distributed as dist

__all__ = ["Hanging"]


class Hanging(dist.Store):
    """Takes questions; answers them when its event is set, by an error if it has one."""

    def __init__(self, inner: dist.Store | None = None, *, answers: bool = False) -> None:
        super().__init__()
        self.answers, self.error, self.written = threading.Event(), None, 0
        self._inner = dist.HashStore() if inner is None else inner
        if answers:
            self.answers.set()

    def clone(self) -> "Hanging":
        return self

    def _ask(self, what: str, *arguments: Any) -> Any:
        self.answers.wait()
        if self.error is not None:
            raise self.error
        self.written += what == "set"
        return getattr(self._inner, what)(*arguments)


for name in ("set", "get", "add", "check", "compare_set", "delete_key", "wait"):
    setattr(Hanging, name, lambda self, *arguments, _what=name: self._ask(_what, *arguments))
