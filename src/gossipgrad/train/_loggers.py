"""Where the figures of a rank go beside its metrics file: TensorBoard, Weights & Biases."""

import threading
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ._config import TrainConfig
from ._layout import RunDir

_CLOSE_SECONDS = 30.0


@runtime_checkable
class Logger(Protocol):
    """Takes figures of one rank as they come."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note the figures of a step; steps never fall, and one may come twice."""

    def close(self) -> None:
        """Write down what is held back; nothing is logged after."""


class TensorBoard:
    """Event files of one rank, in `DIR/tensorboard/rankN`.

    Every rank has its own: replicas that gossip differ, TensorBoard lays the folders over each
    other, and no rank's figures are lost with another.
    """

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir.tensorboard(rank)))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point to the curve of each figure."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class WandB:
    """A run at Weights & Biases, of rank 0 alone: one training is one run there.

    Whether it goes over the network is up to `WANDB_MODE`, as everywhere with this package.
    """

    def __init__(self, config: TrainConfig, run_dir: RunDir) -> None:
        import wandb  # pyrefly: ignore[missing-import]

        self._run = wandb.init(
            project=config.wandb,
            name=run_dir.path.name,
            dir=str(run_dir.path),
            config=config.to_json(),
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the figures to the history of the run."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """End the run; what was not sent yet is."""
        self._run.finish()


class Loggers:
    """Passes figures on to several loggers; one that raises is dropped, with one warning.

    Args:
        openers: What makes each logger, by its name. One that cannot be made is left out, with a
            warning as well.

    Attributes:
        notes: What went wrong, in words.
    """

    def __init__(self, openers: Mapping[str, Callable[[], Logger]]) -> None:
        self.notes: list[str] = []
        self._loggers: dict[str, Logger] = {}
        for name, opener in openers.items():
            try:
                self._loggers[name] = opener()
            except Exception as error:
                self._give_up(name, error)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass the figures on."""
        for name, logger in list(self._loggers.items()):
            try:
                logger.log(step, scalars)
            except Exception as error:
                del self._loggers[name]
                self._give_up(name, error)

    def close(self) -> None:
        """Close all, each within half a minute; then go on without it."""
        loggers, self._loggers = self._loggers, {}
        for name, logger in loggers.items():
            raised: list[Exception] = []
            closing = threading.Thread(target=_close, args=(logger, raised), daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)
            if closing.is_alive():
                raised.append(TimeoutError(f"not closed after {_CLOSE_SECONDS:.0f} s"))
            for error in raised:
                self._give_up(name, error)

    def _give_up(self, name: str, error: Exception) -> None:
        what = f"{name} has stopped ({type(error).__name__}: {error})"
        self.notes.append(what)
        warnings.warn(
            f"{what}; training goes on without it, and the metrics files have all figures.",
            stacklevel=3,
        )


def open_loggers(config: TrainConfig, run_dir: RunDir, rank: int) -> Loggers:
    """The loggers that `config` asks for, on this rank."""
    openers: dict[str, Callable[[], Logger]] = {}
    if config.tensorboard:
        openers["tensorboard"] = lambda: TensorBoard(run_dir, rank)
    if config.wandb is not None and rank == 0:
        openers["wandb"] = lambda: WandB(config, run_dir)
    return Loggers(openers)


def check_loggers(config: TrainConfig) -> None:
    """Raise `ValueError` for a logger that is not installed, or cannot write to such a folder."""
    for package, wanted in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if wanted and not _is_installed(package):
            raise ValueError(
                f"--{package} needs the package {package}: pip install 'gossipgrad[{package}]', "
                "or leave the option out; the metrics files have the same figures."
            )
        if wanted and not _is_text(config.out):
            raise ValueError(
                f"--{package} takes folders whose names are UTF-8 alone, which that of --out is "
                f"not: {str(config.out)!a}; name another folder, or leave the option out; the "
                "metrics files have the same figures."
            )


def _is_installed(package: str) -> bool:
    """Whether there is such a package: a mere folder of that name has a specification as well."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _is_text(path: Path | None) -> bool:
    """Whether a path can be written as UTF-8; one from the shell may be any bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def scalars_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a metrics record as `EVENT/NAME`, those in a dict as `EVENT/NAME/KEY`.

    Example:
        >>> scalars_of({"event": "step", "step": 3, "loss": 0.5, "outcomes": {"late": 1}})
        {'step/loss': 0.5, 'step/outcomes/late': 1.0}
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for key, part in parts:
            if name != "step" and isinstance(part, int | float):
                found["/".join(filter(None, (record["event"], name, key)))] = float(part)
    return found


def _close(logger: Logger, raised: list[Exception]) -> None:
    try:
        logger.close()
    except Exception as error:
        raised.append(error)
