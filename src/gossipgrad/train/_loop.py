"""The training loop: what a user's own loop does, with a clock and a stop."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gossipgrad.checkpoint import write_safetensors
from gossipgrad.data import ElasticBatches

from ._batches import Batches, RingBatches
from ._evaluate import Evaluation, TestPart
from ._job import split_batch, to_device
from ._metrics import Event, Metrics
from ._result import DivergedError
from ._spans import StepSpans
from ._state import Checkpoints, LoopState
from .strategies import RunningStrategy


class RunPosition:
    """The position of a run, in steps of a rank had nobody come or gone.

    It is that of the strategy: this rank's steps, or in mode stale those of all rounds. In epochs
    in which ranks came or went it is the share of the epoch that all together have done; such an
    epoch ends for a rank when there is nothing left of it to train on.
    """

    def __init__(
        self, strategy: RunningStrategy, batches: Batches, resumed: Mapping[str, Any] | None = None
    ) -> None:
        self._strategy = strategy
        self._batches = batches
        self._epoch = self._last = self._ahead = 0
        if resumed is not None:
            position = strategy.position(resumed["steps"])
            self._last = resumed.get("position", position)
            self._ahead = self._last - position

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins, or what is left of it."""
        self._epoch = epoch

    def at(self, steps: int) -> int:
        """Where the run is, for a rank that has made so many steps."""
        if (elastic := self._disturbed(self._epoch)) is not None:
            position = elastic.position
        else:
            position = self._strategy.position(steps) + self._ahead
        self._last = max(self._last, position)
        return self._last

    def is_over(self, steps: int) -> bool:
        """Whether the epoch is known to be over without a look at its batches."""
        if self._disturbed(self._epoch) is not None:
            return False
        return self.at(steps) >= (self._epoch + 1) * len(self._batches)

    def end_epoch(self, steps: int) -> None:
        """The epoch is over, after however many steps of this rank."""
        end = (self._epoch + 1) * len(self._batches)
        if self._disturbed(self._epoch) is not None:
            self._ahead = end - self._strategy.position(steps)
            self._last = max(self._last, end)

    def batch(self, epoch: int, batch: int) -> int:
        """How far an epoch is, in batches of a share, where this rank has made `batch` of it."""
        if (elastic := self._disturbed(epoch)) is None:
            return batch
        return max(0, elastic.position - epoch * len(self._batches))

    def _disturbed(self, epoch: int) -> ElasticBatches | None:
        """The batches, where ranks came or went in an epoch."""
        batches = self._batches
        if isinstance(batches, ElasticBatches) and batches.is_disturbed(epoch):
            return batches
        return None


_PROGRESS_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What a step does beside one forward and one backward pass."""

    accumulate: int = 1
    clip_norm: float | None = None
    amp: bool = False


class Best:
    """The best evaluation, whose model the lowest living rank writes."""

    def __init__(self, path: Path, keeps: Literal["highest", "lowest"], *, rank: int) -> None:
        self._path, self._sign, self._rank = path, 1 if keeps == "highest" else -1, rank
        self.found: dict[str, Any] | None = None

    def is_best(self, accuracy: float) -> bool:
        """Whether a metric is better than all before; NaN is not."""
        if self.found is None:
            return not math.isnan(accuracy)
        return self._sign * accuracy > self._sign * self.found["accuracy"]

    def take(
        self, evaluation: Evaluation, living: Sequence[int] | None, **when: float
    ) -> str | None:
        """Write the model if it is the best so far; why it could not be, if so."""
        if not self.is_best(evaluation.accuracy):
            return None
        self.found = {"accuracy": evaluation.accuracy, **when}
        if self._rank != min(living or [0]):
            return None
        partial = self._path.with_name(f"{self._path.name}.partial")
        try:
            write_safetensors(partial, evaluation.weights, {"format": "pt"})
            partial.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            return f"{self._path} could not be written: {error.strerror}"
        return None


@dataclass(kw_only=True)
class Loop:
    """Trains for some epochs and evaluates after each; a loss that is not finite ends it.

    A stop between two epochs evaluates as well, for the model to export, but makes no epoch event.
    An epoch is over when the run is at its end, though a slow rank may have made fewer steps of it:
    what is left of its share is drawn anew in the next. Where ranks came or went, it is over when
    nothing is left of it that this rank could train on.
    """

    strategy: RunningStrategy
    criterion: Callable[[Any, Any], Tensor]
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LRScheduler]
    batches: Batches
    position: RunPosition
    test: TestPart
    device: torch.device
    epochs: int
    total_steps: int
    log_every: int
    metrics: Metrics
    spans: StepSpans
    stop: threading.Event
    emit: Callable[[Event], None]
    checkpoints: Checkpoints
    loop_state: LoopState | None = None
    widths: Callable[[], dict[str, int]] | None = None
    passes: Passes = field(default_factory=Passes)
    evaluate_every: int | None = None
    best: Best | None = None
    _evaluated: int = 0
    _epoch: int = 0
    _batch: int = 0
    _last: Evaluation | None = None
    _last_progress: float = 0.0
    _last_loss: float = math.nan
    _unread: list[tuple[int, Tensor, int]] = field(default_factory=list)

    def run(self) -> Evaluation:
        """Train to the end or the stop; returns the last evaluation."""
        first, batch = (
            (0, 0) if self.loop_state is None else (self.loop_state.epoch, self.loop_state.batch)
        )
        if self.best is not None:
            self.test.is_best = self.best.is_best
            if self.loop_state is not None:
                self.best.found = self.loop_state.metrics.get("best")
        self._evaluated = self._evaluations()
        for epoch in range(first, self.epochs):
            finished = self._train_epoch(epoch, batch if epoch == first else 0)
            # Before an evaluation, which a run that is resumed here has not made.
            loop_state = self._loop_state(epoch)
            evaluation = self._last
            if evaluation is None:
                is_last = not finished or epoch + 1 == self.epochs or self._is_over()
                evaluation = self._evaluate(epoch, final=is_last)
            if finished:
                self.metrics.epochs += 1
                self._batch = 0
                loop_state = self._loop_state(epoch + 1)
            if evaluation is not None and evaluation.final:
                self._save_last(loop_state, evaluation)
                return evaluation
        # It was at its end when it was resumed, and has shown its last epoch.
        self.metrics.begin_epoch()
        evaluation = self._evaluate(self.epochs - 1, final=True)
        assert evaluation is not None, "nobody trains on behind the last epoch"
        return evaluation

    def _train_epoch(self, epoch: int, batch: int) -> bool:
        """Train on what is left of an epoch; whether it was finished."""
        if batch == 0:
            self.metrics.begin_epoch()
        self._epoch, self._batch = epoch, batch
        self.position.begin_epoch(epoch)
        batches = self.batches.epoch(epoch, start_batch=batch)
        while not self.position.is_over(self.metrics.steps):
            if self._last is not None or self._is_over():
                return False
            step = self.metrics.steps + 1
            if self.strategy.should_stop(step, is_asked=self.stop.is_set()):
                return False
            self.spans.begin(step)
            start_seconds = perf_counter()
            with self.spans.measure("data", step):
                drawn = next(batches, None)
            if drawn is None:
                break
            x, y = drawn
            loss = self._step(x, y, step)
            self._unread.append((step, loss, len(y)))
            if self.device.type == "cpu" or step % self.log_every == 0:
                self._read_losses()
            step_seconds = perf_counter() - start_seconds
            self.metrics.count_step(len(y), step_seconds)
            self._log(epoch, step_seconds)
            self._batch += 1
            self._evaluate_within(epoch)
            self.checkpoints.after_step(self.metrics.steps, partial(self._loop_state, epoch))
        self.position.end_epoch(self.metrics.steps)
        return True

    def _is_over(self) -> bool:
        """Whether the run ends here, before its last epoch does; others end with the epoch."""
        is_shorter = self.total_steps < self.epochs * len(self.batches)
        return is_shorter and self.position.at(self.metrics.steps) >= self.total_steps

    def _evaluations(self) -> int:
        """How many evaluations of `evaluate_every` were due so far."""
        return self.position.at(self.metrics.steps) // (self.evaluate_every or self.total_steps)

    def _evaluate_within(self, epoch: int) -> None:
        """Evaluate in the middle of an epoch, if that is due."""
        if self.evaluate_every is None or (due := self._evaluations()) == self._evaluated:
            return
        self._evaluated, step = due, due * self.evaluate_every
        done = step / len(self.batches)
        if done < epoch + 1 and step < self.total_steps:  # these ends have one
            evaluation = self._evaluate(done, final=False)
            if evaluation is not None and evaluation.final:  # another rank stops
                self._last = evaluation

    def _read_losses(self) -> None:
        """Count the losses of the last steps; on a GPU that waits for all its work.

        So it is done every `log_every` steps, at the end of an epoch and before a checkpoint.
        """
        if not self._unread:
            return
        values = torch.stack([loss for _, loss, _ in self._unread]).tolist()
        for (step, _, samples), value in zip(self._unread, values, strict=True):
            if not math.isfinite(value):
                way_out = self.strategy.against_divergence
                raise DivergedError(f"the loss became {value} in step {step}; {way_out}")
            self.metrics.count_loss(value, samples)
        self._last_loss = values[-1]
        self._unread.clear()

    def carried(self) -> dict[str, Any]:
        """Where this rank is in the run, for one that joins; called between two steps."""
        return {
            "epoch": self._epoch,
            "position": self.position.at(self.metrics.steps),
            "seconds": self.metrics.seconds,
            "best": self.best and self.best.found,
            "strategy": self.strategy.state_dict(),
            "checkpoint_base": self.checkpoints.base,
        }

    def _loop_state(self, epoch: int) -> LoopState:
        self._read_losses()
        metrics = self.metrics.state(epoch_batches=len(self.batches))
        metrics["position"] = self.position.at(self.metrics.steps)
        metrics["best"] = self.best and self.best.found
        batch = self.position.batch(epoch, self._batch)
        return LoopState(epoch=epoch, batch=batch, metrics=metrics)

    def _save_last(self, loop_state: LoopState, evaluation: Evaluation) -> None:
        if self.strategy.has_left:
            return
        why: str | None = "the ranks did not come together for it"
        if evaluation.is_consensus or not self.strategy.meets:
            why = self.checkpoints.end(self.metrics.steps, loop_state)
        if why is not None:
            self.strategy.notes.append(f"no checkpoint at the end: {why}")

    def _step(self, x: Any, y: Tensor, step: int) -> Tensor:
        self.strategy.begin_step()
        *parts, last = split_batch(x, y, self.passes.accumulate)
        losses = []
        for inputs, targets in parts:
            with self.strategy.no_sync():
                losses.append(self._pass(inputs, targets, step, share=len(targets) / len(y)))
        losses.append(self._pass(*last, step, share=len(last[1]) / len(y)))
        with self.spans.measure("optimizer", step):
            if self.passes.clip_norm is not None:
                groups = (group for one in self.optimizers for group in one.param_groups)
                parameters = [parameter for group in groups for parameter in group["params"]]
                nn.utils.clip_grad_norm_(parameters, self.passes.clip_norm)
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self.schedulers:
                # The rate of the step to come: a position further, or more if others are ahead.
                scheduler.last_epoch = self.position.at(step) - 1
                scheduler.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _pass(self, x: Any, y: Tensor, step: int, *, share: float) -> Tensor:
        """One forward and backward pass of a step, for its share of the samples."""
        amp = torch.autocast(self.device.type, torch.bfloat16) if self.passes.amp else nullcontext()
        with self.spans.measure("forward", step), amp:
            outputs = self.strategy.forward(to_device(x, self.device))
            loss = self.criterion(outputs, y.to(self.device))
            loss = loss if share == 1 else loss * share
        with self.spans.measure("backward", step):
            self.strategy.backward(loss)
        return loss.detach().reshape(())

    def _log(self, epoch: int, step_seconds: float) -> None:
        metrics = self.metrics
        traffic = None
        if metrics.steps % self.log_every == 0:
            traffic = self.strategy.traffic()
            metrics.write(
                "step",
                step=metrics.steps,
                epoch=epoch,
                seconds=metrics.seconds,
                loss=self._last_loss,
                samples=metrics.samples,
                consensus_distance_estimate=traffic.consensus_distance_estimate,
                exposed_seconds=traffic.exposed_seconds,
                train_seconds=metrics.train_seconds,
                step_seconds=step_seconds,
                bytes_sent=traffic.bytes_sent,
                outcomes=traffic.outcomes,
                **(self.batches.figures() if isinstance(self.batches, RingBatches) else {}),
                **({} if self.widths is None else {"widths": self.widths()}),
            )
        if metrics.seconds - self._last_progress >= _PROGRESS_SECONDS:
            self._read_losses()
            self._last_progress = metrics.seconds
            traffic = traffic or self.strategy.traffic()
            for text in self.strategy.membership_changes():
                self._tell({"event": "members", "text": text})
            self._tell(
                {
                    "event": "progress",
                    "epoch": epoch,
                    "step": self.position.at(metrics.steps),
                    "loss": metrics.epoch_loss,
                    "samples_per_second": metrics.samples_per_second,
                    "consensus_distance": traffic.consensus_distance_estimate,
                    "exposed_share": traffic.exposed_seconds / metrics.train_seconds,
                }
            )

    def _tell(self, event: Event) -> None:
        self.emit({**event, "living": self.strategy.living})

    def _evaluate(self, epoch: float, *, final: bool) -> Evaluation | None:
        """Evaluate in or at the end of an epoch: a number of epochs that are over, or its index."""
        metrics = self.metrics
        self._read_losses()
        done = epoch if isinstance(epoch, float) else epoch + 1
        with self.spans.measure("evaluate", metrics.steps):
            evaluation = self.strategy.evaluate(self.test, epoch=done, final=final)
        if evaluation is None or not metrics.epoch_samples:
            return evaluation
        if self.best is not None and (evaluation.is_consensus or not self.strategy.meets):
            step = self.position.at(metrics.steps)
            why = self.best.take(evaluation, self.strategy.living, epoch=done, step=step)
            if why is not None:
                self.emit({"event": "checkpoint", "text": why})
        event = metrics.write(
            "epoch",
            epoch=epoch,
            step=metrics.steps,
            seconds=metrics.seconds,
            accuracy=evaluation.accuracy,
            **self.test.metric,
            loss=metrics.epoch_loss,
            consensus_distance=evaluation.consensus_distance,
            **(
                {} if evaluation.disagreement is None else {"disagreement": evaluation.disagreement}
            ),
            samples_per_second=metrics.samples_per_second,
        )
        self._tell({**event, "step": self.position.at(metrics.steps)})
        return evaluation
