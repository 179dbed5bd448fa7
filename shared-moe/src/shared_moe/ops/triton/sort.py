# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Stable counting sort of the assignments by expert: count in blocks, scan, place.

Two kernels around a scan over blocks: no atomics, so the order is that of a stable sort, always.

Shapes: S = T·K assignments, E experts, B blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton.launch import power_of_2


def block_rows(block_e: int) -> int:
    """Assignments of a block, so that a block by all experts fits the registers."""
    return max(16, min(512, 8192 // block_e))


@triton.jit
def count_kernel(ids_ptr, counts_ptr, S, E, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_E)
    expert = tl.load(ids_ptr + s, mask=s < S, other=-1)
    member = (expert[:, None] == e[None, :]) & (e < E)[None, :]
    counts = tl.sum(member.to(tl.int64), 0)
    at = counts_ptr + block * (E + 1)
    tl.store(at + e, counts, mask=e < E)
    tl.store(at + E, tl.sum((s < S).to(tl.int64), 0) - tl.sum(counts, 0))


@triton.jit
def place_kernel(ids_ptr, start_ptr, order_ptr, S, E, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_E)
    expert = tl.load(ids_ptr + s, mask=s < S, other=-1)
    member = ((expert[:, None] == e[None, :]) & (e < E)[None, :]).to(tl.int32)
    held = tl.sum(member, 1)
    rank = tl.sum(member * (tl.cumsum(member, 0) - 1), 1)
    none = ((held == 0) & (s < S)).to(tl.int32)
    rank = tl.where(none == 1, tl.cumsum(none, 0) - 1, rank)
    column = tl.where(held == 1, expert, E)
    first = tl.load(start_ptr + block * (E + 1) + column, mask=s < S, other=0)
    tl.store(order_ptr + first + rank, s, mask=s < S)


def sort(expert_ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(order (S,), counts (E,)) as `ops.sort_by_expert`; ids outside 0..E-1 go last."""
    S, E = expert_ids_TK.numel(), num_experts
    order = expert_ids_TK.new_empty(S)
    block_e = power_of_2(E)
    block_s = block_rows(block_e)
    blocks = triton.cdiv(S, block_s)
    counts_BE = torch.zeros(blocks, E + 1, dtype=torch.int64, device=order.device)
    if S == 0:
        return order, counts_BE.sum(0)[:E]
    ids = expert_ids_TK.contiguous()
    count_kernel[(blocks,)](ids, counts_BE, S, E, BLOCK_S=block_s, BLOCK_E=block_e)
    totals = counts_BE.sum(0)
    start_BE = counts_BE.cumsum(0) - counts_BE + (totals.cumsum(0) - totals)
    place_kernel[(blocks,)](ids, start_BE, order, S, E, BLOCK_S=block_s, BLOCK_E=block_e)
    return order, totals[:E]
