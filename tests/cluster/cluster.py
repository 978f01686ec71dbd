"""A real Slurm cluster of several nodes on one Linux machine, for the tests of the job scripts.

Every machine of the cluster, the login node and the nodes `n1` to `nN`, is a set of kernel namespaces: its own network
with one link to a private bridge, its own host name, process table, mounts and shared memory. Slurm believes in the
pretended cores, memory and GPUs and takes job scripts as they are shipped. The file system is shared by all machines,
as home and scratch are on a cluster, and so is /tmp, unlike on a cluster; /dev/shm is each machine's own.

The machine that runs this keeps its files: nothing is written outside the cluster's folder but `/etc/netns/<prefix>-*`
and the namespaces' names, and both go with `Cluster.down`. The prefix names the process that made the cluster, so that
clusters live side by side, and `Cluster.up` clears away what processes that are dead left behind.
"""

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster.job import Job
from tests.cluster.machines import Machine, ip, network_of, prefix_of, remove_cluster, supported, sweep, wait

__all__ = ["Cluster", "Job", "compile_plugin", "supported"]

_NETWORK = "10.231.77"  # used inside the namespaces only, so every cluster may have the same
_LOGIN_ADDRESS = f"{_NETWORK}.254"
_SLURMD_PORT = 6818  # Slurm's default
# What daemons say at every start here and that is no fault: a PMIx that is not installed, state that a fresh cluster
# does not have, hardware that is pretended.
_HARMLESS = re.compile(
    r"mpi/pmix|Configured MailProg is invalid|NOTE: Trying backup state save file"
    r"|Could not open \w+ state file .*: No such file or directory|No \w+ state file \(.*\) (to recover|found)"
    r"|Node configuration differs from hardware|CPU frequency setting not configured"
    r"|No memory enforcing mechanism configured|backup_controller not specified|MCSParameters|for mcs plugin"
)

# The first process of a machine. bash, because it reaps the orphans that jobs leave, as a real process 1 does.
_BOOT_LOGIN = """
hostname "$2"; mount -t tmpfs shm /dev/shm; umask 022
munged --force --key-file="$1/munge/key" --socket="$1/munge/socket" --pid-file="$1/munge/pid" \\
    --log-file="$1/log/munged.log" --seed-file="$1/munge/seed" --num-threads=4
slurmctld -D -f "$1/etc/slurm.conf" & wait $!
"""
_BOOT_NODE = """
hostname "$2"; mount -t tmpfs shm /dev/shm; umask 022
slurmd -D -f "$1/etc/slurm.conf" -N "$2" & wait $!
"""


class Cluster:
    """A Slurm cluster with the partitions `main`, whose jobs may be preempted, and `urgent`, whose jobs preempt them.

    Args:
        folder: The cluster's state, keys and logs. Its path may hold no spaces, and 80 characters at most. Jobs of
            users other than root need a path that they may enter, which pytest's folders are not.
        nodes: Number of compute nodes, named `n1` to `nN`.
        gpus: Pretended GPUs of a node; a job sees them in CUDA_VISIBLE_DEVICES.
        cpus: Pretended cores of a node, an even number.
        plugin: A SPANK plugin to load, compiled (`.so`) or to be compiled (`.c`).
        plugin_arguments: What the plugin is given in plugstack.conf.
        extra_configuration: Lines for slurm.conf; a setting named here replaces the harness' own.
        kill_wait: Seconds from SIGTERM to SIGKILL (`KillWait`).
        grace: Seconds from the notice of a preemption to the preemption (`GraceTime` of `main`).
        requeue_wait: Seconds that a requeued job waits before it may start again; 120 in production. Also the time
            in which a node must have started what it was sent.

    Raises:
        ValueError: The folder's path cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        gpus: int = 8,
        cpus: int = 96,
        plugin: Path | None = None,
        plugin_arguments: str = "",
        extra_configuration: str = "",
        kill_wait: int = 30,
        grace: int = 30,
        requeue_wait: int = 15,
    ) -> None:
        self.folder = folder.resolve()
        if re.search(r"\s", str(self.folder)) or len(str(self.folder)) > 80:
            raise ValueError(f"{self.folder}: expected a path without spaces and of at most 80 characters")
        self.gpus, self.cpus, self.extra_configuration = gpus, cpus, extra_configuration
        self.plugin, self.plugin_arguments = plugin, plugin_arguments
        self.kill_wait, self.grace, self.requeue_wait = kill_wait, grace, requeue_wait
        self.prefix = f"{prefix_of(os.getpid())}-{hashlib.sha256(bytes(self.folder)).hexdigest()[:8]}"
        self.login = Machine("login", _LOGIN_ADDRESS, f"{self.prefix}-login")
        self.nodes = {n: Machine(f"n{n}", f"{_NETWORK}.{n}", f"{self.prefix}-n{n}") for n in range(1, nodes + 1)}

    @property
    def configuration(self) -> Path:
        """The cluster's slurm.conf."""
        return self.folder / "etc/slurm.conf"

    # Life of the cluster.

    def up(self, timeout: float = 120) -> None:
        """Starts the cluster afresh and returns once every node is idle.

        Raises:
            RuntimeError: It does not start, or not in time; the message ends with the logs.
        """
        sweep()
        self.down()
        atexit.register(self.down)
        try:
            self._write_files()
            for machine in (self.login, *self.nodes.values()):
                self._connect(machine)
            self.login.boot(_BOOT_LOGIN, self.folder)
            socket = self.folder / "munge/socket"
            wait(socket.exists, timeout, "munged listens")
            for n in self.nodes:
                self.power_on(n)
            self._wait_idle(timeout)
        except BaseException as problem:
            self.down()
            if isinstance(problem, Exception):
                raise RuntimeError(f"the cluster does not start: {problem}\n{self.logs()}") from problem
            raise

    def down(self) -> None:
        """Ends every process of the cluster and removes its namespaces. The logs stay. Safe at any time."""
        atexit.unregister(self.down)
        for machine in (*self.nodes.values(), self.login):
            machine.power_off()
        remove_cluster(self.prefix)
        shutil.rmtree(self.folder / "gpu", ignore_errors=True)  # device files
        (self.folder / "munge/socket").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    # Commands.

    def run(
        self,
        *command: str | Path,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the login node.

        Args:
            command: Program and arguments.
            check: Whether a status other than 0 is an error.
            environment: Variables besides those of this process.
            directory: Working directory; the cluster's folder by default.
            timeout: Seconds after which the command and its children are killed.

        Raises:
            RuntimeError: The command failed and `check` is set; the message has its output.
            TimeoutError: It did not end in time.
        """
        return self._enter(self.login, command, check, environment, directory, timeout)

    def on_node(
        self,
        n: int,
        *command: str | Path,
        check: bool = True,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on node `n`, outside of any job; else as `run`."""
        return self._enter(self.nodes[n], command, check, environment, directory, timeout)

    def submit(
        self,
        script: str | Path,
        *arguments: str | Path,
        options: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> Job:
        """Submits a batch script.

        Args:
            script: The script's path.
            arguments: The script's arguments.
            options: Options of `sbatch`.
            environment: Variables besides those of this process, for `sbatch` and so for the job.
            directory: Working directory; the cluster's folder by default.

        Raises:
            RuntimeError: `sbatch` refused it.
        """
        command = ("sbatch", "--parsable", *options, script, *arguments)
        output = self.run(*command, environment=environment, directory=directory).stdout
        return Job(self, int(output.split(";")[0]))

    # Nodes.

    def power_off(self, n: int) -> None:
        """Ends every process of node `n` at once. Its peers see their connections closed, as after a kernel's death."""
        self.nodes[n].power_off()

    def power_on(self, n: int) -> None:
        """Starts node `n` and waits for its slurmd; does nothing where it runs. See `wait_idle` for Slurm's view."""
        node = self.nodes[n]
        (self.folder / "spool" / node.name).mkdir(parents=True, exist_ok=True)
        node.boot(_BOOT_NODE, self.folder)
        wait(lambda: node.listens(_SLURMD_PORT), 60, f"slurmd of {node.name} listens")

    def unplug(self, n: int) -> None:
        """Takes the only link of node `n` down: its processes live on, its peers hear nothing more."""
        ip("-n", self.login.namespace, "link", "set", f"v{n}", "down")

    def plug(self, n: int) -> None:
        """Takes the link of node `n` up again."""
        ip("-n", self.login.namespace, "link", "set", f"v{n}", "up")

    def wait_idle(self, timeout: float = 60) -> None:
        """Waits until every node that is powered is idle for Slurm.

        Raises:
            RuntimeError: It did not happen in time; the message ends with the logs.
        """
        try:
            self._wait_idle(timeout)
        except RuntimeError as problem:
            nodes = self.run("sinfo", "-N", "--long", check=False).stdout
            raise RuntimeError(f"{problem}\n{nodes}{self.logs()}") from problem

    def leftovers(self, timeout: float = 10) -> list[str]:
        """Command lines of what runs on the powered nodes besides the nodes' own daemons.

        Slurm needs a moment to clear up after a job, so the answer is given when nothing is left, or after `timeout`
        seconds.
        """
        deadline = time.monotonic() + timeout
        while (found := self._strangers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def logs(self, lines: int = 25) -> str:
        """The last lines of the logs of slurmctld and of every slurmd, without what they say at every start."""
        parts = []
        for machine in (self.login, *self.nodes.values()):
            log = "slurmctld.log" if machine is self.login else f"slurmd.{machine.name}.log"
            # A daemon that did not come to open its log has told the machine's console why.
            paths = [self.folder / "log" / name for name in (log, f"{machine.name}.out")]
            if path := next((path for path in paths if path.is_file() and path.stat().st_size), None):
                parts.append(f"==> {path.name}\n{_tail(path, lines)}")
        return "\n".join(parts)

    # Internals.

    def _wait_idle(self, timeout: float) -> None:
        names = {machine.name for machine in self.nodes.values() if machine.powered}

        def idle() -> bool:
            result = self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T", check=False)
            states = dict(line.split() for line in result.stdout.splitlines())
            return all(states.get(name) == "idle" for name in names)

        wait(idle, timeout, f"{', '.join(sorted(names))} idle")

    def _enter(
        self,
        machine: Machine,
        command: Sequence[str | Path],
        check: bool,
        environment: Mapping[str, str] | None,
        directory: Path | None,
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        # What this process may have from a Slurm around it must not leak into the cluster's jobs.
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        variables |= {"SLURM_CONF": str(self.configuration), **(environment or {})}
        inside = ["nsenter", "-t", str(machine.init()), "-n", "-u", "-m", "-i", "-p", "--"]
        inside += ["env", f"--chdir={(directory or self.folder).resolve()}", *map(str, command)]
        process = subprocess.Popen(
            inside,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        said = f"`{' '.join(map(str, command))}` on {machine.name}"
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException as problem:
            # nsenter's child is in the same group and would outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            if isinstance(problem, subprocess.TimeoutExpired):
                raise TimeoutError(f"{said} did not end in {timeout} s\n{output}{errors}") from None
            raise
        if check and process.returncode:
            raise RuntimeError(f"{said} ended with {process.returncode}\n{output}{errors}")
        return subprocess.CompletedProcess(list(map(str, command)), process.returncode, output, errors)

    def _strangers(self) -> list[str]:
        """What runs in the nodes' networks, but for the daemons."""
        networks = {network_of(node.init()): node for node in self.nodes.values() if node.powered}
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or (node := networks.get(network_of(int(entry.name)))) is None:
                continue
            with contextlib.suppress(OSError):  # it ended meanwhile
                # "PID (NAME) STATE PARENT ...", and the name may hold anything.
                name, rest = entry.joinpath("stat").read_text().split("(", 1)[1].rsplit(")", 1)
                state, parent = rest.split()[:2]
                own = int(entry.name) in node.own_processes() or (name == "slurmd" and int(parent) == node.init())
                if not own and state not in "ZX":
                    words = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{node.name}: {words.strip() or name}")
        return sorted(found)

    def _connect(self, machine: Machine) -> None:
        """Makes the machine's network, with the bridge in the login node's."""
        files = Path("/etc/netns", machine.namespace)
        files.mkdir(parents=True, exist_ok=True)
        hosts = ["127.0.0.1 localhost", *(f"{m.address} {m.name}" for m in (self.login, *self.nodes.values()))]
        files.joinpath("hosts").write_text("\n".join(hosts) + "\n")
        files.joinpath("resolv.conf").write_text("")
        ip("netns", "add", machine.namespace)
        ip("-n", machine.namespace, "link", "set", "lo", "up")
        device = "br0"
        if machine is self.login:
            ip("-n", machine.namespace, "link", "add", "br0", "type", "bridge")
        else:
            device, port = "eth0", f"v{machine.name[1:]}"
            peer = ("peer", "name", device, "netns", machine.namespace)
            ip("-n", self.login.namespace, "link", "add", port, "type", "veth", *peer)
            ip("-n", self.login.namespace, "link", "set", port, "master", "br0", "up")
        ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", device)
        ip("-n", machine.namespace, "link", "set", device, "up")

    def _write_files(self) -> None:
        for name in ("etc", "state", "spool", "log", "run", "munge", "gpu"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir(mode=0o755, parents=True)
        key = self.folder / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        for gpu in range(self.gpus):
            # Slurm sets CUDA_VISIBLE_DEVICES only where the GPUs are devices: copies of /dev/null.
            os.mknod(self.folder / f"gpu/{gpu}", 0o20666, os.makedev(1, 3))
        self.configuration.write_text(self._slurm_conf())
        # Left to itself slurmd looks for a cgroup mount, which machines without an init do not have.
        self.configuration.with_name("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        devices = f"NodeName=n[1-{len(self.nodes)}] Name=gpu Type=h100 File={self.folder}/gpu/[0-{self.gpus - 1}]\n"
        self.configuration.with_name("gres.conf").write_text("AutoDetect=off\n" + devices * bool(self.gpus))
        if self.plugin is not None:
            plugin = self.plugin.resolve()
            if plugin.suffix == ".c":
                plugin = compile_plugin(plugin, self.folder / "etc")
            self.configuration.with_name("plugstack.conf").write_text(f"required {plugin} {self.plugin_arguments}\n")

    def _slurm_conf(self) -> str:
        folder, gpus = self.folder, f" Gres=gpu:h100:{self.gpus}" if self.gpus else ""
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"login({_LOGIN_ADDRESS})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # A requeued job may start when the credentials of its last start have expired.
            "AuthInfo": f"socket={folder}/munge/socket,cred_expire={self.requeue_wait}",
            "CredType": "cred/munge",
            "StateSaveLocation": f"{folder}/state",
            "SlurmdSpoolDir": f"{folder}/spool/%n",
            "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
            "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
            "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
            "SlurmdParameters": "config_overrides",  # more cores than the machine has
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "JobCompType": "jobcomp/filetxt",
            "JobCompLoc": f"{folder}/log/jobs.log",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core_Memory",
            "SchedulerParameters": "sched_min_interval=0,bf_interval=5,batch_sched_delay=0",
            "MpiDefault": "none",
            "GresTypes": "gpu",
            "ReturnToService": "2",  # a node that is back is used again
            "SlurmdTimeout": "10",
            "KillWait": str(self.kill_wait),
            "MinJobAge": "86400",
            "JobRequeue": "1",
            "FirstJobId": str(int(time.time()) % 60_000_000 + 1),  # never that of an earlier cluster's job
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
        }
        for name in re.findall(r"^\s*(\w+)\s*=", self.extra_configuration, re.MULTILINE):
            settings.pop(name, None)
        cores = f"CPUs={self.cpus} Sockets=2 CoresPerSocket={self.cpus // 2} ThreadsPerCore=1 RealMemory=1000000"
        return "\n".join(
            [
                *(f"{name}={value}" for name, value in settings.items()),
                *(f"NodeName={node.name} NodeAddr={node.address} {cores}{gpus}" for node in self.nodes.values()),
                f"PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE GraceTime={self.grace} PriorityTier=1",
                "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF",
                self.extra_configuration,
                "",
            ]
        )


def compile_plugin(source: Path, folder: Path) -> Path:
    """Compiles a SPANK plugin, for which `gcc` and `libslurm-dev` are needed, and returns the library's path.

    Raises:
        RuntimeError: The compiler refused it.
    """
    library = folder / f"{source.stem}.so"
    flags = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-shared", "-fPIC")
    result = subprocess.run(["cc", *flags, "-o", library, source], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{source} does not compile:\n{result.stderr}")
    return library


def _tail(path: Path, lines: int) -> str:
    said = [line for line in path.read_text(errors="replace").splitlines() if not _HARMLESS.search(line)]
    return "\n".join(said[-lines:])
