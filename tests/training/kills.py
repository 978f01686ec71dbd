"""Runs that are killed again and again, at other world sizes and stages each time, against one that is left alone."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import write_config
from tests.training.launching import BEAT, Launch, end_record, saved_steps, train_losses

WORLD_SIZES = (4, 2, 1, 3)
# Losses of a resumed run differ from those of the undisturbed one by the order in which float32 sums are taken: over
# ranks, micro-batches and partitions. A relative 1e-7 a sum grows over the steps of a chaotic system; over the few
# dozen steps of these runs it stays below this.
TOLERANCE = 2e-4
_STEPS_A_KILL = 6


@dataclass
class Fate:
    """What became of a run.

    Attributes:
        kills: How often it was killed.
        resumes: How often it went on from a checkpoint with a certificate.
        repeated_steps: Steps that were lost with a kill and done again.
        worst_difference: Largest relative difference of a loss from the undisturbed run's.
        same_hash: Whether the hash of all windows is the undisturbed run's.
    """

    kills: int
    resumes: int
    repeated_steps: int
    worst_difference: float
    same_hash: bool


def survive(
    folder: Path, dataset: Path, kills: int, seed: int = 0, say: Callable[[str], None] = lambda text: None
) -> Fate:
    """Trains one run undisturbed on four ranks, and one that is killed `kills` times.

    Each life has another world size of 4, 2, 1, 3 and a stage drawn at random; it dies of SIGKILL to all ranks, or to
    one of them, whose death must end the others, at a random moment after a random number of steps.

    Raises:
        AssertionError: A life ends otherwise than by its kill, or a resume has no certificate.
    """
    draw = random.Random(seed)
    config = write_config(folder / "tiny.yaml", dataset, folder / "runs")
    steps = _STEPS_A_KILL * (kills + 1)
    common = [
        f"schedule.steps={steps}",
        "batch.micro_batch=1",
        "checkpoint.interval_steps=3",
        "checkpoint.keep_last=3",
        "evaluation.interval_steps=0",
        "model.dropout=0.0",
        BEAT,
    ]
    alone = Launch(config, ["run.name=alone", *common], 4, folder / "alone")
    assert alone.wait(600) == [0] * 4, alone.output()
    run = folder / "runs" / "killed"
    resumes = repeated = 0
    for life in range(kills + 1):
        ranks = WORLD_SIZES[life % len(WORLD_SIZES)]
        stage = draw.choice([1, 2, 3]) if ranks > 1 else draw.choice([0, 1, 2, 3])
        launch = Launch(config, ["run.name=killed", *common, f"zero.stage={stage}"], ranks, folder / f"life_{life}")
        from_step = max(saved_steps(run), default=0)
        if life == kills:
            assert launch.wait(600) == [0] * ranks, launch.output()
        else:
            died_at = _kill(launch, run, from_step + draw.randint(1, _STEPS_A_KILL), draw)
            repeated += max(0, died_at - max(saved_steps(run), default=0))
            say(f"life {life}: {ranks} ranks, stage {stage}, from step {from_step}, killed at step {died_at}")
        if from_step:
            assert "replayed 0, skipped 0" in launch.output(), launch.output()
            resumes += 1
    want, got = train_losses(folder / "runs" / "alone"), train_losses(run)
    assert list(got) == list(want)
    worst = max(abs(got[step] - want[step]) / abs(want[step]) for step in want)
    same = end_record(run)["window_hash"] == end_record(folder / "runs" / "alone")["window_hash"]
    return Fate(kills, resumes, repeated, worst, same)


def _kill(launch: Launch, run: Path, step: int, draw: random.Random) -> int:
    """Kills all ranks or one at about `step`; returns the step that rank 0 was last seen at."""
    launch.until_phase(run, "", step)
    time.sleep(draw.random() * 0.1)
    if len(launch.processes) > 1 and draw.random() < 0.4:
        victim = draw.randrange(len(launch.processes))
        launch.send(signal.SIGKILL, [victim])
        codes = launch.wait(60)
        assert codes[victim] == -signal.SIGKILL, launch.output()
        assert all(code != 0 for code in codes), launch.output()
    else:
        launch.kill()
    return max(step, max(train_losses(run), default=0))
