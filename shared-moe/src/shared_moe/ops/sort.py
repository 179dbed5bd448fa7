"""Group token-to-expert assignments by expert.

Shapes: T tokens, K slots a token, E experts; the S = T·K assignments are numbered t·K + k.
"""

import torch
from torch import Tensor

from shared_moe.errors import InputError, ShapeError
from shared_moe.ops.backend import choose_backend, resolve

MOST_EXPERTS = 1024
"""Experts that the kernels for GPUs sort by; torch sorts by more."""


def check_range(expert_ids: Tensor, num_experts: int) -> None:
    """Raises `InputError` for an id that is neither an expert nor -1 or `num_experts`; on the CPU only."""
    if expert_ids.numel() == 0 or expert_ids.device.type != "cpu":
        return
    low, high = (v.item() for v in expert_ids.aminmax())
    if low < -1 or high > num_experts:
        wrong = low if low < -1 else high
        raise InputError(
            f"expert_ids holds {wrong}; expected 0 to {num_experts - 1}, or -1 or {num_experts} for no expert"
        )


@torch.library.custom_op("shared_moe::sort_by_expert", mutates_args=())
def sort_op(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    if expert_ids_TK.device.type == "cuda" and num_experts <= MOST_EXPERTS:
        kernel = resolve("sort_by_expert", choose_backend("sort_by_expert"), expert_ids_TK)
        if kernel == "cuda":
            from shared_moe.ops.cuda.sort import sort

            return sort(expert_ids_TK, num_experts)
        if kernel == "triton":
            from shared_moe.ops.triton.sort import sort

            return sort(expert_ids_TK, num_experts)
    flat = expert_ids_TK.reshape(-1)
    check_range(flat, num_experts)
    key, order = torch.where((flat < 0) | (flat > num_experts), num_experts, flat).sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(num_experts + 1, device=key.device))
    return order, ends.diff()


@sort_op.register_fake
def _(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    return (
        expert_ids_TK.new_empty(expert_ids_TK.numel()),
        expert_ids_TK.new_empty(num_experts),
    )


def positions(order_S: Tensor, counts_E: Tensor) -> Tensor:
    """Where each assignment's row lies (S,); -1 for an assignment without an expert. Does not wait for a GPU."""
    row_S = torch.arange(order_S.shape[0], device=order_S.device)
    position_S = torch.empty_like(order_S)
    position_S[order_S] = torch.where(row_S < counts_E.sum(), row_S, -1)
    return position_S


def sort_by_expert(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Stable order of the assignments by expert, and how many each expert has.

    expert_ids_TK: int64 (T, K); -1 and `num_experts` mean "no expert".
    Returns order (T·K,): assignment numbers sorted by expert, of which the first `counts.sum()` have an expert;
    and counts (E,), int64.

    Raises `InputError` for any other id on the CPU (on a GPU the check would stall the stream: there such an id means
    "no expert"), `ShapeError` for another shape or dtype.
    """
    if expert_ids_TK.dim() != 2 or expert_ids_TK.dtype != torch.int64:
        raise ShapeError(
            f"expert_ids must be int64 of shape (T, K), got {expert_ids_TK.dtype} {tuple(expert_ids_TK.shape)}"
        )
    if num_experts < 1:
        raise InputError(f"num_experts is {num_experts}; expected at least 1")
    return sort_op(expert_ids_TK, num_experts)
