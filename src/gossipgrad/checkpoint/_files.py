"""Files that are on the disk when it says so, with the digest of what was to be in them."""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ._tree import DTYPE_NAMES

_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """What a manifest says of a file."""

    size_bytes: int
    """How much was written."""
    sha256: str
    """Of what was written, in hexadecimal."""


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a new file in one pass, and wait until it is on the disk.

    The digest is of what was meant to be written, taken on the way.

    Raises:
        OSError: The disk is full, or whatever else keeps the file from being written.
    """
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
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
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The content of a safetensors file, piece by piece.

    The library writes it as a whole: to its own temporary file, which a kill leaves behind, without
    a digest, a way to stop, or the number of the error. Tensors, of types in `DTYPE_NAMES`, are
    copied only where they are not contiguous on the CPU, one at a time.
    """
    # Wide types first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
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


def read_plain(path: Path, most_bytes: int) -> bytes:
    """The content of a file, if it is one: a pipe would wait for ever.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no file, cannot be read, or has more than `most_bytes`.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} cannot be read: it is no regular file")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes:,} bytes")
    return content


def check_file(path: Path, entry: FileEntry) -> None:
    """Refuse a file that is not the one that was written.

    Raises:
        ValueError: It is missing, or has another size or another digest.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} cannot be read: it is no regular file")
        found = path.stat().st_size
        if found != entry.size_bytes:
            what = "is truncated: it has" if found < entry.size_bytes else "has"
            raise ValueError(f"{path} {what} {found:,} bytes, {entry.size_bytes:,} were written")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if digest != entry.sha256:
        raise ValueError(
            f"{path} was changed or damaged: it has SHA-256 {digest}, written was {entry.sha256}"
        )


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
