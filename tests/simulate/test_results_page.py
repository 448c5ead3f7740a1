"""The accuracies on the page are those that were measured."""

import json
import re
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulate.md").read_text()


def rows_below(heading):
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def measured(model, world_size, strategy, **factors):
    rows = json.loads((ROOT / "benchmarks/results/virtual_ranks.json").read_text())["rows"]
    wanted = {"lr_factor": 1, "epochs_factor": 1, "batch_factor": 1, **factors}
    wanted |= {"model": model, "world_size": world_size, "strategy": strategy}
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return f"{100 * fmean(row['accuracy']):.2f} ({len(row['accuracy'])})"


def test_accuracies():
    models = re.findall(r"^\| (\w+): strategy \| 8 ranks", PAGE, re.MULTILINE)
    assert "mlp" in models
    for model in models:
        for strategy, *figures in rows_below(f"| {model}: strategy | 8 ranks"):
            for world_size, figure in zip((8, 32, 128), figures, strict=True):
                if figure != "-":
                    assert figure == measured(model, world_size, strategy), (strategy, world_size)


def test_what_helps():
    rows = rows_below("| at 128 ranks | batch of a rank")
    assert rows
    for strategy, batch, epochs, rate, *figures in rows:
        factors = {
            "batch_factor": int(batch) / 16,
            "epochs_factor": int(epochs) / 20,
            "lr_factor": float(rate) / 0.1,
        }
        assert figures == [measured("mlp", 128, strategy, **factors)], (strategy, factors)
