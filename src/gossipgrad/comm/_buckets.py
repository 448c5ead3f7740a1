"""Buckets: contiguous storage for several tensors, in backward order, by size in bytes."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipgrad.comm._part import Part
from gossipgrad.comm._wire import FLOATING

__all__ = ["BucketPlan", "FlatBuffers", "TensorSpec", "is_sharded", "local"]

DEFAULT_BUCKET_BYTES = 4 << 20
_LARGEST_FP16 = torch.finfo(torch.float16).max


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing what only DTensors need (0.6 s)."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds: a DTensor's local shard, else itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a payload: its name in messages, its local shape and its type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "TensorSpec":
        """The spec of a tensor, or of its local shard.

        Raises:
            ValueError: If it is complex, sparse, or not of a floating type that can be averaged.
        """
        if tensor.is_complex():
            raise ValueError(
                f"{name!r} is complex ({tensor.dtype}): train torch.view_as_real of it instead"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{name!r} is sparse ({tensor.layout}), buckets hold dense tensors: use "
                "nn.Embedding(sparse=False), or payload='weights', which sends no gradients"
            )
        if tensor.dtype not in FLOATING:
            raise ValueError(
                f"{name!r} is of type {tensor.dtype}, which has no average; "
                f"tensors of {', '.join(map(str, FLOATING))} have"
            )
        held = local(tensor)
        return cls(name, tuple(held.shape), held.dtype)

    @property
    def numel(self) -> int:
        """How many elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A run of tensors that travel as one message.

    Attributes:
        indices: Places of its tensors in the plan's `specs`, in the order of storage.
        part: Wire type and number of elements.
        dtype: Type of the tensors themselves, the same for all in a bucket.
    """

    indices: tuple[int, ...]
    part: Part
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Which tensor lies in which bucket; equal on all ranks.

    Buckets follow the reverse of `specs`, which is the order in which backward finishes gradients
    when `specs` is in the order of the forward pass. A bucket has tensors of one type, and is full
    at `bucket_bytes`. Tensors are not cut: a larger one makes a larger bucket.
    """

    specs: tuple[TensorSpec, ...]
    buckets: tuple[BucketLayout, ...]

    @classmethod
    def make(
        cls,
        specs: Sequence[TensorSpec],
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        wire_dtype: torch.dtype | None = None,
    ) -> "BucketPlan":
        """Deals tensors into buckets.

        Args:
            specs: The tensors, in the order of the forward pass.
            bucket_bytes: Bytes on the wire at which a bucket is full.
            wire_dtype: What elements are sent as; None for the tensors' own type.

        Raises:
            ValueError: If `bucket_bytes` is not positive or `wire_dtype` is not one of ours.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        if wire_dtype is not None and wire_dtype not in FLOATING:
            raise ValueError(
                f"wire_dtype must be one of {', '.join(map(str, FLOATING))}, got {wire_dtype}"
            )
        filling: dict[torch.dtype, list[int]] = {}
        done: list[list[int]] = []
        for index in reversed(range(len(specs))):
            spec = specs[index]
            indices = filling.setdefault(spec.dtype, [])
            if not indices:
                done.append(indices)
            indices.append(index)
            width = (wire_dtype or spec.dtype).itemsize
            if sum(specs[i].numel for i in indices) * width >= bucket_bytes:
                del filling[spec.dtype]
        buckets = [
            BucketLayout(
                indices=tuple(indices),
                part=Part(
                    wire_dtype or specs[indices[0]].dtype, sum(specs[i].numel for i in indices)
                ),
                dtype=specs[indices[0]].dtype,
            )
            for indices in done
        ]
        return cls(tuple(specs), tuple(bucket for bucket in buckets if bucket.part.numel))

    def sending(self, part_of: Callable[[Part], Part]) -> "BucketPlan":
        """As many buckets, each of one flat tensor that is sent in place of all it has."""
        parts = [part_of(bucket.part) for bucket in self.buckets]
        return BucketPlan(
            specs=tuple(
                TensorSpec(f"bucket {number}", (part.numel,), part.dtype)
                for number, part in enumerate(parts)
            ),
            buckets=tuple(
                BucketLayout((number,), part, bucket.dtype)
                for number, (bucket, part) in enumerate(zip(self.buckets, parts, strict=True))
            ),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a channel must know of the buckets."""
        return tuple(bucket.part for bucket in self.buckets)

    @property
    def size_bytes(self) -> int:
        """Bytes of all buckets on the wire."""
        return sum(part.size_bytes for part in self.parts)


class FlatBuffers:
    """Storage for all buckets of a plan, and views of it in the tensors' shapes.

    Attributes:
        flats: One flat tensor a bucket, of the wire type (or `dtype`), shape `(numel,)`.
        views: For each bucket one view a tensor, in the order of `BucketLayout.indices`.
    """

    def __init__(
        self, plan: BucketPlan, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self.plan = plan
        self.flats = [
            torch.zeros(bucket.part.numel, dtype=dtype or bucket.part.dtype, device=device)
            for bucket in plan.buckets
        ]
        self.views = [
            split(flat, plan, bucket) for flat, bucket in zip(self.flats, plan.buckets, strict=True)
        ]

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return sum(flat.numel() * flat.itemsize for flat in self.flats)

    @torch.no_grad()
    def fill(self, bucket: int, tensors: Sequence[Tensor | None]) -> None:
        """Copies a bucket's tensors into it, casting to the wire type; None counts as zeros.

        What fp16 cannot hold becomes its largest value: both ends subtract what they sent, so that
        costs a slower exchange and no infinity.
        """
        views = self.views[bucket]
        missing = [i for i, tensor in enumerate(tensors) if tensor is None]
        if missing:
            torch._foreach_zero_([views[i] for i in missing])
        there = [i for i, tensor in enumerate(tensors) if tensor is not None]
        if there:
            torch._foreach_copy_([views[i] for i in there], [_present(tensors[i]) for i in there])
        flat = self.flats[bucket]
        if flat.dtype == torch.float16 and self.plan.buckets[bucket].dtype != torch.float16:
            flat.clamp_(-_LARGEST_FP16, _LARGEST_FP16)


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def split(flat: Tensor, plan: BucketPlan, bucket: BucketLayout) -> list[Tensor]:
    """Views of a flat bucket in its tensors' shapes."""
    sizes = [plan.specs[index].numel for index in bucket.indices]
    return [
        piece.view(plan.specs[index].shape)
        for piece, index in zip(flat.split(sizes), bucket.indices, strict=True)
    ]
