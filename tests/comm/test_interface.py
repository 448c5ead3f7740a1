"""Which interface a rank listens on."""

import sys

import pytest

from gossipgrad.comm import ZeroMQTransport, _interface
from support.ranks import run_ranks


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 and lo are Linux's")
@pytest.mark.parametrize(("bind", "address"), [("127.0.0.2", "127.0.0.2"), ("lo", "127.0.0.1")])
def test_the_interface_may_be_named_in_the_environment(monkeypatch, bind, address):
    monkeypatch.setenv("GOSSIPGRAD_BIND", bind)
    ends = run_ranks(
        2, lambda rank, group: ZeroMQTransport(group, bind="127.0.0.1" if rank else None)
    )
    assert [end.address for end in ends] == [address, "127.0.0.1"]
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "bind", ["0.0.0.0", "*", "0", "0.0", "::", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"]
)
def test_every_interface_is_refused_in_all_spellings(bind):
    with pytest.raises(ValueError, match=r"is every interface.*GOSSIPGRAD_BIND=10\.0\.0\.7 or"):
        run_ranks(1, lambda rank, group: ZeroMQTransport(group, bind=bind))


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1"])
def test_loopback_is_refused_where_ranks_are_on_several_hosts(monkeypatch, bind):
    hosts = iter(["one", "other"])
    monkeypatch.setattr(_interface, "here", lambda: next(hosts))
    with pytest.raises(ValueError, match=f"bind='{bind}' is a loopback address"):
        run_ranks(2, lambda rank, group: ZeroMQTransport(group, bind=bind))
