"""What it costs to encrypt links, on loopback.

Two processes exchange messages over plain links and over encrypted ones, by turns.

    python -m benchmarks.encryption
"""

import argparse
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks._common import quartiles, write
from benchmarks._processes import in_processes
from gossipgrad.comm import Channel, Group, Outcome, Part, ZeroMQTransport

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

Spent = tuple[float, float]  # seconds, and processor seconds of the process


def by_turns(world: dist.ProcessGroup, repeats: int | None) -> dict[str, dict[str, list[Spent]]]:
    """What each exchange took on this rank, by case and kind of link."""
    figures: dict[str, dict[str, list[Spent]]] = {}
    for case, (size_bytes, count, own_repeats) in CASES.items():
        # Links of their own for every case, or one broken by chance would colour the rest.
        group = Group.from_process_group(world)
        made = {
            name: _exchange(make(group), group, size_bytes, count) for name, make in LINKS.items()
        }
        figures[case] = {name: [] for name in LINKS}
        for round in range((repeats or own_repeats) + _WARM_UP):
            for name, (exchange, _) in made.items():
                group.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                exchange(round)
                if round >= _WARM_UP:
                    spent = time.perf_counter() - start, time.process_time() - cpu
                    figures[case][name].append(spent)
        group.barrier()
        for _, close in made.values():
            close()
    return figures


def _exchange(
    transport: ZeroMQTransport, group: Group, size_bytes: int, count: int
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A function that exchanges `count` messages with the other rank, and one that closes."""
    peer = 1 - group.rank
    generator = torch.Generator().manual_seed(SEED + group.rank)
    sent = [torch.rand(size_bytes // 4, generator=generator) for _ in range(count)]
    run = bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
    channel = Channel(transport, run=run, plan=[Part(torch.float32, size_bytes // 4)] * count)

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


def summary(ranks: list[list[Spent]], sent_bytes: int) -> dict[str, float]:
    """Of one case and kind of link: time of the slower rank, processor time of both ends."""
    pairs = list(zip(*ranks, strict=True))
    low, median, high = quartiles([max(a[0], b[0]) for a, b in pairs])
    cpu = statistics.median(a[1] + b[1] for a, b in pairs)
    return {
        "seconds_median": median,
        "seconds_lower_quartile": low,
        "seconds_upper_quartile": high,
        "bytes_per_second_each_way": sent_bytes / median,
        "cpu_seconds_per_megabyte_sent": cpu / (2 * sent_bytes / 1e6),
        "repeats": len(pairs),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, help="of each case, for a try")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write(secrets.token_hex(32))
        secret.flush()
        os.environ["GOSSIPGRAD_SECRET_FILE"] = secret.name
        both = in_processes(2, by_turns, options.repeats)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for case, (size_bytes, count, _) in CASES.items():
        results[case] = {
            name: summary([rank[case][name] for rank in both], size_bytes * count) for name in LINKS
        }
        for name, figures in results[case].items():
            print(f"{case:20}{name:12}", {k: float(f"{v:.4g}") for k, v in figures.items()})
    print(write("encryption", {"seed": SEED, "results": results}))


if __name__ == "__main__":
    main()
