"""Saves in the background: training waits for a copy in memory, and for nothing else."""

import atexit
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ._layout import Manifest
from ._save import Written, check_keep, commit, describe_left, part_of, refuse_foreign
from ._tree import Encoded, encode

# A saver that nobody closed holds the end of the process up for so long at most.
_EXIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SaverStats:
    """What a saver has done so far."""

    saved: int
    """States that are on the disk."""
    skipped: int
    """States not taken, since one was being written."""
    failed: int
    """States that could not be written."""
    last_step: int | None
    """Of the last state that is on the disk."""
    held_seconds: float
    """How long the caller waited in `save`, in all."""
    write_seconds: float
    """How long writing took in the background, in all."""
    size_bytes: int
    """Of the last state on the disk."""
    buffer_bytes: int
    """Memory of the copies."""


class Saver:
    """Saves states of one rank one after another, in a thread of its own.

    `save` copies the tensors into memory that is used again and again, one state large, and
    returns; writing, and waiting for the disk, is the thread's. At most one state is written at a
    time: while a disk is slow, states are skipped and counted rather than awaited. Errors
    of the disk end nothing: the checkpoint before stays, a warning says so once, `error` and
    `stats()` at any time, and the next `save` tries again. What keeps old ones from being removed
    is a warning alone. Local, and committed as `save` of this
    room does it, which also says what a rank knows of others. A rank that skips or fails leaves a
    step incomplete, which is removed once a newer one is complete.

    Not for several threads at once. A process that ends without `close` still waits for the write
    under way, up to a minute, unless `multiprocessing` has started it; one that is killed leaves
    the checkpoint before.

    Args:
        directory: Where checkpoints lie; made at the first write.
        rank: This rank; `world_size` or more of one that joined, whom `members` must name.
        world_size: How many ranks there were at the start.
        run: Names the run, the same for all ranks and starts.
        attempt: Names this start of the run, the same on all ranks.
        keep: How many complete checkpoints stay, 1 or more; None: all.
        shared: Whether all ranks share `directory`.
        tell: Called with each thing worth a word, by the thread that calls the saver; None: it
            becomes a warning.

    Raises:
        ValueError: An argument cannot be, or `directory` holds checkpoints of another run.

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
        attempt: str = "",
        keep: int | None = None,
        shared: bool = True,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        check_keep(keep)
        part_of(rank, world_size, 0, run=run, attempt=attempt, members=(rank,))
        refuse_foreign(Path(directory), rank, run)
        self.directory = Path(directory)
        self._whose = (rank, world_size)
        self._named = {"run": run, "attempt": attempt}
        self._keep, self._shared, self._tell = keep, shared, tell
        self._buffers: dict[str, Tensor] = {}
        self._write: _Write | None = None
        self._error: Exception | None = None
        self._said: set[str] = set()
        self._closed = False
        self._stats = SaverStats(
            saved=0,
            skipped=0,
            failed=0,
            last_step=None,
            held_seconds=0.0,
            write_seconds=0.0,
            size_bytes=0,
            buffer_bytes=0,
        )

    def save(
        self,
        state: object,
        *,
        step: int,
        members: Sequence[int] | None = None,
        wait_seconds: float = 0.0,
        copy: bool = True,
    ) -> bool:
        """Take a copy of a state and have it written.

        Args:
            state: As for `save` of this room.
            step: Steps done, the same on all ranks for what belongs together.
            members: Ranks that live, ascending; None: all.
            wait_seconds: How long to wait for a write under way before this one is skipped: 0
                within training, more for a state that must not be missed, such as the last.
            copy: False: the tensors are copies already, which nobody changes any more.

        Returns:
            Whether it was taken. If not, the state before is still being written, or there was no
            memory for a copy.

        Raises:
            ValueError: The state holds something that cannot be written, an argument cannot be, or
                the saver is closed.
        """
        start = time.perf_counter()
        try:
            if self._closed:
                raise ValueError("this saver is closed: make another one")
            part = part_of(*self._whose, step, members=members, **self._named)
            if not self.wait(wait_seconds):
                self._skip(step)
                return False
            return self._take(encode(state), part, copy=copy)
        finally:
            held = self._stats.held_seconds + time.perf_counter() - start
            self._stats = replace(self._stats, held_seconds=held)

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until nothing is being written; returns whether that is so.

        Args:
            timeout_seconds: The longest to wait, 0 or more.
        """
        if timeout_seconds < 0:
            raise ValueError(f"cannot wait {timeout_seconds} seconds: give 0 or more")
        if self._write is not None:
            self._write.thread.join(timeout_seconds)
        self._collect()
        if self._error is not None:
            self._say(
                "error",
                f"a checkpoint could not be saved into {self.directory}: {_describe(self._error)}. "
                "Training goes on, and the checkpoint before stays. (Said once; stats() counts.)",
            )
        return self._write is None

    def close(self, timeout_seconds: float = 60.0) -> bool:
        """Wait for the write under way and give up the memory; may be called again.

        Args:
            timeout_seconds: The longest to wait. What is not written by then is a warning; it may
                come later, and the checkpoint before stays.

        Returns:
            Whether the last state that was taken is on the disk.
        """
        self._closed = True
        done = self.wait(timeout_seconds)
        self._buffers = {}
        if self._write is not None:
            atexit.unregister(self._write.at_exit)
            self._error = TimeoutError(f"not on the disk after {timeout_seconds:g} s")
            self._stats = replace(self._stats, failed=self._stats.failed + 1)
            step, self._write = self._write.part.step, None
            self._said.add("error")
            self._warn(
                f"the checkpoint of step {step} was not on the disk {timeout_seconds:g} s after "
                "the end: it may come, and the one before stays",
                stacklevel=3,
            )
        return done and self._error is None

    @property
    def error(self) -> Exception | None:
        """Why the last state could not be written; None if it could, or is being written."""
        self._collect()
        return self._error

    def stats(self) -> SaverStats:
        """What was done so far; free."""
        self._collect()
        held = sum(buffer.nbytes for buffer in self._buffers.values())
        return replace(self._stats, buffer_bytes=held)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, encoded: Encoded, part: Manifest, *, copy: bool) -> bool:
        try:
            if copy:
                self._buffers = _copied(encoded.tensors, self._buffers)
                encoded = replace(encoded, tensors=self._buffers)
            self._write = _Write(
                self.directory, encoded, part, keep=self._keep, shared=self._shared
            )
        except (MemoryError, RuntimeError) as error:  # no memory, or no thread
            self._buffers = {}
            self._error = error
            self._stats = replace(self._stats, failed=self._stats.failed + 1)
            self.wait(0.0)
            return False
        self._error = None
        return True

    def _skip(self, step: int) -> None:
        assert self._write is not None
        self._stats = replace(self._stats, skipped=self._stats.skipped + 1)
        before = self._write
        self._say(
            "skipped",
            f"the checkpoint of step {step} is skipped, since that of step {before.part.step} is "
            f"being written for {time.perf_counter() - before.start:.1f} s now: save less often, "
            "or to a faster disk. (Said once; stats() counts.)",
        )

    def _collect(self) -> None:
        """Takes over what the thread has left, if it is done."""
        write = self._write
        if write is None or write.thread.is_alive():
            return
        self._write = None
        atexit.unregister(write.at_exit)
        stats = self._stats
        seconds = stats.write_seconds + write.seconds
        self._error = write.error
        if write.written is None:
            self._stats = replace(stats, failed=stats.failed + 1, write_seconds=seconds)
            return
        self._stats = replace(
            stats,
            saved=stats.saved + 1,
            last_step=write.part.step,
            write_seconds=seconds,
            size_bytes=write.written.size_bytes,
        )
        if write.written.left:
            self._say("left", f"{describe_left(write.written)}. (Said once.)")

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._warn(text, stacklevel=4)

    def _warn(self, text: str, *, stacklevel: int) -> None:
        if self._tell is None:
            warnings.warn(text, stacklevel=stacklevel)
        else:
            self._tell(text)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Write:
    """A thread that writes one state; `written` and `error` are to be read when it has ended."""

    def __init__(
        self, directory: Path, encoded: Encoded, part: Manifest, *, keep: int | None, shared: bool
    ) -> None:
        self.part = part
        self.written: Written | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self.start = time.perf_counter()

        def write() -> None:
            try:
                self.written = commit(directory, encoded, part, keep=keep, shared=shared)
            except Exception as error:
                self.error = error
            finally:
                self.seconds = time.perf_counter() - self.start

        # A daemon: a disk that hangs must not keep a process from ending.
        self.thread = threading.Thread(target=write, name="gossipgrad-checkpoint", daemon=True)
        self.thread.start()
        atexit.register(self.at_exit)

    def at_exit(self) -> None:
        self.thread.join(_EXIT_SECONDS)


def _copied(tensors: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
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
