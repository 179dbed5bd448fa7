"""Stable counting sort of the assignments by expert. Shapes: S = T·K assignments, E experts, B blocks."""

from ctypes import c_int, c_int64

from torch import Tensor

from shared_moe.ops.cuda.launch import launch

BLOCK_ROWS = 1024
"""As in sort.cuh."""


def num_blocks(S: int) -> int:
    """Blocks that S assignments take."""
    return -(-S // BLOCK_ROWS)


def sort(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(order (S,), counts (E,)) as `ops.sort_by_expert`; ids outside 0..E-1 go last. E is at most 1024."""
    S, E = expert_ids_TK.numel(), num_experts
    order = expert_ids_TK.new_empty(S)
    blocks = num_blocks(S)
    counts_BE = order.new_empty(blocks, E + 1)
    if S == 0:
        return order, counts_BE.sum(0)[:E]
    ids = expert_ids_TK.contiguous()
    launch("sort.cu", "sort_count", blocks, 256, ids, counts_BE, c_int64(S), c_int(E))
    totals = counts_BE.sum(0)
    start_BE = counts_BE.cumsum(0) - counts_BE + (totals.cumsum(0) - totals)
    launch("sort.cu", "sort_place", blocks, 32, ids, start_BE, order, c_int64(S), c_int(E))
    return order, totals[:E]
