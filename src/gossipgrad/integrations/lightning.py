"""The door into Lightning: a strategy, registered as `"gossip"`."""

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
from gossipgrad.integrations._door import Open, end, load_state, open_session, path_of, save_state

__all__ = ["GossipStrategy"]


class GossipStrategy(DDPStrategy):
    """Has Lightning's `Trainer` train by gossip: processes and samplers as with `"ddp"`, no DDP.

    For example::

        import gossipgrad.integrations.lightning

        trainer = Trainer(strategy="gossip", devices=2)

    Or `strategy=GossipStrategy(mode="stale")`. The session begins when `fit` has made optimizers
    and ends when it is over, also by an exception. Validation runs on the consensus, and
    checkpoints hold it; beside each, in `NAME.ckpt.gossip/`, each rank keeps what it needs to go on
    exactly, and `fit(ckpt_path=...)` does so. A checkpoint of another number of ranks, of another
    strategy, or on a remote file system is gone on with from its model. After `fit` the module of
    each rank is the consensus, which `test` and `predict` take.

    Args:
        open: What opens the session: `gg.gossip` by default, `gg.suda`, `gg.sparsify`, or a
            function of module and optimizer (a list, if there are several) that calls one of them.
        cluster_environment: As of `DDPStrategy`, and so are the next three.
        process_group_backend: Of Lightning's own collectives.
        timeout: Of these.
        start_method: How processes are started.
        options: Of `open`, for example `mode="stale"`. The gradient scaler is passed on.

    Attributes:
        session: The session, while `fit` runs; else None.

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
        """Registers the strategy as `"gossip"`."""
        strategy_registry.register(cls.strategy_name, cls, description="Gossip in place of DDP")

    def configure_ddp(self) -> None:
        """Wraps nothing: each rank steps by its own gradients."""

    def setup(self, trainer: pl.Trainer) -> None:
        """Opens the session, if the trainer fits; a collective."""
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
        """Shows the average of all replicas while `fit` validates; a collective."""
        if self.session is not None:
            self._shown = self.session.consensus()
            self._shown.__enter__()

    def on_validation_end(self) -> None:
        """Takes this rank's replica back."""
        if self._shown is not None:
            shown, self._shown = self._shown, None
            shown.__exit__(None, None, None)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the state of the consensus, on every rank; a collective while `fit` runs."""
        if self.session is None or self._shown is not None:
            return super().lightning_module_state_dict()
        with self.session.consensus():
            state = super().lightning_module_state_dict()
            return {name: value.detach().clone() for name, value in state.items()}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes the checkpoint, and beside it what each rank needs to go on exactly."""
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
        """Removes the checkpoint, and what this rank has written beside it."""
        super().remove_checkpoint(filepath)
        if (folder := _folder_of(filepath)) is not None:
            path_of(folder, self.global_rank, self.world_size).unlink(missing_ok=True)
            with suppress(OSError):  # others have their files in it
                folder.rmdir()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a checkpoint, and keeps in mind which."""
        self._loaded = _folder_of(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint, exactly where each rank has kept its state; a collective."""
        super().load_optimizer_state_dict(checkpoint)
        if self.session is not None:
            load_state(self.session, self._loaded)

    def on_train_end(self) -> None:
        """Leaves the consensus in the module of each rank, and closes the session; a collective."""
        if self.session is not None:
            end(self.session)
            self.session = None

    def teardown(self) -> None:
        """Closes the session of a `fit` that had nothing left to train; a collective then."""
        self.on_train_end()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Closes the session, and waits for no rank; the others go on without this one."""
        self.on_validation_end()
        if self.session is not None:
            self.session.__exit__(type(exception), exception, exception.__traceback__)
            self.session = None
        super().on_exception(exception)


def _folder_of(filepath: Any) -> Path | None:
    """Where ranks keep their states beside a checkpoint; None on a remote file system."""
    if "://" in str(filepath):
        return None
    path = Path(filepath).resolve()  # `save_last="link"` makes links
    return path.with_name(f"{path.name}.gossip")


GossipStrategy.register_strategies(StrategyRegistry)
