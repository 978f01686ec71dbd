"""The test harness itself: the cluster's nodes, jobs, container options, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, Job, supported

REASON = supported()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

PLUGIN = Path(__file__).with_name("container_plugin.c")
NAMES = ["n1", "n2", "n3"]


@pytest.fixture(scope="module")
def small() -> Iterator[Cluster]:
    """Three nodes with the container plugin, in a folder that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Cluster(folder, plugin=PLUGIN, kill_wait=5, grace=2) as cluster:
            yield cluster


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image without programs of its own: they come with a mount of the machine's /usr."""
    folder = tmp_path_factory.mktemp("image")
    folder.chmod(0o755)
    for name in ("etc", "opt/app"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    (folder / "etc/environment").write_text("# comment\nPATH=/opt/app:/usr/bin:/bin\nCOLOUR=image\nSHAPE=image\n")
    (folder / "etc/profile").write_text("PATH=/usr/bin:/bin\n")
    (folder / "etc/rc").write_text('echo entered; export ENTERED=1; exec "$@"\n')
    (folder / "etc/resolv.conf").symlink_to("/nowhere/resolv.conf")
    return folder


def write_script(folder: Path, body: str) -> Path:
    path = folder / "job.sh"
    path.write_text("#!/bin/bash\n" + textwrap.dedent(body))
    return path


class TestNodes:
    def test_each_node_is_a_machine_of_its_own(self, small: Cluster) -> None:
        script = 'echo $(hostname) $SLURM_NODEID; grep -c . /proc/net/dev; ps -e -o comm= | grep -c "^slurmd$"'
        lines = small.run("srun", "-N3", "--label", "sh", "-c", script).stdout.splitlines()
        assert sorted(lines) == sorted(f"{i}: {text}" for i in range(3) for text in (f"n{i + 1} {i}", "4", "1"))
        assert small.on_node(2, "getent", "hosts", "n3").stdout.split() == ["10.231.77.3", "n3"]
        small.on_node(2, "sh", "-c", "echo here > /dev/shm/mark")
        assert small.on_node(2, "cat", "/dev/shm/mark").stdout == "here\n"
        assert small.on_node(3, "test", "-e", "/dev/shm/mark", check=False).returncode == 1

    def test_slurm_believes_in_the_hardware(self, small: Cluster) -> None:
        options = ("--gpus-per-node=8", "--cpus-per-task=96", "--mem=0", "--exclusive")
        seen = small.run("srun", "-N1", *options, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE").stdout
        assert seen == "0,1,2,3,4,5,6,7 96\n"

    def test_a_node_loses_its_power_and_its_cable(self, small: Cluster) -> None:
        def reachable(n: int) -> bool:
            probe = f"exec 3<>/dev/tcp/n{n}/6818"
            return small.on_node(1, "timeout", "2", "bash", "-c", probe, check=False).returncode == 0

        assert reachable(3)
        small.unplug(3)
        assert not reachable(3)
        small.plug(3)
        deadline = time.monotonic() + 30
        while not reachable(3):
            assert time.monotonic() < deadline
        small.power_off(3)
        assert not reachable(3)
        with pytest.raises(RuntimeError, match="n3 is off"):
            small.on_node(3, "true")
        small.power_on(3)
        small.wait_idle()
        assert sorted(small.run("srun", "-N3", "hostname").stdout.split()) == NAMES

    def test_a_command_that_fails_or_hangs_says_so(self, small: Cluster) -> None:
        with pytest.raises(RuntimeError, match=r"(?s)on login ended with 3.*woe"):
            small.run("sh", "-c", "echo woe >&2; exit 3")
        with pytest.raises(TimeoutError, match=r"did not end in 0\.5 s"):
            small.on_node(1, "sh", "-c", "sleep 987; true", timeout=0.5)
        assert small.leftovers() == []


class TestJobs:
    def test_a_job_runs_and_ends(self, small: Cluster, tmp_path: Path) -> None:
        script = write_script(tmp_path, 'echo "$1 $WORD $(pwd)"; srun -l hostname; exit 3')
        job = small.submit(script, "one", options=["-N2"], environment={"WORD": "two"}, directory=tmp_path)
        assert job.wait_for("FAILED", timeout=60) == "FAILED"
        assert (job.exit_code, job.restarts, job.nodes) == (3, 0, ["n1", "n2"])
        assert sorted(job.log().splitlines()) == ["0: n1", "1: n2", f"one two {tmp_path}"]
        assert small.leftovers() == []

    def test_waiting_in_vain_shows_the_logs(self, small: Cluster, tmp_path: Path) -> None:
        job = small.submit(write_script(tmp_path, "echo last words"), directory=tmp_path)
        with pytest.raises(
            AssertionError, match=r"(?s)is COMPLETED: NODE_FAIL: not before its end.*last words.*slurmctld\.log"
        ):
            job.wait_for("NODE_FAIL", timeout=60)

    def test_the_file_of_ended_jobs_answers_for_forgotten_ones(
        self, small: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = small.submit(write_script(tmp_path, "kill -9 $$"), options=["-w", "n2"], directory=tmp_path)
        job.wait_for("FAILED")
        monkeypatch.setattr(Job, "info", lambda self: {})
        assert (job.state(), job.nodes, job.exit_code) == ("FAILED", ["n2"], 137)


class TestContainer:
    @staticmethod
    def srun(cluster: Cluster, image: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        options = [f"--container-image={image}", "--container-mounts=/usr:/usr:ro"]
        given = {word.split("=")[0] for word in arguments}
        options = [option for option in options if option.split("=")[0] not in given]
        return cluster.run("srun", "-N1", *options, *arguments, check=check)

    def test_the_task_sees_the_image_and_the_node(self, small: Cluster, image: Path) -> None:
        script = "pwd; ls / | tr '\\n' ' '; hostname; getent hosts n2 | tr -s ' '; df --output=fstype / /tmp /dev/shm"
        lines = self.srun(small, image, "-wn1", "/bin/sh", "-c", script).stdout.splitlines()
        assert lines[0] == "/"
        assert lines[1] == "bin dev etc lib lib64 opt proc run sys tmp usr n1"
        assert lines[2] == "10.231.77.2 n2"
        assert lines[4:] == ["overlay", "tmpfs", "tmpfs"]

    def test_the_image_stays_as_it_is(self, small: Cluster, image: Path) -> None:
        before = sorted(image.rglob("*"))
        written = self.srun(
            small, image, "/bin/sh", "-c", "echo x > /opt/app/x; echo y > /tmp/y; cat /tmp/y", check=False
        )
        assert "Read-only file system" in written.stderr and written.stdout == "y\n"
        script = "echo x > /opt/app/x && cat /opt/app/x"
        assert self.srun(small, image, "--container-writable", "/bin/sh", "-c", script).stdout == "x\n"
        assert sorted(image.rglob("*")) == before
        assert str(image) not in Path("/proc/mounts").read_text()
        for n in small.nodes:
            assert str(image) not in small.on_node(n, "cat", "/proc/mounts").stdout

    def test_mounts(self, small: Cluster, image: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("content\n")
        mounts = f"--container-mounts=/usr:/usr:ro,{tmp_path}:/data/here:ro,{tmp_path},{tmp_path}/file:/opt/app/file"
        script = f"cat /opt/app/file; echo a > {tmp_path}/a; echo b > /data/here/b"
        result = self.srun(small, image, mounts, "/bin/sh", "-c", script, check=False)
        assert result.stdout == "content\n" and "Read-only file system" in result.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file"]

    def test_the_job_keeps_its_user(self, small: Cluster, image: Path) -> None:
        assert self.srun(small, image, "--uid=nobody", "/bin/sh", "-c", "id -u; pwd").stdout == "65534\n/\n"

    def test_variables(self, small: Cluster, image: Path) -> None:
        command = ("--container-env=SHAPE,OTHER", "/bin/sh", "-c", "echo $COLOUR $SHAPE $KEPT $PATH")
        options = [f"--container-image={image}", "--container-mounts=/usr:/usr"]
        mine = {"COLOUR": "job", "SHAPE": "job", "KEPT": "job"}
        seen = small.run("srun", "-N1", *options, *command, environment=mine).stdout
        assert seen == "image job job /opt/app:/usr/bin:/bin\n"

    def test_switches_and_entry_point(self, small: Cluster, image: Path) -> None:
        accepted = ("--no-container-remap-root", "--no-container-mount-home", "--container-name=x")
        script = "echo $0 $ENTERED; pwd; id -u"
        command = (*accepted, "--container-workdir=/opt/app", "/bin/sh", "-c", script, "name")
        assert self.srun(small, image, "--no-container-entrypoint", *command).stdout == "name\n/opt/app\n0\n"
        assert self.srun(small, image, "--container-entrypoint", *command).stdout == "entered\nname 1\n/opt/app\n0\n"
        home = self.srun(small, image, "--container-mount-home", "/bin/sh", "-c", "ls -d ~").stdout
        assert home == str(Path.home()) + "\n"

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("--container-image=/no/such", "image /no/such: No such file"),
            ("--container-mounts=/usr:/usr,/no/such:/data", "mount source /no/such: No such file"),
            ("--container-mounts=/usr:/usr:rx", "expected ro or rw"),
            ("--container-mounts=/usr::ro", "expected SRC:DST"),
            ("--container-workdir=/no/such", "working directory /no/such: No such file"),
            ("--no-container-writable", "unrecognized option"),
        ],
    )
    def test_mistakes_fail_the_step(self, small: Cluster, image: Path, option: str, message: str) -> None:
        result = self.srun(small, image, option, "/bin/true", check=False)
        assert result.returncode != 0 and message in result.stderr

    def test_a_cancelled_container_leaves_nothing(self, small: Cluster, image: Path, tmp_path: Path) -> None:
        options = f"--container-image={image} --container-mounts=/usr:/usr --container-entrypoint"
        job = small.submit(write_script(tmp_path, f"srun -N2 {options} sleep 300"), options=["-N2"], directory=tmp_path)
        job.until(lambda: "entered" in job.log(), 60, "in the container")
        job.cancel()
        job.wait_for("CANCELLED")
        assert small.leftovers() == []


def test_two_clusters_live_side_by_side(small: Cluster, image: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1, gpus=0, plugin=PLUGIN, plugin_arguments="login-shell") as other:
        options = (f"--container-image={image}", "--container-mounts=/usr:/usr")
        seen = other.run("srun", *options, "/bin/sh", "-c", "hostname; echo $PATH").stdout.split()
        assert seen == ["n1", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
        assert sorted(small.run("srun", "-N3", "hostname").stdout.split()) == NAMES
    assert not list(Path("/etc/netns").glob(f"{other.prefix}-*"))
    other.down()
    assert small.run("hostname").stdout == "login\n"


def test_a_killed_harness_is_cleared_away_by_the_next(small: Cluster, tmp_path: Path) -> None:
    (tmp_path / "dead").mkdir()
    program = f"""
        import os, pathlib, signal
        from tests.cluster.cluster import Cluster
        cluster = Cluster(pathlib.Path({str(tmp_path / "dead")!r}), nodes=1)
        cluster.up()
        print(cluster.prefix, cluster.nodes[1].init(), flush=True)
        os.kill(os.getpid(), signal.{signal.SIGKILL.name})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    assert result.returncode == -signal.SIGKILL
    prefix, init = result.stdout.split()
    os.kill(int(init), 0)
    with Cluster(tmp_path / "next", nodes=1) as cluster:
        assert cluster.run("srun", "hostname").stdout == "n1\n"
        assert not list(Path("/etc/netns").glob(f"{prefix}-*"))
        assert prefix not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert not any(str(tmp_path / "dead") in command_line for command_line in command_lines())
    assert small.run("hostname").stdout == "login\n"


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=1, extra_configuration="NoSuchSetting=1")
    with pytest.raises(RuntimeError, match="NoSuchSetting"):
        cluster.up()
    assert not list(Path("/etc/netns").glob(f"{cluster.prefix}-*"))
    with pytest.raises(ValueError, match="without spaces"):
        Cluster(tmp_path / "a b")


def command_lines() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return lines
