"""More rows than a grid's second and third dimension can count: shapes only, nothing is computed."""

import torch
from triton.runtime import interpreter

from shared_moe.ops.triton.combine import combine, combine_backward
from shared_moe.ops.triton.linear import forward
from shared_moe.ops.triton.sort import sort

LIMITS = (2**31 - 1, 65_535, 65_535)
TOKENS, K, D = 1_150_000, 8, 16


def test_grids_of_nine_million_rows(monkeypatch):
    grids = {}

    def record(self, *arguments, **options):
        grid = self.grid
        if callable(grid):
            grid = grid(options | {"BLOCK_N": 16, "BLOCK_K": 16})
        grids[self.fn.__name__] = (*grid, 1, 1)[:3]

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", record)
    S = TOKENS * K
    rows = torch.zeros(1, D).expand(S, D)
    position = torch.zeros(1, 1, dtype=torch.int64).expand(TOKENS, K)
    order = torch.zeros(1, dtype=torch.int64).expand(S)
    counts = torch.tensor([S - 5, 5])
    combine(rows, position, None)
    combine_backward(rows[:TOKENS], rows, order, counts, torch.zeros(TOKENS, K))
    forward(rows, torch.zeros(2, D, D), counts)
    sort(torch.zeros(TOKENS, K, dtype=torch.int64), 2)
    assert S // 128 > 65_535
    assert {"combine_kernel", "combine_backward_kernel", "rows_gemm_kernel", "place_kernel"} <= grids.keys()
    for name, grid in grids.items():
        assert all(0 < n <= limit for n, limit in zip(grid, LIMITS, strict=True)), (name, grid)
