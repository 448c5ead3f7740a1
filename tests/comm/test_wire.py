"""Headers: what is packed comes back, and whatever else comes is read as it says or refused."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossipgrad.comm import Header, Kind, WireError
from gossipgrad.comm._wire import DTYPES

MUTATIONS = 50_000

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
        "dtype": st.none() | st.sampled_from(DTYPES),
        "size_bytes": st.integers(0, 2**64 - 1),
    }
)


@settings(deadline=None, max_examples=150)
@given(headers)
def test_a_header_comes_back_as_it_was(fields):
    header = Header(**fields)
    assert Header.unpack(header.pack()) == header


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_and_nothing_else(data):
    with pytest.raises(WireError):
        Header.unpack(data)


def some_header(rng):
    return Header(
        kind=rng.choice(list(Kind)),
        run=rng.randbytes(16),
        sender=rng.randrange(1 << 32),
        epoch=rng.randrange(1 << 32),
        round=rng.randrange(-(1 << 63), 1 << 63),
        dtype=rng.choice([None, *DTYPES]),
        size_bytes=rng.randrange(1 << 64),
    ).pack()


def mutated(rng, data):
    """One to three bits flipped or bytes written over; now and then cut short, or made longer."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed))
        match rng.randrange(10):
            case 0:
                return bytes(changed[:at])
            case 1:
                changed[at:at] = rng.randbytes(rng.randrange(1, 20))
            case 2 | 3 | 4:
                changed[at] = rng.choice((0, 1, 127, 128, 254, 255))
            case _:
                changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def test_a_mutated_header_is_read_as_what_it_says_or_refused():
    rng = random.Random(6)
    packed = [some_header(rng) for _ in range(50)]
    read = refused = 0
    for _ in range(MUTATIONS):
        data = mutated(rng, rng.choice(packed))
        try:
            header = Header.unpack(data)
        except WireError:
            refused += 1
        else:
            assert header.pack() == data
            read += 1
    assert min(read, refused) > MUTATIONS // 10  # both ways are tried


def test_parameters_of_all_floating_types_can_be_sent():
    assert {torch.float32, torch.float64, torch.bfloat16, torch.float16} <= set(DTYPES)
