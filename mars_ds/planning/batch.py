"""The batch equation: global batch = micro-batch x accumulation x ranks."""

from dataclasses import dataclass

from mars_ds.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is cut.

    Attributes:
        global_batch: Sequences of one step over all ranks.
        micro_batch: Sequences of one forward/backward on one rank.
        accumulation_steps: Forward/backward passes per rank and step.
        world_size: Data-parallel ranks.
    """

    global_batch: int
    micro_batch: int
    accumulation_steps: int
    world_size: int

    def equation(self) -> str:
        """The arithmetic, as it is shown."""
        return (
            f"{self.global_batch} sequences = {self.micro_batch} micro-batch x "
            f"{self.accumulation_steps} accumulation x {self.world_size} rank{'s' * (self.world_size > 1)}"
        )


def plan_batch(global_batch: int, micro_batch: int, world_size: int) -> BatchPlan:
    """Derives the accumulation.

    Raises:
        ConfigError: The ranks and the micro-batch do not divide the global batch; with the equation,
            the two nearest global batches, and the micro-batches that would do.
    """
    per_pass = micro_batch * world_size
    if global_batch % per_pass == 0:
        return BatchPlan(global_batch, micro_batch, global_batch // per_pass, world_size)
    below = global_batch // per_pass * per_pass
    nearest = " or ".join(str(v) for v in (below, below + per_pass) if v)
    message = (
        f"batch: global batch {global_batch} = micro_batch {micro_batch} x accumulation x {world_size} ranks has "
        f"no whole accumulation ({global_batch} / {per_pass} = {global_batch / per_pass:.3f}); nearest global "
        f"batch: {nearest}"
    )
    if global_batch % world_size == 0:
        share = global_batch // world_size
        divisors = [d for d in range(1, share + 1) if share % d == 0]
        close = sorted(sorted(divisors, key=lambda d: (abs(d - micro_batch), d))[:2])
        message += f"; or batch.micro_batch: {' or '.join(map(str, close))}"
    else:
        message += f"; {world_size} ranks do not divide {global_batch}, so no micro_batch does"
    raise ConfigError(message)
