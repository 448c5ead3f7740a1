"""What a plan says of one bucket, and whether a message fits it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipgrad.comm._wire import Header, Kind, WireError

__all__ = ["Part", "check_fits"]


@dataclass(frozen=True, slots=True)
class Part:
    """What the plan says of one bucket: element type and count."""

    dtype: torch.dtype
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the bucket on the wire."""
        return self.numel * self.dtype.itemsize


def check_fits(header: Header, payload: Tensor | None, plan: Sequence[Part]) -> None:
    """Whether a message carries what its header says and the plan foresees.

    Raises:
        WireError: If it does not.
    """
    if header.kind is not Kind.DATA:
        if payload is not None:
            raise WireError(f"a {header.kind.name} message carries no payload")
        return
    if header.round < 0 or header.bucket >= len(plan):
        raise WireError(f"round {header.round}, bucket {header.bucket} is not in the plan")
    part = plan[header.bucket]
    size = 0 if payload is None else payload.numel()
    if (header.dtype, header.size_bytes, size) != (part.dtype, part.size_bytes, part.size_bytes):
        raise WireError(
            f"bucket {header.bucket} is planned as {part.size_bytes} bytes of {part.dtype}, "
            f"got {size} bytes announced as {header.size_bytes} of {header.dtype}"
        )
