"""What only the ranks of a launch can tell together: whether and how fast they hear each other, and their clocks."""

import socket
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from mars_ds.doctor.finding import Finding

_MAX_SKEW_SECONDS = 1.0
_REPEATS = 5
# Below this share of the fastest, a rank is worth a look.
_SLOW = 0.7


def ranks() -> Finding:
    """Who is there; all ranks call it, as every function here, and rank 0's answer counts."""
    hosts = _gathered(socket.gethostname())
    backend = dist.get_backend()
    per_host = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    if len(set(per_host.values())) > 1:
        return Finding(
            "note", "ranks", f"{len(hosts)} over {backend}, unevenly: {per_host}", "is a node short of ranks?"
        )
    return Finding("ok", "ranks", f"{len(hosts)} over {backend} on {len(per_host)} hosts")


def clocks() -> Finding:
    """Clocks that differ make heartbeats and claims of other nodes look old."""
    # The ranks leave a barrier within a fraction of what is looked for.
    dist.barrier()
    times = _gathered(time.time())
    skew = max(times) - min(times)
    if skew > _MAX_SKEW_SECONDS:
        worst = max(range(len(times)), key=lambda rank: abs(times[rank] - median(times)))
        return Finding(
            "mend", "clocks", f"differ by {skew:.1f} s, rank {worst} most", "start chrony or ntpd on its node"
        )
    return Finding("ok", "clocks", f"differ by {skew * 1000:.0f} ms at most, the exchange included")


def versions_agree() -> Finding:
    """Every rank must run the same code."""
    import deepspeed

    seen = _gathered((torch.__version__, deepspeed.__version__))
    if len(set(seen)) > 1:
        return Finding(
            "mend", "versions", f"differ between ranks: {sorted(set(seen))}", "use one environment on all nodes"
        )
    return Finding("ok", "versions", "equal on all ranks")


def bandwidth(device: torch.device, elements: int) -> Iterator[Finding]:
    """Right sums and their speed for the three collectives that a step uses.

    Args:
        device: Where tensors are.
        elements: float32 elements of the largest tensor; a multiple of the world size.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    share = elements // world_size
    mine = torch.full((elements,), float(rank + 1), device=device)
    part = torch.full((share,), float(rank + 1), device=device)
    whole = torch.empty(share * world_size, device=device)
    expected = {
        "all-reduce": float(world_size * (world_size + 1) // 2),
        "all-gather": float(world_size),  # the last rank's share stands last
        "all-to-all": float(world_size),
    }

    def all_reduce() -> Tensor:
        total = mine.clone()
        dist.all_reduce(total)
        return total

    def all_gather() -> Tensor:
        dist.all_gather_into_tensor(whole, part)
        return whole

    def all_to_all() -> Tensor:
        dist.all_to_all_single(whole, mine[: share * world_size])
        return whole

    # Bytes that each rank must send at least, over the size of the tensor.
    traffic = {"all-reduce": 2 * (world_size - 1) / world_size, "all-gather": 1.0, "all-to-all": 1.0}
    for name, collective in {"all-reduce": all_reduce, "all-gather": all_gather, "all-to-all": all_to_all}.items():
        last = float(collective()[-1])
        wrong = [position for position, value in enumerate(_gathered(last)) if value != expected[name]]
        if wrong:
            yield Finding("mend", name, f"gives wrong sums on ranks {wrong}", "this hardware or network corrupts data")
            continue
        seconds = _gathered(_seconds(collective, device))
        size = 4 * share * world_size * (traffic[name] if name == "all-reduce" else (world_size - 1) / world_size)
        rates = [size / each for each in seconds]
        slow = [position for position, rate in enumerate(rates) if rate < _SLOW * max(rates)]
        seen = f"right; {median(rates) / 1e9:,.2f} GB/s a rank with {4 * elements / 2**20:,.0f} MiB"
        yield Finding("note" if slow else "ok", name, seen + (f"; ranks {slow} are slower" if slow else ""))


def _seconds(collective: Callable[[], Tensor], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS):
        dist.barrier()
        started = time.perf_counter()
        collective()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return median(times)


def _gathered(value: object) -> list:  # type: ignore[type-arg]
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
