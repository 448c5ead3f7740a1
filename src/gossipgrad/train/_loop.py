"""The training loop: what a user's own loop does, with a clock and a stop."""

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gossipgrad.checkpoint import write_safetensors

from ._batches import RingBatches
from ._evaluate import Evaluation
from ._job import split_batch, to_device
from ._metrics import Event, Metrics
from ._result import DivergedError
from ._setup import Rank
from ._state import LoopState

_PROGRESS_SECONDS = 0.1


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

    @staticmethod
    def read(path: Path) -> dict[str, Any] | None:
        """Return the best evaluation of which the model was written, None if none was."""
        try:
            with safe_open(path, framework="pt") as file:
                return json.loads(file.metadata()["found"])
        except (OSError, KeyError, SafetensorError):
            return None

    def take(
        self, evaluation: Evaluation, living: Sequence[int] | None, **when: float
    ) -> str | None:
        """Write the model if it is the best so far; why it could not be, if so."""
        if not self.is_best(evaluation.accuracy):
            return None
        self.found = {"accuracy": evaluation.accuracy, **when}
        if self._rank != min(living or [0]):
            return None
        try:
            about = {"found": json.dumps(self.found)}
            write_safetensors(self._path, evaluation.weights, about)
        except OSError as error:
            return f"{self._path} could not be written: {error.strerror}"
        return None


class Loop:
    """Trains for some epochs and evaluates after each; a loss that is not finite ends it."""

    def __init__(self, one: Rank, metrics: Metrics) -> None:
        self._one, self._config, self.metrics = one, one.config, metrics
        self.strategy, self.position, self._batches = one.strategy, one.position, one.batches
        self._evaluated = self._epoch = self._batch = 0
        self._last: Evaluation | None = None
        self._last_progress, self._last_loss = 0.0, math.nan
        self._unread: list[tuple[int, Tensor, int]] = []
        self.best: Best | None = None
        if self._config.keep_best is not None:
            self.best = Best(one.run_dir.best, self._config.keep_best, rank=one.rank)

    def run(self) -> Evaluation:
        """Train to the end or the stop; returns the last evaluation."""
        begun, epochs = self._one.begun, self._config.epochs
        first, batch = (0, 0) if begun is None else (begun.epoch, begun.batch)
        if self.best is not None:
            self._one.test.is_best = self.best.is_best
            if begun is not None:
                self.best.found = begun.metrics.get("best")
        self._evaluated = self._evaluations()
        for epoch in range(first, epochs):
            finished = self._train_epoch(epoch, batch if epoch == first else 0)
            # Before an evaluation, which a run that is resumed here has not made.
            loop_state = self._loop_state(epoch)
            evaluation = self._last
            if evaluation is None:
                is_last = not finished or epoch + 1 == epochs or self._is_over()
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
        evaluation = self._evaluate(epochs - 1, final=True)
        assert evaluation is not None, "nobody trains on behind the last epoch"
        return evaluation

    def _train_epoch(self, epoch: int, batch: int) -> bool:
        """Train on what is left of an epoch; whether it was finished."""
        if batch == 0:
            self.metrics.begin_epoch()
        self._epoch, self._batch = epoch, batch
        self.position.begin_epoch(epoch)
        batches = self._batches.epoch(epoch, start_batch=batch)
        while not self.position.is_over(self.metrics.steps):
            if self._last is not None or self._is_over():
                return False
            step = self.metrics.steps + 1
            if self.strategy.should_stop(step, is_asked=self._one.stop.is_set()):
                return False
            self._one.spans.begin(step)
            start_seconds = perf_counter()
            with self._one.spans.measure("data", step):
                drawn = next(batches, None)
            if drawn is None:
                break
            x, y = drawn
            loss = self._step(x, y, step)
            self._unread.append((step, loss, len(y)))
            if self._one.device.type == "cpu" or step % self._config.log_every == 0:
                self._read_losses()
            step_seconds = perf_counter() - start_seconds
            self.metrics.count_step(len(y), step_seconds)
            self._log(epoch, step_seconds)
            self._batch += 1
            self._evaluate_within(epoch)
            self._one.checkpoints.after_step(self.metrics.steps, partial(self._loop_state, epoch))
        self.position.end_epoch(self.metrics.steps)
        return True

    def _is_over(self) -> bool:
        """Whether the run ends here, before its last epoch does; others end with the epoch."""
        is_shorter = self._one.total_steps < self._config.epochs * len(self._batches)
        return is_shorter and self.position.at(self.metrics.steps) >= self._one.total_steps

    def _evaluations(self) -> int:
        """How many evaluations of `evaluate_every` were due so far."""
        return self.position.at(self.metrics.steps) // (
            self._config.evaluate_every or self._one.total_steps
        )

    def _evaluate_within(self, epoch: int) -> None:
        """Evaluate in the middle of an epoch, if that is due."""
        if self._config.evaluate_every is None or (due := self._evaluations()) == self._evaluated:
            return
        self._evaluated, step = due, due * self._config.evaluate_every
        done = step / len(self._batches)
        if done < epoch + 1 and step < self._one.total_steps:  # these ends have one
            evaluation = self._evaluate(done, final=False)
            if evaluation is not None and evaluation.final:  # another rank stops
                self._last = evaluation

    def _read_losses(self) -> None:
        """Count the losses of the last steps; on a GPU that waits for all its work."""
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

    def _loop_state(self, epoch: int) -> LoopState:
        self._read_losses()
        metrics = self.metrics.state(epoch_batches=len(self._batches))
        metrics["position"] = self.position.at(self.metrics.steps)
        metrics["best"] = self.best and self.best.found
        batch = self.position.batch(epoch, self._batch)
        session = self._one.shrinking
        shrinking = None if session is None else session.state_dict()
        return LoopState(epoch=epoch, batch=batch, metrics=metrics, shrinking=shrinking)

    def _save_last(self, loop_state: LoopState, evaluation: Evaluation) -> None:
        if self.strategy.has_left:
            return
        why: str | None = "the ranks did not come together for it"
        if evaluation.is_consensus or not self.strategy.meets:
            why = self._one.checkpoints.end(self.metrics.steps, loop_state)
        if why is not None:
            self.strategy.notes.append(f"no checkpoint at the end: {why}")

    def _step(self, x: Any, y: Tensor, step: int) -> Tensor:
        *parts, last = split_batch(x, y, self._config.accumulate)
        losses = []
        for inputs, targets in parts:
            with self.strategy.no_sync():
                losses.append(self._pass(inputs, targets, step, share=len(targets) / len(y)))
        losses.append(self._pass(*last, step, share=len(last[1]) / len(y)))
        with self._one.spans.measure("optimizer", step):
            if self._config.clip_norm is not None:
                groups = (group for one in self._one.optimizers for group in one.param_groups)
                parameters = [parameter for group in groups for parameter in group["params"]]
                nn.utils.clip_grad_norm_(parameters, self._config.clip_norm)
            for optimizer in self._one.optimizers:
                optimizer.step()
            # Of the step to come: a position further, or more if others are ahead.
            self._one.rates.set(self.position.at(step))
            for optimizer in self._one.optimizers:
                optimizer.zero_grad()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _pass(self, x: Any, y: Tensor, step: int, *, share: float) -> Tensor:
        """One forward and backward pass of a step, for its share of the samples."""
        amp = (
            torch.autocast(self._one.device.type, torch.bfloat16)
            if self._config.amp
            else nullcontext()
        )
        with self._one.spans.measure("forward", step), amp:
            outputs = self.strategy.forward(to_device(x, self._one.device))
            loss = self._one.job.loss(outputs, y.to(self._one.device))
            loss = loss if share == 1 else loss * share
        with self._one.spans.measure("backward", step):
            self.strategy.backward(loss)
        return loss.detach().reshape(())

    def _log(self, epoch: int, step_seconds: float) -> None:
        metrics, shrinking, traffic = self.metrics, self._one.shrinking, None
        if metrics.steps % self._config.log_every == 0:
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
                **(self._batches.figures() if isinstance(self._batches, RingBatches) else {}),
                **({} if shrinking is None else {"widths": shrinking.widths()}),
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
        self._one.emit({**event, "living": self.strategy.living})

    def _evaluate(self, epoch: float, *, final: bool) -> Evaluation | None:
        """Evaluate in or at the end of an epoch: a number of epochs that are over, or its index."""
        metrics = self.metrics
        self._read_losses()
        done = epoch if isinstance(epoch, float) else epoch + 1
        with self._one.spans.measure("evaluate", metrics.steps):
            evaluation = self.strategy.evaluate(self._one.test, epoch=done, final=final)
        if evaluation is not None and evaluation.is_consensus:
            self._one.checkpoints.after_evaluation()
        if evaluation is None or not metrics.epoch_samples:
            return evaluation
        if self.best is not None and (evaluation.is_consensus or not self.strategy.meets):
            step = self.position.at(metrics.steps)
            why = self.best.take(evaluation, self.strategy.living, epoch=done, step=step)
            if why is not None:
                self._one.emit({"event": "checkpoint", "text": why})
        event = metrics.write(
            "epoch",
            epoch=epoch,
            step=metrics.steps,
            seconds=metrics.seconds,
            accuracy=evaluation.accuracy,
            **self._one.test.metric,
            loss=metrics.epoch_loss,
            consensus_distance=evaluation.consensus_distance,
            **(
                {} if evaluation.disagreement is None else {"disagreement": evaluation.disagreement}
            ),
            samples_per_second=metrics.samples_per_second,
        )
        self._tell({**event, "step": self.position.at(metrics.steps)})
        return evaluation
