"""A sparse tensor as one message of fixed size: values and indices together."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ._index_encodings import (
    INDEX_ENCODINGS,
    LARGEST_INT32,
    check_ascending,
    decode,
    encode,
    encoded_bytes,
    smallest,
)
from ._top_k import check_count, is_whole

__all__ = ["VALUE_DTYPES", "SparseFormat", "narrowed"]

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of values in sparse messages."""
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class SparseFormat:
    """The format of a message with `count` of `numel` values: all have the same size.

    So an all-gather needs no exchange of sizes first, and values and indices share one latency. A
    message is the values, then the indices, each filled up with zeros to a multiple of 8 bytes; it
    does not name its format, which all ranks have to agree on. Numbers are in the machine's byte
    order.

    | index encoding | bytes | smallest where |
    |---|---|---|
    | `"int32"` | 4 an index | fewer than 2 indices fall in 65,536 elements |
    | `"uint16"` | 2 an index, and 4 for each block of 65,536 elements | between |
    | `"bitmap"` | a bit an element | more than 1 in 16 is sent |

    Attributes:
        numel: Number of elements of the dense tensor.
        count: Number of sent elements, 1 to `numel`.
        value_dtype: float32, bfloat16, float16 or float64.
        index_encoding: The smallest by default, as in the table.

    Raises:
        ValueError: A number is not whole or out of range, the type is not supported, or `"int32"`
            is too short for `numel`.

    Example:
        >>> form = SparseFormat(1_000_000, 1000)
        >>> form.index_encoding, form.size_bytes
        ('uint16', 6064)
        >>> message = torch.empty(form.size_bytes, dtype=torch.uint8)
        >>> _ = form.pack(torch.arange(0, 1_000_000, 1000), torch.ones(1000), message)
        >>> indices, values = form.unpack(message)
        >>> int(indices[1]), float(values.sum())
        (1000, 1000.0)
    """

    numel: int
    count: int
    value_dtype: torch.dtype = torch.float32
    index_encoding: str = "auto"

    def __post_init__(self) -> None:
        if not is_whole(self.numel):
            raise ValueError(f"numel is {self.numel!r}: give a whole number of elements")
        check_count(self.count, self.numel)
        if self.value_dtype not in VALUE_DTYPES:
            raise ValueError(
                f"value_dtype is {self.value_dtype}: values travel as one of "
                f"{', '.join(map(str, VALUE_DTYPES))}"
            )
        if self.index_encoding == "auto":
            object.__setattr__(self, "index_encoding", smallest(self.numel, self.count))
        if self.index_encoding not in INDEX_ENCODINGS:
            raise ValueError(
                f"there is no index encoding {self.index_encoding!r}: choose 'auto' or one of "
                f"{', '.join(INDEX_ENCODINGS)}"
            )
        if self.index_encoding == "int32" and self.numel > LARGEST_INT32 + 1:
            raise ValueError(
                f"indices of {self.numel} elements are too large for 'int32': use 'uint16'"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of a message, a multiple of 8."""
        return self._values_end_bytes + _aligned(self._index_bytes)

    @property
    def _values_bytes(self) -> int:
        return self.count * self.value_dtype.itemsize

    @property
    def _values_end_bytes(self) -> int:
        return _aligned(self._values_bytes)

    @property
    def _index_bytes(self) -> int:
        return encoded_bytes(self.index_encoding, self.numel, self.count)

    def pack(
        self,
        indices: Int[Tensor, " count"],
        values: Float[Tensor, " count"],
        out: UInt8[Tensor, " size"],
    ) -> Float[Tensor, " count"]:
        """Write a message.

        Finite values beyond the range of a narrower `value_dtype` become its largest finite value;
        NaN and inf are kept, so that the receivers see them.

        Args:
            indices: Ascending and all different, as `top_k` returns them.
            values: The values at the indices, of any floating type.
            out: Of `size_bytes` bytes, contiguous, on the device of the others; in a larger buffer
                it begins at a multiple of 8 bytes.

        Returns:
            The values as the receivers will see them, a view of `out`. Error feedback carries over
            the difference from `values`.

        Raises:
            ValueError: There are not `count` indices and values, `out` does not fit, or, on the
                CPU, the indices do not ascend from 0 to below `numel`. On other devices indices are
                not checked: that would wait for the device.
        """
        if indices.numel() != self.count or values.numel() != self.count:
            raise ValueError(
                f"{indices.numel()} indices and {values.numel()} values were given to a format of "
                f"{self.count}: give as many"
            )
        if indices.device.type == "cpu":
            check_ascending(indices, self.numel, "there are")
        self._check_size(out)
        if out.storage_offset() % _ALIGNMENT_BYTES:
            raise ValueError(
                f"the message is to begin at byte {out.storage_offset()} of a larger buffer: begin "
                f"at a multiple of {_ALIGNMENT_BYTES}"
            )
        out[self._values_bytes : self._values_end_bytes] = 0
        sent = out[: self._values_bytes].view(self.value_dtype)
        sent.copy_(narrowed(values.detach(), self.value_dtype))
        index_end_bytes = self._values_end_bytes + self._index_bytes
        out[index_end_bytes:] = 0
        region = out[self._values_end_bytes : index_end_bytes]
        encode(self.index_encoding, indices, self.numel, region)
        return sent

    def unpack(
        self, message: UInt8[Tensor, " size"]
    ) -> tuple[Int[Tensor, " count"], Float[Tensor, " count"]]:
        """Return the ascending indices and the values of an untrusted message.

        The values are a view of the message if that is aligned. On an accelerator the checks wait
        for the device.

        Raises:
            ValueError: It is not of `size_bytes` bytes, or its indices are not `count` different
                ones below `numel` in ascending order. Values are not checked.
        """
        self._check_size(message)
        if message.storage_offset() % _ALIGNMENT_BYTES:
            message = message.clone()
        region = message[self._values_end_bytes : self._values_end_bytes + self._index_bytes]
        indices = decode(self.index_encoding, region, self.numel, self.count)
        return indices, message[: self._values_bytes].view(self.value_dtype)

    def _check_size(self, message: UInt8[Tensor, " size"]) -> None:
        if message.dtype is not torch.uint8 or not message.is_contiguous():
            raise ValueError(
                f"a message is contiguous bytes; this is of type {message.dtype} with a stride of "
                f"{message.stride(0)}: give a flat tensor of torch.uint8"
            )
        if message.numel() != self.size_bytes:
            raise ValueError(
                f"a message of {message.numel()} bytes was given to a format of {self.size_bytes}: "
                "all ranks have to use the same format"
            )


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def narrowed(values: Float[Tensor, " count"], dtype: torch.dtype) -> Float[Tensor, " count"]:
    """Convert to a type; what is finite stays finite."""
    narrow, largest = values.to(dtype), torch.finfo(dtype).max
    return torch.where(values.isfinite(), narrow.clamp(-largest, largest), narrow)
