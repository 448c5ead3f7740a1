"""What parses bytes of strangers takes whatever comes, or refuses it by its own error."""

import random

import pytest
import torch

from gossipgrad.comm import Header, Kind, WireError
from gossipgrad.comm._credentials import Credentials
from gossipgrad.comm._door import Admission
from gossipgrad.comm._links_in import BrokenLinkError
from gossipgrad.comm._seal import Numberer, Opener, Sealer
from gossipgrad.comm._secret import Secret
from gossipgrad.comm._wire import DTYPES

HEADERS = 50_000
SECRET = Secret(bytes(range(32)))
STRANGER = Admission(None)


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


def test_a_mutated_seal_is_refused_and_disturbs_no_genuine_one():
    rng = random.Random(7)
    key = SECRET.derive("seal")
    sealer, opener = Sealer(key), Opener(key)
    refused = 0
    for number in range(300):
        header = some_header(rng)
        sealed = sealer.seal(header, number)
        for _ in range(10):
            changed = mutated(rng, sealed)
            if changed != sealed:
                with pytest.raises(WireError):
                    opener.open(changed, number)
                refused += 1
        with pytest.raises(WireError, match="not genuine"):
            opener.open(sealed, number + 1)
        assert opener.open(sealed, number) == header
        with pytest.raises(WireError, match=f"message {number + 1} comes again"):
            opener.open(sealed, number)
    sealer.seal(header, 0)
    with pytest.raises(WireError, match="message 302 came behind message 300: what was between"):
        opener.open(sealer.seal(header, 0), 0)
    assert refused > 2000


@pytest.mark.parametrize("encrypt", [False, True])
def test_mutated_credentials_are_refused_and_nothing_else(encrypt):
    rng = random.Random(8)
    mine = Credentials(SECRET, 0, [0, 1], encrypt=encrypt)
    mechanism = b"CURVE" if encrypt else b"PLAIN"
    genuine = [next(iter(mine._allowed))] if encrypt else knock(mine, rng.randbytes(16))
    for _ in range(2000):
        shown = [mutated(rng, part) for part in genuine]
        if shown == genuine:
            shown.pop()
        said = rng.choice((mechanism, mechanism, b"NULL", b"GSSAPI", rng.randbytes(5)))
        assert mine.admit(said, shown) == STRANGER
    assert mine.admit(b"NULL", []) == STRANGER
    assert mine.admit(mechanism, genuine).name is not None


def knock(credentials, link, sender=1):
    """What the socket of `sender` shows."""
    word = credentials._of_link("knock", sender, credentials._rank, credentials._nonce, link)
    return [f"{sender}.{link.hex()}".encode(), word.hex().encode()]


def sealer_of(credentials, link, sender=1):
    key = credentials._of_link("seal", sender, credentials._rank, credentials._nonce, link)
    return Sealer(key)


def test_a_word_is_good_until_something_was_said_and_links_of_long_ago_are_forgotten():
    mine = Credentials(SECRET, 0, [0, 1])
    other = Credentials(SECRET, 0, [0, 1])
    names = []
    for number in range(12):
        link = bytes([number]) * 16
        shown = knock(mine, link)
        assert other.admit(b"PLAIN", shown) == STRANGER  # it is for another time of life
        broken_off = mine.admit(b"PLAIN", shown).name
        names.append(mine.admit(b"PLAIN", shown).name)
        assert broken_off != names[-1]
        sealed = [sealer_of(mine, link).seal(b"header", 0)]
        with pytest.raises(WireError, match="not genuine"):  # by who saw the word and not the key
            mine.open(broken_off, bytes(99), 0)
        assert mine.open(names[-1], sealed[0], 0) == (b"header", 1, f"1.{link.hex()}")
        with pytest.raises(WireError, match="another connection than what came before"):
            mine.open(broken_off, sealed[0], 0)
        assert mine.admit(b"PLAIN", shown) == (None, f"1.{link.hex()}")
    assert len(mine._links._links) == 8
    with pytest.raises(WireError, match="long over"):
        mine.open(names[0], bytes(99), 0)
    assert mine.admit(b"PLAIN", knock(mine, bytes(16))).name is None
    with pytest.raises(BrokenLinkError, match="not genuine") as broken:
        mine.open(names[-1], bytes(99), 0)
    assert broken.value.sender == 1
    with pytest.raises(WireError, match="a link that is over"):
        mine.open(names[-1], sealer_of(mine, bytes([11]) * 16).seal(b"header", 0), 0)


def test_a_word_that_was_seen_is_shown_so_often_and_no_more():
    mine = Credentials(SECRET, 0, [0, 1])
    shown = knock(mine, bytes(16))
    admitted = [mine.admit(b"PLAIN", shown).name for _ in range(40)]
    assert admitted[:32] == [f"1.{bytes(16).hex()}.{number}" for number in range(1, 33)]
    assert admitted[32:] == [None] * 8


def test_encrypted_messages_are_numbered_and_none_may_be_missing():
    mine = Credentials(SECRET, 0, [0, 1], encrypt=True)
    numberer = Numberer(bytes(range(16)))
    sealed = [numberer.seal(b"header", 0) for _ in range(4)]
    assert [mine.open("1", one, 0)[:2] for one in sealed[:2]] == [(b"header", 1)] * 2
    with pytest.raises(BrokenLinkError, match="message 4 came behind message 2") as broken:
        mine.open("1", sealed[3], 0)
    assert broken.value.sender == 1
    with pytest.raises(WireError, match="a link that is over"):
        mine.open("1", sealed[2], 0)
    with pytest.raises(BrokenLinkError, match="message 2 came behind message 0"):
        mine.open("0", sealed[1], 0)
    with pytest.raises(WireError, match="no connection of a member"):
        mine.open("", sealed[0], 0)


def test_a_header_takes_the_payload_it_was_sealed_with():
    key = SECRET.derive("seal")
    header = Header(kind=Kind.DATA, run=bytes(16), sender=1, dtype=torch.float32, size_bytes=8)
    sealed = Sealer(key).seal(header.pack(), 8)
    with pytest.raises(WireError, match="not genuine"):
        Opener(SECRET.derive("another")).open(sealed, 8)
    assert Header.unpack(Opener(key).open(sealed, 8)) == header
