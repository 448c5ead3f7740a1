"""A rendezvous store whose host may stand still."""

import threading

import torch.distributed as dist

__all__ = ["Hanging"]


class Hanging(dist.Store):
    """Takes questions, and answers them when its event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self._inner = dist.HashStore()

    def clone(self) -> "Hanging":
        return self

    def set(self, key: str, value: str) -> None:
        self.answers.wait()
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
