"""Integration with Hugging Face Accelerate, with the interface of its `LocalSGD`."""

from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from torch import nn

from gossipgrad.engine import Session
from gossipgrad.integrations._sessions import Open, end, load_state, open_session, save_state

__all__ = ["GossipSGD", "check_distributed_type"]

_PLAIN = (
    "prepare it by accelerator.prepare_model(model, evaluation_mode=True), which wraps nothing and "
    "leaves the model in training mode"
)


def check_distributed_type(accelerator: Accelerator) -> None:
    """Refuse set-ups of Accelerate without one whole replica per process; local.

    Raises:
        ValueError: It is not one process per device, each with a whole replica.
    """
    name = accelerator.distributed_type.name
    if name != "NO" and not name.startswith("MULTI_"):
        raise ValueError(
            f"DistributedType.{name} does not fit: gossip needs one process a device, each with a "
            "whole replica (NO, MULTI_CPU, MULTI_GPU and the like). Drop its plugin; for FSDP2 "
            "inside nodes and gossip between them, call gg.gossip(..., mesh=...) in your own loop"
        )
    if (config := accelerator.parallelism_config) is not None and config.total_size > 1:
        raise ValueError(
            f"{config} does not fit: gossip needs a whole replica on each process. Drop the "
            "parallelism_config"
        )


class GossipSGD:
    """Trains by gossip inside a `with` block, instead of DistributedDataParallel.

    For example::

        model = accelerator.prepare_model(model, evaluation_mode=True)  # is not wrapped
        optimizer, loader = accelerator.prepare(optimizer, loader)
        with GossipSGD(accelerator, model, optimizer) as gossip:
            ...

    Entering and leaving are collectives: on exit the model of each rank is the consensus. After an
    exception a rank keeps its own replica, and the others continue without it.

    Args:
        accelerator: Its distributed type must be one process per device.
        model: As `prepare_model(..., evaluation_mode=True)` returns it.
        optimizer: As `prepare` returns it, or several.
        open: The function that opens the session: `gg.gossip` by default, `gg.suda`, `gg.sparsify`,
            or a function of model and optimizer that calls one of them.
        options: Arguments of `open`, for example `mode="stale"`. The gradient scaler is passed on.

    Attributes:
        session: The session, inside the block.

    Raises:
        ValueError: For a distributed type that does not fit. On entry also for a model that
            DistributedDataParallel wraps, and as `open`.
    """

    session: Session

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        open: Open | None = None,
        **options: Any,
    ) -> None:
        check_distributed_type(accelerator)
        self.accelerator = accelerator
        self._arguments = open, model, optimizer
        self._options = options

    def __enter__(self) -> "GossipSGD":
        open, model, optimizer = self._arguments
        # A compiled model has the parameters of the plain model under other names.
        model = getattr(model, "_orig_mod", model)
        assert isinstance(model, nn.Module)
        scaler = self.accelerator.scaler
        self.session = open_session(
            open, model, optimizer, scaler=scaler, options=self._options, plain=_PLAIN
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.session.__exit__(kind, error, traceback)
            return
        with self.session:
            end(self.session)

    def save_state(self, output_dir: str | Path | None = None) -> None:
        """Call `accelerator.save_state` with the consensus as model; a collective.

        Each rank adds its state to continue exactly, `gossip-rank*.pt`.
        """
        with self.session.consensus():
            folder = self.accelerator.save_state(output_dir)  # type: ignore[arg-type]
        save_state(self.session, folder)

    def load_state(self, input_dir: str | Path) -> None:
        """Call `accelerator.load_state`, then continue from each rank's state; a collective.

        From a checkpoint of other ranks, or of a run without gossip, all continue from the
        consensus.
        """
        self.accelerator.load_state(str(input_dir))
        load_state(self.session, input_dir)
