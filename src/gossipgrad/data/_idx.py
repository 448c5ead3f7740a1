"""The IDX format of MNIST and its successors: a big-endian header and unsigned bytes."""

import gzip
import hashlib
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from ._digest import DELETE_IT

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, *, sha256: str | None = None) -> UInt8[np.ndarray, "..."]:
    """Read a gzipped IDX file of unsigned bytes.

    Args:
        path: The `.gz` file.
        sha256: Digest of the *unpacked* content in hexadecimal. The content and not the archive
            is checked, since the same data set is in circulation packed by different compressors.

    Returns:
        The array, in the shape that the header gives.

    Raises:
        ValueError: The file is no gzipped IDX file of bytes, is cut short, or its digest differs.

    References:
        The IDX file format, as on the MNIST page: magic `0 0 type dims`, one 32-bit size a
        dimension, then the values, last index fastest.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged ({error}){DELETE_IT}") from error
    if sha256 is not None and (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ValueError(
            f"{path} unpacks to content with SHA-256 {found}, expected {sha256}{DELETE_IT}"
        )
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise ValueError(f"{path} is no IDX file of unsigned bytes: it starts {content[:4]!r}.")
    num_dims = content[3]
    header_bytes = 4 + 4 * num_dims
    if len(content) < header_bytes:
        raise ValueError(f"{path} ends inside its header of {header_bytes} bytes.")
    shape = struct.unpack(f">{num_dims}I", content[4:header_bytes])
    if len(content) != header_bytes + math.prod(shape):
        raise ValueError(
            f"{path} holds {len(content) - header_bytes} values, but its header says {shape}."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes).reshape(shape)
