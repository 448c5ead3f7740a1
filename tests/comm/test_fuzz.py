"""What parses bytes of strangers takes whatever comes, or refuses it by its own error."""

import random

from gossipgrad.comm import Header, Kind, WireError
from gossipgrad.comm._wire import DTYPES

HEADERS = 50_000


def some_header(rng):
    return Header(
        kind=rng.choice(list(Kind)),
        run=rng.randbytes(16),
        sender=rng.randrange(1 << 32),
        generation=rng.randrange(1 << 32),
        round=rng.randrange(-(1 << 63), 1 << 63),
        epoch=rng.randrange(1 << 32),
        known=rng.randrange(1 << 32),
        bucket=rng.randrange(1 << 32),
        dtype=rng.choice([None, *DTYPES]),
        size_bytes=rng.randrange(1 << 64),
        voided=tuple(rng.randrange(1 << 63) for _ in range(rng.randrange(4))),
    ).pack()


def mutated(rng, data):
    """Bits flipped, bytes written over, cut out, put in or doubled: one to three times."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(6):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1 if changed:
                changed[at % len(changed)] = rng.choice((0, 1, 127, 128, 254, 255))
            case 2:
                del changed[at : at + rng.randrange(1, 20)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randrange(1, 20))
            case 4:
                changed += changed[at:]
            case _:
                changed = changed[:at]
    return bytes(changed)


def test_a_mutated_header_is_read_as_what_it_says_or_refused():
    rng = random.Random(6)
    headers = [some_header(rng) for _ in range(50)]
    read = refused = 0
    for _ in range(HEADERS):
        data = mutated(rng, rng.choice(headers))
        try:
            header = Header.unpack(data)
        except WireError:
            refused += 1
        else:
            assert header.pack() == data
            read += 1
    assert min(read, refused) > HEADERS // 10  # both ways are tried
