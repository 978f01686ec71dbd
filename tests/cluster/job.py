"""A batch job of a test cluster: what Slurm says of it, waiting for it, and what its user can do to it."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.cluster import Cluster

ENDED = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
"""States that a job does not leave, but for the moment before a requeue."""


@dataclass
class Job:
    """A batch job of a cluster."""

    cluster: "Cluster"
    id: int

    def info(self) -> dict[str, str]:
        """The fields of `scontrol show job`; empty once Slurm has forgotten the job.

        Raises:
            RuntimeError: Slurm does not answer.
        """
        for _ in range(3):  # on a busy machine it may need more than the 10 seconds that Slurm's clients wait
            result = self.cluster.run("scontrol", "--oneliner", "show", "job", str(self.id), check=False)
            if result.returncode == 0:
                return dict(re.findall(r"(?:^|(?<= ))([A-Z][\w:/]*)=(.*?)(?= +[A-Z][\w:/]*=|\s*$)", result.stdout))
            if "Invalid job id" in result.stderr:
                return {}
        raise RuntimeError(f"job {self.id}: {result.stderr}{self.cluster.logs()}")

    def state(self) -> str:
        """The job's state in Slurm's words: PENDING, RUNNING, COMPLETING, COMPLETED, CANCELLED, TIMEOUT and so on."""
        return self._fields()["JobState"]

    @property
    def restarts(self) -> int:
        """How often the job was started again."""
        return int(self.info()["Restarts"])

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes that it runs on or last ran on."""
        names = self._fields()["NodeList"]
        if names in ("", "(null)"):
            return []
        return self.cluster.run("scontrol", "show", "hostnames", names).stdout.split()

    @property
    def exit_code(self) -> int:
        """The batch script's exit code, in a shell's form: 128 and the signal's number where a signal ended it."""
        code, number = map(int, self._fields()["ExitCode"].split(":"))
        return 128 + number if number else code

    def log(self) -> str:
        """What the job has printed so far."""
        fields = self.info()
        paths = dict.fromkeys(fields[key] for key in ("StdOut", "StdErr") if key in fields)
        return "".join(Path(path).read_text(errors="replace") for path in paths if Path(path).is_file())

    def wait_for(self, *states: str, timeout: float = 120) -> str:
        """Waits until the job is in one of the states, and returns it.

        Raises:
            AssertionError: It is not in time, or the job ended otherwise; the message ends with the logs.
        """
        self.until(lambda: self.state() in states, timeout, " or ".join(states))
        return self.state()

    def until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Waits until a condition holds.

        Args:
            condition: Asked several times a second.
            timeout: Seconds to wait.
            what: The condition in words, for the message.

        Raises:
            AssertionError: It does not hold in time, or not a moment after the job's end; the message ends with the
                logs.
        """
        deadline = time.monotonic() + timeout
        ended_since: float | None = None
        while not condition():
            now, state = time.monotonic(), self.state()
            # A job that is about to be requeued may be seen as ended for a moment.
            ended_since = (ended_since or now) if state in ENDED else None
            if now > deadline:
                raise AssertionError(self._report(f"{what}: not in {timeout} s", state))
            if ended_since is not None and now > ended_since + 3:
                raise AssertionError(self._report(f"{what}: not before its end", state))
            time.sleep(0.2)

    def signal_batch(self, name: str) -> None:
        """Sends a signal, such as `USR1`, to the batch script alone."""
        self.cluster.run("scancel", "--batch", f"--signal={name}", str(self.id))

    def cancel(self) -> None:
        """Cancels the job as its user would."""
        self.cluster.run("scancel", str(self.id))

    def requeue(self) -> None:
        """Requeues the job as its user would."""
        self.cluster.run("scontrol", "requeue", str(self.id))

    def update(self, *fields: str) -> None:
        """Changes fields of the job, such as `NumNodes=1`."""
        self.cluster.run("scontrol", "update", f"JobId={self.id}", *fields)

    def start_now(self, timeout: float = 120) -> None:
        """Starts a requeued job without the wait that Slurm gives it, and returns when it has started.

        Nodes refuse a start in the same moments as the end of the job's last one ("Job credential revoked", and the job
        is FAILED), so this waits until the job has been pending for 5 seconds.

        Raises:
            AssertionError: It did not start in time, or ended; the message ends with the logs.
        """
        pending_since = 0.0
        asked = False

        def started() -> bool:
            nonlocal pending_since, asked
            fields = self._fields()
            if fields["JobState"] != "PENDING":
                pending_since = 0.0
                return asked or fields["JobState"] == "RUNNING"
            pending_since = pending_since or time.monotonic()
            if time.monotonic() > pending_since + 5 and fields.get("Reason") == "BeginTime":
                self.cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now", check=False)
                asked = True
            return False

        self.until(started, timeout, "started again")

    def _fields(self) -> dict[str, str]:
        """The job's fields from Slurm, or from the last line on it in the file of ended jobs."""
        if fields := self.info():
            return fields
        ended = self.cluster.folder / "log/jobs.log"
        lines = ended.read_text().splitlines() if ended.is_file() else []
        last = next((line for line in reversed(lines) if line.startswith(f"JobId={self.id} ")), None)
        if last is None:
            raise RuntimeError(f"Slurm does not know job {self.id}\n{self.cluster.logs()}")
        return dict(re.findall(r"(\w+)=(\S*)", last))

    def _report(self, what: str, state: str) -> str:
        log = "\n".join(self.log().splitlines()[-60:])
        return f"job {self.id} is {state}: {what}\n==> the job's log\n{log}\n{self.cluster.logs()}"
