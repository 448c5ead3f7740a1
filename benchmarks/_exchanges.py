"""Symmetric exchanges of two ranks over one link or another: what each takes."""

import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from gossipgrad.comm import Channel, Group, Outcome, Part, Transport

SEED = 0
_WARM_UP = 2

Case = tuple[int, int, int]  # bytes of each message, messages, repeats
Make = Callable[[Group], Transport]
Spent = tuple[float, float]  # seconds, and processor seconds of the process


def by_turns(
    world: dist.ProcessGroup, cases: Mapping[str, Case], contestants: Mapping[str, Make | None]
) -> list[dict[str, dict[str, list[Spent]]]]:
    """What each exchange took on each rank, by case and contestant; a collective.

    The contestants take turns, so that what else the machine does hits all of them alike.

    Args:
        world: The two ranks.
        cases: By name.
        contestants: How each makes its transport; None for torch's `isend` and `irecv`.
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
    make: Make | None, group: Group, size_bytes: int, count: int
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """A function that exchanges `count` messages with the other rank, and one that closes."""
    peer = 1 - group.rank
    generator = torch.Generator().manual_seed(SEED + group.rank)
    sent = [torch.rand(size_bytes // 4, generator=generator) for _ in range(count)]
    if make is None:
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
