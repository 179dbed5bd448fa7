"""Group token-to-expert assignments by expert.

Shapes: T tokens, K slots a token, E experts; the T·K assignments are numbered t·K + k.
"""

import torch
from torch import Tensor

from shared_moe.errors import InputError, ShapeError


@torch.library.custom_op("shared_moe::sort_by_expert", mutates_args=())
def _sort_by_expert(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    flat = expert_ids_TK.reshape(-1)
    if flat.numel() and flat.device.type == "cpu":
        low, high = (v.item() for v in flat.aminmax())
        if low < -1 or high > num_experts:
            wrong = low if low < -1 else high
            raise InputError(
                f"expert_ids holds {wrong}; expected 0 to {num_experts - 1}, or -1 or {num_experts} for no expert"
            )
    key = torch.where(flat < 0, num_experts, flat)
    order = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts].contiguous()
    return order, counts


@_sort_by_expert.register_fake
def _(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return (
        expert_ids_TK.new_empty(expert_ids_TK.numel()),
        expert_ids_TK.new_empty(num_experts),
    )


def sort_by_expert(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Stable order of the assignments by expert, and how many each expert has.

    expert_ids_TK: int64 (T, K); -1 and `num_experts` mean "no expert".
    Returns order (T·K,): assignment numbers sorted by expert, of which the first `counts.sum()` have an expert;
    and counts (E,), int64.

    Raises `InputError` for any other id (checked on the CPU only: on a GPU the check would stall the stream),
    `ShapeError` for another shape or dtype.
    """
    if expert_ids_TK.dim() != 2 or expert_ids_TK.dtype != torch.int64:
        raise ShapeError(
            f"expert_ids must be int64 of shape (T, K), got {expert_ids_TK.dtype} {tuple(expert_ids_TK.shape)}"
        )
    if num_experts < 1:
        raise InputError(f"num_experts is {num_experts}; expected at least 1")
    return _sort_by_expert(expert_ids_TK, num_experts)
