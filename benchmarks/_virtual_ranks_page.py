"""The tables of docs/simulate.md, from the rows of `benchmarks.virtual_ranks`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks._pages import DOCS, fill, table

WORLDS = (1, 8, 32, 128)
EPOCHS = (1, 2, 5, 10, 15, 20)
FACTORS = ("lr_factor", "epochs_factor", "batch_factor")
MAIN = (
    "allreduce",
    "gossip",
    "gossip, no rotation",
    "gossip, hypercube",
    "gossip, hypercube, no rotation",
    "every-log-p",
    "gossip, state",
    "gossip, state every 4",
    "gossip, bf16",
    "local",
)
OWN = "local, mean of the replicas themselves"
FOUR = ("allreduce", "gossip", "every-log-p", "local")
# Strategy, and by how much rate, epochs and batch differ from the others'.
TRIED = (
    ("gossip, state", (1, 1, 1)),
    ("gossip, sync", (1, 1, 1)),
    ("gossip, average every 8", (1, 1, 1)),
    ("gossip, average every 32", (1, 1, 1)),
    ("local, average every 8", (1, 1, 1)),
    ("every-log-p", (1, 1, 1)),
    ("local, state, average every 4", (1, 1, 1)),
    ("local, state, average every 2", (1, 1, 1)),
    ("local, state, average every 1", (1, 1, 1)),
    ("allreduce", (1, 1, 1)),
    ("allreduce", (0.5, 1, 1)),
    ("gossip", (0.5, 1, 1)),
    ("allreduce", (2, 1, 1)),
    ("gossip", (2, 1, 1)),
    ("allreduce", (1, 3, 1)),
    ("gossip", (1, 3, 1)),
    ("allreduce", (1, 4, 4)),
    ("gossip", (1, 4, 4)),
)
# Distances over time: of these at 128 ranks, and of the first two at fewer.
APART = ("gossip", "every-log-p", "gossip, hypercube", "gossip, no rotation", "gossip, state")
APART += (
    "gossip, state every 4",
    "gossip, bf16",
    "gossip, sync",
    "gossip, average every 8",
    "local",
)

Find = Callable[..., dict | None]


def tables(rows: Sequence[dict]) -> list[str]:
    """All of them, in the order of the page."""
    by_key = {
        (row["model"], row["world_size"], row["strategy"], *(row[f] for f in FACTORS)): row
        for row in rows
    }

    def find(model: str, p: int, strategy: str, factors: tuple = (1, 1, 1)) -> dict | None:
        return by_key.get((model, p, strategy, *factors))

    return [
        _accuracies(find, "mlp", MAIN, _accuracy),
        _accuracies(find, "lenet", FOUR, _accuracies_by_seed),
        _behind(find),
        _distances(find),
        _tried(find),
    ]


def fill_page(rows: Sequence[dict], page: Path = DOCS / "simulate.md") -> None:
    """Writes the tables into the page."""
    text = page.read_text(encoding="utf-8")
    for each in tables(rows):
        text = fill(text, each)
    page.write_text(text, encoding="utf-8")


def _ranks(p: int) -> str:
    return f"{p} rank{'s' * (p != 1)}"


def _accuracy(row: dict | None) -> str:
    if row is None:
        return "-"
    return f"{100 * fmean(row['accuracy']):.2f} ({len(row['accuracy'])})"


def _accuracies_by_seed(row: dict | None) -> str:
    """For a model of which some runs never leave chance: a mean would tell nothing."""
    return "-" if row is None else ", ".join(f"{100 * one:.2f}" for one in row["accuracy"])


def _own_accuracy(row: dict | None) -> str:
    """Of the replicas themselves, where they have no consensus worth the name."""
    if row is None:
        return "-"
    return f"{100 * row['replica_accuracy_mean']:.2f} ({len(row['accuracy'])})"


def _accuracies(
    find: Find, model: str, strategies: Sequence[str], told: Callable[[dict | None], str]
) -> str:
    rows = [
        [strategy, *(told(find(model, p, strategy)) for p in WORLDS)] for strategy in strategies
    ]
    rows.append([OWN, *(_own_accuracy(find(model, p, "local")) for p in WORLDS)])
    return table([f"{model}: strategy", *map(_ranks, WORLDS)], rows)


def _by_seed(points: dict[int, float]) -> str:
    return ", ".join(f"{points[seed]:+.2f}" for seed in sorted(points)) or "-"


def _minus(row: dict | None, other: dict | None) -> dict[int, float]:
    """Points of accuracy between the two, on the seeds that both have."""
    if row is None or other is None:
        return {}
    of_other = dict(zip(other["seeds"], other["accuracy"], strict=True))
    return {
        seed: 100 * (accuracy - of_other[seed])
        for seed, accuracy in zip(row["seeds"], row["accuracy"], strict=True)
        if seed in of_other
    }


def _behind(find: Find) -> str:
    rows = []
    for model in ("mlp", "lenet"):
        of = [_minus(find(model, p, "gossip"), find(model, p, "allreduce")) for p in WORLDS[1:]]
        rows.append([model, *map(_by_seed, of)])
    return table(["gossip minus allreduce, by seed", *map(_ranks, WORLDS[1:])], rows)


def _distances(find: Find) -> str:
    asked = [(strategy, p) for p in WORLDS[1:-1] for strategy in APART[:2]]
    asked += [(strategy, WORLDS[-1]) for strategy in APART]
    rows = []
    for strategy, p in asked:
        if (row := find("mlp", p, strategy)) is None:
            continue
        curves = row["consensus_distance_by_epoch"]
        figures = []
        for epoch in EPOCHS:
            held = [c[epoch - 1] for c in curves if len(c) >= epoch and c[epoch - 1] is not None]
            figures.append(_distance(held, len(curves) - len(held)))
        rows.append([strategy, str(p), str(len(curves)), *figures])
    epochs = [f"epoch {epoch}" for epoch in EPOCHS]
    return table(["consensus distance of the mlp", "ranks", "seeds", *epochs], rows)


def _distance(held: Sequence[float], diverged: int) -> str:
    """The mean, and of how many seeds there is none any more."""
    if not held:
        return "diverged"
    return _length(fmean(held)) + (f" ({diverged} diverged)" if diverged else "")


def _length(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _tried(find: Find) -> str:
    rows = []
    for strategy, factors in TRIED:
        if (row := find("mlp", 128, strategy, factors)) is None:
            continue
        rate, epochs, batch = factors
        plain = {} if strategy == "gossip" else _minus(row, find("mlp", 128, "gossip", factors))
        rows.append(
            [
                strategy,
                str(16 * batch),
                str(20 * epochs),
                f"{0.1 * rate:g}",
                _accuracy(row),
                _by_seed(plain),
            ]
        )
    head = ["at 128 ranks", "batch of a rank", "epochs", "peak rate", "accuracy"]
    return table([*head, "minus gossip, by seed"], rows)
