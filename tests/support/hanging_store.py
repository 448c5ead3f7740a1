"""A rendezvous store whose host may stand still."""

import threading
from datetime import timedelta

import torch.distributed as dist

__all__ = ["Hanging"]


class Hanging(dist.Store):
    """Takes questions, and answers them when its event is set."""

    def __init__(self, inner: dist.Store | None = None) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.written = 0
        self._inner = dist.HashStore() if inner is None else inner

    def clone(self) -> "Hanging":
        return self

    def set(self, key: str, value: str) -> None:
        self.answers.wait()
        self.written += 1
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.answers.wait()
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        self.answers.wait()
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.answers.wait()
        return self._inner.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.answers.wait()
        return self._inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        self.answers.wait()
        return self._inner.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=1)) -> None:
        self.answers.wait()
        self._inner.wait(keys, timeout)
