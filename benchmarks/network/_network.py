"""The network itself: made on entering, gone on leaving."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from . import _links, _namespaces
from ._links import INTERFACE, MOST_BITS_PER_SECOND, check_rate, shape_lines
from ._namespaces import NetworkError, run

MAXIMUM_HOSTS = 250
_DEATH_SECONDS = 5.0
_POLL_SECONDS = 0.05
_TIMED_OUT = 124
_NOBODY = "lladdr 02:00:00:00:00:00 nud permanent"
# Else the bridge greets every host now and then, and the counters have it.
_NO_IPV6 = "cd /proc/sys/net/ipv6/conf/default 2>/dev/null && echo 1 > disable_ipv6 || true"


class Counters(NamedTuple):
    """Bytes over a host's link since the network came up: whole frames, headers and all."""

    sent_bytes: int
    received_bytes: int


class Network:
    """Hosts on one machine, each a network namespace behind a link shaped in both directions.

    All links end in a switch in a namespace of its own, so nothing of the machine's own network is
    touched, and nothing in there reaches it: files, pipes and Unix sockets are the way in and out.
    Leaving the block kills what runs inside. What a killed process left goes when the next network
    is entered.

    A rate is that of the wire, in bits a second each way; TCP hands on 1448 bytes of each 1514.
    Bandwidth is shaped, delay and loss are not. A first-in, first-out queue stands before each
    link, as in a switch: flows that share one do not share it evenly.

    Example:
        with Network(hosts=2, rate_bits_per_second=1e8) as network:
            ranks = [network.popen(rank, ["worker", network.address(0)]) for rank in range(2)]
            print([rank.wait() for rank in ranks])
    """

    def __init__(self, *, hosts: int, rate_bits_per_second: float) -> None:
        if not 1 <= hosts <= MAXIMUM_HOSTS:
            raise ValueError(f"hosts={hosts}: a network has 1 to {MAXIMUM_HOSTS}")
        self.hosts = hosts
        self.rates = [check_rate(rate_bits_per_second)] * hosts
        self._name = ""
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        if self._name:
            raise NetworkError("this network is up already: make another Network for a second one")
        if lacks := _namespaces.missing():
            raise NetworkError("; ".join(lacks))
        _check_load(self.rates)
        _namespaces.sweep()
        self._name, self._owner = _namespaces.new_name(), os.getpid()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def _build(self) -> None:
        names, switch = [self.namespace(host) for host in range(self.hosts)], self.switch
        run("ip", lines=(f"netns add {name}" for name in (switch, *names)))
        run("ip", "netns", "exec", switch, "sh", "-c", _NO_IPV6)
        run("ip", "-n", switch, lines=_links.switch_lines(names))
        slowest = min(self.rates)
        for host, name in enumerate(names):
            run("ip", "-n", name, lines=_links.host_lines(self.address(host), slowest))
            run("tc", "-n", name, lines=shape_lines(INTERFACE, self.rates[host], is_new=True))
        ports = (shape_lines(f"host{h}", rate, is_new=True) for h, rate in enumerate(self.rates))
        run("tc", "-n", switch, lines=(line for port in ports for line in port))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs inside and removes the network; the second time does nothing."""
        if not self._name or self._owner != os.getpid():  # a fork of the owner leaves it be
            return
        # One that is only on its way into a namespace would be found in none.
        for process in self._processes:
            process.kill()
        _namespaces.remove(_namespaces.namespaces(self._name))
        self._name = ""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_DEATH_SECONDS)

    @property
    def switch(self) -> str:
        """The namespace in which all links end."""
        return f"{self._up()}switch"

    def namespace(self, host: int) -> str:
        """Its name for `ip netns exec`."""
        return f"{self._up()}host{self._check(host)}"

    def address(self, host: int) -> str:
        """The address of `host`, for all others."""
        self._up()
        return f"10.64.0.{self._check(host) + 1}"

    def environment(self, host: int, *, port: int = 29500) -> dict[str, str]:
        """What `torch.distributed` asks of the environment: rank `host`, store and root at host 0.

        Without `GLOO_SOCKET_IFNAME` Gloo looks up this machine's name, which is not the host's.
        """
        return {
            "RANK": str(self._check(host)),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def popen(
        self, host: int, argv: Sequence[str | os.PathLike[str]], **options: Any
    ) -> "subprocess.Popen[Any]":
        """Starts a process on `host`; it is killed with the network at the latest."""
        command = [os.fspath(word) for word in argv]
        if not command or shutil.which(command[0]) is None:
            raise FileNotFoundError(f"no command {command[:1]} to run on a host")
        inside = ["ip", "netns", "exec", self.namespace(host)]
        process = subprocess.Popen([*inside, *command], **options)
        self._processes.append(process)
        return process

    def set_rate(self, host: int, rate_bits_per_second: float) -> None:
        """Changes the link of `host`, both ways, in use; its queue stays."""
        self.set_rates({host: rate_bits_per_second})

    def set_rates(
        self, rates_bits_per_second: Mapping[int, float], *, used: int | None = None
    ) -> None:
        """As `set_rate`, all or none; `used`: how many of the first hosts move bytes."""
        rates = {self._check(host): check_rate(r) for host, r in rates_bits_per_second.items()}
        after = [rates.get(host, now) for host, now in enumerate(self.rates)]
        _check_load(after[:used])
        ports = (shape_lines(f"host{host}", rate) for host, rate in rates.items())
        run("tc", "-n", self.switch, lines=(line for port in ports for line in port))
        for host, rate in rates.items():
            run("tc", "-n", self.namespace(host), lines=shape_lines(INTERFACE, rate))
        if min(after) != min(self.rates):
            # Connections that are there keep their pieces until they look up their route again.
            lines = [_links.piece_line(min(after)), "route flush cache"]
            for host in range(self.hosts):
                run("ip", "-n", self.namespace(host), lines=lines)
        self.rates = after

    def cut(self, one: int, other: int) -> None:
        """Lets nothing pass between two hosts any more, without a word to either; see `heal`.

        As with a fault far away: connections stay, and their bytes are sent again and again.
        """
        for here, there in self._ends(one, other):
            where = f"neigh replace {self.address(there)} dev {INTERFACE} {_NOBODY}"
            run("ip", "-n", self.namespace(here), *where.split())

    def heal(self, one: int, other: int) -> None:
        """Takes `cut` back. TCP notices when it tries next, after up to as long again."""
        for here, there in self._ends(one, other):
            where = f"neigh del {self.address(there)} dev {INTERFACE}"
            run("ip", "-n", self.namespace(here), *where.split())

    def cut_off(self, host: int) -> None:
        """Lets nothing pass between a host and all others any more; see `reconnect`."""
        self._forward(host, "0")

    def reconnect(self, host: int) -> None:
        """Takes `cut_off` back."""
        self._forward(host, "3")

    def counters(self, host: int) -> Counters:
        """Bytes that have passed the two shapers of a host's link.

        The shapers count frames as a cable would see them; the interface itself counts up to 45
        of them as one, with one header.
        """
        sent = _passed(self.namespace(host))[INTERFACE]
        return Counters(sent, _passed(self.switch)[f"host{host}"])

    def passed_bytes(self, hosts: int) -> int:
        """Bytes that have come to the first hosts: whole frames, at the switch."""
        passed = _passed(self.switch)
        return sum(passed[f"host{host}"] for host in range(hosts))

    def _forward(self, host: int, state: str) -> None:
        """Of a host's port; by number (3 forwards), for not all of `bridge` know the names."""
        port = f"host{self._check(host)}"
        run("bridge", "-n", self.switch, "link", "set", "dev", port, "state", state)

    def _ends(self, one: int, other: int) -> list[tuple[int, int]]:
        if one == other:
            raise ValueError(f"host {one} twice: a link has two ends")
        return [(one, other), (other, one)]

    def _check(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host {host}: there are 0 to {self.hosts - 1}")
        return host

    def _up(self) -> str:
        if not self._name:
            raise NetworkError(
                "the network is not up: use it inside `with Network(...) as network:`"
            )
        return self._name


def run_everywhere(
    network: Network, argv: list[str], *, port: int = 29500, timeout_seconds: float | None = None
) -> int:
    """Runs `argv` on every host until all or one has failed; the first exit status that is not 0.

    Output goes where this process's goes.
    """
    processes = []
    for host in range(network.hosts):
        values = {
            "{rank}": str(host),
            "{world_size}": str(network.hosts),
            "{address}": network.address(host),
            "{master}": network.address(0),
        }
        words = list(argv)
        for name, value in values.items():
            words = [word.replace(name, value) for word in words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | network.environment(host, port=port)
        processes.append(network.popen(host, words, env=environment))
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    try:
        while True:
            ended = [process.poll() for process in processes]
            for host, status in enumerate(ended):
                if status:
                    print(f"host {host}: exit status {status}", file=sys.stderr)
                    return status % 256
            if None not in ended:
                return 0
            if deadline is not None and time.monotonic() > deadline:
                print(f"not ended after {timeout_seconds:g} s", file=sys.stderr)
                return _TIMED_OUT
            time.sleep(_POLL_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _passed(namespace: str) -> dict[str, int]:
    shown = json.loads(run("tc", "-n", namespace, "-s", "-j", "qdisc", "show"))
    return {queue["dev"]: queue["bytes"] for queue in shown if queue.get("root")}


def _check_load(rates: Sequence[float]) -> None:
    if sum(rates) > MOST_BITS_PER_SECOND * 1.001:
        raise NetworkError(
            f"{len(rates)} hosts can move {sum(rates) / 1e9:.4g} Gbit/s together, and a machine "
            f"like those measured carries {MOST_BITS_PER_SECOND / 1e9:g}: above, processors and "
            "not links would set the pace. Take fewer hosts or lower rates"
        )
