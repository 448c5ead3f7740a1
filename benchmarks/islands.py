"""Nodes of several ranks, a fast link inside and a slow one outside: islands beside other ways.

Hosts of the laboratory are nodes: their ranks reach each other over loopback, and share one shaped
link. ResNet-50 replayed at 4 MB, its compute shorter and longer than the exchange of one model over
that link. Contestants take turns; bytes are those that the shapers of all nodes have let through.
Cells that are done are kept. Needs Linux and root.

    python -m benchmarks.islands                     # 4 nodes of 2 ranks, then of 4
    python -m benchmarks.islands --sizes 2 --steps 4 # a try
    python -m benchmarks.islands --kills 20          # a rank killed at random moments, loopback
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from benchmarks._common import once, tell, write
from benchmarks.network import Network
from benchmarks.network._contestants import Contestant, Surroundings
from benchmarks.network._links import PAYLOAD_SHARE
from benchmarks.network._replay import sharpen_sleep
from gossipgrad.planning import Profile
from gossipgrad.topology import matching

RATE, NODES, MODEL_BYTES = 1e8, 4, 4e6
BARE_SECONDS = 8 * MODEL_BYTES / (RATE * PAYLOAD_SHARE)  # one model over a node's link
COMPUTES = (0.6, 1.5)  # of that


class Session(Contestant):
    """`gg.gossip`, of islands or of all ranks."""

    def __init__(self, surroundings: Surroundings, **options: Any) -> None:
        super().__init__(surroundings)
        self._session = gg.gossip(self.model, self.optimizer, **options)

    def close(self) -> None:
        self._session.close()


class DDP(Contestant):
    """torch's all-reduce of all ranks; or a hook that reduces inside nodes first."""

    def __init__(self, surroundings: Surroundings, mesh: DeviceMesh | None = None) -> None:
        super().__init__(surroundings)
        self.model = DistributedDataParallel(
            self.model,
            gradient_as_bucket_view=True,
            bucket_cap_mb=surroundings.bucket_bytes(25 << 20) / (1 << 20),
        )
        if mesh is not None:
            self.model.register_comm_hook(Hierarchy(mesh), Hierarchy.reduce)


class Hierarchy:
    """As HSDP: sum inside the node, a slice of it between nodes, gathered inside; in a thread."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._inside, self._between = mesh["node"].get_group(), mesh["gossip"].get_group()
        self._ranks, self._queue = mesh.size(), queue.SimpleQueue[Any]()
        threading.Thread(target=self._work, daemon=True).start()

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The hook."""
        future: Future[Tensor] = Future()
        self._queue.put((bucket.buffer(), future))
        return future

    def _work(self) -> None:
        size = self._inside.size()
        while True:
            flat, future = self._queue.get()
            dist.all_reduce(flat, group=self._inside)
            padded = torch.zeros(-(-flat.numel() // size) * size)
            padded[: flat.numel()] = flat
            mine = padded.chunk(size)[self._inside.rank()].clone()
            dist.all_reduce(mine, group=self._between)
            dist.all_gather(list(padded.chunk(size)), mine, group=self._inside)
            future.set_result(flat.copy_(padded[: flat.numel()]).div_(self._ranks))


class Bare(Contestant):
    """One model between two nodes, a slice by each rank; nothing else."""

    def __init__(self, surroundings: Surroundings, mesh: DeviceMesh) -> None:
        super().__init__(surroundings)
        elements = sum(p.numel() for p in self.model.parameters()) // mesh["node"].size()
        self._group = mesh["gossip"].get_group()
        self._sent, self._received = torch.zeros(elements), torch.zeros(elements)
        self._schedule, self._round = matching(self._group.size()), 0

    def step(self) -> None:
        peer = self._schedule.peers(self._round, self._group.rank()).send_to
        self._round += 1
        assert peer is not None
        works = [
            dist.irecv(self._received, group=self._group, group_src=peer),
            dist.isend(self._sent, group=self._group, group_dst=peer),
        ]
        for work in works:
            work.wait()


KINDS: dict[str, Callable[[Surroundings, DeviceMesh], Contestant]] = {
    "no communication": lambda s, mesh: Contestant(s),
    "bare exchange": Bare,
    "DDP": lambda s, mesh: DDP(s),
    "DDP, hierarchical": DDP,
    "gossip": lambda s, mesh: Session(s),
    "gossip, islands": lambda s, mesh: Session(s, mesh=mesh["gossip"], island=mesh["node"]),
}


def measure_rank(size: int, compute: float, steps: int, out: Path) -> None:
    """One rank: each contestant in turn; rank 0 writes the slowest rank's median step."""
    torch.set_num_threads(1)
    sharpen_sleep()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NODES, size), mesh_dim_names=("gossip", "node"))
    profile = Profile.load("resnet50")
    time_factor = compute * BARE_SECONDS / profile.compute_seconds
    size_factor = MODEL_BYTES / profile.size_bytes
    scaled = profile.scaled(time=time_factor, size=size_factor)
    found = {}
    for name, make in KINDS.items():
        contestant = make(Surroundings(scaled, time_factor, size_factor), mesh)
        for _ in range(3):
            contestant.step()
        dist.barrier()
        mark(out, f"{name} begins")
        seconds, cpu = [], time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            contestant.step()
            seconds.append(time.perf_counter() - start)
        mark(out, f"{name} ends")
        mine = torch.tensor([statistics.median(seconds), (time.process_time() - cpu) / steps])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        found[name] = {"step_seconds": mine[0].item(), "cpu_seconds": mine[1].item()}
        contestant.close()
        dist.barrier()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()


def mark(out: Path, what: str) -> None:
    """Has the laboratory count bytes between two barriers."""
    dist.barrier()
    if dist.get_rank() == 0:
        marker = out.with_suffix(".mark")
        marker.write_text(what)
        while marker.exists():
            time.sleep(0.01)
    dist.barrier()


def measure(size: int, compute: float, steps: int, folder: Path) -> dict[str, Any]:
    """A cell: seconds and bytes of each contestant."""
    out = folder / "partial.json"
    words = [sys.executable, "-m", "benchmarks.islands", "--rank", str(size), str(compute)]
    words += ["--steps", str(steps), "--out", str(out)]
    passed: dict[str, int] = {}
    with Network(hosts=NODES, rate_bits_per_second=RATE) as network:
        processes = []
        for node in range(NODES):
            for local_rank in range(size):
                environment = os.environ | {"OMP_NUM_THREADS": "1"} | network.environment(node)
                environment |= {"RANK": str(node * size + local_rank)}
                environment |= {"WORLD_SIZE": str(NODES * size), "LOCAL_RANK": str(local_rank)}
                processes.append(network.popen(node, words, env=environment))
        marker = out.with_suffix(".mark")
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                raise SystemExit("a rank failed; its error stands above")
            if marker.exists() and (what := marker.read_text()):
                passed[what] = network.passed_bytes(NODES)
                marker.unlink()
            time.sleep(0.01)
    found = json.loads(out.read_text())
    out.unlink()
    for name, figures in found.items():
        total = passed[f"{name} ends"] - passed[f"{name} begins"]
        figures["models_through_a_link"] = round(total / steps / NODES / MODEL_BYTES, 3)
    bound = max(found["no communication"]["step_seconds"], found["bare exchange"]["step_seconds"])
    for figures in found.values():
        figures["of_the_bound"] = round(figures["step_seconds"] / bound, 3)
    return found


def live(rank: int, port: int, results: Any) -> None:
    """A rank of three islands of two: steps, averages and consensus until one island is gone."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=6)
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("gossip", "node"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mode = gg.Stale() if port % 2 else gg.Overlap()
    beats = gg.Heartbeats(interval_seconds=0.1)
    where: dict[str, Any] = {"mesh": mesh["gossip"], "island": mesh["node"], "heartbeats": beats}
    with gg.gossip(model, optimizer, mode=mode, average_every=None, **where) as session:
        results.put((rank, None))
        is_over = torch.zeros(1)
        while not is_over:
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.position % 20 == 0:
                try:
                    with session.consensus():
                        pass
                except gg.GossipError:
                    pass  # a rank was lost in the middle; on all ranks of this island
            is_over.fill_(len(session.membership.living) == 2)
            dist.all_reduce(is_over, dist.ReduceOp.MIN, group=mesh["node"].get_group())
        for _ in range(5):  # a few more exchanges of those that are left
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        own = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        session.average_()
        mean = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        results.put((rank, (own.hexdigest(), mean.hexdigest())))
        session.group.barrier()


def kill(seed: int) -> dict[str, Any]:
    """Kills one of six ranks at a random moment; how the others end."""
    draw, context = random.Random(seed), multiprocessing.get_context("forkserver")
    results = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=live, args=(r, store.port, results)) for r in range(6)]
    for each in ranks:
        each.start()
    for _ in ranks:
        results.get(timeout=120)
    dies, after_seconds = draw.randrange(6), draw.uniform(0.0, 3.0)
    time.sleep(after_seconds)
    ranks[dies].kill()
    rest = [rank for rank in range(6) if rank // 2 != dies // 2]
    ends = {}
    try:
        while len(ends) < len(rest):
            rank, digests = results.get(timeout=120)
            ends[rank] = digests
    finally:
        for each in ranks:
            each.join(30)
            each.kill()
    pairs = [(ends[rank][0], ends[rank + 1][0]) for rank in rest[::2]]
    return {
        "seed": seed,
        "killed": dies,
        "after_seconds": round(after_seconds, 3),
        "ranks_of_islands_are_equal": all(one == other for one, other in pairs),
        "one_digest": len({mean for _, mean in ends.values()}) == 1,
    }


def main() -> None:
    """Measures what is missing, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/islands"))
    parser.add_argument("--rank", nargs=2, help="of a rank: size of its node, compute")
    parser.add_argument("--out", type=Path, help="of a rank")
    parser.add_argument("--kills", type=int, default=0, help="how many; measures nothing else")
    options = parser.parse_args()
    if options.kills:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rows = []
        for seed in range(options.kills):
            path = options.folder / f"kill-{seed}.json"
            rows.append(once(path, {"seed": seed}, lambda s=seed: kill(s)))
            tell("kill:", rows[-1])
        print(write("islands_kills", {"rows": rows}, module="islands"))
        return
    if options.rank:
        measure_rank(int(options.rank[0]), float(options.rank[1]), options.steps, options.out)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for size in options.sizes:
        for compute in COMPUTES:
            path = options.folder / f"{size}-{compute}.json"
            setting = {"size": size, "compute": compute, "steps": options.steps}
            found = once(
                path, setting, lambda s=setting: measure(*s.values(), options.folder.resolve())
            )
            for name, figures in found.items():
                row = {"nodes": NODES, "ranks_of_a_node": size, "compute_of_exchange": compute}
                rows.append({**row, "what": name, **figures})
                tell(f"{NODES} x {size}, compute {compute:g}, {name}:", figures)
    print(write("islands", {"rate_bits_per_second": RATE, "seed": 0, "rows": rows}))


if __name__ == "__main__":
    main()
