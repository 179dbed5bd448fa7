# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The gradient of one matrix an expert: dW_e = Σ over the expert's rows of g_s x_sᵀ, zero for an expert without rows.

Shapes: S rows sorted by expert, N rows and K columns of a matrix, E experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton import launch


def configs() -> list[triton.Config]:
    if launch.interpreting():
        return [triton.Config({"BLOCK_N": 16, "BLOCK_K": 16, "BLOCK_S": 16}, num_warps=4, num_stages=1)]
    tiles = [
        (128, 128, 64, 8, 3),
        (128, 128, 32, 8, 4),
        (128, 64, 64, 4, 3),
        (64, 64, 64, 4, 3),
        (64, 64, 32, 4, 4),
    ]
    return [
        triton.Config({"BLOCK_N": n, "BLOCK_K": k, "BLOCK_S": s}, num_warps=warps, num_stages=stages)
        for n, k, s, warps, stages in tiles
    ]


@triton.autotune(configs(), ["N", "K", "MEAN"], cache_results=True)
@triton.jit
def weight_gemm_kernel(
    g_ptr,
    x_ptr,
    g_row_ptr,
    x_row_ptr,
    end_ptr,
    out_ptr,
    N,
    K,
    E,
    stride_g: tl.int64,
    stride_x: tl.int64,
    MEAN: tl.constexpr,
    GATHER_G: tl.constexpr,
    GATHER_X: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    num_n, num_k = tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    for tile in range(tl.program_id(0), E * num_n * num_k, tl.num_programs(0)):
        e = tile // (num_n * num_k)
        n = tile // num_k % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tile % num_k * BLOCK_K + tl.arange(0, BLOCK_K)
        start = tl.load(end_ptr + e - 1, mask=e > 0, other=0)
        end = tl.load(end_ptr + e)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for first in range(start, end, BLOCK_S):
            row = first + tl.arange(0, BLOCK_S)
            inside = row < end
            g_row, x_row = row, row
            if GATHER_G:
                g_row = tl.load(g_row_ptr + row, mask=inside, other=0)
            if GATHER_X:
                x_row = tl.load(x_row_ptr + row, mask=inside, other=0)
            g_at = g_ptr + g_row[:, None] * stride_g + n[None, :]
            x_at = x_ptr + x_row[:, None] * stride_x + k[None, :]
            g = tl.load(g_at, mask=inside[:, None] & (n < N)[None, :], other=0)
            x = tl.load(x_at, mask=inside[:, None] & (k < K)[None, :], other=0)
            acc = tl.dot(tl.trans(g), x, acc, input_precision=PRECISION)
        at = out_ptr + (e.to(tl.int64) * N + n)[:, None] * K + k[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def weight_gemm(
    g: Tensor, x: Tensor, counts_E: Tensor, *, g_row: Tensor | None = None, x_row: Tensor | None = None
) -> Tensor:
    """(E, N, K) from rows of g (·, N) and x (·, K); g_row, x_row (S,) int64 name the row that row s reads."""
    E, N, K = counts_E.shape[0], g.shape[1], x.shape[1]
    out = x.new_empty(E, N, K)
    ends = counts_E.cumsum(0)
    rows = x.shape[0] if x_row is None else x_row.shape[0]
    weight_gemm_kernel[
        lambda meta: launch.persistent(
            x.device, E * triton.cdiv(N, meta["BLOCK_N"]) * triton.cdiv(K, meta["BLOCK_K"])
        )
    ](
        g,
        x,
        ends if g_row is None else g_row,
        ends if x_row is None else x_row,
        ends,
        out,
        N,
        K,
        E,
        g.stride(0),
        x.stride(0),
        MEAN=launch.block_rows(rows, E),
        GATHER_G=g_row is not None,
        GATHER_X=x_row is not None,
        PRECISION=launch.precision(x),
    )
    return out
