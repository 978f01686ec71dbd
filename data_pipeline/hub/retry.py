"""Requests to the Hub that outlast its bad moments: time-outs on everything, waits that grow, a bounded end."""

import email.utils
import logging
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from data_pipeline.errors import DataError, Stopped

_RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504, 520, 522, 524}
_WAIT_SLICE_SECONDS = 0.1
_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class TransientError(Exception):
    """An answer that another try may better: the connection, an overloaded server, a page of a proxy.

    Attributes:
        wait_seconds: how long the server asked to wait, if it did.
        progressed: whether the try brought enough to start counting anew.
    """

    def __init__(self, reason: str, wait_seconds: float | None = None, progressed: bool = False) -> None:
        """Remember why, in words for the log and the last message."""
        super().__init__(reason)
        self.wait_seconds = wait_seconds
        self.progressed = progressed


@dataclass(frozen=True)
class RetryPolicy:
    """How long to go on.

    Attributes:
        tries: attempts in a row without progress, the first included.
        first_wait_seconds: after the first failure; doubled after each further one.
        longest_wait_seconds: where the doubling ends.
        longest_asked_seconds: the longest ``Retry-After`` that is waited out.
        timeout_seconds: for connecting and for each read; also the window in which a transfer must move.
    """

    tries: int = 8
    first_wait_seconds: float = 1.0
    longest_wait_seconds: float = 60.0
    longest_asked_seconds: float = 900.0
    timeout_seconds: float = 30.0


DEFAULT_POLICY = RetryPolicy()


def retried(
    what: str,
    attempt: Callable[[], Result],
    policy: RetryPolicy = DEFAULT_POLICY,
    stopped: Callable[[], bool] | None = None,
) -> Result:
    """Run ``attempt`` until it returns.

    Args:
        what: what is fetched, for messages.
        attempt: raises `TransientError`, or an error of the connection, for another try.
        policy: how often and how long.
        stopped: asked before each try and during waits.

    Raises:
        DataError: the last try failed too, or the server asks for a longer wait than the policy allows.
        Stopped: as ``stopped`` says.
    """
    failures = 0
    while True:
        if stopped and stopped():
            raise Stopped(what)
        try:
            return attempt()
        except TransientError as error:
            failure = error
        except OfflineModeIsEnabled as error:
            raise DataError(f"{what}: HF_HUB_OFFLINE is set, so nothing can be fetched; unset it") from error
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
            raise DataError(
                f"{what}: HF_ENDPOINT is {constants.ENDPOINT!r}; expected a URL such as https://huggingface.co"
            ) from error
        except (httpx2.TransportError, httpx2.TooManyRedirects) as error:
            failure = TransientError(failure_reason(error, policy))
        failures = 1 if failure.progressed else failures + 1
        if failures >= policy.tries:
            raise DataError(
                f"{what}: {failures} tries in a row failed, the last one with: {failure}. The server asked was "
                f"{constants.ENDPOINT}; run the same command again once it answers, it goes on from what is there"
            ) from failure
        seconds = _wait_seconds(failures, failure, policy, what)
        _LOG.warning("%s: %s; try %d of %d in %.1f s", what, failure, failures + 1, policy.tries, seconds)
        _wait(seconds, what, stopped)


def failure_reason(error: Exception, policy: RetryPolicy) -> str:
    """An error of the connection in words."""
    if isinstance(error, httpx2.TimeoutException):
        return f"nothing came for {policy.timeout_seconds:g} s ({type(error).__name__})"
    return str(error) if isinstance(error, TransientError) else f"{type(error).__name__}: {error}"


def check_answer(response: httpx2.Response, what: str, repo_id: str) -> None:
    """Sort an answer: return on 200 and 206, else raise.

    Raises:
        TransientError: another try may help.
        DataError: it won't: nothing there, or no access.
    """
    status = response.status_code
    code = response.headers.get("x-error-code", "")
    page = f"{constants.ENDPOINT}/datasets/{repo_id}"
    # A signed address that a resolve request led to can expire; asking again gives a new one.
    expired = status == 403 and bool(response.history) and not code
    if status in (200, 206):
        return
    if status in _RETRIED_STATUS or expired:
        raise TransientError(f"HTTP {status}", wait_seconds=_asked_seconds(response))
    if status == 401 and "Invalid credentials" in response.headers.get("x-error-message", ""):
        raise DataError(f"{what}: {constants.ENDPOINT} refuses the token; set HF_TOKEN to a valid one or unset it")
    if code == "GatedRepo" or (status == 403 and code != "RepoNotFound"):
        raise DataError(
            f"{what}: no access to the dataset repository {repo_id} (HTTP {status}). If it is gated, accept its "
            f"licence on {page} and set HF_TOKEN to a token of that account with read permission"
        )
    if code == "RevisionNotFound":
        raise DataError(f"{what}: {repo_id} has no such revision; expected a branch, a tag or a commit, such as main")
    if code == "RepoNotFound" or status == 401:
        raise DataError(
            f"{what}: no dataset repository {repo_id}, or it is private (HTTP {status}). Check the name on {page}; "
            "for a private or gated one set HF_TOKEN to a token with read permission"
        )
    if status == 404:
        raise DataError(f"{what}: not found in {repo_id} (HTTP 404); look at {page}/tree/main for what is there")
    raise DataError(f"{what}: {constants.ENDPOINT} answered with HTTP {status}, expected 200")


def _asked_seconds(response: httpx2.Response) -> float | None:
    """The wait that the server asks for: ``Retry-After`` in seconds or as a date, or the Hub's ``RateLimit``."""
    asked = response.headers.get("retry-after", "").strip()
    if asked.isdigit():
        return float(asked)
    if asked:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
        except ValueError:
            return None
    window = re.search(r"\br=0\s*;\s*t=(\d+)", response.headers.get("ratelimit", ""))
    return float(window.group(1)) if window else None


def _wait_seconds(failures: int, failure: TransientError, policy: RetryPolicy, what: str) -> float:
    jitter = random.random()
    if failure.wait_seconds is not None:
        if failure.wait_seconds > policy.longest_asked_seconds:
            raise DataError(
                f"{what}: {failure}, and the server asks to wait {failure.wait_seconds:,.0f} s; run the same command "
                "again after that. With HF_TOKEN set the Hub allows more requests"
            ) from failure
        # Everybody was told the same moment: spread out after it, never before.
        return failure.wait_seconds + jitter * policy.first_wait_seconds
    longest = min(policy.longest_wait_seconds, policy.first_wait_seconds * 2.0 ** (failures - 1))
    return longest * (0.5 + 0.5 * jitter)


def _wait(seconds: float, what: str, stopped: Callable[[], bool] | None) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if stopped and stopped():
            raise Stopped(what)
        time.sleep(min(left, _WAIT_SLICE_SECONDS))
