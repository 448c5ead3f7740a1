"""The invitation of a run under way: a file in its folder by which more workers find it."""

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from gossipgrad.data import Samples
from gossipgrad.engine import Session
from gossipgrad.errors import GossipError

from ._folder import RunDir
from ._job import Job

# Targets of so many samples tell two texts apart, which have no labels.
_PROBED_SAMPLES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """How to join a run, or why nobody can.

    It gives no access: a joiner must know the secret of the run.
    """

    address: str | None
    refusal: str | None
    data: str

    def write(self, run_dir: RunDir) -> None:
        """Leave it in the folder of the run, readable by its owner alone."""
        partial = run_dir.invitation.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps(asdict(self), indent=2) + "\n")
        partial.replace(run_dir.invitation)

    @classmethod
    def read(cls, run_dir: RunDir) -> "Invitation | None":
        """What a run has left, None if there is none."""
        try:
            content: dict[str, Any] = json.loads(run_dir.invitation.read_text())
            return cls(**content)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(
                f"cannot read {run_dir.invitation}: {error.strerror}; join as the user who started "
                "the run."
            ) from error
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{run_dir.invitation} is no invitation of a run ({type(error).__name__}: {error})"
            ) from error


def invite(session: Session, job: Job, run_dir: RunDir) -> str | None:
    """Leave an invitation in the folder of the run; why there is none, if so."""
    address = refusal = None
    if job.train_loader is not None:
        refusal = "its job has a loader of its own, whose shares are fixed"
    try:
        address = None if refusal else session.join_address()
    except (ValueError, GossipError) as error:  # a slow store is no reason not to train
        refusal = str(error)
    try:
        Invitation(address=address, refusal=refusal, data=fingerprint_of(job)).write(run_dir)
    except OSError as error:
        return f"nobody can join: {run_dir.invitation} could not be written ({error.strerror})"
    return None


def withdraw(run_dir: RunDir) -> None:
    """Invite nobody any more."""
    with contextlib.suppress(OSError):
        run_dir.invitation.unlink()


def fingerprint_of(job: Job) -> str:
    """A digest of the shapes of a model and of the labels of its samples."""
    shapes = [tuple(tensor.shape) for tensor in job.model.parameters()]
    digest = hashlib.blake2b(repr(shapes).encode(), digest_size=16)
    for samples in (*([] if job.train is None else [job.train_samples()]), job.test_samples()):
        digest.update(str(len(samples)).encode())
        digest.update(_targets(samples).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _targets(samples: Samples) -> torch.Tensor:
    if samples.labels is not None or not len(samples):
        return torch.empty(0) if samples.labels is None else samples.labels
    chosen = torch.linspace(0, len(samples) - 1, _PROBED_SAMPLES).long()
    return samples.batch(chosen)[1]


def root_of(store: dist.Store) -> dist.Store:
    """The store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
