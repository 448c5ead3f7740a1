"""`gossipgrad profile`: what a step of a model costs on this device."""

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gossipgrad import data, models
from gossipgrad.planning import Profile
from gossipgrad.simulate import record_profile

from ._output import parse, show, write_json, writing

_LISTED = 8

Parts = tuple[nn.Module, Optimizer, Sequence[Tensor], Callable[..., Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileOptions:
    """Record forward, backward by parameter and update of a model, as `gossipgrad simulate` reads.

    The model is one of the library's on made-up samples, or your own by --factory.
    """

    out: Path
    """Where to write the profile, a JSON file."""
    model: Literal[models.NAMES] | None = None  # pyrefly: ignore
    """A model of the library."""
    data_set: Literal[data.NAMES] = "cifar10"  # pyrefly: ignore
    """Gives the model its inputs' shape and its classes; no data is read."""
    batch_size: int = 32
    """Samples in a step of such a model."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Updates such a model; sgd with momentum."""
    factory: str | None = None
    """`module:function` of your own, called without arguments, found from this folder: it returns
    model, optimizer, batch (a list of tensors) and loss (called as loss(model, *batch))."""
    device: str = "cpu"
    """Where a model of the library runs, for example cuda; your own is where you put it."""
    steps: int = 20
    """Steps to record."""
    warm_up_steps: int = 5
    """Steps before them that do not count."""
    name: str | None = None
    """Of the profile; by default the model's."""

    def __post_init__(self) -> None:
        if (self.model is None) == (self.factory is None):
            raise ValueError("give either --model or --factory")
        if self.batch_size < 1:
            raise ValueError(
                f"batch-size {self.batch_size} is no number of samples: give 1 or more"
            )


def main(arguments: list[str]) -> int:
    """Parse, record, write, print a table; returns the exit code."""
    options = parse(ProfileOptions, arguments, "profile")
    model, optimizer, batch, loss = (
        _built_in(options) if options.factory is None else _own(options.factory)
    )
    try:
        profile = record_profile(
            model,
            optimizer,
            batch,
            loss,
            name=options.name or options.model,
            steps=options.steps,
            warm_up_steps=options.warm_up_steps,
        )
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"a step failed: {_told(error)}") from error
    with writing("--out", options.out):
        options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json("--out", options.out, profile.to_json())
    _show(profile)
    print(options.out)
    return 0


def _built_in(options: ProfileOptions) -> Parts:
    info = data.info(options.data_set)
    try:
        device = torch.device(options.device)
        model = models.build(str(options.model), info).to(device)
        shape = (options.batch_size, *info.input_shape)
        if info.kind == "text":
            x = torch.randint(info.num_classes, shape, device=device)
            y = torch.randint(info.num_classes, shape, device=device)
        else:
            x = torch.randn(shape, device=device)
            y = torch.randint(info.num_classes, shape[:1], device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {options.device!r} cannot be used: {error}") from error
    parameters = model.parameters()
    optimizer = (
        AdamW(parameters) if options.optimizer == "adamw" else SGD(parameters, 0.01, momentum=0.9)
    )
    return model, optimizer, [x, y], models.training_loss


def _own(factory: str) -> Parts:
    module, _, function = factory.partition(":")
    if not module or not function:
        raise ValueError(f"factory {factory!r} is not of the form module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        parts: Any = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"factory {factory!r} cannot be imported: {error}") from error
    except Exception as error:
        raise ValueError(f"factory {factory!r} failed: {_told(error)}") from error
    finally:
        sys.path.pop(0)
    match parts:
        case (nn.Module(), Optimizer(), [*batch], loss) if callable(loss) and all(
            isinstance(each, Tensor) for each in batch
        ):
            return parts
    kind = type(parts).__name__
    found = [type(part).__name__ for part in parts] if isinstance(parts, tuple) else kind
    raise ValueError(
        f"factory {factory!r} must return a tuple of the model (a Module), its optimizer, a batch "
        f"(a list of tensors) and the loss (called with model and batch), got {found}"
    )


def _told(error: Exception) -> str:
    """The error in one line, and the place in the user's code, or in whatever it called."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if str(Path.cwd()) in frame.filename] or frames[-1:]
    return f"{type(error).__name__}: {text} ({Path(own[-1].filename).name}:{own[-1].lineno})"


def _show(profile: Profile) -> None:
    table = Table(title=f"{profile.name} on {profile.device}", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    times = {
        "forward": profile.forward_seconds,
        "backward": sum(profile.backward_seconds),
        "update": profile.optimizer_seconds,
        "step": profile.compute_seconds,
    }
    for what, seconds in times.items():
        table.add_row(what, f"{1e3 * seconds:,.2f} ms")
    table.add_row("samples", f"{profile.batch_size / profile.compute_seconds:,.1f} /s")
    table.add_row("parameters", f"{profile.size_bytes / 1e6:,.2f} MB in {len(profile.names)}")
    table.add_section()
    rows = zip(profile.names, profile.elements, profile.backward_seconds, strict=True)
    slowest = sorted(rows, key=lambda row: -row[2])[:_LISTED]
    for name, elements, seconds in slowest:
        # As text: a name may look like markup.
        table.add_row(Text(f"{name} ({elements:,})"), f"{1e3 * seconds:,.2f} ms")
    show(table)
    print(f"The {len(slowest)} gradients that take longest are listed.")
