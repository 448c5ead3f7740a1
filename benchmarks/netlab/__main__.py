"""A network of hosts on one machine: `python -m benchmarks.netlab run --hosts 4 -- CMD {rank}`."""

import argparse
import sys
from pathlib import Path

from benchmarks._ends import ends_as_ctrl_c

from ._errors import NetlabError
from ._network import Network
from ._probe import probe
from ._rates import parse_rate
from ._record import alive, records, unrecorded
from ._run import run_everywhere
from ._sweep import sweep
from ._system import missing

_DESCRIPTION = """\
Hosts are network namespaces behind links shaped in both directions. Needs Linux, root and iproute2.

  run      runs a command on every host, with the environment torch.distributed asks for;
           {rank}, {world_size}, {address} and {master} in its arguments are filled in
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
    command = commands.add_parser("run")
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
    command.add_argument("--no-verify", action="store_true", help="do not try the links out first")
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


def _run(options: argparse.Namespace) -> int:
    with Network(
        hosts=options.hosts,
        rate_bits_per_second=options.rate,
        host_rates=dict(options.host_rate),
        racks=options.rack,
        uplink_bits_per_second=options.uplink,
    ) as network:
        if not options.no_verify:
            network.verify()
        return run_everywhere(
            network,
            options.argv,
            port=options.port,
            keep_going=options.keep_going,
            timeout_seconds=options.timeout,
        )


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
        "run": _run,
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
