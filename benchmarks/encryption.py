"""What it costs to encrypt links, on loopback.

Run with `python -m benchmarks.encryption`. Two processes exchange messages over plain links and
over encrypted ones, by turns.
"""

import argparse
import os
import secrets
import statistics
import tempfile
from functools import partial

from benchmarks._common import write
from benchmarks._exchanges import SEED, Spent, by_turns, summary
from benchmarks._two_ranks import in_two_processes
from gossipgrad.comm import ZeroMQTransport

CASES = {  # name: (bytes of each message, messages, repeats)
    "64 kB": (1 << 16, 1, 40),
    "1 MB": (1 << 20, 1, 30),
    "4 MB": (4 << 20, 1, 30),
    "25 MB as 7 x 4 MB": ((25 << 20) // 7 // 4 * 4, 7, 10),
}
LINKS = {
    "plain": partial(ZeroMQTransport, encrypt=False),
    "encrypted": partial(ZeroMQTransport, encrypt=True),
}


def cpu_a_megabyte(both: list[list[Spent]], sent_bytes: int) -> float:
    """Of both ends together, for a megabyte that one of them sends to the other."""
    spent = statistics.median(one[1] + other[1] for one, other in zip(*both, strict=True))
    return spent / (2 * sent_bytes / 1e6)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write(secrets.token_hex(32))
        secret.flush()
        os.environ["GOSSIPGRAD_SECRET_FILE"] = secret.name
        both = in_two_processes(by_turns, CASES, LINKS)
    results = {}
    for case, (size_bytes, count, _) in CASES.items():
        results[case] = {}
        for name in LINKS:
            spent = [rank[case][name] for rank in both]
            results[case][name] = summary(spent, size_bytes * count) | {
                "cpu_seconds_per_megabyte_sent": cpu_a_megabyte(spent, size_bytes * count)
            }
    write("encryption", {"seed": SEED, "results": results})
    for case, by_name in results.items():
        for name, s in by_name.items():
            print(
                f"{case:32}{name:14}{1e3 * s['seconds_median']:8.2f} ms"
                f"{s['bytes_per_second_each_way'] / 1e6:7.0f} MB/s each way"
                f"{1e3 * s['cpu_seconds_per_rank_median']:9.2f} ms CPU a rank"
            )


if __name__ == "__main__":
    main()
