import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.comm import BucketPlan, TensorSpec

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def spec(numel, dtype=F32, name="w"):
    return TensorSpec(name, (numel,), dtype)


@settings(deadline=None, max_examples=30)
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
    ("tensor", "way_out"),
    [
        (torch.zeros(2, dtype=torch.complex64), "train torch.view_as_real of it"),
        (torch.zeros(2, 2).to_sparse(), "nn.Embedding(sparse=False)"),
        (torch.zeros(2, dtype=torch.int64), "has no average"),
    ],
)
def test_what_cannot_be_averaged_is_refused_with_the_way_out(tensor, way_out):
    with pytest.raises(ValueError, match=f"^'w' is .*{re.escape(way_out)}"):
        TensorSpec.of("w", tensor)
