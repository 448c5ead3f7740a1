"""Integration with Lightning: a strategy, registered as `"gossip"`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout

from gossipgrad.engine import Session
from gossipgrad.integrations._sessions import (
    Open,
    end,
    load_state,
    open_session,
    path_of,
    save_state,
)

__all__ = ["GossipStrategy"]


class GossipStrategy(DDPStrategy):
    """Trains Lightning's `Trainer` by gossip, with processes and samplers as with `"ddp"`.

    For example::

        import gossipgrad.integrations.lightning

        trainer = Trainer(strategy="gossip", devices=2)

    Or `strategy=GossipStrategy(mode="stale")`. The session starts after `fit` has created
    optimizers and ends with it, also by an exception. Validation runs on the consensus, and
    checkpoints hold it; next to each, in `NAME.ckpt.gossip/`, each rank saves its state, from which
    `fit(ckpt_path=...)` continues exactly. From a checkpoint of another number of ranks, of another
    strategy, or on a remote file system, training continues with its model. After `fit` the module
    of each rank is the consensus, which `test` and `predict` use.

    Args:
        open: The function that opens the session: `gg.gossip` by default, `gg.suda`, `gg.sparsify`,
            or a function of module and optimizer (a list, if there are several) that calls one of
            them.
        cluster_environment: As of `DDPStrategy`, and so are the next three.
        process_group_backend: Backend of Lightning's own collectives.
        timeout: Timeout of these.
        start_method: How processes are started.
        options: Arguments of `open`, for example `mode="stale"`. The gradient scaler is passed on.

    Attributes:
        session: The session, while `fit` runs; otherwise None.

    Raises:
        ValueError: From `fit`, for `sync_batchnorm=True` or the callback
            `StochasticWeightAveraging`, and as `open`.
    """

    strategy_name = "gossip"

    def __init__(
        self,
        *,
        open: Open | None = None,
        cluster_environment: "ClusterEnvironment | None" = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        super().__init__(
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.session: Session | None = None
        self._open, self._options = open, options
        self._shown: AbstractContextManager[None] | None = None
        self._loaded: Path | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy as `"gossip"`."""
        strategy_registry.register(cls.strategy_name, cls, description="Gossip in place of DDP")

    def configure_ddp(self) -> None:
        """Return the model unwrapped: each rank steps by its own gradients."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Open the session, if the trainer fits; a collective."""
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True has each forward pass wait for all ranks, and gossip waits "
                "for none: leave it out. Statistics of BatchNorm are averaged in the consensus"
            )
        if fits and any(
            isinstance(c, pl.callbacks.StochasticWeightAveraging) for c in trainer.callbacks
        ):
            raise ValueError(
                "StochasticWeightAveraging replaces this rank's weights in the middle of a round, "
                "and partners would mix both: take EMAWeightAveraging, which keeps its average "
                "apart until fit is over"
            )
        super().setup(trainer)
        if fits:
            optimizers = self.optimizers
            self.session = open_session(
                self._open,
                trainer.lightning_module,
                optimizers[0] if len(optimizers) == 1 else optimizers,
                scaler=getattr(self.precision_plugin, "scaler", None),
                options=self._options,
                plain="give the module itself to the trainer",
            )

    def on_validation_start(self) -> None:
        """Set the model to the average of all replicas for validation; a collective."""
        if self.session is not None:
            self._shown = self.session.consensus()
            self._shown.__enter__()

    def on_validation_end(self) -> None:
        """Restore this rank's replica."""
        if self._shown is not None:
            shown, self._shown = self._shown, None
            shown.__exit__(None, None, None)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the consensus, on every rank; a collective while `fit` runs."""
        if self.session is None or self._shown is not None:
            return super().lightning_module_state_dict()
        with self.session.consensus():
            state = super().lightning_module_state_dict()
            return {name: value.detach().clone() for name, value in state.items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the checkpoint, and each rank's state next to it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        folder = _folder_of(filepath)
        if self.session is None or folder is None or "optimizer_states" not in checkpoint:
            return
        shows = self._shown is not None
        self.on_validation_end()
        save_state(self.session, folder)
        if shows:
            self.on_validation_start()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the checkpoint, and this rank's state next to it."""
        super().remove_checkpoint(filepath)
        if (folder := _folder_of(filepath)) is not None:
            path_of(folder, self.global_rank, self.world_size).unlink(missing_ok=True)
            with suppress(OSError):  # other ranks have files in it
                folder.rmdir()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint, and remember its path."""
        self._loaded = _folder_of(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from a checkpoint, exactly if each rank has saved its state; a collective."""
        super().load_optimizer_state_dict(checkpoint)
        if self.session is not None:
            load_state(self.session, self._loaded)

    def on_train_end(self) -> None:
        """Set each rank's module to the consensus, and close the session; a collective."""
        if self.session is not None:
            end(self.session)
            self.session = None

    def teardown(self) -> None:
        """Close the session of a `fit` with nothing left to train; then a collective."""
        self.on_train_end()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Close the session without waiting; the others continue without this rank."""
        self.on_validation_end()
        if self.session is not None:
            self.session.__exit__(type(exception), exception, exception.__traceback__)
            self.session = None
        super().on_exception(exception)


def _folder_of(filepath: Any) -> Path | None:
    """Return the folder of ranks' states of a checkpoint; None on a remote file system."""
    if "://" in str(filepath):
        return None
    path = Path(filepath).resolve()  # `save_last="link"` makes links
    return path.with_name(f"{path.name}.gossip")


GossipStrategy.register_strategies(StrategyRegistry)
