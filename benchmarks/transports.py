"""Latency, bandwidth and CPU time of the transports, between two processes on loopback.

Run with `python -m benchmarks.transports`. Both ranks send and receive at once (a symmetric
exchange). The contestants take turns, so that what else the machine does hits all of them alike.
"""

import argparse

from benchmarks._common import write
from benchmarks._exchanges import SEED, by_turns, summary
from benchmarks._two_ranks import in_two_processes
from gossipgrad.comm import ZeroMQTransport

CASES = {  # name: (bytes of each message, messages, repeats)
    "64 kB": (1 << 16, 1, 40),
    "256 kB": (1 << 18, 1, 40),
    "1 MB": (1 << 20, 1, 30),
    "4 MB": (4 << 20, 1, 30),
    "25 MB": (25 << 20, 1, 15),
    "100 MB": (100 << 20, 1, 7),
    "25 MB as 25 x 1 MB": (1 << 20, 25, 15),
    "25 MB as 7 x 4 MB": ((25 << 20) // 7 // 4 * 4, 7, 15),
}
CONTESTANTS = {"zeromq": ZeroMQTransport, "isend/irecv": None}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    both = in_two_processes(by_turns, CASES, CONTESTANTS)
    results = {
        case: {
            name: summary([rank[case][name] for rank in both], size_bytes * count)
            for name in CONTESTANTS
        }
        for case, (size_bytes, count, _) in CASES.items()
    }
    write("transports", {"seed": SEED, "results": results})
    print(f"{'':20}{'':14}{'median':>9}{'quartiles':>17}{'MB/s':>7}{'CPU a rank':>12}")
    for case, by_name in results.items():
        for name, s in by_name.items():
            quartiles = "{:.2f}..{:.2f}".format(
                *(1e3 * s[f"seconds_{side}_quartile"] for side in ("lower", "upper"))
            )
            print(
                f"{case:20}{name:14}{1e3 * s['seconds_median']:6.2f} ms{quartiles:>17}"
                f"{s['bytes_per_second_each_way'] / 1e6:7.0f}"
                f"{1e3 * s['cpu_seconds_per_rank_median']:9.2f} ms"
            )


if __name__ == "__main__":
    main()
