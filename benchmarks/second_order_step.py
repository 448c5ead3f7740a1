"""One step of gg.SOAP and gg.Shampoo, and of pytorch_optimizer's, on a transformer's matrices.

Both step the same shapes with the same gradients, by turns, and renew roots every 10 steps without
blocks, so that the work is the same. A turn is a window of 10 steps, one of which renews; reported
are processor seconds a step, smallest and median over the turns. `distance` is how far the weights
of SOAP are from theirs after the first window. `ours-single` has an optimizer for each matrix, so
that nothing is stacked; `ours-staggered` spreads the renewals.

pytorch_optimizer is not a dependency: `pip install --no-deps --target DIR pytorch_optimizer`, and
put DIR on PYTHONPATH.

    python -m benchmarks.second_order_step --width 256 --layers 4 --turns 5
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gossipgrad as gg
from benchmarks._common import write

WINDOW = 10
Step = Callable[[], None]


def matrices(width: int, layers: int) -> list[nn.Parameter]:
    """The matrices of a transformer's layers, with gradients; the same in every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    found = []
    for shape in shapes * layers:
        parameter = nn.Parameter(0.02 * torch.randn(shape, generator=generator))
        parameter.grad = torch.randn(shape, generator=generator)
        found.append(parameter)
    return found


def theirs(name: str, parameters: list[nn.Parameter]) -> Step:
    """pytorch_optimizer's, at the settings of ours."""
    import pytorch_optimizer

    options: dict[str, Any] = (
        {"precondition_frequency": WINDOW, "weight_decay": 0.0}
        if name == "SOAP"
        else {"preconditioning_compute_steps": WINDOW}
    )
    return getattr(pytorch_optimizer, name)(parameters, lr=3e-3, **options).step


def contestants(name: str, width: int, layers: int) -> dict[str, tuple[list[nn.Parameter], Step]]:
    """Parameters and a step of each."""
    cls = getattr(gg, name)
    options = {"lr": 3e-3, "weight_decay": 0.0, "max_dim": 4 * width}
    found = {}
    for way in ("ours", "ours-staggered", "ours-single", "pytorch_optimizer"):
        parameters = matrices(width, layers)
        step: Step
        if way == "pytorch_optimizer":
            step = theirs(name, parameters)
        elif way == "ours-single":
            optimizers = [cls([p], **options) for p in parameters]

            def step(optimizers=optimizers) -> None:
                for optimizer in optimizers:
                    optimizer.step()

        else:
            refresh = gg.Staggered(WINDOW) if "staggered" in way else gg.Synchronous(WINDOW)
            step = cls(parameters, **options, refresh=refresh).step
        found[way] = parameters, step
    return found


def change_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    """New ones, the same for all contestants."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def measure(name: str, width: int, layers: int, turns: int) -> dict[str, dict]:
    """Times of a step of each contestant, by turns."""
    ways = contestants(name, width, layers)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    longest: dict[str, list[float]] = {way: [] for way in ways}
    distances: dict[str, float] = {}
    order = list(ways)
    for turn in range(turns + 1):
        for way in order[turn % len(order) :] + order[: turn % len(order)]:
            parameters, step = ways[way]
            each = []
            for k in range(WINDOW):
                change_gradients(parameters, WINDOW * turn + k)
                start = time.process_time()
                step()
                each.append(time.process_time() - start)
            if turn:  # the first window allocates and starts
                seconds[way].append(sum(each) / WINDOW)
                longest[way].append(max(each))
        if turn == 0:
            base = [p.detach() for p in matrices(width, layers)]
            peer = [p.detach() for p in ways["pytorch_optimizer"][0]]
            scale = sum((a - b).square().sum().item() for a, b in zip(peer, base, strict=True))
            for way, (parameters, _) in ways.items():
                off = sum(
                    (p.detach() - q).square().sum().item()
                    for p, q in zip(parameters, peer, strict=True)
                )
                distances[way] = (off / scale) ** 0.5 if scale else float("nan")
    return {
        way: {
            "processor_s": seconds[way],
            "least_s": min(seconds[way]),
            "median_s": statistics.median(seconds[way]),
            "longest_s": statistics.median(longest[way]),
            "distance": distances[way],
        }
        for way in ways
    }


def profile(width: int, layers: int) -> dict[str, float]:
    """Where a window of gg.SOAP spends processor seconds, by operation."""
    parameters = matrices(width, layers)
    optimizer = gg.SOAP(parameters, max_dim=4 * width)
    for _ in range(2):
        optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(WINDOW):
            optimizer.step()
    events = sorted(found.key_averages(), key=lambda e: -e.self_cpu_time_total)[:12]
    return {event.key: event.self_cpu_time_total / 1e6 for event in events}


def main() -> None:
    """Measures, and writes `results/second_order_step.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--names", default="SOAP,Shampoo")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = {
        name: measure(name, options.width, options.layers, options.turns)
        for name in options.names.split(",")
    }
    where = profile(options.width, options.layers)
    write("second_order_step", {"setting": vars(options), "steps": figures, "profile": where})
    for name, ways in figures.items():
        for way, of in ways.items():
            ratio = of["median_s"] / ways["ours"]["median_s"]
            print(f"{name:8} {way:18} {1e3 * of['median_s']:8.1f} ms", end=", ")
            print(f"{ratio:.2f} times ours, longest {1e3 * of['longest_s']:.1f} ms", end=", ")
            print(f"{of['distance']:.1e} from pytorch_optimizer")
    total = sum(where.values())
    print(", ".join(f"{name} {100 * s / total:.0f} %" for name, s in where.items()))


if __name__ == "__main__":
    main()
