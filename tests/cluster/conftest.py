"""One cluster for all tests, a tiny run, and what a run leaves behind to be looked at."""

import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mars_ds.telemetry.jsonl import read_jsonl
from tests.cluster import images
from tests.cluster.cluster import Cluster, Job, supported
from tests.conftest import write_config
from tests.corpora import byte_dataset

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "launch" / "slurm"
STEPS = 100
"""Of the tiny run; it saves every 20."""
# Gradient sums of another world size are added in another order (tests/training/kills.py).
LOSS_TOLERANCE = 2e-4


@dataclass
class Run:
    """A run folder as a job script makes it."""

    folder: Path

    @property
    def state(self) -> list[str]:
        """The words of the state file; nothing before the first start."""
        file = self.folder / "state"
        return file.read_text().split() if file.exists() else []

    @property
    def saved(self) -> int:
        """Step of the newest checkpoint, as rank 0 told it while training; -1 in any other state."""
        return int(self.state[1]) if self.state[:1] == ["running"] else -1

    @property
    def losses(self) -> dict[int, float]:
        """Training loss by step."""
        return {r["step"]: r["loss"] for r in self._records("train")}

    @property
    def ends(self) -> list[dict[str, Any]]:
        """How its attempts ended, as far as they came to an end."""
        return self._records("end")

    @property
    def worlds(self) -> list[int]:
        """World size of each attempt."""
        return [r["world_size"] for r in self._records("start")]

    @property
    def attempts(self) -> list[Path]:
        """Folders of the attempts, in order."""
        return sorted((self.folder / "slurm").iterdir(), key=lambda path: path.stat().st_ctime)

    def output(self, attempt: int = -1, rank: int = 0) -> str:
        """What a rank printed."""
        return (self.attempts[attempt] / f"rank_{rank:05d}.log").read_text()

    def _records(self, kind: str) -> list[dict[str, Any]]:
        log = self.folder / "log.jsonl"
        return [r for r in read_jsonl(log) if r["kind"] == kind] if log.exists() else []


@dataclass
class Lab:
    """A cluster with a tiny run to submit: 12 sequences of 32 bytes a step, which 1, 2, 4 and 6 ranks divide."""

    cluster: Cluster
    folder: Path
    config: Path

    def environment(self, ranks: int) -> dict[str, str]:
        """What a site would write into site.env."""
        return {"RUNS_DIR": str(self.folder / "runs"), "RANKS_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1"}

    def run(self, name: str) -> Run:
        """The run folder of that name."""
        return Run(self.folder / "runs" / name)

    def submit(
        self,
        script: str,
        *arguments: str | Path,
        options: tuple[str, ...] = (),
        ranks: int = 1,
        environment: dict[str, str] | None = None,
        directory: Path = REPOSITORY,
    ) -> Job:
        """Submits a shipped script, as it is, from the top of the checkout; its log lies in the lab."""
        return self.cluster.submit(
            SCRIPTS / script,
            *arguments,
            options=(f"--output={self.folder}/%x-%j.out", *options),
            environment={**self.environment(ranks), **(environment or {})},
            directory=directory,
        )

    def train(
        self,
        name: str,
        *overrides: str,
        options: tuple[str, ...] = (),
        ranks: int = 2,
        steps: int = STEPS,
        environment: dict[str, str] | None = None,
    ) -> tuple[Job, Run]:
        """Submits pretrain.sbatch for the tiny run."""
        arguments = [self.config, f"run.name={name}", f"schedule.steps={steps}", *overrides]
        job = self.submit("pretrain.sbatch", *arguments, options=options, ranks=ranks, environment=environment)
        return job, self.run(name)

    def until_queue_is_empty(self, timeout: float = 180) -> None:
        """Waits until every job has ended; for several jobs under one number, or without a number at hand."""
        deadline = time.monotonic() + timeout
        while self.cluster.run("squeue", "--noheader").stdout:
            assert time.monotonic() < deadline, self.cluster.logs()
            time.sleep(0.5)

    def until_saved(self, job: Job, run: Run, step: int) -> None:
        """Waits until the run has a checkpoint of `step` or later."""
        job.until(lambda: run.saved >= step, 120, f"a checkpoint of step {step}")

    def until_started_again(self, job: Job, starts: int) -> None:
        """Waits until a requeued job runs again."""
        job.until(lambda: job.restarts >= starts - 1, 120, f"start {starts}")
        job.start_now()

    def assert_clean(self) -> None:
        """No process of any job is left on any node."""
        assert self.cluster.leftovers() == []


@pytest.fixture(scope="session", autouse=True)
def image_in_the_background(request: pytest.FixtureRequest) -> None:
    """The image takes minutes: it is built while the tests of the cluster wait for Slurm's clocks."""
    wanted = any("container" in item.name or item.path.name == "test_image.py" for item in request.session.items)
    if wanted and images.supported() is None:
        images.building()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three nodes, eight pretended GPUs each, with the container flags."""
    reason = supported()
    if reason is not None:
        pytest.skip(f"no cluster on this machine: {reason}")
    # Short: a socket's path has a limit. Open: ranks in a container are another user.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name:
        os.chmod(name, 0o755)
        plugin = Path(__file__).with_name("container_plugin.c")
        with Cluster(Path(name), nodes=3, plugin=plugin) as result:
            yield result


@pytest.fixture(scope="session")
def lab(cluster: Cluster) -> Lab:
    """The cluster with data and a config on its file system."""
    folder = cluster.folder / "scratch"
    folder.mkdir(mode=0o755)
    config = write_config(folder / "tiny.yaml", byte_dataset(folder), folder / "runs")
    text = config.read_text()
    for found, wanted in {
        "micro_batch: 2": "micro_batch: 1",
        "interval_steps: 4": "interval_steps: 20",
        "interval_steps: 6": "interval_steps: 60",
    }.items():
        assert found in text
        text = text.replace(found, wanted)
    config.write_text(text)
    return Lab(cluster, folder, config)


@pytest.fixture(scope="session")
def undisturbed(lab: Lab) -> Run:
    """The tiny run on 2 nodes x 2 ranks, from its start to its end."""
    job, run = lab.train("undisturbed", options=("--nodes=2",))
    job.wait_for("COMPLETED", timeout=180)
    assert run.state == ["done", str(STEPS)], job.log()
    lab.assert_clean()
    return run


def assert_equal_runs(run: Run, undisturbed: Run, tolerance: float = 0.0) -> None:
    """The same windows in the same order, and the same losses: to the bit at one world size."""
    assert run.ends[-1]["window_hash"] == undisturbed.ends[-1]["window_hash"]
    assert run.losses.keys() == undisturbed.losses.keys()
    worst = max(abs(loss / undisturbed.losses[step] - 1) for step, loss in run.losses.items())
    assert worst <= tolerance
