"""Counts what a piece of code costs: collectives with their bytes, and matrix-product FLOPs.

Collectives are seen where every way of calling them meets (the `c10d` operators), so none slips past.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# Object collectives and barriers are bookkeeping of an engine, not part of a step.
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all_single",
    "alltoall_": "all_to_all",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
}


@dataclass
class Costs:
    """What one rank did.

    Attributes:
        calls: Collective -> calls.
        received_bytes: Collective -> bytes that this rank receives: of n bytes an all-reduce 2 n (W-1)/W (ring), a
            reduce-scatter or all-gather n (W-1)/W of the whole, an all-to-all what comes from others, a broadcast n.
        sent_bytes: Bytes that this rank hands to other ranks in all-to-alls.
        dtypes: Dtypes that all-to-alls carried.
        flops: Matrix-product FLOPs.
    """

    calls: Counter[str] = field(default_factory=Counter)
    received_bytes: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    flops: int = 0

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(
            self.calls + other.calls,
            self.received_bytes + other.received_bytes,
            self.sent_bytes + other.sent_bytes,
            self.dtypes | other.dtypes,
            self.flops + other.flops,
        )

    @property
    def total_received_bytes(self) -> int:
        """Over all collectives."""
        return sum(self.received_bytes.values())


class CollectiveCounter(TorchDispatchMode):
    """While entered, counts every collective of this rank into `costs`."""

    def __init__(self) -> None:
        super().__init__()
        self.costs = Costs()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d" and name.partition(".")[0] in NAMES:
            position = [argument.name for argument in func._schema.arguments].index("process_group")
            self._count(name.partition(".")[0], args, dist.ProcessGroup.unbox(args[position]))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple, group: dist.ProcessGroup) -> None:
        size, rank = group.size(), group.rank()
        label = NAMES[name]
        self.costs.calls[label] += 1
        if label == "all_to_all_single":
            output, source, output_splits, input_splits = args[0], args[1], args[3], args[4]
            self.costs.dtypes.add(str(source.dtype).removeprefix("torch."))
            received, sent = _others(output, output_splits, size, rank), _others(source, input_splits, size, rank)
            self.costs.received_bytes[label] += received
            self.costs.sent_bytes += sent
            return
        # The whole is the output of an all-gather, the input of a reduce-scatter, and the tensor itself elsewhere.
        whole = args[1] if label == "reduce_scatter" else args[0]
        num_bytes = _bytes(whole)
        factor = {"all_reduce": 2 * (size - 1), "all_gather": size - 1, "reduce_scatter": size - 1}
        self.costs.received_bytes[label] += num_bytes * factor.get(label, size) // size


class CountedStep:
    """Replaces `owner.name` by itself with counting; `costs` adds up over calls, `per_call` keeps them apart."""

    def __init__(self, owner: Any, name: str = "step") -> None:
        self._function: Callable[..., Any] = getattr(owner, name)
        self.per_call: list[Costs] = []
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, costs = counted(self._function, *args, **kwargs)
        self.per_call.append(costs)
        return result

    @property
    def costs(self) -> Costs:
        """Of all calls since the start or `reset`."""
        return sum(self.per_call, Costs())

    def reset(self) -> None:
        """Forgets the calls so far."""
        self.per_call = []


def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Costs]:
    """Calls a function; returns its result and what it cost on this rank."""
    counter, flops = CollectiveCounter(), FlopCounterMode(display=False)
    with counter, flops:
        result = function(*args, **kwargs)
    counter.costs.flops = flops.get_total_flops()
    return result, counter.costs


def _others(tensor: Tensor, splits: Iterable[int], size: int, rank: int) -> int:
    """Bytes of an all-to-all buffer that belong to other ranks."""
    parts = list(splits) or [tensor.shape[0] // size] * size
    return (sum(parts) - parts[rank]) * (tensor.numel() // max(1, tensor.shape[0])) * tensor.element_size()


def _bytes(value: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))
