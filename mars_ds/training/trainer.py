"""The training loop, on one screen."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import mars_ds
from mars_ds.checkpoint.api import load_checkpoint, save_checkpoint
from mars_ds.checkpoint.writer import prune
from mars_ds.config import RunConfig
from mars_ds.errors import ConfigError
from mars_ds.planning.batch import BatchPlan
from mars_ds.training.data import WindowLoader, check_vocabulary, open_split, run_sampling
from mars_ds.training.engine_config import deepspeed_config
from mars_ds.training.evaluation import Evaluation, Evaluator
from mars_ds.training.model import TrainableModel, build_model
from mars_ds.training.progress import Progress, is_log_step
from mars_ds.training.run_folder import CARD_NAME, CONFIG_NAME, RunFolder
from mars_ds.training.schedule import Schedule, set_learning_rates
from mars_ds.zero.card import optimizer_card
from mars_ds.zero.lookahead import lookahead

# DeepSpeed skips a step with a non-finite gradient without a word in bf16; so many in a row is divergence.
MAX_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: Optimizer steps done in all.
        validation_loss: Last one, or None without evaluation.
    """

    steps: int
    validation_loss: float | None


class Trainer:
    """One run on this rank; every rank makes one and calls `train`.

    Args:
        config: The run.
        batch: How a step is cut for this world size.
        folder: Where it lives and what it resumes from.
        printed: Console of rank 0, a no-op elsewhere.

    Raises:
        ConfigError, data_pipeline.DataError: Input that does not fit, on every rank alike.
    """

    def __init__(self, config: RunConfig, batch: BatchPlan, folder: RunFolder, printed: Callable[[str], None]) -> None:
        self.config, self.batch, self.folder, self.print = config, batch, folder, printed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(_accelerator().current_device_name())
        train_windows = open_split(config, "train")
        self.model: TrainableModel = build_model(config)
        check_vocabulary(train_windows, self.model)
        sampling = run_sampling(config, train_windows)
        self.loader = WindowLoader(train_windows, sampling, batch, self.rank, self.device, config.data, self.print)
        self.evaluator = self._make_evaluator()
        self.schedule = Schedule.from_config(config.schedule)
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
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._load()

    def train(self) -> Outcome:
        """Runs the remaining steps, with evaluations and checkpoints; writes the end of the log."""
        self.print(self.card)
        progress = self._start_progress()
        total = self.config.schedule.steps
        result = self._evaluate(progress) if self.step == 0 else None
        while self.step < total:
            loss, lr = self._train_step()
            self._count_skipped()
            if is_log_step(self.config, self.step):
                self._log_step(progress, loss, lr)
            if self._is_due(self.config.evaluation.interval_steps):
                result = self._evaluate(progress)
            if self._is_due(self.config.checkpoint.interval_steps) and self._is_healthy(loss):
                self._save(progress)
        outcome = Outcome(self.step, result.loss if result else None)
        state = self.loader.state()
        if progress:
            progress.end({"step": self.step, "validation_loss": outcome.validation_loss, **state})
        return outcome

    def _train_step(self) -> tuple[torch.Tensor, float]:
        """One optimizer step.

        Returns:
            Mean loss of this rank's micro-batches, on the device, and the lr.
        """
        lr = set_learning_rates(self.engine.mars, self.schedule, self.config.schedule, self.config.optimizer, self.step)
        if self.exact:
            with lookahead(self.engine):
                self._run_window(self.loader.peek_step(1), self.step + 1)
        loss = self._run_window(self.loader.next_step(), self.step)
        self.step += 1
        if self._proof_is_open:
            self._show_proof()
        return loss, lr

    def _run_window(self, micro_batches: Iterable[torch.Tensor], batch_index: int) -> torch.Tensor:
        """Forward, backward and engine step of one accumulation window; returns its mean loss."""
        # Dropout masks belong to the batch: exact mode evaluates each batch twice.
        torch.manual_seed(((self.config.run.seed * 1_000_003 + batch_index) * 65_537 + self.rank) % 2**63)
        total = torch.zeros((), device=self.device)
        for windows in micro_batches:
            inputs, labels = self.model.inputs(windows)
            loss = self.engine(input_ids=inputs, labels=labels).loss
            self.engine.backward(loss)
            total += loss.detach().float()
            self._measure_norm()
            self.engine.step()
        return total / self.batch.accumulation_steps

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

    def _grad_norm(self) -> float | None:
        norm = self.engine.get_global_grad_norm()
        scale = self.config.optimizer.resolved().gradient_scale or 1.0
        return float(norm) * scale if norm is not None else None

    def _count_skipped(self) -> None:
        if self.engine.was_step_applied():
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        self.print(f"step {self.step}: gradient is not finite; the update was skipped ({self.skipped_steps} in all)")
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise ConfigError(
                f"step {self.step}: {MAX_SKIPPED_IN_A_ROW} updates in a row were skipped for non-finite gradients; the "
                f"last checkpoint in {self.folder.checkpoints} is older: continue from it with a lower optimizer.lr"
            )

    def _is_healthy(self, loss: torch.Tensor) -> bool:
        """False after a skipped update or with a loss that is not finite: such a state must not replace a good one."""
        finite = torch.isfinite(loss).to(torch.int32)
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        healthy = bool(finite) and self._skipped_in_a_row == 0
        if not healthy:
            self.print(f"step {self.step}: not saved, because its loss or gradient is not finite")
        return healthy

    def _log_step(self, progress: Progress | None, loss: torch.Tensor, lr: float) -> None:
        loss = loss.clone()
        dist.all_reduce(loss)
        if progress:
            extra = {"epoch": self.loader.epoch(), "skipped_steps": self.skipped_steps}
            progress.step(self.step, float(loss) / self.world_size, self._grad_norm(), lr, extra)

    def _evaluate(self, progress: Progress | None) -> Evaluation | None:
        if self.evaluator is None:
            return None
        resume = progress.pause_clock() if progress else None
        result = self.evaluator.run(self.engine)
        if progress and resume:
            progress.evaluation(self.step, result.loss, result.bits_per_byte, result.tokens)
            resume()
        return result

    def _save(self, progress: Progress | None) -> None:
        resume = progress.pause_clock() if progress else None
        extra = {
            "data": self.loader.state(),
            "trainer": {"skipped_steps": self.skipped_steps, "tokens": self.step * self.config.tokens_per_step},
            "config": self.config.model_dump(mode="json"),
        }
        path = save_checkpoint(self.engine, self.folder.checkpoints, self.step, extra)
        if progress and resume:
            prune(self.folder.checkpoints, self.config.checkpoint.keep_last, path)
            self.print(f"step {self.step}: checkpoint {path}")
            resume()

    def _load(self) -> None:
        if self.folder.resume_from is not None:
            reader = load_checkpoint(self.engine, self.folder.resume_from, group_settings=False)
            if "data" not in reader.index:
                raise ConfigError(
                    f"{reader.folder}: was not written by this trainer and has no data position; to take its weights, "
                    "start a new run with run.init_from"
                )
            self.loader.load_state(reader.index["data"])
            self.step = reader.step
            self.skipped_steps = reader.index["trainer"]["skipped_steps"]
            self.print(
                f"resumed {self.folder.resume_from} (stage {reader.index['zero_stage']}, {reader.index['world_size']} "
                f"ranks): step {self.step}, sample {self.loader.position}, windows hash "
                f"{reader.index['data']['window_hash']}"
            )
        elif self.config.run.init_from is not None:
            reader = load_checkpoint(self.engine, self.config.run.init_from, weights_only=True)
            self.print(f"weights of {self.config.run.init_from} (step {reader.step}); the optimizer starts anew")

    def _start_progress(self) -> Progress | None:
        if self.rank != 0:
            return None
        self.folder.path.mkdir(parents=True, exist_ok=True)
        (self.folder.path / CONFIG_NAME).write_text(self.config.to_yaml(), encoding="utf-8")
        progress = Progress(
            self.config,
            self.folder.path,
            self.model.flops_per_token,
            self.world_size,
            self.step,
            self.print,
        )
        progress.start(
            {
                "num_parameters": sum(p.numel() for p in self.model.module.parameters()),
                "world_size": self.world_size,
                "manifest_sha256": self.loader.windows.manifest_sha256,
                "torch": torch.__version__,
                "resumed_from": str(self.folder.resume_from) if self.folder.resume_from else None,
            }
        )
        return progress

    def _make_evaluator(self) -> Evaluator | None:
        section = self.config.evaluation
        if section.interval_steps == 0:
            return None
        windows = open_split(self.config, "val")
        return Evaluator(windows, self.model, section.sequences, self.batch.micro_batch, self.device)

    def _is_due(self, interval: int) -> bool:
        return self.step == self.config.schedule.steps or (interval > 0 and self.step % interval == 0)


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
