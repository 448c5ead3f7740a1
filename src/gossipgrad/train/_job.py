"""What a run trains: a model, its data and its loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset, default_collate

from gossipgrad.checkpoint import try_to_write
from gossipgrad.data import Samples, TensorSamples, num_batches
from gossipgrad.errors import GossipError


class JobError(GossipError):
    """An attribute of a job cannot work; the message names it, the rule, and the way out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A model with its data and its loss, for `gossipgrad train --job MODULE:FUNCTION`.

    The function takes no argument and returns one of these. Every worker calls it, with the random
    numbers of torch, numpy and Python seeded alike, and so does the command before it starts any.
    A built-in task is such a job as well.

    Attributes:
        model: Called with the inputs of a batch. All its parameters that need gradients are
            trained.
        train: A map-style `torch.utils.data.Dataset` of pairs (input, target), the same on every
            rank: ranks take their shares of its indices.
        train_loader: In place of `train`: makes the `DataLoader` of a rank from rank and world
            size, with equally many batches (inputs, targets) on all. Shares are then fixed: that of
            a rank that dies is trained on by nobody after that, and no worker can join. A sampler
            with `set_epoch` gets the epoch; a run that is resumed skips the batches that were done.
        test: As `train`, for evaluation: each rank evaluates a part of it.
        loss: Of what the model returns and the targets of a batch: a scalar tensor, their mean.
        metric: Of the same, without gradients: a tensor with one number a prediction. Their mean
            over `test` is what a run reports, as `accuracy` in its files. None: whether the largest
            of the last dimension is the target, for classification.
        metric_name: What the terminal and the report call it. None: "accuracy" for classification,
            else "metric".
        metric_format: How they show it, as `format(value, ".3g")` does. None: ".2%" for
            classification, else ".4g".
        optimizer: Makes the optimizer of a model, or several. None: what `--optimizer` and `--lr`
            say. The schedule of the run multiplies the rates that it has.
        collate: Makes a batch of a list of pairs: inputs, which may be tensors in a tuple, list or
            dict, and a tensor of targets, whose length is that of the batch.

    Raises:
        JobError: An attribute is not as it should be.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> points = TensorDataset(torch.randn(100, 8), torch.randn(100, 1))
        >>> job = Job(
        ...     model=nn.Linear(8, 1),
        ...     train=points,
        ...     test=points,
        ...     loss=nn.functional.mse_loss,
        ...     metric=lambda output, target: (output - target).abs(),
        ...     metric_name="mean error",
        ... )
    """

    model: nn.Module
    train: Any = None
    train_loader: Callable[[int, int], Any] | None = None
    test: Any
    loss: Callable[[Any, Any], Tensor]
    metric: Callable[[Any, Any], Tensor] | None = None
    metric_name: str | None = None
    metric_format: str | None = None
    optimizer: Callable[[nn.Module], Optimizer | Sequence[Optimizer]] | None = None
    collate: Callable[[list[Any]], tuple[Any, Tensor]] = default_collate

    def __post_init__(self) -> None:
        is_accuracy = self.metric is None
        if self.metric_name is None:
            object.__setattr__(self, "metric_name", "accuracy" if is_accuracy else "metric")
        if self.metric_format is None:
            object.__setattr__(self, "metric_format", ".2%" if is_accuracy else ".4g")
        if not isinstance(self.metric_name, str) or not self.metric_name.strip():
            raise JobError(_wrong("metric_name", self.metric_name, "must be a name"))
        try:
            format(0.5, self.metric_format or "")
        except (TypeError, ValueError) as error:
            rule = 'must be a format specification of a float, such as ".2%" or ".3g"'
            raise JobError(_wrong("metric_format", self.metric_format, rule)) from error
        if not isinstance(self.model, nn.Module):
            raise JobError(_wrong("model", self.model, "must be a torch.nn.Module"))
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise JobError("Job.model has no parameter that needs gradients: nothing to train.")
        if (self.train is None) == (self.train_loader is None):
            raise JobError("Job.train or Job.train_loader must be given, and not both.")
        for name in ("test", *(() if self.train is None else ("train",))):
            value = getattr(self, name)
            if isinstance(value, torch.utils.data.DataLoader):
                raise JobError(
                    f"Job.{name} is a DataLoader, but must be its dataset: the run makes the "
                    "batches, so that ranks share them out. Give loader.dataset, or for loaders of "
                    "your own Job.train_loader."
                )
            if not hasattr(value, "__len__") or not (
                hasattr(value, "__getitem__") or isinstance(value, Samples)
            ):
                rule = "must be a map-style dataset, with __len__ and __getitem__"
                raise JobError(_wrong(name, value, rule))
            if not len(value):
                raise JobError(f"Job.{name} is empty, but must have samples.")
        for name in ("loss", "metric", "optimizer", "train_loader", "collate"):
            value = getattr(self, name)
            optional = name in ("metric", "optimizer", "train_loader")
            if not callable(value) and not (optional and value is None):
                raise JobError(_wrong(name, value, f"must be a function{' or None' * optional}"))

    def train_samples(self) -> Samples:
        """The training part, by index."""
        return _samples("train", self.train, self.collate)

    def make_loader(self, rank: int, world_size: int) -> Any:
        """The loader of a rank, of a job that has `train_loader`."""
        assert self.train_loader is not None
        loader = self.train_loader(rank, world_size)
        if not hasattr(loader, "__len__") or not hasattr(loader, "__iter__") or not len(loader):
            rule = "must return a DataLoader, with a length above 0"
            raise JobError(_wrong("train_loader", loader, rule))
        return loader

    def epoch_batches(self, batch_size: int, world_size: int) -> int:
        """Batches of a rank in an epoch."""
        if self.train_loader is not None:
            return len(self.make_loader(0, world_size))
        return num_batches(len(self.train_samples()) // world_size, batch_size)

    def test_samples(self) -> Samples:
        """The test part, by index."""
        return _samples("test", self.test, self.collate)

    def measure(self, outputs: Any, targets: Tensor) -> Tensor:
        """The metric of a batch, one number a prediction."""
        if self.metric is not None:
            values = self.metric(outputs, targets)
            if not isinstance(values, Tensor):
                rule = "must return a tensor, with one number a prediction"
                raise JobError(f"Job.metric returned {type(values).__name__}, but {rule}.")
            return values
        if not isinstance(outputs, Tensor) or outputs.shape[:-1] != targets.shape:
            raise JobError(
                "Job.metric is None, which stands for the accuracy of classification, and the "
                f"model returned {_shape(outputs)} for targets of shape {tuple(targets.shape)}: "
                "give a metric."
            )
        return outputs.argmax(-1) == targets

    def make_optimizers(self) -> list[Optimizer] | None:
        """Its own optimizers, None if it has none."""
        if self.optimizer is None:
            return None
        made = self.optimizer(self.model)
        optimizers = [made] if isinstance(made, Optimizer) else made
        if not isinstance(optimizers, list | tuple) or not optimizers:
            raise JobError(_wrong("optimizer", made, "must return an optimizer, or a list of them"))
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                rule = "must return optimizers of torch.optim"
                raise JobError(_wrong("optimizer", optimizer, rule))
        return list(optimizers)

    def try_out(self, batch_size: int, device: torch.device) -> None:
        """Take two samples through model, loss and metric, and the model through its export.

        Changes the model's gradients.

        Raises:
            JobError: An attribute cannot work; the message names it.
        """
        model = self.model.to(device)

        def first(samples: Samples) -> tuple[Any, Tensor]:
            return samples.batch(torch.arange(min(2, batch_size, len(samples))))

        batches: dict[str, Callable[[], tuple[Any, Tensor]]] = {
            "train": lambda: first(self.train_samples()),
            "train_loader": lambda: next(iter(self.make_loader(0, 1))),
            "test": lambda: first(self.test_samples()),
        }
        del batches["train_loader" if self.train_loader is None else "train"]
        for name, batch in batches.items():
            x, y = _tried(name, batch)
            x, y = to_device(x, device), y.to(device)
            model.train(name != "test")
            outputs = _tried("model", lambda x=x: model(x))
            if name != "test":
                loss = _tried("loss", lambda outputs=outputs, y=y: self.loss(outputs, y))
                if not isinstance(loss, Tensor) or loss.ndim:
                    rule = "must return a scalar tensor, the mean over the batch"
                    raise JobError(f"Job.loss returned {_shape(loss)}, but {rule}.")
            else:
                _tried("metric", lambda outputs=outputs, y=y: self.measure(outputs, y))
        self.make_optimizers()
        try:
            try_to_write(model)
        except Exception as error:
            raise JobError(
                f"Job.model could not be exported at the end of the run: {error}. Use a parameter "
                "or buffer of another type, such as torch.complex64 or torch.float32, or a buffer "
                "with persistent=False."
            ) from error


class DatasetSamples:
    """A map-style dataset by index, for sharded batches and evaluations."""

    def __init__(self, name: str, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._name = name
        self._dataset = dataset
        self._collate = collate

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._dataset)

    @property
    def labels(self) -> Tensor | None:
        """The class of each sample, where the dataset has `targets`, as those of torchvision."""
        targets = getattr(self._dataset, "targets", None)
        if targets is None:
            return None
        labels = torch.as_tensor(targets)
        is_class = labels.ndim == 1 and len(labels) == len(self) and not labels.is_floating_point()
        return labels if is_class else None

    def batch(
        self, indices: Tensor, *, augment: tuple[int, int] | None = None
    ) -> tuple[Any, Tensor]:
        """Inputs and targets; what the dataset draws at random is its own."""
        chosen = indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            pairs = self._dataset.__getitems__(chosen)
        else:
            pairs = [self._dataset[index] for index in chosen]
        batch = self._collate(pairs)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise JobError(
                f"Job.{self._name} gave {_shape(batch)}, but its samples must be pairs (input, "
                "target); give Job.collate to make batches of others."
            )
        x, y = batch
        if not isinstance(y, Tensor) or not y.ndim or len(y) != len(chosen):
            raise JobError(
                f"Job.{self._name} gave targets as {_shape(y)} for a batch of {len(chosen)}, but "
                "they must be a tensor of that length; see Job.collate."
            )
        return x, y


def to_device(x: Any, device: torch.device) -> Any:
    """The same inputs on a device: tensors, also those in tuples, lists and dicts."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {key: to_device(value, device) for key, value in x.items()}
    if isinstance(x, tuple | list):
        moved = [to_device(value, device) for value in x]
        is_named = isinstance(x, tuple) and hasattr(x, "_fields")
        return type(x)(*moved) if is_named else type(x)(moved)
    return x


def split_batch(x: Any, y: Tensor, parts: int) -> list[tuple[Any, Tensor]]:
    """A batch in at most so many parts of two samples or more, which BatchNorm needs."""
    parts = max(1, min(parts, len(y) // 2))
    if parts == 1:
        return [(x, y)]
    sizes = [len(chunk) for chunk in y.tensor_split(parts)]
    return list(zip(_split(x, sizes), y.split(sizes), strict=True))


def _split(x: Any, sizes: list[int]) -> list[Any]:
    if isinstance(x, Tensor) and x.ndim and len(x) == sum(sizes):
        return list(x.split(sizes))
    if isinstance(x, dict):
        split = [_split(value, sizes) for value in x.values()]
        return [dict(zip(x, part, strict=True)) for part in zip(*split, strict=True)]
    if isinstance(x, tuple | list):
        split = zip(*(_split(value, sizes) for value in x), strict=True)
        is_named = isinstance(x, tuple) and hasattr(x, "_fields")
        return [type(x)(*part) if is_named else type(x)(part) for part in split]
    raise JobError(
        f"inputs hold {_shape(x)} in a batch of {sum(sizes)} samples, which --accumulate cannot "
        "divide: give tensors of that length, or leave --accumulate out."
    )


def tensors_of(x: Any) -> list[Tensor]:
    """All tensors of inputs."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = list(x.values())
    return [one for part in x for one in tensors_of(part)] if isinstance(x, tuple | list) else []


def _samples(name: str, part: Any, collate: Callable[[list[Any]], Any]) -> Samples:
    if isinstance(part, Samples):
        return part
    if (
        isinstance(part, TensorDataset)
        and len(part.tensors) == 2
        and collate is Job.__dataclass_fields__["collate"].default
    ):
        return TensorSamples(*part.tensors)
    return cast("Samples", DatasetSamples(name, part, collate))


def _tried(name: str, attempt: Callable[[], Any]) -> Any:
    try:
        return attempt()
    except JobError:
        raise
    except Exception as error:
        raise JobError(
            f"Job.{name} failed with the first samples: {type(error).__name__}: {error}"
        ) from error


def _wrong(name: str, value: object, rule: str) -> str:
    return f"Job.{name} is {_shape(value)}, but {rule}."


def _shape(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return (
        f"{value!r}"
        if value is None or isinstance(value, int | float | str)
        else (f"a {type(value).__name__}")
    )
