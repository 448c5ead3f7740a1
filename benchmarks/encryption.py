"""What it costs to encrypt links, on loopback.

Run with `python -m benchmarks.encryption`. Two processes exchange messages over plain links and
over encrypted ones, by turns.
"""

import argparse
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks._common import write
from benchmarks._two_ranks import in_two_processes
from gossipgrad.comm import Channel, Group, Outcome, Part, Transport, ZeroMQTransport

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


SEED = 0
_WARM_UP = 2

Case = tuple[int, int, int]  # bytes of each message, messages, repeats
Make = Callable[[Group], Transport]
Spent = tuple[float, float]  # seconds, and processor seconds of the process


def by_turns(
    world: dist.ProcessGroup, cases: Mapping[str, Case], contestants: Mapping[str, Make]
) -> list[dict[str, dict[str, list[Spent]]]]:
    """What each exchange took on each rank, by case and contestant; a collective.

    The contestants take turns, so that what else the machine does hits all of them alike.

    Args:
        world: The two ranks.
        cases: By name.
        contestants: How each makes its transport.
    """
    figures: dict[str, dict[str, list[Spent]]] = {}
    for case, (size_bytes, count, repeats) in cases.items():
        # Links of their own for every case, or one broken by chance would colour the rest.
        group = Group.from_process_group(world)
        exchanges = {
            name: _contestant(make, group, size_bytes, count) for name, make in contestants.items()
        }
        figures[case] = {name: [] for name in contestants}
        for round in range(repeats + _WARM_UP):
            for name, (exchange, _) in exchanges.items():
                group.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                exchange(round)
                if round >= _WARM_UP:
                    spent = time.perf_counter() - start, time.process_time() - cpu
                    figures[case][name].append(spent)
        group.barrier()
        for _, close in exchanges.values():
            close()
    return Group.from_process_group(world).all_gather_object(figures)


def summary(ranks: Sequence[Sequence[Spent]], size_bytes: int) -> dict[str, float]:
    """Of one case and contestant: time of the slower rank, processor time a rank."""
    seconds = [max(a[0], b[0]) for a, b in zip(*ranks, strict=True)]
    cpu = [(a[1] + b[1]) / 2 for a, b in zip(*ranks, strict=True)]
    low, _, high = statistics.quantiles(seconds, n=4)
    median = statistics.median(seconds)
    return {
        "seconds_median": median,
        "seconds_lower_quartile": low,
        "seconds_upper_quartile": high,
        "bytes_per_second_each_way": size_bytes / median,
        "cpu_seconds_per_rank_median": statistics.median(cpu),
        "repeats": len(seconds),
    }


def _contestant(
    make: Make, group: Group, size_bytes: int, count: int
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A function that exchanges `count` messages with the other rank, and one that closes."""
    peer = 1 - group.rank
    generator = torch.Generator().manual_seed(SEED + group.rank)
    sent = [torch.rand(size_bytes // 4, generator=generator) for _ in range(count)]
    run = bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
    plan = [Part(torch.float32, size_bytes // 4)] * count
    channel = Channel(make(group), run=run, plan=plan)

    def exchange(round: int) -> None:
        posted = [
            channel.post(round, bucket, flat, send_to=peer, recv_from=peer)
            for bucket, flat in enumerate(sent)
        ]
        for taken in posted:
            assert channel.take(taken, 60.0) is Outcome.DELIVERED
            taken.received = None
        while not all(taken.ticket.done for taken in posted):
            time.sleep(0.0001)

    return exchange, channel.close


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
