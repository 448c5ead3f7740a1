"""Where the figures of a rank go beside its metrics file: TensorBoard, Weights & Biases."""

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from ._config import TrainConfig
from ._folder import RunDir


class TensorBoard:
    """Event files of one rank, in `DIR/tensorboard/rankN`, which TensorBoard lays together."""

    def __init__(self, run_dir: RunDir, rank: int, resumed_steps: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(run_dir.tensorboard(rank)),
            # Later steps of the last start are made again.
            purge_step=None if resumed_steps is None else resumed_steps + 1,
        )
        self.close = self._writer.close

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WandB:
    """A run at Weights & Biases, of rank 0 alone; `WANDB_MODE` says if it uses the network."""

    def __init__(self, config: TrainConfig, run_dir: RunDir) -> None:
        import wandb  # pyrefly: ignore[missing-import]

        self._run = wandb.init(
            project=config.wandb,
            name=run_dir.path.name,
            id=config.run_name,  # a run that is resumed is the same run there
            resume="allow",
            dir=str(run_dir.path),
            config=config.to_json(),
        )
        self.close = self._run.finish

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)


class Loggers:
    """The loggers that a run asks for, on one rank; one that raises is dropped, with a warning."""

    def __init__(
        self, config: TrainConfig, run_dir: RunDir, rank: int, *, resumed_steps: int | None = None
    ) -> None:
        self.notes: list[str] = []
        self._loggers: dict[str, Any] = {}
        if config.tensorboard:
            self._open("tensorboard", lambda: TensorBoard(run_dir, rank, resumed_steps))
        if config.wandb is not None and rank == 0:
            self._open("wandb", lambda: WandB(config, run_dir))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass the figures of a step on."""
        for name, logger in list(self._loggers.items()):
            self._try(name, lambda logger=logger: logger.log(step, scalars))

    def close(self) -> None:
        """Close all."""
        for name, logger in list(self._loggers.items()):
            self._try(name, logger.close)

    def _open(self, name: str, opener: Callable[[], Any]) -> None:
        self._try(name, lambda: self._loggers.update({name: opener()}))

    def _try(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            self._loggers.pop(name, None)
            what = f"{name} has stopped ({type(error).__name__}: {error})"
            self.notes.append(what)
            warnings.warn(
                f"{what}; training continues without it, and the metrics files have all figures.",
                stacklevel=3,
            )


def check_loggers(config: TrainConfig) -> None:
    """Raise `ValueError` for a logger that is not installed."""
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        spec = find_spec(package) if wanted else None
        if wanted and (spec is None or spec.origin is None):  # a mere folder has no origin
            raise ValueError(
                f"--{package} needs the package {package}: pip install 'gossipgrad[{package}]', "
                "or leave the option out; the metrics files have the same figures."
            )


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a metrics record as `EVENT/NAME`, those in a dict as `EVENT/NAME/KEY`."""
    found: dict[str, float] = {}
    for name, value in record.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for key, part in parts:
            if name != "step" and isinstance(part, int | float):
                found["/".join(filter(None, (record["event"], name, key)))] = float(part)
    return found
