"""The rendezvous of a run's launchers: a store in the launcher of node 0."""

import contextlib
import ipaddress
import socket
import threading
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from gossipgrad.comm import AskedStore
from gossipgrad.errors import GossipError

_LOOPBACK = "127.0.0.1"
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 30.0
_MORE_SECONDS = 1.0  # torch's own message is the better one


class Rendezvous:
    """The store of a run, and the ranks of this node; a context manager.

    The launcher of node 0 hosts the store, so that it does not depend on any worker. It leaves it
    open until the other launchers are done, or have been silent for 30 seconds.

    Args:
        nproc: Number of workers of this node; it may differ between nodes.
        nodes: Number of launchers.
        node_rank: Index of this launcher.
        address: Host and port of the store, an address of node 0; None: loopback, a free port.
        timeout_seconds: How long to wait for the other launchers.

    Attributes:
        nproc: Number of workers of this launcher.
        nodes: Number of launchers.
        node_rank: Index of this launcher.
        store: The store.
        host: Its host.
        port: Its port.
        first_rank: The lowest rank of this node.
        world_size: Number of ranks of all nodes.

    Raises:
        ValueError: The store cannot listen there, or another launcher has the same node rank.
        GossipError: A launcher is missing after the timeout; the message names it.
    """

    def __init__(
        self,
        nproc: int,
        *,
        nodes: int = 1,
        node_rank: int = 0,
        address: tuple[str, int] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.host, self.port = address or (_LOOPBACK, 0)
        self.nproc, self.nodes, self.node_rank = nproc, nodes, node_rank
        self.store = self._host() if node_rank == 0 else self._connect(timeout_seconds)
        self._launchers = dist.PrefixStore("gossipgrad/launch", self.store)
        self._over = threading.Event()
        self.first_rank, self.world_size = self._meet(timeout_seconds)
        if nodes > 1:
            threading.Thread(target=self._beat, daemon=True).start()

    def __enter__(self) -> "Rendezvous":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(wait=error is None)

    def close(self, *, wait: bool = True) -> None:
        """Leave the others; node 0 first waits for them, if requested."""
        if self._over.is_set():
            return
        self._over.set()
        with contextlib.suppress(RuntimeError):  # the launcher of node 0 may be gone
            self._launchers.set(f"done{self.node_rank}", "")
        others = range(1, self.nodes) if wait and self.node_rank == 0 else ()
        for node in others:
            beats = None
            while not self._launchers.check([f"done{node}"]):
                before, beats = beats, self._launchers.add(f"beats{node}", 0)
                if beats == before:
                    break
                with contextlib.suppress(RuntimeError):
                    self._launchers.wait([f"done{node}"], timedelta(seconds=_SILENT_SECONDS))

    def _host(self) -> dist.Store:
        # Debian's hosts file gives a machine's own name a loopback address, which no other machine
        # reaches by that name: then listen on all interfaces, as the store of torch does.
        is_hidden = self.nodes > 1 and _is_hidden(self.host)
        try:
            listener = socket.create_server(
                ("" if is_hidden else self.host, self.port), family=_family(self.host)
            )
        except OSError as error:
            raise ValueError(
                f"the store cannot listen at {self.host}:{self.port} ({error.strerror or error}): "
                "--rendezvous must name an address of the machine of --node-rank 0 and a free port."
            ) from error
        self.port = listener.getsockname()[1]
        return dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )

    def _connect(self, timeout_seconds: float) -> dist.Store:
        def connect() -> dist.Store:
            return dist.TCPStore(
                self.host,
                self.port,
                is_master=False,
                timeout=timedelta(seconds=timeout_seconds),
            )

        try:
            # In a thread: after a connection that was reset torch waits several times its timeout.
            return AskedStore(connect, timeout_seconds=timeout_seconds + _MORE_SECONDS).ask(
                lambda connection: connection
            )
        except RuntimeError as error:
            raise GossipError(
                f"node {self.node_rank} found no store at {self.host}:{self.port} within "
                f"{timeout_seconds:g} s: start `gossipgrad launch` with --node-rank 0 there, see "
                "that --rendezvous is an address of that machine which this one reaches, and that "
                "no other program listens at that port."
            ) from error

    def _meet(self, timeout_seconds: float) -> tuple[int, int]:
        if self._launchers.add(f"came{self.node_rank}", 1) > 1:
            raise ValueError(
                f"--node-rank is {self.node_rank}, but another launcher at {self.host}:"
                f"{self.port} has the same: give each node its own, from 0."
            )
        self._launchers.set(f"node{self.node_rank}", f"{self.nodes} {self.nproc}")
        sizes: list[int] = []
        for node in range(self.nodes):
            key = f"node{node}"
            try:
                self._launchers.wait([key], timedelta(seconds=timeout_seconds))
            except RuntimeError as error:
                raise GossipError(
                    f"the launcher of node {node} of {self.nodes} did not come within "
                    f"{timeout_seconds:g} s: start it with --node-rank {node}."
                ) from error
            nodes, size = map(int, self._launchers.get(key).split())
            if nodes != self.nodes:
                raise ValueError(
                    f"--nodes is {self.nodes} here and {nodes} on node {node}: give the same."
                )
            sizes.append(size)
        return sum(sizes[: self.node_rank]), sum(sizes)

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):
            while not self._over.wait(_BEAT_SECONDS):
                self._launchers.add(f"beats{self.node_rank}", 1)


def _family(host: str) -> socket.AddressFamily:
    """Return IPv4 if a host has such an address."""
    found = {each[0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in found else socket.AF_INET6


def _is_hidden(host: str) -> bool:
    """Whether a name, which is neither an address nor localhost, resolves to loopback here."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    return host not in ("localhost", address) and ipaddress.ip_address(address).is_loopback
