"""Messages of a sparse format: what is packed is what is added, and damage is found."""

import itertools
import math

import pytest
import torch

from gossipgrad.compression import VALUE_DTYPES, SparseFormat, top_k

ENCODINGS = ("int32", "uint16", "bitmap")
SIZES = (1, 7, 8, 65_536, 65_537, 200_001)


def message_of(form, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(form.numel, generator=generator)[: form.count].sort().values
    values = torch.randn(form.count, generator=generator)
    message = torch.full((form.size_bytes,), 0xAB, dtype=torch.uint8, device=device)
    sent = form.pack(indices.to(device), values.to(device), message)
    return indices, values, message, sent


def cases():
    for numel, encoding in itertools.product(SIZES, ENCODINGS):
        for count in sorted({1, -(-numel // 1000), -(-numel // 3), numel}):
            yield numel, count, encoding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_packed_is_unpacked(dtype):
    for numel, count, encoding in cases():
        form = SparseFormat(numel, count, dtype, encoding)
        indices, values, message, sent = message_of(form)
        assert form.size_bytes % 8 == 0
        for taken in (message, torch.cat([message[:3], message])[3:]):  # aligned, and not
            found, received = form.unpack(taken)
            assert found.dtype == torch.int64
            assert torch.equal(found, indices), (numel, count, encoding)
            assert received.dtype == dtype
            assert torch.equal(received, values.to(dtype))
        again = torch.zeros_like(message)
        form.pack(indices, values, again)
        assert torch.equal(again, message)
        assert torch.equal(sent, received)
        assert sent.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()


def test_messages_of_many_ranks_add_up():
    form = SparseFormat(70_000, 700)
    gathered = torch.empty(5 * form.size_bytes, dtype=torch.uint8)
    dense, expected = torch.zeros(70_000), torch.zeros(70_000, dtype=torch.float64)
    for rank, part in enumerate(gathered.split(form.size_bytes)):
        gradient = torch.randn(70_000, generator=torch.Generator().manual_seed(rank))
        indices = top_k(gradient, 700)
        form.pack(indices, gradient[indices], part)
        expected[indices] += gradient[indices].double()
    for part in gathered.split(form.size_bytes):
        dense.index_add_(0, *form.unpack(part))
    torch.testing.assert_close(dense, expected.float())


@pytest.mark.parametrize("source", VALUE_DTYPES)
@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_finite_values_stay_finite_and_what_is_not_is_shown(dtype, source):
    form = SparseFormat(6, 6, dtype)
    message = torch.empty(form.size_bytes, dtype=torch.uint8)
    most = torch.finfo(source).max
    values = torch.tensor([1.0, most, -most, math.inf, -math.inf, math.nan], dtype=source)
    sent = form.pack(torch.arange(6), values, message)
    largest = min(most, torch.finfo(dtype).max)
    nearest = torch.tensor(largest, dtype=torch.float64).to(dtype).item()  # of a coarser type
    assert sent[:5].tolist() == [1.0, nearest, -nearest, math.inf, -math.inf]
    assert math.isfinite(nearest)
    assert math.isnan(sent[5])


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        *(
            (SparseFormat(1000, 4, index_encoding="int32"), [(16, torch.int32, indices)])
            for indices in ([1, 2, 3, 1000], [-1, 2, 3, 4], [1, 3, 2, 4], [1, 2, 2, 4])
        ),
        *(
            (SparseFormat(70_000, 4, index_encoding="uint16"), [(16, torch.int32, counts)])
            for counts in ([3, 2], [5, -1], [0, 0])
        ),
        (
            SparseFormat(70_000, 4, index_encoding="uint16"),
            [(16, torch.int32, [0, 4]), (24, torch.uint16, [1, 2, 3, 4464])],
        ),
        (SparseFormat(11, 4, index_encoding="bitmap"), [(16, torch.uint8, [0xFF, 0])]),
        (SparseFormat(11, 4, index_encoding="bitmap"), [(16, torch.uint8, [0b111, 0b1000])]),
    ],
)
def test_foreign_indices_are_checked(form, damage):
    _, _, message, _ = message_of(form)
    for begin, dtype, numbers in damage:
        numbers = torch.tensor(numbers, dtype=dtype)
        message[begin : begin + numbers.nbytes].view(dtype).copy_(numbers)
    with pytest.raises(ValueError, match="message"):
        form.unpack(message)


def test_what_does_not_fit_is_refused():
    form = SparseFormat(1000, 4)
    indices, values, message, _ = message_of(form)
    empty = torch.empty(64, dtype=torch.uint8)
    for call in (
        lambda: form.pack(indices, values, empty[:25]),
        lambda: form.pack(indices, values, empty[4:36]),
        lambda: form.pack(indices[:3], values[:3], message),
        lambda: form.pack(indices.flip(0), values, message),
        lambda: form.pack(torch.tensor([1, 2, 3, 1000]), values, message),
        lambda: form.unpack(message[:-1]),
        lambda: form.unpack(empty[::2]),
    ):
        with pytest.raises(ValueError, match=r"format|byte|indices|elements"):
            call()


def test_formats_that_cannot_be_are_refused():
    for count in (0, 11, -1):
        with pytest.raises(ValueError, match=f"count is {count}"):
            SparseFormat(10, count)
    with pytest.raises(ValueError, match=r"torch\.int32"):
        SparseFormat(10, 1, torch.int32)
    with pytest.raises(ValueError, match="'delta'"):
        SparseFormat(10, 1, index_encoding="delta")
    with pytest.raises(ValueError, match="'int32': use 'uint16'"):
        SparseFormat((1 << 31) + 1, 1, index_encoding="int32")
    assert SparseFormat(1 << 31, 1, index_encoding="int32").size_bytes == 16


@pytest.mark.gpu
def test_a_gpu_packs_the_same_bytes():
    for numel, count, encoding in cases():
        form = SparseFormat(numel, count, torch.bfloat16, encoding)
        indices, values, message, _ = message_of(form)
        *_, moved, _ = message_of(form, device="cuda")
        assert torch.equal(message, moved.cpu())
        found, received = form.unpack(moved)
        assert torch.equal(found.cpu(), indices)
        assert torch.equal(received.cpu(), values.bfloat16())
