# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Which rows each tile of a grouped product holds: the table that the product's programs walk over.

Rows lie sorted by expert; a tile has BLOCK_M rows of one expert, fewer at the expert's end. How many tiles there are is
known on the device only; the launch needs just the bound S / BLOCK_M + E.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton.launch import block_rows, power_of_2


class Tiles(NamedTuple):
    """expert (M,) int32, first row and end of rows (M,) int64 of each tile; total (1,) int64 of real tiles; M is the bound."""

    expert: Tensor
    start: Tensor
    end: Tensor
    total: Tensor
    block_m: int

    @property
    def most(self) -> int:
        return self.expert.shape[0]


@triton.jit
def tile_table_kernel(
    counts_ptr,
    expert_ptr,
    start_ptr,
    end_ptr,
    total_ptr,
    E,
    most,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.zeros((BLOCK_T,), tl.int64)
    tiles_before = tl.zeros((BLOCK_T,), tl.int64)
    rows_before = tl.zeros((BLOCK_T,), tl.int64)
    total = tl.full((), 0, tl.int64)
    for first in range(0, E, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        rows_E = tl.load(counts_ptr + e, mask=e < E, other=0)
        tiles_E = (rows_E + BLOCK_M - 1) // BLOCK_M
        ends_E = total + tl.cumsum(tiles_E, 0)
        passed = (ends_E[None, :] <= tile[:, None]) & (e < E)[None, :]
        expert += tl.sum(passed.to(tl.int64), 1)
        tiles_before += tl.sum(tl.where(passed, tiles_E[None, :], 0), 1)
        rows_before += tl.sum(tl.where(passed, rows_E[None, :], 0), 1)
        total += tl.sum(tiles_E, 0)
    inside = tile < most
    rows = tl.load(counts_ptr + expert, mask=inside & (expert < E), other=0)
    tl.store(expert_ptr + tile, expert.to(tl.int32), mask=inside)
    tl.store(start_ptr + tile, rows_before + (tile - tiles_before) * BLOCK_M, mask=inside)
    tl.store(end_ptr + tile, rows_before + rows, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(total_ptr, total)


def tile_table(counts_E: Tensor, rows: int, block_m: int | None = None) -> Tiles:
    """The table for `rows` sorted rows, counts_E of them (int64) for each expert."""
    E, device = counts_E.shape[0], counts_E.device
    block_m = block_m or block_rows(rows, E)
    most = max(1, rows // block_m + min(E, rows))
    expert = torch.empty(most, dtype=torch.int32, device=device)
    start, end = (torch.empty(most, dtype=torch.int64, device=device) for _ in range(2))
    total = torch.empty(1, dtype=torch.int64, device=device)
    block_t, block_e = 16, min(64, power_of_2(E))
    tile_table_kernel[(triton.cdiv(most, block_t),)](
        counts_E,
        expert,
        start,
        end,
        total,
        E,
        most,
        BLOCK_M=block_m,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )
    return Tiles(expert, start, end, total, block_m)


@triton.jit
def pick_tile(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(row tile, column tile) of a tile number: bands of GROUP_M row tiles, so that neighbours share weights in the
    cache."""
    band = GROUP_M * num_n
    first = tile // band * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    inside = tile % band
    return first + inside % height, inside // height
