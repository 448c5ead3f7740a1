import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.comm import Header, Kind, WireError
from gossipgrad.comm._wire import DTYPES, MAX_VOIDED

# Drawn as fields: the type checks of tests use `random`, which strategies must not.
headers = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(Kind),
        "run": st.binary(min_size=16, max_size=16),
        "sender": st.integers(0, 2**32 - 1),
        "generation": st.integers(0, 2**32 - 1),
        "round": st.integers(-(2**63), 2**63 - 1),
        "epoch": st.integers(0, 2**63 - 1),
        "known": st.integers(0, 2**32 - 1),
        "bucket": st.integers(0, 2**32 - 1),
        "dtype": st.none() | st.sampled_from(DTYPES),
        "size_bytes": st.integers(0, 2**64 - 1),
        "voided": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5).map(tuple),
    }
)
settings.register_profile("wire", deadline=None, max_examples=150)
settings.load_profile("wire")


@given(headers)
def test_a_header_comes_back_as_it_was(fields):
    header = Header(**fields)
    assert Header.unpack(header.pack()) == header


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_and_nothing_else(data):
    with pytest.raises(WireError):
        Header.unpack(data)


@given(headers, st.data())
def test_a_header_with_a_changed_byte_reads_or_is_refused(fields, data):
    header = Header(**fields)
    packed = bytearray(header.pack())
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    try:
        read = Header.unpack(bytes(packed))
    except WireError:
        return
    assert read != header
    assert read.pack() == bytes(packed)


@given(headers, st.integers(0, 400))
def test_a_header_that_is_cut_off_or_padded_is_refused(fields, length):
    header = Header(**fields)
    packed = header.pack()
    changed = (packed + bytes(400))[:length]
    if changed != packed:
        with pytest.raises(WireError):
            Header.unpack(changed)


def test_the_longest_header_fits_what_transports_take():
    longest = Header(kind=Kind.NOTE, run=bytes(16), sender=0, voided=tuple(range(MAX_VOIDED)))
    assert len(longest.pack()) < 1 << 14
    assert Header.unpack(longest.pack()) == longest
    with pytest.raises(WireError, match="do not fit"):
        Header.unpack(
            Header(
                kind=Kind.NOTE, run=bytes(16), sender=0, voided=tuple(range(MAX_VOIDED + 1))
            ).pack()
        )


def test_every_dtype_has_a_code():
    for dtype in DTYPES:
        header = Header(kind=Kind.DATA, run=bytes(16), sender=1, dtype=dtype, size_bytes=8)
        assert Header.unpack(header.pack()).dtype == dtype
    assert torch.float32 in DTYPES
