"""A network of hosts on one machine: `python -m benchmarks.netlab run --hosts 4 -- CMD {rank}`."""

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks._ends import ends_as_ctrl_c

from ._errors import NetlabError
from ._layout import PAYLOAD_SHARE
from ._network import Network
from ._plan import links
from ._probe import probe
from ._rates import format_rate, parse_rate
from ._record import alive, records, unrecorded
from ._run import run_everywhere
from ._sweep import sweep
from ._system import missing

_DESCRIPTION = """\
Hosts are network namespaces behind links shaped in both directions. Needs Linux, root and iproute2.

  up       brings a network up and holds it until Ctrl-C; `ip netns exec NAME CMD` runs inside
  run      runs a command on every host, with the environment torch.distributed asks for;
           {rank}, {world_size}, {address} and {master} in its arguments are filled in
  verify   fills every link by real transfers and holds them against their rates
  check    says what is missing here
  clean    removes what dead laboratories have left
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.netlab",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "run", "verify"):
        command = commands.add_parser(name)
        command.add_argument("--hosts", type=int, default=4)
        command.add_argument("--rate", type=_rate, default=1e9, help="of every link, as in 1Gbit")
        command.add_argument(
            "--host-rate",
            type=_host_rate,
            action="append",
            default=[],
            metavar="HOST=RATE",
            help="a host whose link differs; may be repeated",
        )
        command.add_argument(
            "--rack",
            type=_hosts,
            action="append",
            default=[],
            metavar="HOST,HOST,...",
            help="hosts that share an uplink; may be repeated",
        )
        command.add_argument("--uplink", type=_rate, help="of each rack, to all others")
        if name != "verify":
            command.add_argument(
                "--no-verify", action="store_true", help="do not try the links out first"
            )
        if name == "run":
            command.add_argument("--port", type=int, default=29500, help="MASTER_PORT")
            command.add_argument(
                "--keep-going", action="store_true", help="when one fails, let the others go on"
            )
            command.add_argument("--timeout", type=float, help="seconds until all are ended")
            command.add_argument("argv", nargs="+", metavar="-- CMD")
    commands.add_parser("check")
    commands.add_parser("clean")
    return parser


def _rate(text: str) -> float:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _host_rate(text: str) -> tuple[int, float]:
    host, _, rate = text.partition("=")
    if not host.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: write HOST=RATE, as in 2=100Mbit")
    return int(host), _rate(rate)


def _hosts(text: str) -> tuple[int, ...]:
    if not all(host.isdecimal() for host in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: write the numbers of hosts, as in 0,1")
    return tuple(int(host) for host in text.split(","))


def _network(options: argparse.Namespace) -> Network:
    return Network(
        hosts=options.hosts,
        rate_bits_per_second=options.rate,
        host_rates=dict(options.host_rate),
        racks=options.rack,
        uplink_bits_per_second=options.uplink,
    )


def _up(options: argparse.Namespace) -> int:
    with _network(options) as network:
        if not options.no_verify:
            network.verify()
        for host in range(network.hosts):
            print(
                f"host {host}  {network.address(host):<14}{format_rate(network.layout.rates[host])}"
                f"  ip netns exec {network.namespace(host)} CMD"
            )
        switch = network.wiring.switch
        print(f"switch  ip netns exec {switch} CMD")
        print("up; Ctrl-C ends it", flush=True)
        signal.pause()
    return 0


def _run(options: argparse.Namespace) -> int:
    with _network(options) as network:
        if not options.no_verify:
            network.verify()
        return run_everywhere(
            network,
            options.argv,
            port=options.port,
            keep_going=options.keep_going,
            timeout_seconds=options.timeout,
        )


def _verify(options: argparse.Namespace) -> int:
    with _network(options) as network:
        start = time.perf_counter()
        checked = network.verify()
        seconds = time.perf_counter() - start
    for link in checked:
        print(
            f"{link.link:24} {format_rate(link.measured_bits_per_second):>14} of "
            f"{format_rate(link.expected_bits_per_second):<14} {link.ratio:6.1%}"
        )
    for link in sorted(set(links(network.layout)).difference(link.link for link in checked)):
        print(f"{link:24} not tried: the other links together do not fill it")
    print(
        f"{len(checked)} links keep to their rate (payload, {PAYLOAD_SHARE:.1%} of it); "
        f"took {seconds:.1f} s"
    )
    return 0


def _check(_options: argparse.Namespace) -> int:
    if lacks := missing() or probe():
        print("\n".join(lacks), file=sys.stderr)
        return 1
    print("nothing is missing")
    return 0


def _clean(_options: argparse.Namespace) -> int:
    if lacks := missing():
        print("\n".join(lacks), file=sys.stderr)
        return 1
    removed = sweep()
    print(f"removed {', '.join(removed)}" if removed else "nothing was left behind")
    for record in records():
        if alive(record) is None:
            print(f"left alone, for its owner is in another container: {record.name}")
    for name in unrecorded():
        print(f"left alone, for no record says who made it: ip netns del {name}")
    return 0


def main() -> int:
    options = _parser().parse_args()
    commands = {
        "up": _up,
        "run": _run,
        "verify": _verify,
        "check": _check,
        "clean": _clean,
    }
    try:
        with ends_as_ctrl_c():
            return commands[options.command](options)
    except (NetlabError, ValueError, FileNotFoundError) as error:
        print(f"{Path(__file__).parent.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
