"""Integration with Hugging Face Transformers: a callback that trains a `Trainer` by gossip."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from math import isclose
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from gossipgrad._messages import warn
from gossipgrad.engine import Session
from gossipgrad.integrations._sessions import Open, end, load_state, open_session, save_state
from gossipgrad.integrations.accelerate import check_distributed_type

__all__ = ["GossipCallback"]


class GossipCallback(TrainerCallback):
    """Trains a `Trainer` by gossip, instead of DistributedDataParallel.

    For example::

        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.add_callback(GossipCallback(trainer))
        trainer.train()

    The session lasts as long as `trainer.train()`, and ends with it, also by an exception. After
    the callback is created, the trainer's accelerator wraps no model. The trainer evaluates and
    saves the consensus; each rank adds its state, `gossip-rank*.pt`, to each checkpoint, from which
    `train(resume_from_checkpoint=...)` continues exactly. From a checkpoint of another number of
    ranks, or of a run without gossip, training continues with its model. After training the model
    of each rank is the consensus, or with `load_best_model_at_end` the best saved one, with a
    warning if the trainer could not load all of it.

    Args:
        trainer: The trainer, before it trains; add the callback to it.
        open: The function that opens the session: `gg.gossip` by default, `gg.suda`, `gg.sparsify`,
            or a function of model and optimizer that calls one of them.
        consensus: False: the trainer evaluates each rank's own replica on its share of the samples,
            and saves that of rank 0.
        options: Arguments of `open`, for example `mode="stale"`. The gradient scaler is passed on.

    Attributes:
        session: The session, while the trainer trains; otherwise None.

    Raises:
        ValueError: For a trainer that uses DeepSpeed, FSDP, several devices per process or
            `auto_find_batch_size`.
    """

    def __init__(
        self, trainer: Trainer, *, open: Open | None = None, consensus: bool = True, **options: Any
    ) -> None:
        check_distributed_type(trainer.accelerator)
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"this process has {trainer.args.n_gpu} devices, among which DataParallel would "
                "split each batch: start one process a device, with torchrun"
            )
        if trainer.args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True starts again on a rank that is out of memory, and the "
                "others do not: give per_device_train_batch_size"
            )
        self.session: Session | None = None
        self._trainer, self._open, self._options = trainer, open, options
        self._shows_consensus = consensus
        self._checkpoint: str | None = None
        self._stack = ExitStack()
        accelerator: Any = trainer.accelerator
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
        whole: Any = trainer
        whole.train = self._train(trainer.train)
        whole.evaluation_loop = self._in_consensus(trainer.evaluation_loop)
        whole.save_model = self._in_consensus(trainer.save_model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the session, and continue from a checkpoint if the trainer does; a collective."""
        trainer = self._trainer
        if state.is_hyper_param_search:
            raise ValueError(
                "hyperparameter_search makes a new accelerator for each trial, which wraps the "
                "model: make a trainer and a GossipCallback for each trial of your own"
            )
        self.session = self._stack.enter_context(
            open_session(
                self._open,
                trainer.model,
                kwargs["optimizer"],
                scaler=trainer.accelerator.scaler,
                options=self._options,
                plain="make the GossipCallback before the trainer has prepared the model",
            )
        )
        if self._checkpoint is not None:
            load_state(self.session, self._checkpoint)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add this rank's state to the trainer's checkpoint."""
        if self.session is not None and not args.save_only_model:
            folder = Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            save_state(self.session, folder)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set each rank's model to the consensus, or to the best saved model."""
        session, self.session = self.session, None
        if session is None:
            return
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):
            end(session)
            return
        model = session.replica.model  # the trainer has just loaded it on each rank
        tensors = [*model.parameters(), *model.buffers()]
        best = [tensor.detach().clone() for tensor in tensors]
        sums = session.agree([float(value.double().abs().sum()) for value in best])
        if session.rank == 0 and not all(all(map(isclose, sums[0], each)) for each in sums):
            warn(
                f"the trainer has not loaded all weights of {state.best_model_checkpoint}, which "
                "Transformers may save by other names than the model's: what it left out is each "
                "rank's own. Load the best model by from_pretrained(...) of that folder"
            )
        session.close()  # mixes parts in flight
        with torch.no_grad():
            for tensor, value in zip(tensors, best, strict=True):
                tensor.copy_(value)

    def _train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `trainer.train` to end the session in every case."""

        @wraps(train)
        def call(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self not in self._trainer.callback_handler.callbacks:
                raise ValueError(
                    "this GossipCallback is not one of the trainer's, so replicas would drift "
                    "apart: call trainer.add_callback(callback) before trainer.train()"
                )
            found = resume_from_checkpoint
            if found is True:
                found = get_last_checkpoint(self._trainer.args.output_dir)
            self._checkpoint = found or None
            try:
                with self._stack:
                    return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self.session = None

        return call

    def _in_consensus(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of the trainer, called on all ranks, to use the average of all replicas."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            shown: AbstractContextManager[None] = nullcontext()
            if self.session is not None and self._shows_consensus:
                shown = self.session.consensus()
            with shown:
                return method(*args, **kwargs)

        return call
