"""Where workers run: hosts on shaped links, or this machine's loopback."""

import json
import subprocess
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.netlab import NetlabError, Network
from benchmarks.netlab._envelope import MOST_BITS_PER_SECOND, check_load
from benchmarks.netlab._layout import Layout
from benchmarks.netlab._record import others_load
from benchmarks.netlab._verify import verify

_START_RATE = 1e8
_FAST = 1e9


class Hosts(Protocol):
    """What the laboratory needs of a network."""

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen: ...
    def environment(self, host: int) -> dict[str, str]: ...
    def address(self, host: int) -> str: ...
    def refusal(self, hosts: int, rate_bits_per_second: float) -> str | None: ...
    def shape(self, hosts: int, rate_bits_per_second: float | None) -> None: ...
    def passed_bytes(self, hosts: int) -> int: ...


class Shaped(Network):
    """A network of which the first hosts are used, at one rate.

    Args:
        hosts: The most that will be used.
    """

    def __init__(self, hosts: int) -> None:
        super().__init__(hosts=hosts, rate_bits_per_second=_START_RATE)
        self._used = 0

    def _load(self, rates_bits_per_second: Sequence[float]) -> float:
        return sum(rates_bits_per_second[: self._used])  # the others move nothing

    def refusal(self, hosts: int, rate_bits_per_second: float) -> str | None:
        """Why this machine cannot carry so much, None if it can."""
        try:
            check_load(hosts * rate_bits_per_second, hosts, None)
        except NetlabError as error:
            return str(error)
        return None

    def shape(self, hosts: int, rate_bits_per_second: float | None) -> None:
        """Sets the links of all hosts to a rate, and fills those of the first to see it held.

        Args:
            hosts: How many will move bytes.
            rate_bits_per_second: None for one that is fast, and is not tried out.

        Raises:
            NetlabError: The machine cannot carry it, or the links do not keep to it.
        """
        rate = rate_bits_per_second
        if rate is None:
            others = others_load(self._record and self._record.name)
            rate = min(_FAST, max(_START_RATE, (MOST_BITS_PER_SECOND - others) / hosts))
        check_load(hosts * rate, hosts, None)
        self._used = hosts
        self.set_rates(dict.fromkeys(range(self.hosts), rate))
        if rate_bits_per_second is not None and hosts > 1:
            with self.traffic(range(hosts)) as traffic:
                verify(Layout.of(hosts, rate), traffic)

    def passed_bytes(self, hosts: int) -> int:
        """Bytes that have come to the first hosts: whole frames, at the switch."""
        shown = subprocess.run(
            ["tc", "-n", self.wiring.switch, "-s", "-j", "qdisc", "show"],
            capture_output=True,
            check=True,
        )
        ports = {f"host{host}" for host in range(hosts)}
        return sum(
            queue["bytes"]
            for queue in json.loads(shown.stdout)
            if queue.get("root") and queue["dev"] in ports
        )


class Loopback:
    """Hosts that are no hosts: processes on this machine's loopback, unshaped and uncounted."""

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen:
        return subprocess.Popen(argv, **options)

    def environment(self, host: int) -> dict[str, str]:
        return {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def address(self, host: int) -> str:
        return "127.0.0.1"

    def refusal(self, hosts: int, rate_bits_per_second: float) -> str | None:
        """Nothing is refused."""
        return None

    def shape(self, hosts: int, rate_bits_per_second: float | None) -> None:
        """Nothing is shaped."""

    def passed_bytes(self, hosts: int) -> int:
        return 0
