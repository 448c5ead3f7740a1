"""Large models on loopback, without compute: exchange, consensus, save and start, beside Gloo.

Contestants take turns in the same processes, block by block: a step of gossip, with float32 and
with bfloat16 on the wire; Gloo's all-reduce of the same bytes in one tensor; and Gloo's send and
receive of them, to the partner that gossip has in that round. Then a start, a consensus, a
consensus state dict and a checkpoint of the session's state.

For each: the seconds of the slower rank (median, 99th percentile, longest), processor seconds of a
rank, and by how much its memory grew at most beyond what it had before.

    python -m benchmarks.scale                                # 10 and 100 million parameters
    python -m benchmarks.scale --millions 10 --blocks 2       # a try
    python -m benchmarks.scale --millions 400 --ranks 2 3     # needs about 60 GB
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks._common import forget_peak, in_processes, memory_bytes, merged, spread, tell, write
from gossipgrad import checkpoint
from gossipgrad.topology import dissemination

TENSORS = 100  # of a model; about as many as a ResNet or a small GPT has
STEPS_SECONDS = 3.0  # about how long a block is; three steps at least
SAVE_SECONDS = 600.0
MODELS_OF_MEMORY = 12  # what a rank needs at most, in sizes of the model


class Model(nn.Module):
    """Parameters of equal sizes."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        size = parameters // TENSORS
        self.tensors = nn.ParameterList(torch.zeros(size) for _ in range(TENSORS))


class NoUpdate(Optimizer):
    """A step takes no time: what is left is the exchange."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


class Gossip:
    """A session with all defaults but the type on the wire."""

    def __init__(self, parameters: int, wire_dtype: torch.dtype | None) -> None:
        self.model = Model(parameters)
        self.optimizer = NoUpdate(self.model.parameters())
        self.session = gg.gossip(self.model, self.optimizer, wire_dtype=wire_dtype)

    def step(self) -> None:
        """One step, which mixes what the step before has sent for."""
        self.optimizer.step()


class Gloo:
    """All-reduce, or send and receive, of one tensor."""

    def __init__(self, parameters: int, *, reduces: bool) -> None:
        self.flat = torch.zeros(parameters)
        self.received = None if reduces else torch.zeros(parameters)
        self.schedule, self.rounds = dissemination(dist.get_world_size()), 0

    def step(self) -> None:
        """One exchange."""
        if self.received is None:
            dist.all_reduce(self.flat)
            return
        peers = self.schedule.peers(self.rounds, dist.get_rank())
        self.rounds += 1
        works = [dist.irecv(self.received, peers.recv_from), dist.isend(self.flat, peers.send_to)]
        for work in works:
            work.wait()


CONTESTANTS: dict[str, Callable[[int], Any]] = {
    "gossip": lambda parameters: Gossip(parameters, None),
    "gossip, bf16 wire": lambda parameters: Gossip(parameters, torch.bfloat16),
    "Gloo all-reduce": lambda parameters: Gloo(parameters, reduces=True),
    "Gloo send/recv": lambda parameters: Gloo(parameters, reduces=False),
}


class Clock:
    """Seconds, processor seconds and memory of what is done once or again and again."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}
        self.peak_bytes: dict[str, int] = {}

    def time(self, name: str, act: Callable[[], Any], times: int = 1) -> Any:
        """Begins together with the other ranks; what `act` returned last."""
        gc.collect()
        dist.barrier()
        before, result = forget_peak(), None
        for _ in range(times):
            start, cpu = time.perf_counter(), time.process_time()
            result = act()
            self.seconds.setdefault(name, []).append(time.perf_counter() - start)
            self.cpu_seconds.setdefault(name, []).append(time.process_time() - cpu)
        grown = memory_bytes("VmHWM") - before
        self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), grown)
        return result

    def forget(self, name: str) -> None:
        """Drops times, but not memory."""
        self.seconds.pop(name, None)
        self.cpu_seconds.pop(name, None)


def on_a_rank(_group: Any, parameters: int, blocks: int) -> dict[str, Any]:
    """Everything of one size; what this rank has measured."""
    clock, made = Clock(), {}
    Gossip(TENSORS, None).session.close()  # what is imported for the first session is not timed
    for name, make in CONTESTANTS.items():
        held = memory_bytes()
        made[name] = clock.time(f"start, {name}", lambda make=make: make(parameters))
        clock.time(name, made[name].step, 3)  # links are made, memory is taken
        clock.peak_bytes[name] = memory_bytes("VmHWM") - held
    seconds = torch.tensor([statistics.median(clock.seconds[name][1:]) for name in made])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    for name in made:
        clock.forget(name)
    for _ in range(blocks):
        for (name, contestant), step_seconds in zip(made.items(), seconds.tolist(), strict=True):
            dist.barrier()
            contestant.step()  # leaves an exchange of gossip under way, as every step does
            steps = max(3, min(50, round(STEPS_SECONDS / step_seconds)))
            peak = clock.peak_bytes[name]
            clock.time(name, contestant.step, steps)
            clock.peak_bytes[name] = peak
            time.sleep(2 * step_seconds)  # the exchange of the last step arrives
    session = made["gossip"].session
    for _ in range(3):
        clock.time("consensus()", lambda: enter(session.consensus()))
        clock.time("consensus_state_dict()", session.consensus_state_dict)
    with tempfile.TemporaryDirectory() as folder:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        with checkpoint.Saver(Path(folder), rank=rank, world_size=world_size) as saver:
            state = clock.time("state_dict()", session.state_dict)
            clock.time("save: the step waits", lambda: saver.save(state, step=1))
            clock.time("save: until it is on disk", lambda: saver.wait(SAVE_SECONDS))
        del state
    for contestant in made.values():
        if isinstance(contestant, Gossip):
            contestant.session.close()
    return {"seconds": clock.seconds, "cpu": clock.cpu_seconds, "peak": clock.peak_bytes}


def enter(context: Any) -> None:
    """Enters a block and leaves it."""
    with context:
        pass


def rows_of(parameters: int, world_size: int, blocks: int) -> list[dict[str, Any]]:
    """A row for each thing that was timed: of each repeat, the slowest rank."""
    ranks = in_processes(world_size, on_a_rank, parameters, blocks)
    rows = []
    for name in ranks[0]["seconds"]:
        if name.startswith("start") and "gossip" not in name:
            continue
        slowest = [max(times) for times in zip(*(r["seconds"][name] for r in ranks), strict=True)]
        cpu = [statistics.median(rank["cpu"][name]) for rank in ranks]
        row: dict[str, Any] = {"parameters": parameters, "ranks": world_size, "what": name}
        row |= {f"{key}_seconds": value for key, value in spread(slowest).items()}
        row |= {"repeats": len(slowest), "cpu_seconds": round(statistics.fmean(cpu), 5)}
        row["peak_memory_bytes"] = max(rank["peak"][name] for rank in ranks)
        rows.append(row)
        tell(f"{parameters / 1e6:g} M, {world_size} ranks, {name}:", row)
    return rows


def available_bytes() -> int:
    """Memory that the machine has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def main() -> None:
    """Measures every size and number of ranks, and writes after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[10, 100])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--blocks", type=int, default=5)
    options = parser.parse_args()
    for millions in options.millions:
        for world_size in options.ranks:
            parameters = round(millions * 1e6)
            needs = 4 * parameters * MODELS_OF_MEMORY * world_size
            if needs > available_bytes():
                print(f"{millions:g} M, {world_size} ranks: may need {needs / 1e9:.0f} GB, skipped")
                continue
            rows = rows_of(parameters, world_size, options.blocks)
            merged_rows = merged("scale", rows, "parameters", "ranks", "what")
            print(write("scale", {"seed": 0, "rows": merged_rows}))


if __name__ == "__main__":
    main()
