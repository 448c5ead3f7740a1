"""Which interface a rank listens on."""

import os
import socket
import sys
from pathlib import Path

import pytest

from gossipgrad.comm import (
    TCPTransport,
    _interface,
    here,
    set_gloo_interface,
)
from gossipgrad.errors import GossipError
from support.ranks import run_ranks


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 and lo are Linux's")
@pytest.mark.parametrize(("bind", "address"), [("127.0.0.2", "127.0.0.2"), ("lo", "127.0.0.1")])
def test_the_interface_may_be_named_in_the_environment(monkeypatch, bind, address):
    monkeypatch.setenv("GOSSIPGRAD_BIND", bind)
    ends = run_ranks(2, lambda rank, group: TCPTransport(group, bind="127.0.0.1" if rank else None))
    assert [end.address for end in ends] == [address, "127.0.0.1"]
    for end in ends:
        end.close()


@pytest.mark.parametrize("bind", ["127.0.0.1", "::1"])
def test_loopback_is_refused_where_ranks_are_on_several_hosts(monkeypatch, bind):
    hosts = iter(["one", "other"])
    monkeypatch.setattr(_interface, "here", lambda: next(hosts))
    with pytest.raises(ValueError, match=f"bind='{bind}' is a loopback address"):
        run_ranks(2, lambda rank, group: TCPTransport(group, bind=bind))


def test_hosts_are_told_apart_by_their_boot_and_not_by_name(monkeypatch):
    mine = here()
    monkeypatch.setattr(socket, "gethostname", lambda: "raspberrypi")
    assert here() == mine
    monkeypatch.setattr(Path, "read_text", lambda self: "another boot")
    assert here() != mine


def test_a_link_that_leads_nowhere_ends_the_start_on_all_ranks_with_both_addresses():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"

    def work(rank, group):
        gather = group.all_gather_object

        def gather_wrongly(value, **options):
            values = gather(value, **options)
            if rank == 0 and str(values[1]).startswith("['tcp://"):
                values[1][0] = f"tcp://{nowhere}"
            return values

        group.all_gather_object = gather_wrongly
        with pytest.raises(GossipError) as caught:
            TCPTransport(group)
        return str(caught.value)

    for said in run_ranks(3, work):
        assert "rank 0 at 127.0.0.1 cannot reach rank 1 at 127.0.0.1:" in said
        assert "GOSSIPGRAD_BIND" in said


@pytest.mark.parametrize(
    ("variables", "name", "interface"),
    [
        ({}, "127.0.1.1", "eth7"),
        ({}, "192.0.2.9", None),
        ({"LOCAL_WORLD_SIZE": "4"}, "127.0.1.1", None),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "127.0.1.1", "eth0"),
    ],
    ids=["leads to loopback", "leads elsewhere", "one host", "is set"],
)
def test_gloo_gets_an_interface_where_the_name_of_the_host_leads_to_loopback(
    monkeypatch, variables, name, interface
):
    """Under torchrun on several hosts, for the user's own process group."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    known = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}
    for variable, value in {**known, "GOSSIPGRAD_BIND": "eth7", **variables}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    set_gloo_interface()
    assert (os.environ["GLOO_SOCKET_IFNAME"] or None) == interface


def test_an_interface_with_ipv6_alone_can_be_listened_on(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setattr(socket, "gethostname", lambda: "::1")
    monkeypatch.setattr(_interface, "_ELSEWHERE", ())
    (end,) = run_ranks(1, lambda rank, group: TCPTransport(group, bind="::1"))
    assert end.address == "::1"
    end.close()
