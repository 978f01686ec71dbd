"""From the command line to a finished run: what `launch/pretrain.py` calls.

Exit codes tell a scheduler what to do: 0 done; 75 stopped on request and saved, start it again; 2 bad input, 3 the
optimizer that runs is not the one configured, 4 the run is unhealthy: starting it again would not help (one message on
rank 0, no traceback); 130 stopped by a person with Ctrl-C, saved if it was the first. Where a script reads the state
file (mars_ds/training/job.py) a stop ends with 0 and the file tells.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline import DataError
from mars_ds.config import RunConfig, load_config
from mars_ds.errors import ConfigError, LaunchError
from mars_ds.telemetry.bar import CLEAR
from mars_ds.training.job import COMMAND, Job
from mars_ds.training.signals import INTERRUPTED_STATUS, STOPPED_STATUS, Reason, SignalWatch, launched_rank

if TYPE_CHECKING:
    from mars_ds.planning.plan import RunPlan
    from mars_ds.training.trainer import Outcome

# A requeued job may start while a file server still holds the lock of its lost node.
_LOCK_SECONDS = 120.0
# A stop that is asked for before the ranks have found each other waits so long for them.
_JOIN_SECONDS = 5.0
DONE, BAD_INPUT, NOT_PROVEN, UNHEALTHY = 0, 2, 3, 4
PREEMPTED, INTERRUPTED = STOPPED_STATUS, INTERRUPTED_STATUS


def parser() -> argparse.ArgumentParser:
    """Arguments of pretrain.py."""
    result = argparse.ArgumentParser(
        prog="pretrain.py",
        description="Trains a language model as a YAML file says, on one process or under any launcher.",
        epilog=(
            "examples: deepspeed launch/pretrain.py --config configs/xl_mars_m.yaml | torchrun --nproc-per-node 8 "
            "launch/pretrain.py --config configs/small_mars_m.yaml optimizer.lr=3e-3 | python launch/pretrain.py "
            "--config configs/xl_mars_m.yaml --plan --world-size 64"
        ),
    )
    result.add_argument("--config", required=True, help="YAML file of the run")
    result.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over the file")
    result.add_argument("--plan", action="store_true", help="check and print the plan, train nothing")
    result.add_argument("--world-size", type=int, help="with --plan: plan for so many ranks")
    # Launchers pass it; the environment says the same.
    result.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return result


def main(arguments: Sequence[str] | None = None, signals: SignalWatch | None = None) -> int:
    """Runs one rank.

    Args:
        arguments: Command line without the program's name; None takes it from the process.
        signals: Requests to stop, already watched; None watches from here on.

    Returns:
        Exit code.
    """
    options = parser().parse_intermixed_args(arguments)
    from mars_ds.zero.distributed import shut_down
    from mars_ds.zero.layout import LayoutError
    from mars_ds.zero.proof import ProofError
    from mars_ds.zero.support import UnsupportedError

    _quiet()
    signals = signals or SignalWatch(_rank())
    job = Job()
    try:
        if options.plan:
            signals.restore()
            print(_plan_only(load_config(options.config, options.overrides), options.world_size or 1))
            return DONE
        signals.install()
        job = Job.from_environment(os.environ, _rank())
        reason = _train(load_config(options.config, options.overrides), _command(options), signals, job)
        state = {Reason.NONE: "done", Reason.UNHEALTHY: "failed"}.get(reason, "stopped")
        job.ended(state, "" if reason == Reason.NONE else reason.name)
        if job.is_watched and state == "stopped":
            return DONE
        return {Reason.NONE: DONE, Reason.SIGINT: INTERRUPTED, Reason.UNHEALTHY: UNHEALTHY}.get(reason, PREEMPTED)
    except (ConfigError, DataError, LaunchError, UnsupportedError) as error:
        if _rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        job.ended("failed", "BAD_INPUT")
        return BAD_INPUT
    except (LayoutError, ProofError) as error:
        if _rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        job.ended("failed", "NOT_PROVEN")
        return NOT_PROVEN
    except KeyboardInterrupt:
        if _rank() == 0:
            print(f"interrupted; continue with: {_command(options)}", file=sys.stderr, flush=True)
        return INTERRUPTED
    finally:
        signals.restore()
        shut_down()


def _train(config: RunConfig, command: str, signals: SignalWatch, job: Job) -> Reason:
    import torch.distributed as dist

    from mars_ds.planning.card import plan_card
    from mars_ds.telemetry.report import write_report
    from mars_ds.training.planning import device_name, plan_run
    from mars_ds.training.run_folder import FLIGHT_FOLDER, hold, open_run_folder
    from mars_ds.training.trainer import Trainer
    from mars_ds.zero.distributed import join, launch_environment

    # Everything that can be known without the other ranks is checked before they are waited for.
    world_size = int(launch_environment(os.environ)["WORLD_SIZE"])
    job.check_world_size(world_size)
    printed = _say if _rank() == 0 else _hush
    plan = plan_run(config, world_size, device=device_name())
    printed(plan_card(plan))
    folder = open_run_folder(config)
    for problem in folder.passed_over:
        printed(f"passed over a damaged checkpoint: {problem}")
    with signals.impatient(_JOIN_SECONDS):
        join(folder.path / FLIGHT_FOLDER, config.telemetry.deepspeed_log)
    printed(_banner())
    _refuse_unfit(plan, printed)
    patience = _LOCK_SECONDS if job.is_watched else 0.0
    lock = agree(lambda: hold(folder, patience) if dist.get_rank() == 0 else None)
    if dist.get_rank() == 0:
        config.stop_file.unlink(missing_ok=True)  # of the stop that this start ends
    trainer = Trainer(config, plan.batch, folder, printed, signals, job)
    job.running(trainer.step)
    reason = Reason.NONE
    if trainer.step >= config.schedule.steps:
        printed(f"nothing to do: {folder.path} is at step {trainer.step}; raise schedule.steps to go on")
    else:
        printed(f"run folder {folder.path}; if it stops, the same command continues it:\n  {command}")
        outcome = trainer.train()
        reason = outcome.reason
        printed(_ending(outcome))
    if dist.get_rank() == 0:
        # Also after a run that was killed between its last checkpoint and its report; not when every second counts.
        if trainer.step > 0 and reason != Reason.SIGTERM:
            printed(f"report     {write_report(folder.path)}\ncheckpoint {_newest(folder.checkpoints)}")
        printed(f"continue   {command}")
    if lock is not None:
        lock.close()
    # Ranks leave together: a launcher ends the others when one of them goes first and is slow to close.
    dist.barrier()
    return reason


def _banner() -> str:
    """What was detected, in one line."""
    import torch
    import torch.distributed as dist

    from mars_ds.training.certificate import environment

    found = environment()
    cores = "" if torch.cuda.is_available() else f" ({torch.get_num_threads()} threads a rank)"
    where = f"{found['device']}{cores} on {found['host']}"
    versions = f"torch {found['torch']}, deepspeed {found['deepspeed']}, python {found['python']}"
    return f"detected   {dist.get_world_size()} ranks over {dist.get_backend()}, {where}; {versions}"


def _ending(outcome: "Outcome") -> str:
    loss = f"validation loss {_number(outcome.validation_loss)}"
    if outcome.reason == Reason.NONE:
        return f"done: {outcome.steps} steps, {loss}"
    if outcome.reason == Reason.UNHEALTHY:
        return f"stopped at step {outcome.steps}: the run is unhealthy; {loss}"
    return f"stopped at step {outcome.steps} for {outcome.reason.words}; {loss}"


def agree(action: Callable[[], Any]) -> Any:
    """Runs `action` on this rank and raises its `ConfigError` on every rank, so that none waits for another."""
    import torch.distributed as dist

    result, message = None, None
    try:
        result = action()
    except ConfigError as error:
        message = str(error)
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    found = next((m for m in messages if m is not None), None)
    if found is not None:
        raise ConfigError(found)
    return result


def _plan_only(config: RunConfig, world_size: int) -> str:
    """The card for a world size, whether or not the data is there."""
    from mars_ds.planning.card import plan_card
    from mars_ds.training.planning import plan_with_or_without_data

    plan, note = plan_with_or_without_data(config, world_size)
    return plan_card(plan) + (f"\nnote: {note}" if note else "")


def _refuse_unfit(plan: "RunPlan", printed: Callable[[str], None]) -> None:
    """Refuses a run that cannot fit into the memory of some rank, on every rank."""
    from mars_ds.planning.fitting import refuse_unfit
    from mars_ds.training.planning import available_memory

    warning = agree(lambda: refuse_unfit(plan, available_memory(plan.batch.world_size)))
    if warning:
        printed(f"note: {warning}")


def _command(options: argparse.Namespace) -> str:
    """The command that continues this run, in the launcher that started it."""
    if COMMAND in os.environ:
        return os.environ[COMMAND]
    world_size = os.environ.get("WORLD_SIZE", "1")
    script = os.path.relpath(sys.argv[0]) if sys.argv[0].endswith(".py") else "launch/pretrain.py"
    arguments = " ".join(["--config", options.config, *options.overrides])
    if "SLURM_STEP_ID" in os.environ:
        return f"srun python {script} {arguments}"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', world_size)} {script} {arguments}"
    if "RANK" in os.environ and world_size != "1":
        return f"deepspeed --num_gpus {os.environ.get('LOCAL_SIZE', world_size)} {script} {arguments}"
    return f"python {script} {arguments}"


def _newest(folder: Path) -> str:
    from mars_ds.checkpoint import newest_checkpoint

    return str(newest_checkpoint(folder))


def _rank() -> int:
    return launched_rank(os.environ)


def _number(value: float | None) -> str:
    return "not evaluated" if value is None else f"{value:.4f}"


def _say(text: str) -> None:
    # A progress bar may stand in the line.
    print(CLEAR + text if sys.stdout.isatty() else text, flush=True)


def _hush(text: str) -> None:
    """Console of the other ranks."""


def _quiet() -> None:
    """Keeps the libraries' own chatter out of the console; their warnings and errors stay."""
    import torch

    if not torch.accelerator.is_available():
        # DeepSpeed would find out by itself, with a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
