"""What it costs that strangers may not speak, and that nobody may listen, on loopback.

Run with `python -m benchmarks.encryption`. Two processes exchange messages over plain links, whose
headers are sealed, and over encrypted ones, by turns; then over plain ones while another process
comes to both ports, again and again, with what is no credentials.
"""

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

from benchmarks._common import write
from benchmarks.transports import SEED, contestant, summary
from gossipgrad.comm import Group, Header, Kind, ZeroMQTransport
from gossipgrad.comm._seal import Opener, Sealer

CASES = {  # name: (bytes of each message, messages, repeats)
    "64 kB": (1 << 16, 1, 40),
    "1 MB": (1 << 20, 1, 30),
    "4 MB": (4 << 20, 1, 30),
    "25 MB as 7 x 4 MB": ((25 << 20) // 7 // 4 * 4, 7, 10),
}
LINKS = {"plain": "zeromq", "encrypted": "zeromq, encrypted"}
FLOOD_SECONDS = 4.0
FLOOD_BYTES = 4 << 20
SEALS = 20_000


def seal_seconds() -> float:
    """For one message: sealing it and opening it, median of ten batches."""
    header = Header(
        kind=Kind.DATA,
        run=bytes(16),
        sender=1,
        round=7,
        dtype=torch.float32,
        size_bytes=FLOOD_BYTES,
    ).pack()
    sealer, opener = Sealer(bytes(32)), Opener(bytes(32))
    taken = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(SEALS // 10):
            opener.open(sealer.seal(header, FLOOD_BYTES), FLOOD_BYTES)
        taken.append((time.perf_counter() - start) / (SEALS // 10))
    return statistics.median(taken)


def compare(world: dist.ProcessGroup) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Seconds and processor seconds of each exchange, by case and link."""
    figures: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case, (size_bytes, count, repeats) in CASES.items():
        group = Group.from_process_group(world)
        exchanges = {
            name: contestant(transport, group, size_bytes, count)
            for name, transport in LINKS.items()
        }
        figures[case] = {name: [] for name in LINKS}
        for round in range(repeats + 2):
            for name, (exchange, _) in exchanges.items():
                group.barrier()
                start, cpu = time.perf_counter(), time.process_time()
                exchange(round)
                if round >= 2:
                    spent = time.perf_counter() - start, time.process_time() - cpu
                    figures[case][name].append(spent)
        group.barrier()
        for _, close in exchanges.values():
            close()
    return figures


def flooded(world: dist.ProcessGroup) -> dict[str, list[tuple[float, float]]]:
    """Exchanges for a while in peace, then for as long under attack."""
    group = Group.from_process_group(world)
    made: list[ZeroMQTransport] = []

    def transport(group: Group) -> ZeroMQTransport:
        made.append(ZeroMQTransport(group, max_payload_bytes=2 * FLOOD_BYTES))
        return made[0]

    exchange, close = contestant(transport, group, FLOOD_BYTES, 1)
    exchange(0)
    ports = [endpoint.rpartition(":")[2] for endpoint in made[0]._endpoints.values()]
    figures: dict[str, list[tuple[float, float]]] = {"in peace": [], "under attack": []}
    round = 1
    for name, spent in figures.items():
        attacker = None
        if name == "under attack" and group.rank == 0:
            command = [sys.executable, "-m", "benchmarks.encryption", "--flood", *ports]
            attacker = subprocess.Popen(command)
        if name == "under attack":
            while made[0].refused_connections == 0:
                time.sleep(0.01)
        end = time.perf_counter() + FLOOD_SECONDS
        while group.broadcast_object(time.perf_counter() < end):
            start, cpu = time.perf_counter(), time.process_time()
            exchange(round)
            spent.append((time.perf_counter() - start, time.process_time() - cpu))
            round += 1
        if attacker is not None:
            attacker.kill()
            attacker.wait()
    refused = group.all_gather_object(made[0].refused_connections)
    group.barrier()
    close()
    return {**figures, "refused": [(float(sum(refused)), 0.0)]}


def flood(ports: list[int]) -> None:
    """Comes to the ports with what is no credentials until it is killed."""

    def come(port: int) -> None:
        rng = random.Random(port)
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(rng.randbytes(200))
                    connection.recv(1 << 12)
            except OSError:
                continue

    for port in ports:
        threading.Thread(target=come, args=(port,), daemon=True).start()
    threading.Event().wait()


def work(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    found = {"cases": compare(dist.group.WORLD), "flood": flooded(dist.group.WORLD)}
    everyone = Group.from_process_group(dist.group.WORLD).all_gather_object(found)
    if rank == 0:
        print(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--flood", type=int, nargs="+")
    options = parser.parse_args()
    if options.flood is not None:
        flood(options.flood)
    if options.rank is not None:
        work(options.rank, options.port)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.encryption", "--port", str(port), "--rank"]
    ranks = [subprocess.Popen([*command, str(r)], stdout=subprocess.PIPE) for r in range(2)]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        ranks[1].wait(timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
    both = json.loads(output.splitlines()[-1])
    results = {
        case: {
            name: summary([rank["cases"][case][name] for rank in both], size_bytes * count)
            | {"cpu_seconds_per_megabyte_sent": cpu_a_megabyte(both, case, name)}
            for name in LINKS
        }
        for case, (size_bytes, count, _) in CASES.items()
    }
    attack = {
        name: summary([rank["flood"][name] for rank in both], FLOOD_BYTES)
        for name in ("in peace", "under attack")
    }
    refused = both[0]["flood"]["refused"][0][0] / FLOOD_SECONDS
    figures = {
        "seed": SEED,
        "seal_and_open_seconds": seal_seconds(),
        "results": results,
        "flood": {"refused_per_second": refused, "message_bytes": FLOOD_BYTES, **attack},
    }
    write("encryption", figures)
    print(f"sealing and opening a header: {1e6 * figures['seal_and_open_seconds']:.1f} us")
    for case, by_name in [*results.items(), (f"4 MB, {refused:.0f} refused a second", attack)]:
        for name, s in by_name.items():
            print(
                f"{case:32}{name:14}{1e3 * s['seconds_median']:8.2f} ms"
                f"{s['bytes_per_second_each_way'] / 1e6:7.0f} MB/s each way"
                f"{1e3 * s['cpu_seconds_per_rank_median']:9.2f} ms CPU a rank"
            )


def cpu_a_megabyte(both: list[dict], case: str, name: str) -> float:
    """Of both ends together, for a megabyte that one of them sends to the other."""
    size_bytes, count, _ = CASES[case]
    spent = statistics.median(
        one[1] + other[1]
        for one, other in zip(*(r["cases"][case][name] for r in both), strict=True)
    )
    return spent / (2 * size_bytes * count / 1e6)


if __name__ == "__main__":
    main()
