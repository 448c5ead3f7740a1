"""Error and time of inverse fourth roots, by condition number and method.

The matrices have 256 rows, eigenvalues that fall evenly in their logarithm, and are rounded to
fp32; the truth is the root of the matrix before rounding, in fp64. Errors are relative, in the
Frobenius norm, medians over seeds. The last row is a matrix of rank 8: whether its root is finite,
symmetric, and its largest entry.

    python -m benchmarks.second_order_roots
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks._common import write
from gossipgrad.second_order import inverse_root, newton_inverse_root

EPS = 1e-12


def in_fp32(matrices: Tensor, root: int, eps: float) -> Tensor:
    """By eigenvalues in fp32, as others do by default."""
    values, vectors = torch.linalg.eigh(matrices)
    damped = values.clamp(min=0) + eps * values[..., -1:]
    return (vectors * damped.pow(-1 / root).unsqueeze(-2)) @ vectors.mT


METHODS: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "eigh, fp64 on the host": inverse_root,
    "eigh, fp32": in_fp32,
    "coupled Newton, fp32": newton_inverse_root,
}


def measure(n: int, condition: float, seeds: int) -> dict[str, dict[str, float]]:
    """Errors and processor milliseconds of each method."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), n).double()
    for seed in range(seeds):
        torch.manual_seed(seed)
        q = torch.linalg.qr(torch.randn(1, n, n, dtype=torch.float64))[0]
        rounded, truth = ((q * v @ q.mT) for v in (values, values.pow(-0.25)))
        for name, find in METHODS.items():
            start = time.process_time()
            root = find(rounded.float(), 4, EPS)
            took = time.process_time() - start
            error = (root.double() - truth).norm() / truth.norm()
            found[name].append((error.item(), 1e3 * took))
    return {
        name: {
            "error": statistics.median(error for error, _ in of),
            "worst": max(error for error, _ in of),
            "ms": statistics.median(ms for _, ms in of),
        }
        for name, of in found.items()
    }


def of_rank_8(n: int) -> dict[str, dict[str, float | bool]]:
    """What each method makes of a matrix with n - 8 eigenvalues of zero."""
    torch.manual_seed(0)
    x = torch.randn(1, n, 8)
    found = {}
    for name, find in METHODS.items():
        root = find(x @ x.mT, 4, EPS)
        found[name] = {
            "is_finite": bool(root.isfinite().all()),
            "largest": root.abs().max().item(),
            "asymmetry": ((root - root.mT).norm() / root.norm()).item(),
        }
    return found


def main() -> None:
    """Measures, and writes `results/second_order_roots.json`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {
        f"{condition:g}": measure(options.size, condition, options.seeds)
        for condition in (1e2, 1e5, 1e8)
    }
    deficient = of_rank_8(options.size)
    write("second_order_roots", {"setting": vars(options), "errors": figures, "rank_8": deficient})
    for condition, ways in figures.items():
        shown = (f"{name} {of['error']:.1e} ({of['ms']:.0f} ms)" for name, of in ways.items())
        print(f"condition {condition}:", ", ".join(shown))
    print("rank 8:", deficient)


if __name__ == "__main__":
    main()
