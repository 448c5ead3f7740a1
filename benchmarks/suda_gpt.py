"""Decentralized Muon on a GPT over tiny Shakespeare: loss at equal steps, and time on slow links.

Loss: a GPT of two blocks of width 64 on windows of 64 characters, 8 a rank and step, 4 and 8
virtual ranks. `suda` is `gg.suda` as it comes (`semi-atc-gt`, one rotating partner a step). With
all-reduce every rank has the mean gradient, so `all-reduce Muon` and `all-reduce AdamW` are one
process with the batches of all. All get the same windows. Learning rates rise over a tenth of the
steps and fall to zero; each contestant has its own from three that lie a factor of 3 apart, by the
first seed's loss; the other seeds run with that one alone. Reported is the mean loss of the test
part, in nats a character, of the mean of all replicas.

Time (`--time`): the default GPT (818,048 parameters) in one process a rank, each behind a link of
its own of the network laboratory. Contestants take turns block by block; a block is a few steps
after two that do not count. The processes share this machine's cores: compute is real, and slower
than on a machine a rank. Needs what `benchmarks.netlab` needs: Linux, root, iproute2.

    python -m benchmarks.suda_gpt --ranks 4
    python -m benchmarks.suda_gpt --ranks 4 --time
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import gossipgrad as gg
from benchmarks._common import RESULTS, write
from benchmarks.netlab import Network
from gossipgrad import data
from gossipgrad.models import GPT, training_loss
from gossipgrad.simulate import SudaRanks

SEEDS, RATES = (0, 1, 2), (1e-3, 3e-3, 1e-2)
CONTEXT, BATCH = 64, 8
RATE_BITS, ROUNDS, WARM_UP = 1e8, 3, 2
SUDA: dict[str, dict[str, Any]] = {
    "suda": {},
    "suda, demuon": {"backbone": "demuon"},
    "suda, bf16 wire": {"wire_dtype": torch.bfloat16},
}


def muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """One learning rate for both of its parts."""
    return gg.Muon(model, lr, scale="match_rms_adamw")


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """With the moments that `gg.Muon` gives its own AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


ALL_REDUCE = {"all-reduce Muon": muon, "all-reduce AdamW": adamw}


# -- loss ----------------------------------------------------------------------------------------


def windows(text: Any, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Characters, and those that follow them."""
    x, y = text.batch(indices.flatten())
    return x[:, :CONTEXT], y[:, :CONTEXT]


def stepper(name: str, model: GPT, ranks: int, lr: float) -> tuple[Any, Callable, Callable]:
    """An optimizer, a step on the windows of all ranks, and the model that is evaluated."""
    if name in ALL_REDUCE:
        optimizer = ALL_REDUCE[name](model, lr)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.zero_grad()
            training_loss(model, x, y).backward()
            optimizer.step()

        return optimizer, step, lambda: model
    virtual = SudaRanks(
        model,
        ranks,
        **SUDA[name],
        lr=lr,
        scale="match_rms_adamw",
        batching="loop",
        loss=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
    )

    def steps(x: Tensor, y: Tensor) -> None:
        virtual.step(x.view(ranks, BATCH, -1), y.view(ranks, BATCH, -1))

    return virtual.optimizer, steps, virtual.consensus_model


def train(name: str, lr: float, ranks: int, steps: int, seed: int) -> dict[str, float]:
    """One run."""
    loaded = data.load("shakespeare")
    torch.manual_seed(seed)
    model = GPT(65, context=CONTEXT, layers=2, width=64)
    optimizer, step, evaluated = stepper(name, model, ranks, lr)
    scheduler = LambdaLR(optimizer, lambda k: min((k + 1) / (0.1 * steps), (1 - k / steps) / 0.9))
    generator = torch.Generator().manual_seed(seed)
    start = time.process_time()
    for _ in range(steps):
        chosen = torch.randint(len(loaded.train), (ranks * BATCH,), generator=generator)
        step(*windows(loaded.train, chosen))
        scheduler.step()
    with torch.no_grad():
        x, y = windows(loaded.test, torch.arange(len(loaded.test)))
        loss = training_loss(evaluated(), x, y).item()
    return {"lr": lr, "seed": seed, "loss": loss, "cpu_seconds": time.process_time() - start}


def losses(ranks: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """All runs of one number of ranks; those that are done are not run again."""
    cells = kept().get("loss", {})
    held = cells.setdefault(f"{ranks} ranks, {steps} steps", {})
    for seed in SEEDS:
        for name in ("suda", *ALL_REDUCE):
            done = held.setdefault(name, [])
            for lr in RATES if seed == SEEDS[0] else (best_rate(done),):
                if not any(one["lr"] == lr and one["seed"] == seed for one in done):
                    done.append(train(name, lr, ranks, steps, seed))
                    print(f"{name:16} {done[-1]}", flush=True)
                    write("suda_gpt", kept() | {"loss": cells})
    for name, done in held.items():
        found = [one["loss"] for one in done if one["lr"] == best_rate(done)]
        spread = statistics.stdev(found)
        print(f"{name:16} lr {best_rate(done):g}: {statistics.mean(found):.4f} +- {spread:.4f}")
    return held


def best_rate(done: list[dict[str, float]]) -> float:
    """By the first seed."""
    return min((one for one in done if one["seed"] == SEEDS[0]), key=lambda one: one["loss"])["lr"]


def kept() -> dict[str, Any]:
    """What is in the results."""
    path = RESULTS / "suda_gpt.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    return {part: held[part] for part in ("loss", "time") if part in held}


# -- time ----------------------------------------------------------------------------------------


def block(name: str, steps: int) -> dict[str, float]:
    """A few steps of one contestant on this rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = GPT(65)
    session: Any = nullcontext()
    if name in ALL_REDUCE:
        model = DistributedDataParallel(model)
        optimizer = ALL_REDUCE[name](model, 1e-3)
    else:
        optimizer = muon(model, 1e-3)
        session = gg.suda(model, optimizer, **SUDA[name])
    generator = torch.Generator().manual_seed(rank)
    interface = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics/tx_bytes"
    begun, sent = 0.0, 0
    with session:
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                dist.barrier()
                begun, sent = time.perf_counter(), int(interface.read_text())
            x = torch.randint(65, (4, 129), generator=generator)
            optimizer.zero_grad()
            training_loss(model, x[:, :-1], x[:, 1:]).backward()
            optimizer.step()
        seconds = (time.perf_counter() - begun) / steps
        megabytes = (int(interface.read_text()) - sent) / steps / 1e6
        dist.barrier()
    return {"step_seconds": seconds, "sent_megabytes_per_step": megabytes}


def work(out: str, steps: int) -> None:
    """A rank: all contestants in turn, several times."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*SUDA, *ALL_REDUCE)}
    for turn in range(ROUNDS):
        for name in list(found)[:: 1 - 2 * (turn % 2)]:
            found[name].append(block(name, steps))
            if dist.get_rank() == 0:
                print(f"{name:16} {found[name][-1]}", flush=True)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def times(ranks: int, steps: int) -> None:
    """Runs the ranks on a network of their own."""
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, "-m", "benchmarks.suda_gpt", "--work", out.name]
        command += ["--steps", str(steps)]
        with Network(hosts=ranks, rate_bits_per_second=RATE_BITS) as network:
            network.verify()
            processes = [
                network.popen(host, command, env={**os.environ, **network.environment(host)})
                for host in range(ranks)
            ]
            if codes := [code for code in (p.wait(1800) for p in processes) if code]:
                raise subprocess.CalledProcessError(codes[0], command)
        found = json.loads(Path(out.name).read_text())
    cells = kept().get("time", {})
    cells[f"{ranks} ranks, {RATE_BITS / 1e6:g} Mbit/s"] = found
    write("suda_gpt", kept() | {"time": cells})
    for name, blocks in found.items():
        seconds = [each["step_seconds"] for each in blocks]
        sent = statistics.median(each["sent_megabytes_per_step"] for each in blocks)
        spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
        print(f"{name:16} {statistics.median(seconds):.3f} s ({spread}), {sent:.2f} MB a step")


def main() -> None:
    """Fills one part of `results/suda_gpt.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, help="150 of training, 10 of a block with --time")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.work:
        work(options.work, options.steps)
    elif options.time:
        times(options.ranks, options.steps or 10)
    else:
        losses(options.ranks, options.steps or 150)


if __name__ == "__main__":
    main()
