"""One line of a diagnosis."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "mend"]


@dataclass(frozen=True)
class Finding:
    """What was looked at and what was seen.

    Attributes:
        status: `ok`; `note`, which does not stop a run; `mend`, which does, or soon will.
        subject: What was looked at.
        seen: What was seen, with numbers.
        remedy: What to do, in words or as a command; empty where nothing needs doing.
    """

    status: Status
    subject: str
    seen: str
    remedy: str = ""

    def line(self) -> str:
        """For a person."""
        mark = {"ok": "ok  ", "note": "note", "mend": "MEND"}[self.status]
        return f"{mark}  {self.subject:<22} {self.seen}" + (f"\n      -> {self.remedy}" if self.remedy else "")
