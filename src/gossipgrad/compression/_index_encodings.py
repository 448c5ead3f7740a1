"""Three encodings of ascending indices as bytes, with sizes that depend only on the counts."""

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

__all__ = [
    "INDEX_ENCODINGS",
    "LARGEST_INT32",
    "check_ascending",
    "decode",
    "encode",
    "encoded_bytes",
    "smallest",
]

INDEX_ENCODINGS = ("int32", "uint16", "bitmap")
_BLOCK = 1 << 16
LARGEST_INT32 = (1 << 31) - 1
_BITMAP_PIECE = 1 << 14


def encoded_bytes(encoding: str, numel: int, count: int) -> int:
    """Return the size of `count` indices of `numel` elements in bytes.

    `"int32"` takes 4 bytes per index, `"uint16"` 2 bytes per index within its block of 65,536
    elements and 4 bytes per block for their number, `"bitmap"` a bit per element.
    """
    if encoding == "int32":
        return 4 * count
    if encoding == "uint16":
        return 4 * _blocks(numel) + 2 * count
    return -(-numel // 8)


def smallest(numel: int, count: int) -> str:
    """Return the smallest encoding: a bitmap above a density of about 1/16."""
    usable = INDEX_ENCODINGS if numel <= LARGEST_INT32 + 1 else INDEX_ENCODINGS[1:]
    return min(usable, key=lambda encoding: encoded_bytes(encoding, numel, count))


def encode(
    encoding: str, indices: Int[Tensor, " count"], numel: int, out: UInt8[Tensor, " size"]
) -> None:
    """Write ascending indices, without checks."""
    if encoding == "int32":
        out.view(torch.int32).copy_(indices)
    elif encoding == "uint16":
        counts, inside = out[: 4 * _blocks(numel)], out[4 * _blocks(numel) :]
        ends = torch.searchsorted(indices, _block_starts(numel, indices.device) + _BLOCK)
        counts.view(torch.int32).copy_(ends.diff(prepend=ends.new_zeros(1)))
        inside.view(torch.uint16).copy_(indices & (_BLOCK - 1))
    else:
        out.zero_()
        out.index_add_(0, indices >> 3, (1 << (indices & 7)).to(torch.uint8))


def decode(
    encoding: str, data: UInt8[Tensor, " size"], numel: int, count: int
) -> Int[Tensor, " count"]:
    """Read and check the indices of another rank.

    Raises:
        ValueError: It does not hold `count` different indices below `numel` in ascending order.
    """
    if encoding == "int32":
        indices = data.view(torch.int32).to(torch.int64)
    elif encoding == "uint16":
        counts = data[: 4 * _blocks(numel)].view(torch.int32).to(torch.int64)
        least, total = torch.stack([counts.min(), counts.sum()]).tolist()
        if least < 0 or total != count:
            raise ValueError(
                f"a message of {count} indices says that its blocks hold {total}, and the least "
                f"of them {least}: it is damaged, or of another format"
            )
        starts = torch.repeat_interleave(
            _block_starts(numel, data.device), counts, output_size=count
        )
        indices = starts + data[4 * _blocks(numel) :].view(torch.uint16).to(torch.int64)
    else:
        indices = _set_bits(data)
        if indices.numel() != count:
            raise ValueError(
                f"a message of {count} indices marks {indices.numel()} elements: it is damaged, or "
                "of another format"
            )
    check_ascending(indices, numel, "a message holds")
    return indices


def check_ascending(indices: Int[Tensor, " count"], numel: int, who: str) -> None:
    """Check that indices ascend, are all different, and are below `numel`.

    Raises:
        ValueError: They are not.
    """
    rising = (indices[1:] > indices[:-1]).all()
    first, last, ascend = torch.stack([indices[0], indices[-1], rising.to(indices.dtype)]).tolist()
    if not (ascend and first >= 0 and last < numel):
        raise ValueError(
            f"{who} {indices.numel()} indices from {first} to {last} of {numel} elements"
            f"{'' if ascend else ', not in ascending order or not all different'}: they have to "
            f"ascend and be 0 to {numel - 1}"
        )


def _blocks(numel: int) -> int:
    return -(-numel // _BLOCK)


def _block_starts(numel: int, device: torch.device) -> Int[Tensor, " blocks"]:
    return torch.arange(0, numel, _BLOCK, device=device)


def _set_bits(data: UInt8[Tensor, " size"]) -> Int[Tensor, " found"]:
    if data.device.type != "cpu":
        places = torch.arange(8, dtype=torch.uint8, device=data.device)
        return ((data.unsqueeze(1) >> places) & 1).flatten().nonzero().flatten()
    found = [  # in pieces that fit the cache; as bools, which numpy searches twice as fast
        np.flatnonzero(np.unpackbits(piece.numpy(), bitorder="little").view(np.bool_))
        + 8 * _BITMAP_PIECE * number
        for number, piece in enumerate(data.split(_BITMAP_PIECE))
    ]
    return torch.from_numpy(np.concatenate(found))
