"""The shipped pretrain.sbatch on a real Slurm: stopped, requeued, resumed, a node lost, finished as if nothing was."""

import pytest

from tests.cluster import images
from tests.cluster.cluster import Cluster, Job
from tests.cluster.conftest import LOSS_TOLERANCE, SCRIPTS, STEPS, Lab, Run, assert_equal_runs


def through_a_stop_and_a_lost_node(lab: Lab, job: Job, run: Run) -> None:
    """Submit, USR1, save, requeue, resume, power-off, requeue on the spare, done."""
    lab.until_saved(job, run, 20)
    job.signal_batch("USR1")
    job.until(lambda: run.state[:1] == ["stopped"], 60, "the stop")
    stopped_at = int(run.state[1])
    lab.until_started_again(job, 2)
    lab.until_saved(job, run, (stopped_at // 20 + 1) * 20)
    assert f"step_{stopped_at:08d}, written by {run.worlds[0]} ranks" in run.output()
    assert "replayed 0, skipped 0" in run.output()
    assert job.nodes == ["n1", "n2"]
    lab.cluster.power_off(2)
    lab.until_started_again(job, 3)
    assert job.nodes == ["n1", "n3"]
    job.wait_for("COMPLETED", timeout=180)
    lab.assert_clean()
    lab.cluster.power_on(2)
    lab.cluster.wait_idle()
    assert run.state == ["done", str(STEPS)]
    assert job.restarts == 2


def test_the_chain_ends_as_an_undisturbed_run(lab: Lab, undisturbed: Run) -> None:
    job, run = lab.train("chain", options=("--nodes=2",))
    through_a_stop_and_a_lost_node(lab, job, run)
    assert_equal_runs(run, undisturbed)
    # One log for the job, one for each rank of each attempt; nothing is overwritten.
    assert [path.name for path in run.attempts] == [f"{job.id}.{start}" for start in range(3)]
    assert job.log().count("detected   4 ranks over gloo") == 3
    for attempt in run.attempts:
        assert sorted(path.name for path in attempt.glob("rank_*.log")) == [f"rank_{r:05d}.log" for r in range(4)]
    assert f"continue   sbatch launch/slurm/pretrain.sbatch {lab.config}" in run.output()


def test_the_same_in_a_container(lab: Lab, undisturbed: Run) -> None:
    """The image of the shipped Dockerfile by pyxis' flags: interpreter and code are the image's, none of the host's."""
    reason = images.supported()
    if reason is not None:
        pytest.skip(reason)
    root = images.built_image().image_root()
    environment = {"IMAGE": str(root), "MOUNTS": f"{lab.folder}:{lab.folder}"}
    # A cluster of its own, whose nodes see the image: they see no mount that is younger than they are.
    with Cluster(lab.cluster.folder / "contained", plugin=lab.cluster.plugin) as cluster:
        contained = Lab(cluster, lab.folder, lab.config)
        job, run = contained.train("contained", options=("--nodes=2",), ranks=1, environment=environment)
        through_a_stop_and_a_lost_node(contained, job, run)
        prepare_in_a_container(contained, environment)
    assert_equal_runs(run, undisturbed, LOSS_TOLERANCE)  # with one rank a node, which starts sooner
    for attempt in run.attempts:
        assert "PYTHON=/opt/venv/bin/python\n" in (attempt / "environment").read_text()


def prepare_in_a_container(lab: Lab, environment: dict[str, str]) -> None:
    """The same image by data.sbatch, into a folder that is named absolutely."""
    output = lab.folder / "from_a_container"
    job = lab.submit(
        "data.sbatch",
        *("--source", lab.folder / "text.jsonl", "--output", output, "--tokenizer", "bytes", "--val-fraction", "0.1"),
        options=("--nodes=2",),
        environment=environment,
    )
    job.wait_for("COMPLETED", timeout=90)
    assert (output / "manifest.json").read_bytes() == (lab.folder / "bytes" / "manifest.json").read_bytes()


def test_another_number_of_nodes_at_every_start(lab: Lab, undisturbed: Run) -> None:
    job, run = lab.train("elastic", options=("--nodes=2-3",))
    for starts, nodes in enumerate((1, 3), start=2):
        lab.until_saved(job, run, 20 * starts - 20)
        resized = lab.cluster.run("bash", SCRIPTS / "resize.sh", job.id, nodes, timeout=90)
        assert f"job {job.id} starts with {nodes} nodes" in resized.stdout
        lab.until_started_again(job, starts)
    job.wait_for("COMPLETED", timeout=180)
    assert [len(attempt.joinpath("hostfile").read_text().splitlines()) for attempt in run.attempts] == [2, 1, 3]
    assert run.worlds == [4, 2, 6]
    assert "written by 2 ranks at ZeRO stage 1; here 6 ranks" in run.output()
    assert run.output().count("replayed 0, skipped 0") == 1
    assert_equal_runs(run, undisturbed, LOSS_TOLERANCE)
    lab.assert_clean()
