"""Console lines, the JSONL log and the trackers of one run: everything a person sees of the loop."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError
from mars_ds.telemetry.bar import Bar
from mars_ds.telemetry.console import StepLine, first_loss_line, step_header, step_line
from mars_ds.telemetry.devices import mfu
from mars_ds.telemetry.jsonl import JsonlLog
from mars_ds.telemetry.statistics import RunningZScore
from mars_ds.telemetry.trackers import BackgroundTracker, TensorBoardTracker, Tracker, WandbTracker
from mars_ds.training.callbacks import Callback, StepResult
from mars_ds.training.certificate import environment
from mars_ds.training.evaluation import OWN_SET, Evaluation
from mars_ds.training.run_folder import CONFIG_NAME
from mars_ds.training.signals import URGENT_SECONDS

if TYPE_CHECKING:
    from mars_ds.training.trainer import Outcome, Trainer

# The first steps are logged one by one: that is when a person watches.
ALWAYS_LOGGED_STEPS = 20


def is_log_step(config: RunConfig, step: int) -> bool:
    """True when step `step` (from 1) has a line; every rank asks, since the loss is summed over them."""
    interval = config.telemetry.log_interval_steps
    return step % interval == 0 or step <= ALWAYS_LOGGED_STEPS or step == config.schedule.steps


class Progress:
    """Rank 0's reporting; on other ranks nothing is made and nothing is written.

    Args:
        config: The run.
        folder: Run folder.
        flops_per_token: For MFU.
        world_size: Devices.
        first_step: Steps already done when this process started.
        printed: Where console lines go.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        flops_per_token: int,
        world_size: int,
        first_step: int,
        printed: Callable[[str], None],
    ) -> None:
        self.config, self.flops_per_token, self.world_size = config, flops_per_token, world_size
        self.print = printed
        self.first_step = first_step
        self.log = JsonlLog(folder / "log.jsonl")
        # From the start there is nothing to keep: also what was evaluated at step 0 comes again.
        try:
            self.log.resume(first_step or -1)
        except ValueError as error:
            raise ConfigError(f"{error}; move the file away to go on without what it holds") from error
        self._loss_statistics, self._norm_statistics = RunningZScore(), RunningZScore()
        self._clipped, self._logged = 0, 0
        self._device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self._without = () if torch.cuda.is_available() else ("mfu", "memory_bytes")
        self._trackers = _trackers(config, folder, printed)
        for tracker in self._trackers:
            tracker.start(config.model_dump(mode="json"))
        self._timer = time.perf_counter()
        self._timed_step = first_step
        self._started = time.perf_counter()
        self.seconds_per_step = 0.0

    def start(self, facts: dict[str, Any]) -> None:
        """Writes the start line and the header."""
        self.log.write({"kind": "start", "step": self.first_step, "time": time.time(), **facts})
        self.print(step_header(self._without))

    @contextlib.contextmanager
    def clock_paused(self) -> Iterator[None]:
        """Stops the throughput clock inside: evaluation, saving."""
        paused = time.perf_counter()
        try:
            yield
        finally:
            self._timer += time.perf_counter() - paused

    def step(self, step: int, loss: float, grad_norm: float | None, lr: float, extra: dict[str, Any]) -> None:
        """Logs one finished step."""
        now = time.perf_counter()
        seconds = (now - self._timer) / max(1, step - self._timed_step)
        self.seconds_per_step = seconds
        self._timer, self._timed_step = now, step
        # The first step compiles and fills caches: its time is told apart, and is no throughput.
        warm_up = step == self.first_step + 1
        tokens_per_second = None if warm_up else self.config.tokens_per_step / seconds
        clip = self.config.batch.gradient_clipping
        if grad_norm is not None:
            self._logged += 1
            self._clipped += bool(clip and grad_norm > clip)
        rate = tokens_per_second or 0.0
        used = None if warm_up else mfu(rate, self.flops_per_token, self.world_size, self._device)
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        line = StepLine(
            step=step,
            total_steps=self.config.schedule.steps,
            tokens=step * self.config.tokens_per_step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            loss_zscore=self._loss_statistics.update(loss),
            clip_rate=self._clipped / self._logged if self._logged else None,
            tokens_per_second=tokens_per_second,
            mfu=used,
            memory_bytes=memory,
            eta_seconds=None if warm_up else seconds * (self.config.schedule.steps - step),
        )
        record = {
            "kind": "train",
            "step": step,
            "tokens": line.tokens,
            "loss": loss,
            "grad_norm": grad_norm,
            "grad_norm_zscore": self._norm_statistics.update(grad_norm) if grad_norm is not None else None,
            "loss_zscore": line.loss_zscore,
            "lr": lr,
            "seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "mfu": used,
            "memory_bytes": memory,
            **extra,
        }
        self.log.write(record)
        self.print(step_line(line, self._without))
        if warm_up:
            what = "compilation and warm-up" if self.config.model.compile else "warm-up"
            self.print(f"step {step} took {seconds:.1f} s, {what} included; the throughput is measured from here on")
        self._tell_spikes(step, {"loss": line.loss_zscore, "gradient norm": record["grad_norm_zscore"]})
        self._track({f"train/{k}": v for k, v in record.items() if k not in ("kind", "step")}, step)
        if step == 1 and self.config.model.factory is None and self.config.run.init_from is None:
            self.print(first_loss_line(loss, self.config.model.vocab_size))

    def _tell_spikes(self, step: int, zscores: dict[str, float | None]) -> None:
        threshold = self.config.health.spike_zscore
        for what, zscore in zscores.items():
            if threshold and zscore is not None and zscore > threshold:
                self.print(
                    f"step {step}: the {what} is a spike, {zscore:.1f} standard deviations above its recent mean"
                )

    def evaluation(self, step: int, name: str, result: Evaluation) -> None:
        """Logs a validation loss of the set `name`."""
        record = {
            "kind": "eval" if name == OWN_SET else "eval_set",
            "set": name,
            "step": step,
            "tokens": step * self.config.tokens_per_step,
            "loss": result.loss,
            "half_width": result.half_width,
            "bits_per_byte": result.bits_per_byte,
            "evaluated_tokens": result.tokens,
        }
        self.log.write(record)
        self.print(f"step {step}: {result.line(name)}")
        prefix = "eval" if name == OWN_SET else f"eval/{name}"
        self._track({f"{prefix}/loss": result.loss, f"{prefix}/bits_per_byte": result.bits_per_byte}, step)

    def end(self, facts: dict[str, Any]) -> None:
        """Writes the last line."""
        self.log.write({"kind": "end", "seconds": time.perf_counter() - self._started, **facts})

    def close(self, seconds: float = math.inf) -> None:
        """Closes the log and the trackers, these within their deadline or `seconds` each."""
        self.log.close()
        for tracker in self._trackers:
            tracker.finish(seconds)

    def _track(self, metrics: dict[str, Any], step: int) -> None:
        numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(numbers, step)


def _trackers(config: RunConfig, folder: Path, warn: Callable[[str], None]) -> list[BackgroundTracker]:
    wanted: list[Tracker] = []
    wandb = config.telemetry.wandb
    if wandb.mode != "disabled":
        wanted.append(WandbTracker(wandb.project, config.run.name, wandb.mode, tuple(wandb.tags), folder))
    if config.telemetry.tensorboard:
        wanted.append(TensorBoardTracker(folder / "tensorboard"))
    deadline = wandb.deadline_seconds
    return [BackgroundTracker(tracker, deadline, deadline, warn=warn) for tracker in wanted]


class StepLog(Callback):
    """Reports from rank 0; the other ranks take part where numbers are summed over all.

    Attributes:
        seconds_per_step: Of the last logged steps; what one more step takes.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._progress: Progress | None = None
        self._bar = Bar(config.schedule.steps)
        self._close_seconds = math.inf
        self.seconds_per_step = 0.0

    def start(self, trainer: "Trainer") -> None:
        """Opens the log, once the state is known to be good."""
        if trainer.rank != 0:
            return
        trainer.folder.path.mkdir(parents=True, exist_ok=True)
        (trainer.folder.path / CONFIG_NAME).write_text(self._config.to_yaml(), encoding="utf-8")
        self._progress = Progress(
            self._config,
            trainer.folder.path,
            trainer.model.flops_per_token,
            trainer.world_size,
            trainer.step,
            trainer.print,
        )
        self._progress.start(
            {
                "num_parameters": sum(p.numel() for p in trainer.model.module.parameters()),
                "world_size": trainer.world_size,
                "manifest_sha256": trainer.loader.windows.manifest_sha256,
                "environment": environment(),
                "torch": torch.__version__,
                "resumed_from": str(trainer.folder.resume_from) if trainer.folder.resume_from else None,
            }
        )

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """Logs the step when it is time: the only place where the host waits for the device."""
        if not is_log_step(self._config, trainer.step):
            if self._progress:
                self._bar.update(trainer.step, self.seconds_per_step)
            return
        self._bar.clear()
        loss = result.loss.clone()
        dist.all_reduce(loss)
        if self._progress:
            extra = {"epoch": trainer.loader.epoch(), "skipped_steps": trainer.health.skipped_steps}
            extra |= {f"optimizer/{name}": value for name, value in trainer.optimizer_metrics.values.items()}
            mean = float(loss) / trainer.world_size
            self._progress.step(trainer.step, mean, trainer.grad_norm(), result.lr, extra)
            self.seconds_per_step = self._progress.seconds_per_step

    def write(self, record: dict[str, Any]) -> None:
        """Adds a record of another kind to the JSONL log."""
        if self._progress:
            self._progress.log.write(record)

    def evaluation(self, step: int, name: str, result: Evaluation) -> None:
        """Logs a validation loss."""
        if self._progress:
            self._progress.evaluation(step, name, result)

    @contextlib.contextmanager
    def clock_paused(self) -> Iterator[None]:
        """Inside, time does not count for the throughput."""
        with self._progress.clock_paused() if self._progress else contextlib.nullcontext():
            yield

    def end(self, trainer: "Trainer", outcome: "Outcome") -> None:
        """Writes the last line, with the hash of all windows consumed."""
        state = trainer.loader.state()
        if outcome.reason.is_urgent:
            self._close_seconds = URGENT_SECONDS
        if self._progress:
            reason = outcome.reason.name if outcome.reason else "finished"
            facts = {"step": outcome.steps, "validation_loss": outcome.validation_loss, "reason": reason}
            self._progress.end({**facts, **state})

    def close(self) -> None:
        """Lets trackers go within their deadline."""
        self._bar.clear()
        if self._progress:
            self._progress.close(self._close_seconds)
