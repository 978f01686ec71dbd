"""What a cluster does to a job - requeue, preemption, cancel, limit, crash, a sick node - and what it makes of it."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, Job
from tests.cluster.conftest import SCRIPTS, Lab, Run

LONG = 100_000
"""Steps of a run that is never done."""


@pytest.fixture(autouse=True)
def nothing_is_left(lab: Lab) -> Iterator[None]:
    """After every test, whatever happened in it."""
    yield
    lab.assert_clean()


def resumed_at(run: Run) -> int:
    """The step at which the newest attempt went on."""
    found = re.search(r"resumed .*step_(\d+), written by", run.output())
    assert found, run.output()
    return int(found.group(1))


def preempt(cluster: Cluster, job: Job) -> None:
    """An urgent job takes all nodes until `job` is in the queue again."""
    script = cluster.folder / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 600\n")
    urgent = cluster.submit(script, options=("--partition=urgent", "--nodes=3", "--exclusive"))
    job.until(lambda: job.state() == "PENDING", 90, "the preemption")
    urgent.cancel()


def test_a_requeue_a_preemption_and_a_cancel(lab: Lab) -> None:
    job, run = lab.train("events", options=("--nodes=2",), ranks=1, steps=LONG)
    lab.until_saved(job, run, 20)

    job.requeue()  # by its owner, or an operator
    job.until(lambda: run.state[0] == "stopped", 60, "the stop")
    first = int(run.state[1])
    assert first > 20
    assert run.state[2] == "SIGTERM"
    lab.until_started_again(job, 2)
    lab.until_saved(job, run, first + 20)
    assert resumed_at(run) == first

    # Slurm's default: the steps are told, the batch script is not; to Slurm a job that leaves in time has completed.
    preempt(lab.cluster, job)
    assert run.state[0] == "stopped"
    second = int(run.state[1])
    assert "saved and stopped: requeued" in job.log()
    lab.until_started_again(job, 3)
    lab.until_saved(job, run, second + 20)
    assert resumed_at(run) == second

    job.cancel()
    job.wait_for("CANCELLED", timeout=60)
    assert run.state[0] == "stopped", "a cancelled run is saved too"
    assert int(run.state[1]) > second
    assert job.log().count(": requeued") == 1, "and stays cancelled"


def test_a_preemption_that_the_script_is_told_of(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = lab.cluster.folder / "told"
    told = "SlurmctldParameters=preempt_send_user_signal"
    with Cluster(folder, nodes=3, extra_configuration=told) as cluster:
        job, run = Lab(cluster, lab.folder, lab.config).train("told", options=("--nodes=2",), ranks=1, steps=LONG)
        lab.until_saved(job, run, 20)
        preempt(cluster, job)
        assert "USR1: asking the run to save and stop" in job.log()
        assert run.state[0] == "stopped"
        job.cancel()
        assert cluster.leftovers() == []


def test_the_time_limit(lab: Lab) -> None:
    # Limits have a grain of a minute, and the signal may come up to a minute early.
    options = ("--nodes=2", "--time=2", "--signal=B:USR1@60")
    job, run = lab.train("limit", options=options, ranks=1, steps=LONG)
    job.until(lambda: job.restarts == 1, 150, "the requeue before the limit")
    assert run.state[0] == "stopped"
    assert "USR1: asking the run to save and stop" in job.log()
    job.cancel()
    job.wait_for("CANCELLED", timeout=30)


def test_a_rank_that_dies(lab: Lab) -> None:
    job, run = lab.train("dies", options=("--nodes=2",), ranks=1, steps=LONG)
    lab.until_saved(job, run, 20)
    kill_a_rank(lab, 2)
    job.until(lambda: job.restarts == 1, 90, "the requeue, because it had saved something")
    assert run.state[0] == "running", "never done"
    assert "it broke, but had saved" in job.log()
    # The same again before anything new is saved: it would go on like that for ever.
    lab.until_started_again(job, 2)
    job.until(lambda: len(run.worlds) == 2, 90, "its second start")
    kill_a_rank(lab, 1)
    # It may have saved once more before the kill, and is then requeued a last time.
    job.wait_for("FAILED", "PENDING", timeout=90)
    if job.state() == "PENDING":
        assert run.state[0] == "running"
        job.cancel()
    else:
        assert "no progress since step" in job.log()
        assert job.exit_code != 0


def kill_a_rank(lab: Lab, node: int) -> None:
    lab.cluster.on_node(node, "pkill", "-KILL", "-f", "launch/pretrain.py --local_rank=0")


def test_a_crash_at_the_start_is_final(lab: Lab) -> None:
    """Bad input, an allocation that does not divide the batch, a rank that is killed before the first step."""
    bad, run = lab.train("bad", "optimizer.kind=mars-x", options=("--nodes=1",), ranks=1)
    bad.wait_for("FAILED", timeout=60)
    assert run.state == ["failed", "0", "BAD_INPUT"]
    assert "optimizer.kind" in bad.log()
    assert "starting it again would not help" in bad.log()

    killed, run = lab.train("killed", options=("--nodes=2",), ranks=1)
    killed.until(lambda: (run.folder / "slurm").exists() and bool(run.attempts), 60, "the start")
    lab.cluster.run("sh", "-c", "true")
    killed.until(lambda: running_ranks(lab, 2) > 0, 60, "a rank on n2")
    kill_a_rank(lab, 2)
    killed.wait_for("FAILED", timeout=90)
    assert run.state[:2] in (["starting", "0"], ["running", "0"])
    assert "no progress since step 0: not requeued" in killed.log()
    assert killed.exit_code != 0


def running_ranks(lab: Lab, node: int) -> int:
    found = lab.cluster.on_node(node, "pgrep", "-f", "launch/pretrain.py --local_rank", check=False)
    return len(found.stdout.split())


def test_a_run_that_stops_too_often(lab: Lab) -> None:
    job, run = lab.train("often", options=("--nodes=1",), ranks=1, steps=LONG, environment={"MAX_STARTS": "1"})
    lab.until_saved(job, run, 20)
    job.signal_batch("USR1")
    job.wait_for("FAILED", timeout=60)
    assert "it has been started 1 times (MAX_STARTS), not requeued" in job.log()
    assert run.state[0] == "stopped"


def test_a_stop_file_of_a_person_is_final(lab: Lab) -> None:
    job, run = lab.train("person", options=("--nodes=1",), ranks=1, steps=LONG)
    lab.until_saved(job, run, 20)
    (run.folder / "stop").touch()
    job.wait_for("FAILED", timeout=60)  # completed would mean done
    assert "stopped by a person: not requeued" in job.log()
    assert job.exit_code == 75


def test_a_folder_that_a_node_does_not_see(lab: Lab) -> None:
    """The hostfile of the attempt is not there: nothing may train on its own."""
    runs = lab.folder / "runs"
    runs.mkdir(exist_ok=True)
    lab.cluster.on_node(2, "mount", "-t", "tmpfs", "empty", runs)
    try:
        job, run = lab.train("unseen", options=("--nodes=2",), ranks=1)
        job.wait_for("FAILED", timeout=90)
    finally:
        lab.cluster.on_node(2, "umount", runs)
    assert "error: n2:" in job.log()
    assert "is not visible here; RUNS_DIR must be on a file system that every node sees" in job.log()
    assert run.state == ["starting", "0"]
    assert run.losses == {}


def test_a_hostfile_that_is_gone_leaves_no_node_alone(lab: Lab, tmp_path: Path) -> None:
    """DeepSpeed's launcher would train on one node, as if it were the whole world."""
    job, run = lab.train(
        "hostless", options=("--nodes=2",), ranks=1, environment={"NODE_SETUP": 'rm -f "$attempt/hostfile"'}
    )
    job.wait_for("FAILED", timeout=90)
    assert "hostfile is not there" in job.log()
    assert run.losses == {}


def test_a_master_that_does_not_resolve(lab: Lab) -> None:
    job, run = lab.train("nameless", options=("--nodes=2",), environment={"MASTER_SUFFIX": "-ib7"})
    job.wait_for("FAILED", timeout=30)
    assert "master n1-ib7 does not resolve on n1" in job.log()
    assert run.losses == {}


def test_two_jobs_on_one_node(lab: Lab) -> None:
    half = ("--nodes=1", "--nodelist=n1", "--oversubscribe", "--cpus-per-task=48", "--gpus-per-node=4", "--mem=1000")
    jobs = [lab.train(f"half_{i}", options=half, ranks=1, steps=20) for i in range(2)]
    jobs[0][0].until(lambda: len({j.state() for j, _ in jobs}) == 1, 60, "both at once")
    for job, run in jobs:
        job.wait_for("COMPLETED", timeout=120)
        assert job.nodes == ["n1"]
        assert run.state == ["done", "20"]
    ports = {re.search(r"master n1:(\d+)", job.log()).group(1) for job, _ in jobs}  # type: ignore[union-attr]
    assert len(ports) == 2
    assert jobs[0][1].losses == jobs[1][1].losses


def test_a_sick_node_is_left_out(lab: Lab) -> None:
    """By a spare of the allocation; without one, by another allocation."""
    sick = 'if [ "$node" = n2 ]; then PYTHON=/gone/python; fi'
    environment = {"PREFLIGHT": "1", "NODE_SETUP": sick}
    spare, run = lab.train(
        "spare", options=("--nodes=3",), ranks=1, steps=20, environment={**environment, "SPARE_NODES": "1"}
    )
    spare.wait_for("COMPLETED", timeout=120)
    assert "n2 fails the preflight: error: n2: PYTHON: /gone/python is no interpreter here" in spare.log()
    assert (run.attempts[0] / "hostfile").read_text() == "n1 slots=1\nn3 slots=1\n"
    assert run.state == ["done", "20"]

    requeued, run = lab.train("requeued", options=("--nodes=2",), ranks=1, steps=20, environment=environment)
    requeued.until(lambda: requeued.restarts == 1, 90, "the requeue")
    requeued.until(lambda: requeued.info()["ExcNodeList"] == "n2", 30, "n2 left out")
    lab.until_started_again(requeued, 2)
    requeued.wait_for("COMPLETED", timeout=120)
    assert (run.attempts[1] / "hostfile").read_text() == "n1 slots=1\nn3 slots=1\n"


def test_a_study(lab: Lab) -> None:
    study = lab.folder / "study.txt"
    lines = [f"{lab.config} run.name=study_{kind} optimizer.kind={kind}" for kind in ("moonlight", "muon")]
    study.write_text("\n".join(["# two optimizers", lines[0], "", lines[1]]) + "\n")
    lab.submit("compare.sbatch", study, "schedule.steps=20", options=("--array=1-2%1", "--nodes=1"))
    runs = [lab.run("study_moonlight"), lab.run("study_muon")]
    lab.until_queue_is_empty()
    assert [run.state for run in runs] == [["done", "20"]] * 2
    assert runs[0].losses.keys() == runs[1].losses.keys()
    assert runs[0].losses[1] == runs[1].losses[1], "the same data and weights"
    assert runs[0].losses[20] != runs[1].losses[20]


def test_requests_before_the_ranks_are_there(lab: Lab) -> None:
    """A cancel in the preflight is a cancel, and the nodes it cut short are not sick; a stop before it comes back."""
    slow = {"PREFLIGHT": "1", "NODE_SETUP": '[ "$node" = n1 ] || sleep 60'}
    cancelled, run = lab.train("cancelled", options=("--nodes=2",), ranks=1, environment=slow)
    cancelled.until(lambda: any(run.folder.glob("slurm/*/preflight/n1.healthy")), 60, "one healthy node")
    cancelled.cancel()
    cancelled.wait_for("CANCELLED", timeout=60)
    assert cancelled.info()["ExcNodeList"] == "(null)"

    site = lab.folder / "slow.env"
    site.write_text("sleep 4\n")
    early, run = lab.train("early", options=("--nodes=1",), ranks=1, environment={"SITE_ENV": str(site)})
    early.wait_for("RUNNING", timeout=60)
    time.sleep(1)
    early.signal_batch("USR1")
    early.until(lambda: early.restarts == 1, 60, "the requeue")
    assert run.losses == {}
    early.cancel()


def test_a_second_job_on_a_run_folder_is_refused(lab: Lab) -> None:
    first, run = lab.train("folder", options=("--nodes=1",), ranks=1, steps=LONG)
    lab.until_saved(first, run, 20)
    second, _ = lab.train("folder", options=("--nodes=1",), ranks=1, steps=LONG)
    second.wait_for("FAILED", timeout=60)
    assert f"in use by job {first.id}" in second.log()
    assert run.state[0] == "running"
    # A refused resize leaves the job as it was.
    refused = lab.cluster.run("bash", SCRIPTS / "resize.sh", first.id, 7, check=False, timeout=120)
    assert refused.returncode == 2
    assert "Slurm refuses 7 nodes" in refused.stderr
    lab.until_started_again(first, 2)
    first.cancel()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["gone.yaml"], {}, "gone.yaml: cannot be read in"),
        (["{config}", "--nodes=3"], {}, "--nodes=3: expected section.key=value after the config"),
        ([], {}, "usage: sbatch launch/slurm/pretrain.sbatch CONFIG"),
        (["{config}"], {"MAX_STARTS": "abc"}, "MAX_STARTS: abc; expected a number"),
        (["{config}"], {"SPARE_NODES": "1"}, "SPARE_NODES: 1 of 1 nodes leaves none"),
        (
            ["{config}"],
            {"NODE_COUNTS": "2 4"},
            "NODE_COUNTS: 2 4; this allocation of 1 nodes is smaller than each of them",
        ),
        (["{config}"], {"RANKS_PER_NODE": "0"}, "RANKS_PER_NODE: 0; expected a positive number"),
        (["{config}"], {"SITE_ENV": "/gone.env"}, "SITE_ENV: /gone.env cannot be read"),
    ],
)
def test_bad_input(lab: Lab, arguments: list[str], environment: dict[str, str], message: str) -> None:
    given = [argument.format(config=lab.config) for argument in arguments]
    job = lab.submit("pretrain.sbatch", *given, options=("--nodes=1",), environment=environment)
    job.wait_for("FAILED", timeout=30)
    assert f"error: {message}" in job.log()
    assert job.exit_code == 2


def test_a_submission_from_elsewhere(lab: Lab) -> None:
    job = lab.submit("pretrain.sbatch", lab.config, options=("--nodes=1",), directory=lab.folder)
    job.wait_for("FAILED", timeout=30)
    assert "error: submit this from the top of the checkout, or set MARS_DS_CHECKOUT" in job.log()
