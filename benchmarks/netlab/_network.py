"""The laboratory itself: made on entering, gone on leaving."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ._build import (
    Counters,
    build,
    change_pieces,
    change_rates,
    change_uplink,
    connect,
    join_hosts,
    part_hosts,
    read_counters,
)
from ._envelope import check_load
from ._errors import NetlabError
from ._layout import INTERFACE, Layout
from ._links import Wiring
from ._rates import check_rate
from ._record import Record, allocate, locked, others_load
from ._sweep import dismantle, sweep_locked
from ._system import missing
from ._traffic import Traffic
from ._verify import Checked, verify
from ._watchdog import guard

__all__ = ["Network"]

_SWITCH = "switch"
_DEATH_SECONDS = 5.0


class Network:
    """Hosts on one machine, each behind a link shaped in both directions.

    Every host is a network namespace. All links end in a switch in a namespace of its own, so
    nothing of the machine's own network is touched, and nothing in there reaches it: files, pipes
    and Unix sockets are the way in and out. Leaving the block kills what runs inside.

    A rate is that of the wire, in bits a second each way; TCP hands on 1448 bytes of each 1514.
    Bandwidth is shaped, delay and loss are not. A first-in, first-out queue stands before each
    link, as in a switch: flows that share one do not share it evenly.

    Args:
        hosts: How many.
        rate_bits_per_second: Of every host's link.
        host_rates: Of those that differ.
        racks: The hosts of each rack; one that is in none stands at the core.
        uplink_bits_per_second: Of each rack's link to the core; None does not constrict.
        envelope_bits_per_second: What this machine can carry, all hosts of all laboratories
            together. By default what `python -m benchmarks.netlab check` measured here.

    Raises:
        ValueError: If the settings contradict each other.
        NetlabError: On entering: if something is missing, or the machine cannot carry so much.

    Example:
        with Network(hosts=2, rate_bits_per_second=1e8) as network:
            network.verify()
            ranks = [network.popen(rank, ["worker", network.address(0)]) for rank in range(2)]
            print([rank.wait() for rank in ranks])
    """

    def __init__(
        self,
        *,
        hosts: int,
        rate_bits_per_second: float,
        host_rates: Mapping[int, float] | None = None,
        racks: Sequence[Sequence[int]] | None = None,
        uplink_bits_per_second: float | None = None,
        envelope_bits_per_second: float | None = None,
    ) -> None:
        self.layout = Layout.of(
            hosts,
            rate_bits_per_second,
            host_rates,
            racks,
            uplink_bits_per_second,
        )
        self._envelope = envelope_bits_per_second
        self._record: Record | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        if self._record is not None:
            raise NetlabError("this network is up already: make another Network for a second one")
        if lacks := missing():
            raise NetlabError("; ".join(lacks))
        layout = self.layout
        with locked():
            sweep_locked()
            load = self._load(layout.rates)
            check_load(load, layout.hosts, self._envelope, others_load())
            self._record = allocate(
                [_SWITCH, *(f"host{host}" for host in range(layout.hosts))],
                rates=layout.rates,
                uplinks=layout.uplinks,
                load=load,
            )
        try:
            self._watchdog = guard(self._record)
            build(self.wiring, self._record.namespaces)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs inside and removes the network; the second time does nothing."""
        record = self._record
        if record is None or record.owner != os.getpid():  # a fork of the owner leaves it be
            return
        # One that is only on its way into a namespace would be found in none.
        for process in self._processes:
            process.kill()
        try:
            dismantle(record)
            self._record = None
        finally:
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_DEATH_SECONDS)
            # Kept if something is left: it tries again when this process has ended.
            if self._watchdog is not None and self._record is None:
                self._watchdog.kill()
                self._watchdog.wait()

    @property
    def hosts(self) -> int:
        """How many."""
        return self.layout.hosts

    @property
    def wiring(self) -> Wiring:
        """Names and addresses."""
        record = self._up()
        return Wiring(
            self.layout, list(record.namespaces[1:]), record.namespaces[0], record.network
        )

    def address(self, host: int) -> str:
        """The address of `host`, for all others."""
        return self.wiring.address(self.layout.check_host(host))

    def interface(self, host: int) -> str:
        """The name of its link in its namespace."""
        self.layout.check_host(host)
        return INTERFACE

    def namespace(self, host: int) -> str:
        """Its name for `ip netns exec`."""
        return self.wiring.hosts[self.layout.check_host(host)]

    def environment(self, host: int, *, port: int = 29500) -> dict[str, str]:
        """What `torch.distributed` asks of the environment: rank `host`, store and root at host 0.

        Without `GLOO_SOCKET_IFNAME` Gloo looks up this machine's name, which is not the host's.
        """
        return {
            "RANK": str(self.layout.check_host(host)),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def popen(
        self,
        host: int,
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Starts a process on `host`; killed with the network at the latest.

        Args:
            host: Where.
            argv: The command and its arguments; no shell.
            env: The whole environment, as for `subprocess`; by default this process's own. To it
                add `environment(host)` for torch.
            options: All else that `subprocess.Popen` takes.
        """
        command = [os.fspath(word) for word in argv]
        path = (os.environ if env is None else env).get("PATH")
        if not command or shutil.which(command[0], path=path) is None:
            raise FileNotFoundError(
                f"no command {command[0] if command else ''!r} to run on a host"
            )
        inside = ["ip", "netns", "exec", self.namespace(host)]
        process = subprocess.Popen([*inside, *command], env=env, **options)
        self._processes.append(process)
        return process

    def set_rate(self, host: int, rate_bits_per_second: float) -> None:
        """Changes the link of `host`, both ways, while it carries bytes; its queue stays."""
        self.set_rates({host: rate_bits_per_second})

    def set_rates(self, rates_bits_per_second: Mapping[int, float]) -> None:
        """Changes the links of several hosts as `set_rate` does; all or, if refused, none."""
        rates = {
            self.layout.check_host(host): check_rate(rate, f"the rate of host {host}")
            for host, rate in rates_bits_per_second.items()
        }
        with self._changing():
            after = [rates.get(host, now) for host, now in enumerate(self.layout.rates)]
            others = others_load(self._up().name)
            check_load(self._load(after), self.hosts, self._envelope, others)
            change_rates(self.wiring, rates)
            slowest = self.layout.slowest()
            self.layout.rates[:] = after
            self._resize(slowest)

    def set_uplink(self, rack: int, rate_bits_per_second: float | None) -> None:
        """Changes the link of `rack` to the core, both ways; None does not constrict."""
        self.layout.check_rack(rack)
        if rate_bits_per_second is not None:
            check_rate(rate_bits_per_second, f"the uplink of rack {rack}")
        with self._changing():
            change_uplink(self.wiring, rack, rate_bits_per_second)
            slowest = self.layout.slowest()
            self.layout.uplinks[rack] = rate_bits_per_second
            self._resize(slowest)

    def cut(self, one: int, other: int) -> None:
        """Lets nothing pass between two hosts any more, without a word to either; see `heal`.

        As with a fault far away: connections stay, and their bytes are sent again and again.
        """
        part_hosts(self.wiring, *self._two(one, other))

    def heal(self, one: int, other: int) -> None:
        """Takes `cut` back. TCP notices when it tries next, after up to as long again."""
        join_hosts(self.wiring, *self._two(one, other))

    def cut_off(self, host: int) -> None:
        """Lets nothing pass between a host and all others any more; see `cut` and `reconnect`."""
        connect(self.wiring, self.layout.check_host(host), on=False)

    def reconnect(self, host: int) -> None:
        """Takes `cut_off` back."""
        connect(self.wiring, self.layout.check_host(host), on=True)

    def traffic(self, hosts: Sequence[int] | None = None) -> Traffic:
        """Workers that move real bytes between `hosts`, by default all; a context manager."""
        return Traffic(self.popen, self.address, range(self.hosts) if hosts is None else hosts)

    def verify(self) -> list[Checked]:
        """Fills the links by real transfers and holds what they carry against their rates.

        Call it before the network is used: it takes all of it, for about a second.

        Returns:
            Each link that could be filled. One that the other links together cannot fill is not
            among them.

        Raises:
            NetlabError: If a link is off its rate by more than 5 %, three times in a row.
        """
        with self.traffic() as traffic:
            return verify(self.layout, traffic)

    def counters(self, host: int) -> Counters:
        """Bytes that have passed the two shapers of a host's link.

        The shapers count frames as a cable would see them; the interface itself counts up to 45
        of them as one, with one header.
        """
        return read_counters(self.wiring, self.layout.check_host(host))

    def _load(self, rates_bits_per_second: Sequence[float]) -> float:
        """Bits a second that the hosts may move together."""
        return sum(rates_bits_per_second)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Alone among all who change links; what has become of them is written down."""
        record = self._up()
        with locked():
            yield
            rates, uplinks = tuple(self.layout.rates), tuple(self.layout.uplinks)
            replace(record, rates=rates, uplinks=uplinks, load=self._load(rates)).write()

    def _resize(self, slowest: float) -> None:
        if self.layout.slowest() != slowest:
            change_pieces(self.wiring)

    def _two(self, one: int, other: int) -> tuple[int, int]:
        if one == other:
            raise ValueError(f"host {one} twice: a link has two ends")
        return self.layout.check_host(one), self.layout.check_host(other)

    def _up(self) -> Record:
        if self._record is None:
            raise NetlabError(
                "the network is not up: use it inside `with Network(...) as network:`"
            )
        return self._record
