import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

from gossipgrad.comm import BucketPlan, FlatBuffers, TensorSpec, local, split

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def spec(numel, dtype=F32, name="w"):
    return TensorSpec(name, (numel,), dtype)


def test_buckets_follow_the_reverse_order_and_are_full_at_their_size():
    plan = BucketPlan.make([spec(n) for n in (1, 2, 3, 4)], bucket_bytes=20)
    assert [bucket.indices for bucket in plan.buckets] == [(3, 2), (1, 0)]
    assert [part.numel for part in plan.parts] == [7, 3]
    assert plan.size_bytes == 40


def test_a_tensor_above_the_size_ends_its_bucket():
    plan = BucketPlan.make([spec(100), spec(1), spec(100)], bucket_bytes=16)
    assert [bucket.indices for bucket in plan.buckets] == [(2,), (1, 0)]


def test_types_have_buckets_of_their_own():
    plan = BucketPlan.make([spec(2), spec(3, F64), spec(4), spec(5, F64)], bucket_bytes=1000)
    assert [(b.indices, b.dtype, b.part.dtype) for b in plan.buckets] == [
        ((3, 1), F64, F64),
        ((2, 0), F32, F32),
    ]


def test_tensors_without_elements_make_no_bucket():
    assert BucketPlan.make([spec(0), TensorSpec("e", (3, 0), F64)]).buckets == ()
    plan = BucketPlan.make([spec(0), spec(2)])
    assert plan.parts[0].numel == 2


def test_a_narrow_wire_counts_its_own_bytes():
    plan = BucketPlan.make([spec(4), spec(4)], bucket_bytes=16, wire_dtype=BF16)
    assert [(b.indices, b.part.dtype, b.dtype) for b in plan.buckets] == [((1, 0), BF16, F32)]
    assert plan.size_bytes == 16


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([F32, F64, BF16])), max_size=12),
    st.integers(1, 200),
)
def test_every_tensor_is_in_one_bucket_of_its_type(tensors, bucket_bytes):
    plan = BucketPlan.make([spec(*t) for t in tensors], bucket_bytes=bucket_bytes)
    placed = [i for bucket in plan.buckets for i in bucket.indices]
    assert sorted(i for i in placed if tensors[i][0]) == [
        i for i, (numel, _) in enumerate(tensors) if numel
    ]
    for bucket in plan.buckets:
        assert list(bucket.indices) == sorted(bucket.indices, reverse=True)
        assert {tensors[i][1] for i in bucket.indices} == {bucket.dtype}
        before_last = sum(tensors[i][0] for i in bucket.indices[:-1])
        assert before_last * bucket.dtype.itemsize < bucket_bytes


def test_settings_are_checked():
    with pytest.raises(ValueError, match="bucket_bytes must be positive, got 0"):
        BucketPlan.make([spec(1)], bucket_bytes=0)
    with pytest.raises(ValueError, match=r"wire_dtype must be one of .*got torch.int8"):
        BucketPlan.make([spec(1)], wire_dtype=torch.int8)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.zeros(2, dtype=torch.complex64),
            "'w' is complex (torch.complex64): train torch.view_as_real of it instead",
        ),
        (
            torch.zeros(2, 2).to_sparse(),
            "'w' is sparse (torch.sparse_coo), buckets hold dense tensors: use "
            "nn.Embedding(sparse=False), or payload='weights', which sends no gradients",
        ),
        (
            torch.zeros(2, dtype=torch.int64),
            "'w' is of type torch.int64, which has no average; tensors of torch.float32, "
            "torch.float64, torch.bfloat16, torch.float16 have",
        ),
    ],
)
def test_what_cannot_be_averaged_is_refused_with_the_way_out(tensor, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TensorSpec.of("w", tensor)


def test_filling_copies_values_whatever_the_strides_and_splits_back():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    turned = torch.randn(3, 2).t()
    scalar = torch.tensor(7.0)
    tensors = [image, turned, scalar]
    plan = BucketPlan.make([TensorSpec.of(str(i), t) for i, t in enumerate(tensors)])
    buffers = FlatBuffers(plan, torch.device("cpu"))
    assert buffers.size_bytes == plan.size_bytes
    (bucket,) = plan.buckets
    buffers.fill(0, [tensors[i] for i in bucket.indices])
    for index, piece in zip(bucket.indices, split(buffers.flats[0], plan, bucket), strict=True):
        assert torch.equal(piece, tensors[index])
    flat = buffers.flats[0].clone()
    buffers.fill(0, [None] * 3)
    assert buffers.flats[0].eq(0).all()
    for index, piece in zip(bucket.indices, split(flat, plan, bucket), strict=True):
        tensors[index].copy_(piece)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_a_narrow_wire_rounds_and_leaves_the_tensors_alone():
    tensor = torch.nn.Parameter(torch.tensor([1.0, 1.0 + 2**-12]))
    plan = BucketPlan.make([TensorSpec.of("w", tensor)], wire_dtype=BF16)
    buffers = FlatBuffers(plan, torch.device("cpu"))
    buffers.fill(0, [tensor])
    assert buffers.flats[0].dtype == BF16
    assert buffers.flats[0].tolist() == [1.0, 1.0]
    assert tensor[1] != 1.0


def test_distributed_tensors_count_by_their_local_shard():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        whole = torch.arange(6.0).reshape(3, 2)
        tensor = distribute_tensor(whole, mesh, [Shard(0)])
        assert TensorSpec.of("d", tensor) == TensorSpec("d", (3, 2), F32)
        assert torch.equal(local(tensor), whole)
        plan = BucketPlan.make([TensorSpec.of("d", tensor)])
        buffers = FlatBuffers(plan, torch.device("cpu"))
        buffers.fill(0, [local(tensor)])
        assert torch.equal(buffers.views[0][0], whole)
        local(tensor).add_(1)
        assert torch.equal(tensor.full_tensor(), whole + 1)
    finally:
        dist.destroy_process_group()
