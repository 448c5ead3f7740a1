"""Second-order optimizers: loss at equal steps and equal time, how even steps are, and memory.

* `loss`: a small GPT on Shakespeare (2 layers, width 64, context 64) and a perceptron on
  Fashion-MNIST of 14 x 14 pixels, one thread. Every optimizer has its learning rate from one
  search, on the first seed. Warm-up in 5 % of the steps, then linear decay to zero. Reported: the
  loss on held-out samples after equal steps; after as many steps as take AdamW's processor time;
  the share of steps after which each is where AdamW ends; and roots of SOAP that are 0 to 10
  steps late.
* `steps`: the optimizer's part of a step on a GPT of 4 layers and width 256, by turns, a window of
  steps at a time, from equal weights on equal batches; refreshes every 10 steps. The median, the
  mean, the 99th percentile and the longest step, by the clock, and in processor time of the thread
  that trains (of the process with more threads), which a busy machine changes less.
* `memory`: bytes of state a parameter, by option, on square matrices.
* `sharing`: SOAP on the same GPT with equal gradients on all ranks, as under
  DistributedDataParallel, on processes with one thread each over Gloo on loopback: each rank
  computes everything, roots are shared (`gg.share_roots`), or state is sharded (`shard=True`). By
  turns, a window of steps at a time. The state of each rank, the bytes that all ranks send in a
  step, and the processor time of a step, of the rank with most: more processes than cores would
  share them. The bytes are those of the loopback device: run it in a network namespace of its
  own, `unshare --net sh -c "ip link set lo up; python ..."`.

`pytorch_optimizer` takes part in `loss` and `steps` where it is installed.

    python -m benchmarks.second_order loss
    python -m benchmarks.second_order steps --threads 2
    python -m benchmarks.second_order memory
    python -m benchmarks.second_order sharing --processes 1 2 4
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gossipgrad as gg
from benchmarks._common import best_rate, in_processes, paired, spread, tell, write
from benchmarks._tasks import GPT, Part, loss, mlp, whole, windows

STEPS, SEEDS = 300, 3
RATES = (1e-3, 3e-3, 1e-2)
CONTEXT = 64
EVALUATIONS = 25
LATE = (0, 1, 3, 5, 10)
Make = Callable[[nn.Module, float], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda model, lr: torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01
    ),
    "Muon": lambda model, lr: gg.Muon(
        model, lr=lr, scale="match_rms_adamw", weight_decay=0.01, betas=(0.9, 0.95)
    ),
    "SOAP": lambda model, lr: gg.SOAP(model, lr=lr),
    "KLShampoo": lambda model, lr: gg.KLShampoo(model, lr=lr),
    "Shampoo": lambda model, lr: gg.Shampoo(model, lr=lr),
}


if find_spec("pytorch_optimizer") is not None:
    import pytorch_optimizer

    OPTIMIZERS |= {
        "pytorch_optimizer SOAP": lambda model, lr: pytorch_optimizer.SOAP(
            model.parameters(), lr=lr, max_precondition_dim=2048
        ),
        "pytorch_optimizer Shampoo": lambda model, lr: pytorch_optimizer.Shampoo(
            model.parameters(), lr=lr, preconditioning_compute_steps=10
        ),
    }


class Gpt:
    """A small GPT on Shakespeare."""

    batch = 8

    def model(self) -> nn.Module:
        """A new one."""
        return GPT(context=CONTEXT, layers=2, width=64)

    def sample(self, part: int, generator: torch.Generator, count: int) -> Part:
        """Random windows."""
        return windows(part, generator, count, CONTEXT)


class Perceptron:
    """A perceptron on Fashion-MNIST."""

    batch = 128

    def __init__(self) -> None:
        self.parts = [(F.avg_pool2d(x, 2), y) for x, y in whole("fashion-mnist")]

    def model(self) -> nn.Module:
        """A new one."""
        return mlp(196, 10, 64, 64)

    def sample(self, part: int, generator: torch.Generator, count: int) -> Part:
        """Random samples."""
        inputs, labels = self.parts[part]
        chosen = torch.randint(len(inputs), (count,), generator=generator)
        return inputs[chosen], labels[chosen]


def train(task: Any, make: Make, lr: float, steps: int, seed: int) -> dict[str, Any]:
    """One run: losses on held-out samples, at which steps, and processor seconds."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = make(model, lr)
    generator = torch.Generator().manual_seed(seed)
    x, y = task.sample(1, torch.Generator().manual_seed(7), 16 * task.batch)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warm, (steps - k) / (steps - warm))
    )
    at, losses, seconds, in_step = [], [], 0.0, 0.0
    for step in range(1, steps + 1):
        inputs, labels = task.sample(0, generator, task.batch)
        start = time.process_time()
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()
        before = time.process_time()
        optimizer.step()
        end = time.process_time()
        seconds, in_step = seconds + end - start, in_step + end - before
        schedule.step()
        if step % max(1, steps // EVALUATIONS) == 0 or step == steps:
            with torch.no_grad():
                at.append(step)
                losses.append(round(loss(model(x), y).item(), 5))
    if isinstance(optimizer, gg.second_order.SecondOrder):
        optimizer.close()
    return {"lr": lr, "at": at, "loss": losses, "seconds": seconds, "in_step": in_step}


def reaches(run: dict[str, Any], target: float, steps: int) -> float | None:
    """The share of steps after which a run is at this loss, between evaluations by a line."""
    before = (0, float("inf"))
    for at, value in zip(run["at"], run["loss"], strict=True):
        if value <= target:
            fall = (before[1] - target) / (before[1] - value) if before[1] < float("inf") else 1.0
            return (before[0] + fall * (at - before[0])) / steps
        before = at, value
    return None


def measure_task(
    name: str, task: Any, found: dict[str, Any], steps: int, seeds: int, save: Callable[[], Any]
) -> None:
    """Adds to `found` the optimizers, and then the delays, that it lacks."""
    for each, make in OPTIMIZERS.items():
        if each in found["optimizers"]:
            continue
        first: dict[float, dict[str, Any]] = {}

        def final(lr: float, make: Make = make, first: dict = first) -> float:
            try:
                first[lr] = train(task, make, lr, steps, 0)
            except torch.linalg.LinAlgError:  # of weights that are not finite any more
                return math.inf
            return first[lr]["loss"][-1]

        lr, tried = best_rate(RATES, final, 3.0)
        runs = [first[lr], *(train(task, make, lr, steps, seed) for seed in range(1, seeds))]
        finals = [run["loss"][-1] for run in runs]
        milliseconds = 1e3 * statistics.median(one["seconds"] / steps for one in runs)
        adamw = found["optimizers"].get("AdamW", {"final": finals, "ms_a_step": milliseconds})
        fewer = min(steps, round(steps * adamw["ms_a_step"] / milliseconds))
        timed = [train(task, make, lr, fewer, seed)["loss"][-1] for seed in range(seeds)]
        shares = zip(runs, adamw["final"], strict=True)
        found["optimizers"][each] = {
            "lr": lr,
            "searched": {str(k): v if v < math.inf else None for k, v in sorted(tried.items())},
            "final": finals,
            "mean": statistics.mean(finals),
            "over_adamw": paired(finals, adamw["final"]),
            "equal_time": {"steps": fewer, "final": timed, **paired(timed, adamw["final"])},
            "share_of_steps": [reaches(one, target, steps) for one, target in shares],
            "ms_a_step": milliseconds,
            "ms_in_optimizer": 1e3 * statistics.median(one["in_step"] / steps for one in runs),
        }
        tell(f"{name} {each}", found["optimizers"][each])
        save()
    lr = found["optimizers"]["SOAP"]["lr"]
    for delay in LATE:
        refresh = gg.Refresh(10, delay)

        def late(model: nn.Module, lr: float, refresh: gg.Refresh = refresh) -> Optimizer:
            return gg.SOAP(model, lr=lr, refresh=refresh)

        runs = [train(task, late, lr, steps, seed) for seed in range(seeds)]
        again = train(task, late, lr, steps, 0)["loss"]
        finals = [one["loss"][-1] for one in runs]
        found["late"][str(delay)] = {"final": finals, "repeats": again == runs[0]["loss"]}
        save()
    tell(f"{name} late", found["late"])


def measure_loss(steps: int, seeds: int) -> None:
    """Trains, and writes `results/second_order_loss.json` after each part."""
    figures: dict[str, Any] = {"setting": {"steps": steps, "seeds": seeds}}
    for name, kind in (("gpt", Gpt), ("mlp", Perceptron)):
        found: dict[str, Any] = {"optimizers": {}, "late": {}}
        figures[name] = found

        def save() -> None:
            write("second_order_loss", figures, module="second_order")

        measure_task(name, kind(), found, steps, seeds, save)


WINDOW = 20
STEPPERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "Muon": gg.Muon,
    "SOAP": lambda model: gg.SOAP(model, lr=1e-3),
    "SOAP, 5 late": lambda model: gg.SOAP(model, lr=1e-3, refresh=gg.Refresh(10, 5)),
    "Shampoo": gg.Shampoo,
    "Shampoo, 5 late": lambda model: gg.Shampoo(model, refresh=gg.Refresh(10, 5)),
}


class Contestant:
    """A model, its optimizer, and what has been measured of its steps."""

    def __init__(self, make: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = GPT(context=CONTEXT, layers=4, width=256)
        self.optimizer = make(self.model)
        self.data = torch.Generator().manual_seed(1)
        self.walls: list[float] = []
        self.processor: list[float] = []  # of one thread, or with more of the process

    def window(self, steps: int, *, counts: bool) -> None:
        """Some steps; the first ones do not count. Work that is late is waited for."""
        for _ in range(steps):
            x, y = windows(0, self.data, 8, CONTEXT)
            self.optimizer.zero_grad()
            loss(self.model(x), y).backward()
            clock = time.thread_time if torch.get_num_threads() == 1 else time.process_time
            start, before = time.perf_counter(), clock()
            self.optimizer.step()
            if counts:
                self.processor.append(clock() - before)
                self.walls.append(time.perf_counter() - start)
        self.optimizer.state_dict()

    def figures(self) -> dict[str, Any]:
        """Of all steps that count, in milliseconds, on the clock and on processors."""
        figures: dict[str, Any] = {"steps": len(self.walls)}
        for what, seconds in (("", self.walls), ("processor_", self.processor)):
            found = spread(seconds)
            figures[f"{what}mean_ms"] = 1e3 * statistics.mean(seconds)
            figures |= {f"{what}{name}_ms": 1e3 * value for name, value in found.items()}
            figures[f"{what}p99_over_median"] = found["p99"] / found["median"]
        if isinstance(self.optimizer, gg.second_order.SecondOrder):
            figures["waited_ms"] = 1e3 * self.optimizer.refresh_stats.waited_seconds
        return figures


def measure_steps(rounds: int, threads: int, names: list[str]) -> None:
    """Measures by turns, and writes `results/second_order_steps.json`."""
    made = STEPPERS | {
        name: (lambda model, make=make: make(model, 1e-3))
        for name, make in OPTIMIZERS.items()
        if name.startswith("pytorch_optimizer")
    }
    contestants = {
        name: Contestant(make) for name, make in made.items() if not names or name in names
    }
    for turn in range(rounds + 1):
        for contestant in contestants.values():
            contestant.window(WINDOW if turn else 3, counts=turn > 0)
    found = {name: each.figures() for name, each in contestants.items()}
    for name, figures in found.items():
        tell(name, {key: round(value, 2) for key, value in figures.items()})
    for each in contestants.values():
        if hasattr(each.optimizer, "close"):
            each.optimizer.close()
    name = f"second_order_steps_{threads}"
    print(write(name, {"threads": threads, "figures": found}, module="second_order"))


MEMORY: dict[str, dict[str, Any]] = {
    "": {},
    "delay=5": {"refresh": gg.Refresh(10, 5)},
    "root_dtype=bfloat16": {"root_dtype": torch.bfloat16},
    "bfloat16, delay=5": {"root_dtype": torch.bfloat16, "refresh": gg.Refresh(10, 5)},
}
MATRIX = 256


def state_bytes(optimizer: Optimizer, names: tuple[str, ...] = ("",)) -> int:
    """Bytes of the memory behind an optimizer's state, of tensors whose names start so."""
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for state in optimizer.state_dict()["state"].values()
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and name.startswith(names)
    }
    return sum(found.values())


def squares(parameters: int) -> nn.ModuleList:
    """Square matrices."""
    count = round(parameters / MATRIX**2)
    return nn.ModuleList(nn.Linear(MATRIX, MATRIX, bias=False) for _ in range(count))


def stepped(model: nn.Module, optimizer: Optimizer, steps: int, seed: int = 0) -> None:
    """Steps with random gradients, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def measure_memory(sizes: list[int]) -> None:
    """Writes `results/second_order_memory.json`."""
    found: dict[str, Any] = {}
    for size in sizes:
        model = squares(size)
        count = sum(p.numel() for p in model.parameters())
        of_size = found[f"{size / 1e6:g} M"] = {}
        for kind in ("AdamW", "SOAP", "KLShampoo", "Shampoo"):
            for option, settings in MEMORY.items() if kind != "AdamW" else [("", {})]:
                if kind == "AdamW":
                    optimizer = torch.optim.AdamW(model.parameters())
                else:
                    optimizer = getattr(gg, kind)(model, **settings)
                stepped(model, optimizer, 1)
                name = f"{kind}({option})"
                of_size[name] = round(state_bytes(optimizer) / count, 2)
                if kind != "AdamW":
                    optimizer.close()
                    roots = state_bytes(optimizer, ("left_", "right_"))
                    of_size[f"{name}, roots"] = round(roots / count, 2)
                tell(f"{size / 1e6:g} M {name}", {"bytes a parameter": of_size[name]})
                write("second_order_memory", found, module="second_order")


WAYS = ("whole", "shared roots", "sharded")


def loopback_bytes() -> int:
    """What the loopback device of this network namespace has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def shared(group: Any, rounds: int) -> dict[str, Any]:
    """Processor time of steps, bytes of all ranks in a step and of state, by way, of one rank."""
    taking_part = WAYS if group.size() > 1 else WAYS[:1]
    made: dict[str, tuple[nn.Module, Any, Any]] = {}
    for way in taking_part:
        torch.manual_seed(0)
        model = GPT(context=CONTEXT, layers=4, width=256)
        optimizer, sharing = gg.SOAP(model, lr=1e-3), None
        if way != "whole":
            # Patient: a busy machine changes no figure.
            sharing = gg.share_roots(optimizer, shard=way == "sharded", patience_seconds=600)
        made[way] = model, optimizer, sharing
    seconds: dict[str, list[float]] = {way: [] for way in taking_part}
    sent: dict[str, list[float]] = {way: [] for way in taking_part}
    for turn in range(rounds + 1):
        for way, (model, optimizer, _) in made.items():
            steps = WINDOW if turn else 3
            before, begin = loopback_bytes(), time.process_time()
            stepped(model, optimizer, steps, seed=turn)
            optimizer.state_dict()
            group.barrier().wait()
            if turn:
                seconds[way].append((time.process_time() - begin) / steps)
                sent[way].append((loopback_bytes() - before) / steps)
    found = {
        way: {
            "processor_ms": 1e3 * statistics.median(seconds[way]),
            "sent_bytes": statistics.median(sent[way]),
            "state_bytes": state_bytes(optimizer),
            "weights": sum(float(p.detach().sum()) for p in model.parameters()),
        }
        for way, (model, optimizer, _) in made.items()
    }
    assert len({each.pop("weights") for each in found.values()}) == 1, "weights differ"
    group.barrier().wait()
    for way, (_, optimizer, sharing) in made.items():
        if way == "shared roots":
            sharing.close()
        optimizer.close()
    return found


def measure_sharing(processes: list[int], rounds: int) -> None:
    """Writes `results/second_order_sharing.json`."""
    figures: dict[str, Any] = {
        "parameters": sum(p.numel() for p in Contestant(gg.SOAP).model.parameters())
    }
    for count in processes:
        ranks = in_processes(count, shared, rounds)
        figures[f"{count} processes"] = {
            way: {
                "processor_ms": round(max(rank[way]["processor_ms"] for rank in ranks), 1),
                "sent_bytes": round(ranks[0][way]["sent_bytes"]),
                "state_bytes": [rank[way]["state_bytes"] for rank in ranks],
            }
            for way in ranks[0]
        }
        tell(f"{count} processes", figures[f"{count} processes"])
        write("second_order_sharing", figures, module="second_order")


def main() -> None:
    """Answers one question."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("question", choices=("loss", "steps", "memory", "sharing"))
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run of `loss`")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--rounds", type=int, default=2, help="of `steps` and `sharing`, 20 steps each"
    )
    parser.add_argument("--threads", type=int, default=1, help="of `steps`")
    parser.add_argument("--only", nargs="*", default=[], help="contestants of `steps`")
    parser.add_argument("--sizes", type=float, nargs="*", default=[1e7, 1e8], help="of `memory`")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="of `sharing`")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.question == "loss":
        measure_loss(options.steps, options.seeds)
    elif options.question == "steps":
        measure_steps(options.rounds, options.threads, options.only)
    elif options.question == "sharing":
        measure_sharing(options.processes, options.rounds)
    else:
        measure_memory([round(size) for size in options.sizes])


if __name__ == "__main__":
    main()
