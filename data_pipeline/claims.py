"""Claims: who works on which unit, among any number of processes and nodes that share the output directory.

A claim is a file made exclusively. Its owner touches it while it lives, so a claim that is not touched for a minute
belongs to nobody and may be taken over. Claims only save work: two that build one unit make equal bytes, and the
slower one steps back when it finds the unit committed.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

CLAIMS_DIRECTORY = "claims"
TOUCH_SECONDS = 5.0
STALE_SECONDS = 60.0


class Claims:
    """The claims of one prepare; a context manager that gives back what is still held."""

    def __init__(self, work: Path) -> None:
        """Use ``work``/claims."""
        self._directory = work / CLAIMS_DIRECTORY
        self._directory.mkdir(exist_ok=True)
        self._owner = {"host": _host(), "pid": os.getpid(), "id": uuid.uuid4().hex}
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, daemon=True)

    def __enter__(self) -> "Claims":
        """Start to keep claims alive."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back all claims."""
        self._closed.set()
        self._thread.join()
        for name in list(self._held):
            self.give_back(name)

    def take(self, name: str) -> bool:
        """Try to claim ``name``; a claim of a dead owner is taken over."""
        path = self._directory / name
        owner = _read_owner(path)
        if owner is not None and not (self._is_abandoned(path, owner) and self._remove(path, owner)):
            return False
        # Written aside and linked: a claim is never seen without its owner, and only one can link.
        aside = self._directory / f".{name}.{self._owner['id']}"
        aside.write_text(json.dumps(self._owner))
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        finally:
            aside.unlink(missing_ok=True)
        with self._lock:
            self._held.add(name)
        return True

    def give_back(self, name: str) -> None:
        """Release a claim that this object holds."""
        with self._lock:
            self._held.discard(name)
        path = self._directory / name
        # Somebody may have taken it over from a process that was stopped for a minute.
        if _read_owner(path) == self._owner:
            path.unlink(missing_ok=True)

    def _remove(self, path: Path, owner: dict[str, Any]) -> bool:
        """Remove the claim of a dead ``owner``; False where somebody else has taken it over before."""
        removed = self._directory / f".{path.name}.{uuid.uuid4().hex}"
        try:
            os.rename(path, removed)
        except FileNotFoundError:
            return True
        try:
            if _read_owner(removed) == owner:
                return True
            os.link(removed, path)  # a living one: give it back
        except FileExistsError:
            pass
        finally:
            removed.unlink(missing_ok=True)
        return False

    def _is_abandoned(self, path: Path, owner: dict[str, Any]) -> bool:
        if owner.get("host") == self._owner["host"] and not _is_alive(int(owner.get("pid", 0))):
            return True
        # Compared with a file of now on the same file system: clocks of nodes differ.
        probe = self._directory / f".now.{self._owner['id']}"
        probe.touch()
        try:
            return probe.stat().st_mtime - path.stat().st_mtime > STALE_SECONDS
        except FileNotFoundError:
            return False
        finally:
            probe.unlink(missing_ok=True)

    def _keep_alive(self) -> None:
        while not self._closed.wait(TOUCH_SECONDS):
            with self._lock:
                held = list(self._held)
            for name in held:
                # The directory is gone once another node has finished the data set.
                with contextlib.suppress(OSError):
                    os.utime(self._directory / name)


def wait_briefly() -> None:
    """The pause between two looks at what others hold."""
    time.sleep(0.2)


def _host() -> str:
    """A name that two machines, or two boots, do not share; nor do two containers with process ids of their own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    pid_namespace = Path("/proc/self/ns/pid")
    parts = [socket.gethostname()]
    if boot.exists():
        parts.append(boot.read_text().strip())
    if pid_namespace.exists():
        parts.append(os.readlink(pid_namespace))
    return " ".join(parts)


def _read_owner(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
