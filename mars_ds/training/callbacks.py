"""What happens around the loop, in one documented order.

    start        once, after the run was begun or resumed and before anything is trained
    before_step  before the data of a step is read
    after_step   after the optimizer step; here things are logged, evaluated, saved, in the order of the list
    end          once, when the last step is done or a stop was agreed; not after an error
    close        once, always, in reverse order: threads and files are let go

Every rank runs the same callbacks in the same order, so that each may use collectives. A callback that raises ends
the run on its rank; it must not raise for what a run can go on without (a full log disk, a dead tracker).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from mars_ds.training.trainer import Outcome, Trainer


@dataclass(frozen=True)
class StepResult:
    """One finished step.

    Attributes:
        loss: Mean loss of this rank's micro-batches, on the device; reading it waits for the device.
        lr: Learning rate of matrices.
        applied: False when DeepSpeed skipped the update for a gradient that is not finite.
    """

    loss: Tensor
    lr: float
    applied: bool


class Callback:
    """Does nothing at every hook."""

    def start(self, trainer: "Trainer") -> None:
        """See the module."""

    def before_step(self, trainer: "Trainer") -> None:
        """See the module."""

    def after_step(self, trainer: "Trainer", result: StepResult) -> None:
        """See the module."""

    def end(self, trainer: "Trainer", outcome: "Outcome") -> None:
        """See the module."""

    def close(self) -> None:
        """See the module."""
