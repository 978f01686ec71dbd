"""Copies committed checkpoints elsewhere in the background; a thread of rank 0 that can never stop the run."""

import threading
import time
from pathlib import Path

from mars_ds.checkpoint.copying import Place, copy_checkpoint

# A destination slower than the saves must not keep ever more checkpoints from being deleted.
_MOST_WAITING = 4
_TRIES, _PAUSE_SECONDS = 3, 5.0


class Uploads:
    """A queue and its thread.

    Args:
        url: Folder of checkpoints, for fsspec.

    Raises:
        ConfigError: fsspec cannot reach such a URL here.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        Place.open(url)
        self._changed = threading.Condition()
        self._waiting: list[Path] = []
        self._current: Path | None = None
        self._failed: dict[str, str] = {}
        self._news: list[str] = []
        self._closed = False
        threading.Thread(target=self._run, name="checkpoint copies", daemon=True).start()

    @property
    def busy(self) -> set[Path]:
        """Checkpoints that are needed still."""
        with self._changed:
            return {*self._waiting, *([self._current] if self._current else [])}

    def add(self, path: Path) -> None:
        """Puts a committed checkpoint into the queue."""
        with self._changed:
            self._waiting.append(path)
            if len(self._waiting) > _MOST_WAITING:
                passed_over = self._waiting.pop(0)
                self._failed[passed_over.name] = f"passed over, since {self._url} is slower than the saves"
            self._changed.notify_all()

    def news(self) -> list[str]:
        """What happened since the last call, for the console."""
        with self._changed:
            news, self._news = self._news, []
        return news

    def wait(self, seconds: float) -> list[str]:
        """Waits until all is copied, or so long; returns what is missing in the end."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (self._waiting or self._current) and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
            late = {path.name: f"not done after {seconds:.0f} s" for path in self._waiting}
            if self._current:
                late[self._current.name] = f"not done after {seconds:.0f} s"
            missing = {**self._failed, **late}
        return [f"checkpoint.copy_to: {name} is not at {self._url}: {why}" for name, why in sorted(missing.items())]

    def close(self) -> None:
        """Lets the thread go after what it is doing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                path = self._current = self._waiting.pop(0)
            started, problem = time.monotonic(), self._copy(path)
            with self._changed:
                self._current = None
                if problem is None:
                    self._failed.pop(path.name, None)
                    self._news.append(f"copied {path.name} to {self._url} ({time.monotonic() - started:.1f} s)")
                else:
                    self._failed[path.name] = problem
                    self._news.append(f"warning: {path.name} could not be copied to {self._url}: {problem}")
                self._changed.notify_all()

    def _copy(self, path: Path) -> str | None:
        """Copies with some patience for a network; returns what is wrong in the end."""
        problem = None
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_SECONDS)
            try:
                # The run's own: a step that is written again after the run went back replaces the one before.
                copy_checkpoint(Place.open(str(path)), Place.open(self._url), replace=True)
                return None
            # Whatever a remote file system throws, the run goes on.
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                if self._closed:
                    break
        return problem
