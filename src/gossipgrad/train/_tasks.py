"""The job of a configuration: a function of the user's, or a built-in data set and model."""

import importlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from gossipgrad import data

from ._config import TrainConfig
from ._job import Job, JobError
from ._models import build_model


def load_job(config: TrainConfig) -> Job:
    """What a configuration trains, with the weights that its seed decides.

    Raises:
        ValueError: There is no such function.
        JobError: What it returns cannot work; the message names the attribute.
        GossipError: A built-in data set is missing and could not be fetched.
        RuntimeError: The user's module or function raised an error, which is the cause.
    """
    if config.job is not None:
        function = _find(config.job)
        _seed(config.seed)
        try:
            job = function()
        except JobError as error:
            raise JobError(f"--job {config.job}: {error}") from error
        except Exception as error:
            raise RuntimeError(f"the function of --job {config.job} failed") from error
        if not isinstance(job, Job):
            raise JobError(
                f"--job {config.job} returned a {type(job).__name__}, but must return a "
                "gossipgrad.train.Job."
            )
        return job
    dataset = data.load(config.data, config.data_dir)
    _seed(config.seed)
    return Job(
        model=build_model(config.model, dataset.info),
        train=dataset.train,
        test=dataset.test,
        loss=nn.functional.cross_entropy,
    )


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (whatever user code draws from)


def _find(name: str) -> Callable[[], Any]:
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(
            f"--job is {name!r}, but must be MODULE:FUNCTION, as mypackage.jobs:vision."
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # where python -m looks first
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise RuntimeError(f"the module of --job {name} cannot be imported") from error
        raise ValueError(
            f"--job is {name}, but there is no module {error.name} in the current folder or on "
            "PYTHONPATH."
        ) from error
    except Exception as error:
        raise RuntimeError(f"the module of --job {name} cannot be imported") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"--job is {name}, but {module_name} has no function {function_name}.")
    return cast("Callable[[], Any]", function)
