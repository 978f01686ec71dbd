"""The training loop, on one screen; everything around it is a callback."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import mars_ds
from mars_ds.config import RunConfig
from mars_ds.planning.batch import BatchPlan
from mars_ds.training.callbacks import Callback, StepResult
from mars_ds.training.certificate import resume
from mars_ds.training.data import WindowLoader, check_vocabulary, open_split, run_sampling
from mars_ds.training.engine_config import deepspeed_config
from mars_ds.training.evaluation import Evaluations
from mars_ds.training.health import HealthWatch, LossGuard
from mars_ds.training.heartbeat import Heartbeat
from mars_ds.training.job import Job
from mars_ds.training.loop_speed import GarbageCollection, Profiler
from mars_ds.training.model import TrainableModel, build_model
from mars_ds.training.optimizer_metrics import OptimizerMetrics
from mars_ds.training.plan_check import PlanCheck
from mars_ds.training.progress import StepLog
from mars_ds.training.run_folder import CARD_NAME, RunFolder
from mars_ds.training.saving import Checkpoints
from mars_ds.training.schedule import Schedule, set_learning_rates
from mars_ds.training.signals import Reason, SignalWatch
from mars_ds.training.stop import StopWatch
from mars_ds.zero.card import optimizer_card
from mars_ds.zero.lookahead import lookahead


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: Optimizer steps done in all.
        validation_loss: Last one, or None without evaluation.
        reason: Why it stopped before its last step; NONE when it did not.
    """

    steps: int
    validation_loss: float | None
    reason: Reason = Reason.NONE


class Trainer:
    """One run on this rank; every rank makes one and calls `train`.

    Args:
        config: The run.
        batch: How a step is cut for this world size.
        folder: Where it lives and what it resumes from.
        printed: Console of rank 0, a no-op elsewhere.
        signals: Requests to stop that were noted while the ranks were joining.
        job: The scheduler's script, when there is one.

    Raises:
        ConfigError, data_pipeline.DataError: Input that does not fit, on every rank alike.
    """

    def __init__(
        self,
        config: RunConfig,
        batch: BatchPlan,
        folder: RunFolder,
        printed: Callable[[str], None],
        signals: SignalWatch | None = None,
        job: Job | None = None,
    ) -> None:
        self.job = job or Job()
        self.config, self.batch, self.folder, self.print = config, batch, folder, printed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(_accelerator().current_device_name())
        train_windows = open_split(config, "train")
        self.model: TrainableModel = build_model(config)
        check_vocabulary(train_windows, self.model)
        sampling = run_sampling(config, train_windows)
        self.loader = WindowLoader(train_windows, sampling, batch, self.rank, self.device, config.data, self.print)
        health = config.health
        self.heartbeat = Heartbeat(
            folder.path, self.rank, self.world_size, health.heartbeat_seconds, health.silence_seconds, printed
        )
        try:
            self._build(signals or SignalWatch(self.rank))
        except BaseException:
            self.heartbeat.close()
            raise

    def _build(self, signals: SignalWatch) -> None:
        """Everything that other ranks may be waited for in."""
        config, batch, folder = self.config, self.batch, self.folder
        self.health, self.guard = HealthWatch(config.health), LossGuard(config.health, self.device)
        self.evaluations = Evaluations(config, self.model, batch.micro_batch, self.device)
        self.checkpoints = Checkpoints(config)
        self.log = StepLog(config)
        self.optimizer_metrics = OptimizerMetrics(config)
        # In this order after every step: see mars_ds.training.callbacks.
        self.callbacks: list[Callback] = [
            Profiler(config.telemetry),
            self.optimizer_metrics,
            self.health,
            self.log,
            PlanCheck(),
            self.evaluations,
            self.checkpoints,
            GarbageCollection(config.telemetry.garbage_collection_steps),
        ]
        self.schedule = Schedule.from_config(config.schedule)
        with self.heartbeat.phase("building the engine"):
            self.engine = mars_ds.initialize(
                self.model.module,
                config.optimizer,
                deepspeed_config(config, batch),
                parameter_order=config.zero.parameter_order,
            )
            if config.model.compile:
                self.engine.compile()
        self.exact = any(group["exact"] for group in self.engine.mars.param_groups)
        self._proof_is_open = True
        self.card = optimizer_card(self.engine.mars, self.engine.mars_sharding)
        self.step = 0
        self.stop = StopWatch(
            signals,
            [config.stop_file, *([self.job.stop_file] if self.job.stop_file else [])],
            folder.deadline(config.run.time_limit_minutes),
            lambda: self.checkpoints.seconds + 2 * self.log.seconds_per_step,
        )
        with self.heartbeat.phase("loading"):
            resume(self)

    def train(self) -> Outcome:
        """Runs the remaining steps, until the last one or an agreed stop."""
        self.print(self.card)
        try:
            for callback in self.callbacks:
                callback.start(self)
            while self.step < self.config.schedule.steps and self.stop.poll() == Reason.NONE:
                for callback in self.callbacks:
                    callback.before_step(self)
                with self.heartbeat.phase("training"):
                    result = self._train_step()
                for callback in self.callbacks:
                    callback.after_step(self, result)
            outcome = Outcome(self.step, self.evaluations.last_loss, self._why_stopped())
            for callback in self.callbacks:
                callback.end(self, outcome)
            return outcome
        finally:
            for callback in reversed(self.callbacks):
                callback.close()
            self.loader.close()
            self.heartbeat.close()

    def _train_step(self) -> StepResult:
        """One optimizer step."""
        lr = set_learning_rates(self.engine.mars, self.schedule, self.config.schedule, self.config.optimizer, self.step)
        if self.exact:
            with lookahead(self.engine):
                self._run_window(self.loader.peek_step(1), self.step + 1, judged=False)
        loss = self._run_window(self.loader.next_step(), self.step)
        self.step += 1
        self.heartbeat.step(self.step)
        if self._proof_is_open:
            self._show_proof()
        return StepResult(loss, lr, self.engine.was_step_applied())

    def _run_window(self, micro_batches: Iterable[torch.Tensor], batch_index: int, judged: bool = True) -> torch.Tensor:
        """Forward, backward and engine step of one accumulation window; returns its mean loss.

        A window that is only looked ahead at is not judged as a spike: that is done when its own step comes.
        """
        # Dropout masks belong to the batch: exact mode evaluates each batch twice.
        torch.manual_seed(((self.config.run.seed * 1_000_003 + batch_index) * 65_537 + self.rank) % 2**63)
        total = torch.zeros((), device=self.device)
        count = self.batch.accumulation_steps
        for index, windows in enumerate(self._arriving(micro_batches), start=1):
            inputs, labels = self.model.inputs(windows)
            loss = self.engine(input_ids=inputs, labels=labels).loss
            total += loss.detach().float()
            window_loss = total / count if judged and index == count else None
            self.engine.backward(loss * self.guard.factor(loss, window_loss))
            self._measure_norm()
            self.engine.step()
        return total / count

    def _arriving(self, micro_batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The micro-batches, with the wait for each of them told to the heartbeat."""
        iterator = iter(micro_batches)
        while True:
            with self.heartbeat.phase("waiting for data"):
                windows = next(iterator, None)
            if windows is None:
                return
            yield windows

    def _show_proof(self) -> None:
        """Writes the optimizer card and what the start-up proof has shown so far into the run folder."""
        proof = self.engine.mars_proof
        if self.rank == 0:
            text = "\n".join([self.card, *proof.lines]) + "\n"
            (self.folder.path / CARD_NAME).write_text(text, encoding="utf-8")
        if proof.done:
            self._proof_is_open = False
            self.print("\n".join(["start-up proof passed:", *(f"  {line}" for line in proof.lines)]))

    def _measure_norm(self) -> None:
        """Stage 0 in fp32 clips with torch and keeps no norm: take it before the clip."""
        if self.engine.optimizer is self.engine.mars and self.engine.is_gradient_accumulation_boundary():
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            self.engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients)

    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradient before the clip, times `optimizer.gradient_scale`."""
        norm = self.engine.get_global_grad_norm()
        scale = self.config.optimizer.resolved().gradient_scale or 1.0
        return float(norm) * scale if norm is not None else None

    def is_due(self, interval: int) -> bool:
        """Whether something that is done every `interval` steps, and at the last one, is due now."""
        return self.step == self.config.schedule.steps or (interval > 0 and self.step % interval == 0)

    def _why_stopped(self) -> Reason:
        """NONE for a run that reached its last step, whatever was asked in that moment."""
        if self.step < self.config.schedule.steps or self.stop.agreed == Reason.UNHEALTHY:
            return self.stop.settle()
        return Reason.NONE


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
