"""What sharing roots saves with DDP: processor time of roots on each rank, and equal bits.

gg.SOAP on a small GPT under DistributedDataParallel with 2 and 4 processes on one machine, with
and without `gg.share_roots()`, from equal weights on the same global batches. Reported are the
processor time that each rank spent on roots, the mean over ranks and that of the busiest, which
falls only as far as there are units to deal; the bytes of roots sent; and whether final weights of
sharing equal those without, bit for bit.

    python -m benchmarks.second_order_ranks
"""

import argparse
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gossipgrad as gg
from benchmarks._common import write
from gossipgrad import models

GLOBAL_BATCH = 4


def timed(job: Any, spent: list[float]) -> Any:
    """A job that notes the processor time of the thread that runs it."""

    def run() -> Any:
        start = time.thread_time()
        value = job()
        spent.append(time.thread_time() - start)
        return value

    return run


def rank_main(rank: int, world_size: int, folder: str, shares: bool, options: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = models.GPT(65, layers=options.layers, width=options.width)
    policy = gg.Background(4, 2, fixed_delay=True)
    optimizer = gg.SOAP(model, lr=1e-3, max_dim=256, refresh=policy)
    spent: list[float] = []
    make_job = optimizer.make_job
    optimizer.make_job = lambda unit, group: timed(make_job(unit, group), spent)
    replica = DistributedDataParallel(model)
    data = torch.Generator().manual_seed(1)
    each = GLOBAL_BATCH // world_size
    sharing = gg.share_roots(optimizer, patience_seconds=300) if shares else nullcontext()
    start = time.perf_counter()
    with sharing:
        for _ in range(options.steps):
            x = torch.randint(65, (GLOBAL_BATCH, 33), generator=data)
            x = x[rank * each : (rank + 1) * each]
            optimizer.zero_grad()
            F.cross_entropy(replica(x[:, :-1]).transpose(1, 2), x[:, 1:]).backward()
            optimizer.step()
        optimizer.refresher.drain()
        seconds = time.perf_counter() - start
        dist.barrier()
        found = {
            "root_cpu_seconds": sum(spent),
            "roots_computed": len(spent),
            "seconds": seconds,
            "weights": [p.detach().clone() for p in model.parameters()],
        }
        if shares:
            found["sent_bytes"] = sharing.stats.sent_bytes
            found["alone"] = sharing.stats.alone
    torch.save(found, f"{folder}/rank{rank}")
    dist.barrier()
    optimizer.close()
    dist.destroy_process_group()


def run(world_size: int, shares: bool, options: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        of = world_size, folder, shares, options
        mp.spawn(rank_main, of, nprocs=world_size)
        return [torch.load(Path(folder) / f"rank{rank}") for rank in range(world_size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    found = {}
    for world_size in (2, 4):
        plain = run(world_size, False, options)
        shared = (
            run(world_size, True, options) if world_size > 1 else [dict(each) for each in plain]
        )
        equal = all(
            torch.equal(a, b)
            for one, other in zip(plain, shared, strict=True)
            for a, b in zip(one.pop("weights"), other["weights"], strict=True)
        )
        for each in shared:
            each.pop("weights", None)
        cpu = [sum(r["root_cpu_seconds"] for r in ranks) / world_size for ranks in (plain, shared)]
        found[world_size] = {
            "each_rank_computes_all": plain,
            "shared": shared,
            "root_cpu_seconds_a_rank": {"all": cpu[0], "shared": cpu[1]},
            "share_of_processor_time": cpu[1] / cpu[0],
            "share_of_the_busiest_rank": max(r["root_cpu_seconds"] for r in shared) / cpu[0],
            "equal_bit_for_bit": equal,
        }
        busiest = found[world_size]["share_of_the_busiest_rank"]
        print(world_size, cpu, cpu[1] / cpu[0], "busiest", busiest, "equal", equal, flush=True)
    print(write("second_order_ranks", {"options": vars(options), "figures": found}))


if __name__ == "__main__":
    main()
