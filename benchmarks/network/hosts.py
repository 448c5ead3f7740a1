"""Runs a command on every host of a shaped network; needs Linux, root and iproute2.

    python -m benchmarks.network.hosts run --hosts 4 --rate 100Mbit -- CMD {rank}
    python -m benchmarks.network.hosts check    # says what is missing here
    python -m benchmarks.network.hosts clean    # removes what a killed run has left

The command gets the environment torch.distributed asks for; {rank}, {world_size}, {address} and
{master} in its arguments are filled in. When one fails the others are ended.
"""

import argparse
import sys

from benchmarks._common import ends_as_ctrl_c

from ._links import parse_rate
from ._namespaces import NetworkError, missing, sweep
from ._network import Network, run_everywhere


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("run", "check", "clean"))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1Gbit", help="of every link, as in 1Gbit")
    parser.add_argument("--port", type=int, default=29500, help="MASTER_PORT")
    parser.add_argument("--timeout", type=float, help="seconds until all are ended")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    options, argv = parser.parse_args(words[:cut]), words[cut + 1 :]
    try:
        with ends_as_ctrl_c():
            if options.command == "run":
                rate = parse_rate(options.rate)
                with Network(hosts=options.hosts, rate_bits_per_second=rate) as network:
                    port, timeout = options.port, options.timeout
                    return run_everywhere(network, argv, port=port, timeout_seconds=timeout)
            if lacks := missing():
                raise NetworkError("; ".join(lacks))
            if options.command == "clean":
                print("removed", ", ".join(sweep()) or "nothing")
            else:
                with Network(hosts=2, rate_bits_per_second=1e8):
                    print("nothing is missing")
    except (NetworkError, ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
