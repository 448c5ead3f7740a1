"""Accuracy by epoch, from virtual ranks or runs: how many steps an accuracy takes."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["Curves"]

_SAMPLES = {"Fashion-MNIST": 60_000}


@dataclass(frozen=True, slots=True)
class _Curve:
    accuracies: tuple[float, ...]
    steps_per_epoch: float
    batch_size: int


@dataclass(frozen=True, slots=True)
class Curves:
    """Accuracy after each epoch, by strategy and number of ranks.

    Joined with predicted step times they tell the time to accuracy. They are those of one model
    and data set; for another they are a guess at best.

    Attributes:
        model: Whose they are.
    """

    model: str
    _curves: dict[tuple[str, int], _Curve]

    @classmethod
    def load(cls, path: Path, *, model: str | None = None) -> "Curves":
        """Those of one model in a file as `python -m benchmarks.virtual_ranks` writes it.

        It holds `rows`, each with `strategy`, `world_size`, `accuracy_by_epoch_mean`, and, where
        there are several models, `model`. `global_batch`, the samples of all ranks in a step, is
        the row's, or that of `settings` by model; steps an epoch are `steps_per_epoch` in the same
        places, or follow from it where `data` begins with Fashion-MNIST. Rows of another learning
        rate, batch or length (a key that ends in `_factor` is not 1) are left out.

        Args:
            path: The file.
            model: Whose curves; may be left out where there is one model.

        Raises:
            ValueError: There is no such file, it has no such rows, or the model is not clear.
        """
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"no curves {str(path)!r} ({error.strerror})") from error
        except ValueError as error:
            raise ValueError(f"{str(path)!r} is not JSON ({error})") from error
        if not isinstance(held, dict) or not isinstance(held.get("rows"), list):
            raise ValueError(
                f"{str(path)!r} has no rows of accuracies: `python -m benchmarks.virtual_ranks` "
                "writes them"
            )
        models = list(dict.fromkeys(row.get("model", "") for row in held["rows"]))
        if model is None and len(models) == 1:
            model = models[0]
        if model is None or model not in models:
            asked = "say which one's curves" if model is None else f"no curves of {model!r}"
            raise ValueError(f"{str(path)!r}: {asked}; it has {', '.join(models) or 'none'}")
        setting = dict((held.get("settings") or {}).get(model) or {})
        for data, samples in _SAMPLES.items():
            if str(held.get("data")).startswith(data) and "global_batch" in setting:
                setting.setdefault("steps_per_epoch", samples // setting["global_batch"])
        curves = {}
        for row in held["rows"]:
            plain = all(value == 1 for name, value in row.items() if name.endswith("_factor"))
            if row.get("model", "") == model and plain:
                try:
                    key = row["strategy"], row["world_size"]
                    curves[key] = _curve(row, setting)
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    raise ValueError(f"{str(path)!r}: a row is not as expected: {error}") from error
        return cls(model, curves)

    def knows(self, strategy: str, world_size: int) -> bool:
        """Whether there is a curve of that strategy at that number of ranks."""
        return (strategy, world_size) in self._curves

    def final(self, strategy: str, world_size: int) -> float | None:
        """The accuracy that it ended with, None where there is no curve."""
        curve = self._curves.get((strategy, world_size))
        return None if curve is None else curve.accuracies[-1]

    def batch_size(self, strategy: str, world_size: int) -> int:
        """Samples of each rank in a step of that curve.

        Raises:
            KeyError: There is no such curve.
        """
        return self._curves[strategy, world_size].batch_size

    def steps_to(self, strategy: str, world_size: int, accuracy: float) -> float | None:
        """Steps until the accuracy was first reached, straight between epochs; None if never."""
        curve = self._curves.get((strategy, world_size))
        if curve is None:
            return None
        if curve.accuracies[0] >= accuracy:
            return curve.steps_per_epoch
        for epoch, (before, after) in enumerate(pairwise(curve.accuracies), start=1):
            if after >= accuracy:
                part = (accuracy - before) / (after - before)
                return (epoch + part) * curve.steps_per_epoch
        return None


def _curve(row: dict[str, Any], setting: dict[str, Any]) -> _Curve:
    accuracies = tuple(float(value) for value in row["accuracy_by_epoch_mean"])
    if not accuracies:
        raise ValueError("a curve without epochs")
    steps = row.get("steps_per_epoch", setting.get("steps_per_epoch"))
    if steps is None:
        raise ValueError("it does not tell steps_per_epoch")
    samples = row.get("global_batch", setting.get("global_batch"))
    if samples is None:
        raise ValueError("it does not tell global_batch, the samples of all ranks in a step")
    batch_size, rest = divmod(int(samples), int(row["world_size"]))
    if batch_size < 1 or rest:
        raise ValueError(f"a batch of {samples} is not shared evenly by {row['world_size']} ranks")
    return _Curve(accuracies, float(steps), batch_size)
