"""Saves in the background: training waits for a copy in memory, and for nothing else."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from gossipgrad._messages import warn

from ._layout import Manifest
from ._save import check_keep, commit, copied, part_of, refuse_occupied


@dataclass(frozen=True, kw_only=True, slots=True)
class SaverStats:
    """What a saver has done so far."""

    saved: int = 0
    """States that are on the disk."""
    skipped: int = 0
    """States not taken, since one was being written."""
    failed: int = 0
    """States that could not be written."""


class Saver:
    """Saves states of one rank one after another, in a thread of its own.

    `save` copies the tensors into memory that is used again, one state large, and returns; a thread
    writes. At most one state is written at a time: while a disk is slow, states are skipped and
    counted. Errors of the disk do not end training: the previous checkpoint stays, a warning says
    so once, `error` and `stats()` at any time, and the next `save` tries again. A rank that skips
    or fails leaves a step incomplete, which is removed once a newer one is complete. Local; what is
    committed and kept is that of `gossipgrad.checkpoint.save`.

    Not for several threads at once. A process that ends without `close` still waits for the write
    in progress; one that is killed leaves the previous checkpoint.

    Args:
        directory: Where checkpoints lie; made at the first write.
        rank: This rank; `world_size` or more of one that joined, whom `members` must name.
        world_size: How many ranks there were at the start.
        run: Names the run, the same for all ranks and starts.
        keep: How many complete checkpoints stay, 1 or more; None: all.
        tell: Called with each message, by the thread that calls the saver; None: it becomes a
            warning.

    Raises:
        ValueError: An argument is impossible, or `directory` holds checkpoints of another run.

    Example:
        >>> import tempfile, torch
        >>> from gossipgrad import checkpoint
        >>> weights = {"w": torch.zeros(3)}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with checkpoint.Saver(directory, rank=0, world_size=1, keep=1) as saver:
        ...         taken = saver.save({"model": weights}, step=10)
        ...         _ = weights["w"].add_(1)  # what is written is a copy
        ...     checkpoint.load(directory, rank=0)
        {'model': {'w': tensor([0., 0., 0.])}}
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        rank: int,
        world_size: int,
        run: str = "",
        keep: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        check_keep(keep)
        self.directory = Path(directory)
        self._rank, self._world_size, self._run = rank, world_size, run
        # A step beyond all others: this asks for the run alone.
        refuse_occupied(self.directory, self._part(2**62, (rank,)))
        self._keep, self._tell = keep, tell
        self._buffers: list[Tensor] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="gossipgrad-checkpoint")
        self._write: Future[str | None] | None = None
        self._writing = 0  # the step that it is of
        self._error: Exception | None = None
        self._said: set[str] = set()
        self._closed = False
        self._stats = SaverStats()

    def save(
        self,
        state: object,
        *,
        step: int,
        members: Sequence[int] | None = None,
        wait_seconds: float = 0.0,
    ) -> bool:
        """Take a copy of a state and have it written.

        Args:
            state: As for `gossipgrad.checkpoint.save`.
            step: Steps done, the same on all ranks for what belongs together.
            members: Living ranks, ascending; None: all.
            wait_seconds: How long to wait for a write in progress before this one is skipped: 0
                within training, more for a state that must not be missed, such as the last.

        Returns:
            Whether it was taken. If not, the previous state is still being written, or there was
            no memory for a copy.

        Raises:
            ValueError: The state holds something that cannot be written, an argument is
                impossible, or the saver is closed.
        """
        if self._closed:
            raise ValueError("this saver is closed: make another one")
        part = self._part(step, members)
        if not self.wait(wait_seconds):
            self._stats = replace(self._stats, skipped=self._stats.skipped + 1)
            self._say_once(
                "skipped",
                f"the checkpoint of step {step} is skipped, since that of step {self._writing} is "
                "still being written: save less often, or to a faster disk. (Said once; stats() "
                "counts.)",
            )
            return False
        try:
            copy = _Copies(self._buffers)
            tree = copied(state, copy)
            copy.finish()
            write = self._writer.submit(commit, self.directory, tree, part, keep=self._keep)
        except (MemoryError, RuntimeError) as error:  # no memory, or no thread
            self._buffers = []
            self._fail(error)
            self.wait(0.0)
            return False
        self._buffers, self._error, self._writing = copy.made, None, step
        self._write = write
        return True

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until nothing is being written; returns whether that is so.

        Args:
            timeout_seconds: The longest to wait, 0 or more.
        """
        if timeout_seconds < 0:
            raise ValueError(f"cannot wait {timeout_seconds} seconds: give 0 or more")
        if self._write is not None:
            wait([self._write], timeout_seconds)
        self._collect()
        if self._error is not None:
            self._say_once(
                "error",
                f"a checkpoint could not be saved into {self.directory}: "
                f"{type(self._error).__name__}: {self._error}. Training continues, and the "
                "previous checkpoint stays. (Said once; stats() counts.)",
            )
        return self._write is None

    def close(self, timeout_seconds: float = 60.0) -> bool:
        """Wait for the write in progress and free the memory; may be called again.

        Args:
            timeout_seconds: The longest to wait. What is not written by then is a warning; it may
                come later, and the previous checkpoint stays.

        Returns:
            Whether the last state that was taken is on the disk.
        """
        self._closed = True
        done = self.wait(timeout_seconds)
        self._buffers = []
        self._writer.shutdown(wait=False)
        if self._write is not None:
            self._write = None
            self._fail(TimeoutError(f"not on the disk after {timeout_seconds:g} s"))
            self._say_once(
                "late",
                f"the checkpoint of step {self._writing} was not on the disk {timeout_seconds:g} s "
                "after the end: it may come, and the previous one stays",
            )
        return done and self._error is None

    @property
    def error(self) -> Exception | None:
        """Why the last state could not be written; None if it could, or is being written."""
        self._collect()
        return self._error

    def stats(self) -> SaverStats:
        """Return what was done so far."""
        self._collect()
        return self._stats

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _part(self, step: int, members: Sequence[int] | None) -> Manifest:
        return part_of(self._rank, self._world_size, step, run=self._run, members=members)

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._stats = replace(self._stats, failed=self._stats.failed + 1)

    def _collect(self) -> None:
        """Take over what the thread has done, if it has ended."""
        if self._write is None or not self._write.done():
            return
        write, self._write = self._write, None
        error = write.exception()
        if isinstance(error, Exception):
            self._fail(error)
            return
        self._stats = replace(self._stats, saved=self._stats.saved + 1)
        if (problem := write.result()) is not None:
            self._say_once("not removed", f"{problem}. (Said once.)")

    def _say_once(self, what: str, text: str) -> None:
        if what in self._said:
            return
        self._said.add(what)
        if self._tell is None:
            warn(text)
        else:
            self._tell(text)


class _Copies:
    """Copies tensors to the CPU, into the buffers of the last time where they fit."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = iter(buffers)
        self._devices: set[torch.device] = set()
        self.made: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        buffer = next(self._buffers, None)
        wanted = (tensor.shape, tensor.stride(), tensor.dtype)
        if buffer is None or (buffer.shape, buffer.stride(), buffer.dtype) != wanted:
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        self.made.append(buffer.copy_(tensor, non_blocking=tensor.is_cuda))
        return buffer

    def finish(self) -> None:
        """Wait for copies from devices."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
