"""Headers: what is packed comes back, and whatever else comes is read as it says or refused."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.comm import Header, Kind, WireError

# Drawn as fields: the type checks of tests use `random`, which strategies must not.
headers = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(Kind),
        "run": st.binary(min_size=16, max_size=16),
        "sender": st.integers(0, 2**32 - 1),
        "generation": st.integers(0, 2**32 - 1),
        "epoch": st.integers(0, 2**32 - 1),
        "round": st.integers(-(2**63), 2**63 - 1),
        "bucket": st.integers(0, 2**32 - 1),
        "dtype": st.none() | st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
        "size_bytes": st.integers(0, 2**64 - 1),
    }
)


@settings(deadline=None, max_examples=100)
@given(headers, st.integers(0, 56), st.integers(0, 255), st.integers(0, 56))
def test_a_header_comes_back_as_it_was_and_a_changed_one_as_it_says_or_not_at_all(
    fields, at, byte, length
):
    header = Header(**fields)
    data = header.pack()
    assert Header.unpack(data) == header
    changed = data[:at] + bytes([byte]) + data[at + 1 :]
    with contextlib.suppress(WireError):
        assert Header.unpack(changed).pack() == changed
    for other in (data[:length], data + bytes([byte])):
        with pytest.raises(WireError):
            Header.unpack(other)
