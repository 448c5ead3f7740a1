"""One state on its way to the disk, and the memory it waits in."""

import atexit
import threading
import time
from pathlib import Path

import torch
from torch import Tensor

from ._encode import Encoded
from ._files import StoppedError
from ._manifest import Manifest
from ._save import Written, commit

__all__ = ["Write", "copied"]

# A saver that nobody closed holds the end of the process up for so long at most.
_EXIT_SECONDS = 60.0


class Write:
    """A thread that writes one state; `written` and `error` are to be read when it has ended."""

    def __init__(
        self, directory: Path, encoded: Encoded, part: Manifest, *, keep: int | None, shared: bool
    ) -> None:
        self.part = part
        self.written: Written | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self.start = time.perf_counter()
        self._stop = threading.Event()
        self._last_word = threading.Lock()

        def write() -> None:
            try:
                self.written = commit(
                    directory,
                    encoded,
                    part,
                    keep=keep,
                    shared=shared,
                    stop=self._stop.is_set,
                    may_commit=lambda: self._last_word.acquire(blocking=False),
                )
            except StoppedError:
                pass
            except Exception as error:
                self.error = error
            finally:
                self.seconds = time.perf_counter() - self.start

        # A daemon: a disk that hangs must not keep a process from ending.
        self.thread = threading.Thread(target=write, name="gossipgrad-checkpoint", daemon=True)
        self.thread.start()
        atexit.register(self.at_exit)

    def give_up(self) -> bool:
        """Has it end without a commit; False: too late, the commit is under way or done."""
        self._stop.set()
        return self._last_word.acquire(blocking=False)

    def at_exit(self) -> None:
        self.thread.join(_EXIT_SECONDS)


def copied(tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, in the buffers of the last time where they fit."""
    copies: dict[str, Tensor] = {}
    devices = set()
    for name, tensor in tensors.items():
        copy = buffers.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
            )
        copies[name] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            devices.add(tensor.device)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies
