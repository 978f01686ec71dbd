"""Takes the state out of a live engine as named slices, and puts named slices into one."""

from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mars_ds.checkpoint.layout import MASTER, MODULE, RNG
from mars_ds.checkpoint.reader import CheckpointReader
from mars_ds.errors import CheckpointError
from mars_ds.optim import Fragment
from mars_ds.optim.state import BUFFERS
from mars_ds.zero.initialize import optimizer_of, sharding_of

# What a user may change in a param group while a run goes on; the rest follows from the optimizer's kind.
HYPER_PARAMETERS = {
    "lr", "lr_factor", "betas", "momentum", "eps", "weight_decay", "gamma", "clip_threshold", "gradient_scale"
}  # fmt: skip


# Exact mode between two steps: a next gradient is captured, was dropped, or the coming step starts with c = g.
EXACT_FLAGS = ("captured", "dropped", "restart")
SCALARS = ("step", *EXACT_FLAGS)


def held_slices(engine: Any) -> Iterator[tuple[str, str, int, Tensor]]:
    """This rank's share of the state: (buffer, name, start, flat values).

    At stage 0 every rank holds everything, so the parameters are dealt out; elsewhere a rank writes
    exactly its fragments.
    """
    sharding, optimizer = sharding_of(engine), optimizer_of(engine)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for position, (tensor, local) in enumerate(sharding.local_shards.items()):
        if sharding.layout.replicated and position % world_size != rank:
            continue
        state = optimizer.state[tensor]
        buffers = {MASTER: tensor.detach().view(-1)} | {b: state[b] for b in BUFFERS if b in state}
        for fragment in local.shard.fragments:
            for buffer, flat in buffers.items():
                yield buffer, fragment.name, fragment.start, fragment.view(flat)
    module_tensors = _module_tensors(engine)
    if rank == 0:
        for name, value in module_tensors:
            yield MODULE, name, 0, value
    yield RNG, f"cpu_rank_{rank}", 0, torch.get_rng_state()
    if torch.cuda.is_available():
        yield RNG, f"cuda_rank_{rank}", 0, torch.cuda.get_rng_state()


def describe(engine: Any) -> dict[str, Any]:
    """What the index says of the state: shapes, group settings and scalars by name."""
    optimizer, sharding = optimizer_of(engine), sharding_of(engine)
    mine = {
        fragment.name: {key: int(optimizer.state[tensor].get(key, 0)) for key in SCALARS}
        for tensor, local in sharding.local_shards.items()
        for fragment in local.shard.fragments
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    scalars = {name: values for part in gathered for name, values in part.items()}
    return {
        "optimizer": optimizer.config.model_dump(mode="json", exclude_none=True),
        "zero_stage": engine.zero_optimization_stage(),
        "shapes": _shapes(engine),
        "module_shapes": {name: list(value.shape) for name, value in _module_tensors(engine)},
        "groups": [
            {key: value for key, value in group.items() if key not in ("params", "shapes")}
            for group in optimizer.param_groups
        ],
        "scalars": {key: {name: values[key] for name, values in scalars.items()} for key in SCALARS},
    }


def restore(engine: Any, reader: CheckpointReader, *, weights_only: bool = False) -> None:
    """Puts a checkpoint into an engine of any stage and world size.

    Args:
        engine: Made by `mars_ds.initialize`; all ranks call this.
        reader: The checkpoint.
        weights_only: Leave the optimizer at its start (`run.init_from`).

    Raises:
        CheckpointError: The checkpoint is of another model, or lacks a buffer that the optimizer needs.
    """
    check_same_model(engine, reader)
    sharding, optimizer = sharding_of(engine), optimizer_of(engine)
    for tensor, local in sharding.local_shards.items():
        state = optimizer.state[tensor]
        targets = {MASTER: tensor.detach().view(-1)}
        if not weights_only:
            targets |= {b: state[b] for b in BUFFERS if b in state}
        for fragment in local.shard.fragments:
            for buffer, flat in targets.items():
                if not reader.has(fragment.name, buffer):
                    raise CheckpointError(
                        f"{reader.folder}: has no {buffer} of {fragment.name}; it was written by "
                        f"{reader.index['optimizer']['kind']}, this run uses {optimizer.config.kind}; to take the "
                        "weights only, start a new run with run.init_from"
                    )
                fragment.view(flat).copy_(reader.read(fragment.name, buffer, fragment.start, fragment.numel))
        if not weights_only:
            state["step"] = _common(reader, "step", local.shard.fragments, reader.step)
            state |= {flag: bool(_common(reader, flag, local.shard.fragments, 0)) for flag in EXACT_FLAGS}
    _restore_module_tensors(engine, reader)
    refresh_weights(engine)


@torch.no_grad()
def _restore_module_tensors(engine: Any, reader: CheckpointReader) -> None:
    optimized = set(_shapes(engine))
    for name, value in (*engine.module.named_parameters(), *engine.module.named_buffers()):
        if name not in optimized and reader.has(name, MODULE):
            with deepspeed.zero.GatheredParameters([value], modifier_rank=0, enabled=hasattr(value, "ds_id")):
                if value.numel():
                    value.copy_(reader.read(name, MODULE, 0, value.numel()).view_as(value))


def restore_group_settings(engine: Any, reader: CheckpointReader) -> None:
    """Gives every param group the hyper-parameters that its parameters had, found by name.

    Raises:
        CheckpointError: Parameters of one group had different settings.
    """
    saved = {name: group for group in reader.index["groups"] for name in group["names"]}
    for group in optimizer_of(engine).param_groups:
        sources = {id(saved[name]): saved[name] for name in group["names"] if name in saved}
        if len(sources) > 1:
            raise CheckpointError(f"{reader.folder}: parameters of group {group['role']} had different settings")
        for source in sources.values():
            for key in HYPER_PARAMETERS & group.keys() & source.keys():
                group[key] = tuple(source[key]) if isinstance(source[key], list) else source[key]


def restore_rng(reader: CheckpointReader) -> bool:
    """Restores this rank's generators; False when the checkpoint had another world size."""
    rank = dist.get_rank()
    if reader.index["world_size"] != dist.get_world_size():
        return False
    torch.set_rng_state(_rng(reader, f"cpu_rank_{rank}"))
    if torch.cuda.is_available() and reader.has(f"cuda_rank_{rank}", RNG):
        torch.cuda.set_rng_state(_rng(reader, f"cuda_rank_{rank}"))
    return True


def _rng(reader: CheckpointReader, name: str) -> Tensor:
    sizes = [s["numel"] for s in reader.index["slices"] if s["buffer"] == RNG and s["name"] == name]
    return reader.read(name, RNG, 0, sizes[0])


def check_same_model(engine: Any, reader: CheckpointReader) -> None:
    """Refuses a checkpoint whose parameters have other names or shapes.

    Raises:
        CheckpointError: Naming the first difference.
    """
    ours = {name: tuple(shape) for name, shape in _shapes(engine).items()}
    ours |= {name: tuple(value.shape) for name, value in _module_tensors(engine)}
    theirs = reader.shapes | {n: tuple(s) for n, s in reader.index["module_shapes"].items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise CheckpointError(
                f"{reader.folder}: a checkpoint of another model: {name} is {theirs.get(name, 'absent')} there and "
                f"{ours.get(name, 'absent')} here"
            )


def refresh_weights(engine: Any) -> None:
    """Makes the 16-bit weights of the forward pass equal the fp32 masters again."""
    wrapper = engine.optimizer
    if hasattr(wrapper, "update_lp_params"):
        wrapper.update_lp_params()
    elif hasattr(wrapper, "fp32_partitioned_groups_flat"):
        wrapper._partition_all_parameters()
        for index in range(len(wrapper.fp32_partitioned_groups_flat)):
            wrapper._reassign_or_swap_out_partitioned_parameters(index)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
    elif hasattr(wrapper, "fp32_groups"):
        for masters, params in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
            for master, p in zip(masters, params, strict=True):
                p.data.copy_(master.data)


def _common(reader: CheckpointReader, scalar: str, fragments: Sequence[Fragment], padding: int) -> int:
    """The value that all parameters of one flat tensor had; `padding` for a rank that holds nothing else."""
    values = {int(reader.index["scalars"][scalar][fragment.name]) for fragment in fragments}
    if len(values) > 1:
        raise CheckpointError(f"{reader.folder}: parameters of one group have {scalar} {sorted(values)}")
    return values.pop() if values else padding


def _shapes(engine: Any) -> dict[str, list[int]]:
    return {
        name: list(shape)
        for group in optimizer_of(engine).param_groups
        for name, shape in zip(group["names"], group["shapes"], strict=True)
    }


def _module_tensors(engine: Any) -> list[tuple[str, Tensor]]:
    """Persistent buffers and frozen parameters: what the optimizer does not own but the model needs.

    All ranks call it: under stage 3 a frozen parameter is put together for the call.
    """
    module: nn.Module = engine.module
    optimized = set(_shapes(engine))
    keys = set(module.state_dict(keep_vars=True))
    found = []
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if name in keys and name not in optimized:
            with deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
                found.append((name, value.detach() if not hasattr(value, "ds_id") else value.detach().clone()))
    return found
