"""The machines of a test cluster as kernel namespaces, their names, and the removal of what is left of them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "testslurm"
_PROGRAMS = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "cc": "gcc",
}
_PLUGIN_HEADER = Path("/usr/include/slurm/spank.h")  # of libslurm-dev
_UNSHARE = ("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def supported() -> str | None:
    """Says why this machine cannot carry a cluster, or None where it can."""
    if os.geteuid() != 0:
        return "the cluster's namespaces need root"
    missing = {package for program, package in _PROGRAMS.items() if shutil.which(program) is None}
    if not _PLUGIN_HEADER.is_file():
        missing.add("libslurm-dev")
    if missing:
        return f"not installed: {' '.join(sorted(missing))}"
    probe = f"{prefix_of(os.getpid())}-probe"
    attempts = (
        ["ip", "netns", "add", probe],
        ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"],
        ["ip", "-n", probe, "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
        ["ip", "netns", "exec", probe, *_UNSHARE, "mount", "-t", "tmpfs", "shm", "/dev/shm"],
        ["ip", "netns", "exec", probe, *_UNSHARE, "sh", "-c", f"mknod /tmp/{probe} c 1 3 && rm /tmp/{probe}"],
    )
    try:
        for attempt in attempts:
            result = subprocess.run(attempt, capture_output=True, text=True)
            if result.returncode:
                return f"`{' '.join(attempt)}` is refused: {result.stderr.strip()}"
    finally:
        _remove_namespace(probe)
    return None


@dataclass
class Machine:
    """One set of namespaces and the processes in it."""

    name: str
    address: str
    namespace: str
    process: subprocess.Popen[bytes] | None = None  # unshare, whose only child is the machine's process 1

    @property
    def powered(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def boot(self, script: str, folder: Path) -> None:
        if self.powered:
            return
        self.power_off()
        command = ("ip", "netns", "exec", self.namespace, *_UNSHARE, "bash", "-c", script, "boot", folder, self.name)
        with (folder / f"log/{self.name}.out").open("ab") as output:
            # A session of its own: an interrupt from the terminal is for pytest, which then takes the cluster down.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

        def ready() -> bool:
            # The host name is the first thing that the script sets, when all the namespaces are there.
            with contextlib.suppress(OSError, RuntimeError):
                enter = ("nsenter", "-t", str(self.init()), "-u", "hostname")
                return subprocess.run(enter, capture_output=True, text=True).stdout.strip() == self.name
            if not self.powered:
                raise RuntimeError(f"{self.name} went off while it started")
            return False

        wait(ready, 60, f"{self.name} starts")

    def init(self) -> int:
        """The id, outside, of the machine's process 1.

        Raises:
            RuntimeError: The machine is off.
        """
        if self.process is not None and self.process.poll() is None:
            pid = self.process.pid
            if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                return int(children[0])
        raise RuntimeError(f"{self.name} is off")

    def listens(self, port: int) -> bool:
        """Whether a process of the machine accepts connections at the port."""
        connections = Path(f"/proc/{self.init()}/net/tcp").read_text().splitlines()[1:]
        # "0: LOCAL:PORT REMOTE:PORT STATE ...", in hexadecimal; state 0A is LISTEN.
        return any(f[1].endswith(f":{port:04X}") and f[3] == "0A" for f in map(str.split, connections))

    def own_processes(self) -> tuple[int, ...]:
        return () if self.process is None else (self.process.pid, self.init())

    def power_off(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(OSError, RuntimeError):
            os.kill(self.init(), signal.SIGKILL)
        try:
            # With its process 1 the kernel ends the whole machine, and only then does unshare come to its own end.
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


def sweep() -> None:
    """Removes the clusters of processes that are dead."""
    for name in _namespaces():
        match = re.match(rf"({_PREFIX}-(\d+)-\d+)-", name)
        if match and prefix_of(int(match[2])) != match[1]:
            _remove_namespace(name)


def prefix_of(pid: int) -> str | None:
    """A name for the clusters of a process: its id, and when it started, for ids come again. None where it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    # State and start. A zombie is dead: where process 1 does not reap, it stays for ever.
    return None if fields[0] == "Z" else f"{_PREFIX}-{pid}-{fields[19]}"


def _namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    files = Path("/etc/netns")
    names = {line.split()[0] for line in listed if line} | {path.name for path in files.glob(f"{_PREFIX}-*")}
    return {name for name in names if name.startswith(f"{_PREFIX}-")}


def remove_cluster(prefix: str) -> None:
    for name in _namespaces():
        if name.startswith(f"{prefix}-"):
            _remove_namespace(name)


def _remove_namespace(name: str) -> None:
    """Ends what runs in a network namespace and removes it with its files."""

    def emptied() -> bool:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not pids

    wait(emptied, 30, f"processes of {name} end")
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
    with contextlib.suppress(OSError):  # other clusters' files are there, or none ever were
        Path("/etc/netns").rmdir()


def network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"`ip {' '.join(arguments)}` ended with {result.returncode}: {result.stderr.strip()}")


def wait(condition: Callable[[], bool], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not after {timeout} s")
        time.sleep(0.1)
