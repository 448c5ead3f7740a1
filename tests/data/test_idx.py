import gzip
import hashlib
import struct
from functools import partial

import numpy as np
import pytest

from gossipgrad.data import read_idx

packed = partial(gzip.compress, mtime=0)  # the same bytes in every process that collects tests


def idx(array: np.ndarray) -> bytes:
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def pixels():
    return np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def test_gives_back_what_was_written(tmp_path, pixels):
    path = tmp_path / "a.gz"
    path.write_bytes(packed(idx(pixels)))
    np.testing.assert_array_equal(read_idx(path), pixels)


def test_digest_is_of_the_content_and_not_of_the_archive(tmp_path, pixels):
    digest = hashlib.sha256(idx(pixels)).hexdigest()
    for level in (1, 9):
        path = tmp_path / f"{level}.gz"
        path.write_bytes(packed(idx(pixels), compresslevel=level))
        assert read_idx(path, sha256=digest).shape == (2, 3, 4)


def test_wrong_digest_names_the_file_and_the_way_out(tmp_path, pixels):
    path = tmp_path / "a.gz"
    path.write_bytes(packed(idx(pixels)))
    with pytest.raises(ValueError, match=r"a\.gz unpacks to .* expected 00; delete it"):
        read_idx(path, sha256="00")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "is damaged"),
        (packed(b"x" * 1000)[:-20], "is damaged"),
        (packed(b"\x89PNG....."), "is no IDX file"),
        (packed(b"\0\0\x0d\x01\0\0\0\x01...."), "is no IDX file"),
        (packed(b"\0\0\x08\x03\0\0"), "ends inside its header of 16 bytes"),
        (packed(idx(np.zeros((2, 2))) + b"!"), r"holds 5 values, but .* \(2, 2\)"),
    ],
)
def test_refuses_what_is_no_idx_file(tmp_path, content, message):
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(path)
