"""Bytes of the tensors that a live engine holds, under the names of `mars_ds.planning.state`."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from mars_ds.planning import state
from mars_ds.zero.initialize import optimizer_of, sharding_of


def live_state(engine: Any) -> dict[str, int]:
    """Sums the storages of an engine's state, each storage once, by item; items without bytes are left out.

    Args:
        engine: Made by `mars_ds.initialize`, on DeepSpeed 0.19.8.
    """
    wrapper, optimizer = engine.optimizer, optimizer_of(engine)
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    masters = list(sharding_of(engine).local_shards)
    partitioned = hasattr(wrapper, "fp32_partitioned_groups_flat")
    named: list[tuple[str, list[Tensor]]] = [
        (state.WEIGHTS, [p.ds_tensor if partitioned else p.data for p in parameters]),
        (state.SMALL_WEIGHTS, [p.data for p in parameters if partitioned and p.ds_persist]),
        (state.MASTERS, masters),
    ]
    buffers = sorted({key for t in masters for key, value in optimizer.state[t].items() if isinstance(value, Tensor)})
    named += [(name, [optimizer.state[t][name] for t in masters if name in optimizer.state[t]]) for name in buffers]
    named += list(_gradients(wrapper, parameters, masters))
    seen: set[int] = set()
    found: dict[str, int] = {}
    for name, tensors in named:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[name] = found.get(name, 0) + storage.nbytes()
    return found


def _gradients(wrapper: Any, parameters: list[Tensor], masters: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        yield state.ACCUMULATION, [wrapper.grad_partitions_flat_buffer]
        yield state.BUCKET, [bucket.buffer for bucket in wrapper.ipg_buckets.values()]
        yield state.OFFLOADED_GRADIENTS, _present(t.grad for t in masters if wrapper.offload_optimizer)
        return
    if not hasattr(wrapper, "single_partition_of_fp32_groups"):
        yield state.ACCUMULATION, getattr(wrapper, "fp32_groups_gradients_flat", [])
        yield state.GRADIENTS, _present(p.grad for p in parameters)
        return
    averaged = [group for group in wrapper.averaged_gradients.values() if group is not None]
    if not wrapper.cpu_offload:
        yield state.GRADIENTS, _present(t for group in averaged for t in group)
        return
    own = [t.grad for t in masters]
    yield state.OFFLOADED_GRADIENTS, _present([*own, *wrapper.accumulated_grads_in_cpu.values()])
    yield state.GRADIENTS, _present(t for group in averaged for t in group)
    host = [*wrapper.param_buffer_of_bit16_for_cpu_offload_groups, wrapper.temp_grad_buffer_for_cpu_offload]
    yield f"{state.STAGING} (host)", host
    yield state.STAGING, [wrapper.temp_grad_buffer_for_gpu_offload]


def _present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]
