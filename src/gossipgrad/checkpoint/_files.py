"""Files that are on the disk when it says so, with the digest of what was to be in them."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from ._encode import DTYPE_NAMES

__all__ = [
    "FileEntry",
    "StoppedError",
    "check_file",
    "open_plain",
    "open_tensors",
    "read_file",
    "sync_folder",
    "tensor_chunks",
    "write_file",
]

try:
    from safetensors import SafetensorError, safe_open
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "checkpoints need safetensors: pip install 'gossipgrad[export]'", name="safetensors"
    ) from error

_CHUNK_BYTES = 4 * 2**20


class StoppedError(Exception):
    """Writing was given up, because nobody waits for it any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """What a manifest says of a file."""

    size_bytes: int
    """How much was written."""
    sha256: str
    """Of what was written, in hexadecimal."""


def write_file(
    path: Path, chunks: Iterable[bytes | memoryview], stop: Callable[[], bool] | None = None
) -> FileEntry:
    """Write a new file in one pass, and wait until it is on the disk.

    The digest is of what was meant to be written, taken on the way.

    Raises:
        OSError: The disk is full, or whatever else keeps the file from being written.
        StoppedError: `stop` said so, between two chunks.
    """
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            if stop is not None and stop():
                raise StoppedError(f"writing {path} was given up")
            left = memoryview(chunk)
            digest.update(left)
            size_bytes += len(left)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, too, where the file system can say so."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def tensor_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, piece by piece.

    The library would write it, too: but to its own temporary file, which a kill leaves behind,
    without a digest, a way to stop, or the number of the error. Tensors, of types in `DTYPE_NAMES`,
    are copied only where they are not contiguous on the CPU, one at a time.
    """
    # Wide types first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = flat.numpy().data
        for start in range(0, len(data), _CHUNK_BYTES):
            yield data[start : start + _CHUNK_BYTES]


def open_plain(path: Path) -> BufferedReader:
    """Open a file for reading, if it is one: a pipe would wait for ever, a link leads elsewhere.

    Raises:
        OSError: It is none, or cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, "it is a symbolic link", str(path)) from None
    file = os.fdopen(handle, "rb")
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def check_file(path: Path, entry: FileEntry) -> None:
    """Refuse a file that is not the one that was written.

    Raises:
        ValueError: It is missing, has another size or another digest; its size is looked at first.
    """
    with _sized(path, entry) as file:
        try:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(path, error) from error
    _check_digest(path, digest, entry)


def read_file(path: Path, entry: FileEntry) -> bytes:
    """The content of a file, if it is the one that was written.

    Raises:
        ValueError: As by `check_file`.
    """
    with _sized(path, entry) as file:
        try:
            content = file.read(entry.size_bytes + 1)
        except OSError as error:
            raise _unreadable(path, error) from error
    _check_digest(path, hashlib.sha256(content).hexdigest(), entry)
    return content


def _sized(path: Path, entry: FileEntry) -> BufferedReader:
    try:
        file = open_plain(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    found = os.fstat(file.fileno()).st_size
    if found == entry.size_bytes:
        return file
    file.close()
    if found < entry.size_bytes:
        raise ValueError(
            f"{path} is truncated: it has {found:,} bytes, {entry.size_bytes:,} were written"
        )
    raise ValueError(f"{path} has {found:,} bytes, {entry.size_bytes:,} were written")


def _check_digest(path: Path, digest: str, entry: FileEntry) -> None:
    if digest != entry.sha256:
        raise ValueError(
            f"{path} was changed or damaged: it has SHA-256 {digest}, written was {entry.sha256}"
        )


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be read: {error.strerror or error}")


def open_tensors(path: Path) -> Callable[[str], Tensor]:
    """The tensors of a safetensors file, each in memory of its own when it is asked for.

    Raises:
        ValueError: It is none.
    """
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error

    def tensor(name: str) -> Tensor:
        try:
            # What is read is mapped memory, which fails when the file goes away on its server.
            return file.get_tensor(name).clone()
        except SafetensorError as error:
            raise ValueError(f"{path} has no tensor {name!r}: {error}") from error

    return tensor
