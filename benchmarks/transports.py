"""Latency, bandwidth and CPU time of the transports, between two processes on loopback.

Run with `python -m benchmarks.transports`. Both ranks send and receive at once (a symmetric
exchange). The contestants take turns, so that what else the machine does hits all of them alike.
"""

import argparse
import json
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks._common import write
from gossipgrad.comm import Channel, GlooTransport, Group, Outcome, Part, Transport, ZeroMQTransport

SEED = 0
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
CONTESTANTS = ("zeromq", "gloo", "isend/irecv")
TRANSPORTS = {
    "zeromq": ZeroMQTransport,
    "zeromq, encrypted": partial(ZeroMQTransport, encrypt=True),
    "gloo": GlooTransport,
}


def contestant(
    name: str | Callable[[Group], Transport], group: Group, size_bytes: int, count: int
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A function that exchanges `count` messages with the other rank, and one that closes.

    Args:
        name: One of the contestants, or how a transport is made.
        group: The two ranks.
        size_bytes: Of a message.
        count: How many.
    """
    peer = 1 - group.rank
    generator = torch.Generator().manual_seed(SEED + group.rank)
    sent = [torch.rand(size_bytes // 4, generator=generator) for _ in range(count)]
    if name == "isend/irecv":
        received = [torch.empty(size_bytes // 4) for _ in range(count)]

        def exchange_raw(round: int) -> None:
            works = [
                work
                for s, r in zip(sent, received, strict=True)
                for work in (dist.irecv(r, peer), dist.isend(s, peer))
            ]
            for work in works:
                assert work is not None
                work.wait()

        return exchange_raw, lambda: None
    run = bytes.fromhex(group.broadcast_object(secrets.token_hex(16)))
    plan = [Part(torch.float32, size_bytes // 4)] * count
    transport = TRANSPORTS[name] if isinstance(name, str) else name
    channel = Channel(transport(group), run=run, plan=plan)

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


def work(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    figures: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case, (size_bytes, count, repeats) in CASES.items():
        # Links of their own for every case, or one broken by chance would colour the rest.
        group = Group.from_process_group(dist.group.WORLD)
        exchanges = {name: contestant(name, group, size_bytes, count) for name in CONTESTANTS}
        figures[case] = {name: [] for name in CONTESTANTS}
        for round in range(repeats + 2):
            for name, (exchange, _) in exchanges.items():
                group.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                exchange(round)
                spent = (time.perf_counter() - start, time.process_time() - cpu)
                if round >= 2:
                    figures[case][name].append(spent)
        group.barrier()
        for _, close in exchanges.values():
            close()
    everyone = Group.from_process_group(dist.group.WORLD).all_gather_object(figures)
    if rank == 0:
        print(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def summary(ranks: list[list[list[float]]], size_bytes: int) -> dict[str, float]:
    """Of one case: time of the slower rank, CPU time a rank."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank, options.port)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.transports", "--port", str(port), "--rank"]
    ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE) for r in range(2)]
    try:
        output, _ = ranks[0].communicate(timeout=240)
        ranks[1].wait(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
    both = json.loads(output.splitlines()[-1])
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
