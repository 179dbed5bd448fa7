"""Checkpoints of one process, from many: weights and optimizer state as if the experts had never been spread out.

A checkpoint knows nothing of ranks: names and shapes are those of the model before `ParallelExperts`, so that it can be
loaded by one process or by any number of ranks. Both directions take dense parts that are replicated (DDP) or sharded
(FSDP2). Shapes: E experts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shared_moe.errors import InputError, UnreadableError
from shared_moe.hub import load_weights
from shared_moe.parallel.dense import parallel_layers
from shared_moe.parallel.experts import ParallelExperts
from shared_moe.parallel.moving import per_expert_state


@torch.no_grad()
def full_state(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """All weights and buffers of a model as plain CPU tensors on rank 0; {} elsewhere. Every rank calls it.

    With `optimizer`, the optimizer's state instead, as "<parameter>/<key>" (its hyperparameters are not in it). Both can
    be written with safetensors. Raises `InputError` for optimizer state that is neither tensors nor numbers.
    """
    model = _unwrapped(model)
    entries = _weights(model) if optimizer is None else _optimizer_state(model, optimizer)
    group = next(iter(parallel_layers(model).values())).group
    group.agree({"operation": "gather state", "tensors": len(entries)})
    found = {}
    for name, (tensor, layer) in entries.items():
        whole = _whole(tensor) if layer is None else _gather(tensor, layer)
        if group.rank == 0:
            found[name] = whole.detach().cpu().clone()
    return found


@torch.no_grad()
def load_full_state(
    model: nn.Module, state: Mapping[str, Tensor], optimizer: Optimizer | None = None
) -> None:
    """Put a whole checkpoint into this rank's part of a model, or with `optimizer` into the optimizer.

    Every rank passes the whole `state`, as `full_state` or one process made it, however many ranks there were then.
    Raises `UnreadableError` that names what is missing, unknown or of the wrong shape.
    """
    model = _unwrapped(model)
    if optimizer is None:
        _load_weights(model, state)
    else:
        _load_optimizer_state(model, state, optimizer)


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _expert_names(model: nn.Module) -> dict[str, tuple[str, ParallelExperts]]:
    """Name of each expert parameter in the model -> its name in one process, and its layer."""
    names = {}
    for path, layer in parallel_layers(model).items():
        prefix = f"{path}." if path else ""
        for name, _ in layer.local.named_parameters():
            names[f"{prefix}local.{name}"] = f"{prefix}{name}", layer
    return names


def _weights(model: nn.Module) -> dict[str, tuple[Tensor, ParallelExperts | None]]:
    names = _expert_names(model)
    entries = {}
    for name, tensor in model.state_dict().items():
        plain, layer = names.get(name, (name, None))
        entries[plain] = tensor, layer
    return entries


def _optimizer_state(
    model: nn.Module, optimizer: Optimizer
) -> dict[str, tuple[Tensor, ParallelExperts | None]]:
    names = _expert_names(model)
    entries = {}
    for name, parameter in model.named_parameters():
        plain, layer = names.get(name, (name, None))
        by_expert = per_expert_state(parameter, optimizer)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if value is None:
                continue
            if not isinstance(value, Tensor | int | float):
                raise InputError(
                    f"optimizer state {key!r} of {plain} is {type(value).__name__}, not a tensor"
                )
            entries[f"{plain}/{key}"] = torch.as_tensor(value), layer if key in by_expert else None
    return entries


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gather(rows_L: Tensor, layer: ParallelExperts) -> Tensor:
    """Everyone's experts on rank 0, each from the rank that owns it; elsewhere nothing."""
    group, placement = layer.group, layer.placement
    owned = [placement.owned_slots(r) for r in range(group.size)]
    sends = [len(owned[group.rank])] + [0] * (group.size - 1)
    receives = [len(slots) if group.rank == 0 else 0 for slots in owned]
    came = group.exchange(rows_L[owned[group.rank]], sends, receives, "gather state")
    experts = [placement.experts_of(r)[slot] for r, slots in enumerate(owned) for slot in slots]
    return came[torch.tensor(experts).argsort()] if group.rank == 0 else came


def _load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    names = _expert_names(model)
    rest = dict(state)
    parts = {}
    for name, own in model.state_dict().items():
        plain, layer = names.get(name, (name, None))
        if plain not in rest:
            continue
        value = rest.pop(plain)
        expected = own.shape if layer is None else (layer.num_experts, *own.shape[1:])
        if value.shape != expected:
            raise UnreadableError(
                f"the checkpoint holds {plain} as {tuple(value.shape)}; the model has {tuple(expected)}"
            )
        parts[name] = _part(value, own, layer)
    load_weights(model, parts | rest, "the checkpoint")


def _load_optimizer_state(model: nn.Module, state: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    names = _expert_names(model)
    held = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    index_of = {parameter: index for index, parameter in enumerate(held)}
    known = {names.get(name, (name,))[0]: (name, p) for name, p in model.named_parameters() if p in index_of}
    loaded: dict[int, dict[str, Any]] = {}
    for entry, value in state.items():
        plain, _, key = entry.rpartition("/")
        if plain not in known:
            raise UnreadableError(f"the checkpoint holds {entry!r}, but the optimizer has no such parameter")
        name, parameter = known[plain]
        part = _part(value, parameter, names.get(name, (name, None))[1])
        loaded.setdefault(index_of[parameter], {})[key] = part.clone()  # the optimizer writes into it
    optimizer.load_state_dict({"state": loaded, "param_groups": optimizer.state_dict()["param_groups"]})


def _part(value: Tensor, own: Tensor, layer: ParallelExperts | None) -> Tensor:
    """What this rank keeps of a whole tensor that belongs to its tensor `own`."""
    if layer is not None and value.dim() > 0 and value.shape[0] == layer.num_experts:
        return value[layer.placement.experts_of(layer.group.rank)]
    if isinstance(own, DTensor) and value.shape == own.shape:
        value = value.to(own.device)
        return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
    return value
