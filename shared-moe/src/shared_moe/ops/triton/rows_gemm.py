# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""One matrix an expert, applied to rows sorted by expert: gather in, product, bias, scatter out.

    y[out_s] = W_e(s) x[in_s] + b_e(s)

Shapes: S rows, K depth of the product, N columns, E experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton import launch
from shared_moe.ops.triton.tiles import Tiles, pick_tile


@triton.jit
def load_weight(w_ptr, desc, e, n0, k0, N, K, stride_e, stride_row, K_INNER, TMA, BLOCK_N, BLOCK_K):
    """A tile of the expert's matrix, (BLOCK_K, BLOCK_N), zero outside; K_INNER says which index is contiguous."""
    if TMA:
        if K_INNER:
            return tl.trans(tl.reshape(desc.load([e, n0, k0]), (BLOCK_N, BLOCK_K)))
        return tl.reshape(desc.load([e, k0, n0]), (BLOCK_K, BLOCK_N))
    n = n0 + tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_K)
    base = w_ptr + e.to(tl.int64) * stride_e
    if K_INNER:
        at = base + n.to(tl.int64)[None, :] * stride_row + k[:, None]
    else:
        at = base + k.to(tl.int64)[:, None] * stride_row + n[None, :]
    return tl.load(at, mask=(k < K)[:, None] & (n < N)[None, :], other=0)


@triton.jit
def describe_weight(
    w_ptr, E, rows, columns, stride_e, stride_row, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr
):
    return tl.make_tensor_descriptor(
        w_ptr,
        shape=[E, rows, columns],
        strides=[stride_e, stride_row, 1],
        block_shape=[1, BLOCK_ROW, BLOCK_COL],
    )


@triton.autotune(
    launch.gemm_configs(), ["N", "K", "BLOCK_M"], {"early_config_prune": launch.pruner()}, cache_results=True
)
@triton.jit
def rows_gemm_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    in_row_ptr,
    out_row_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    tile_end_ptr,
    num_tiles_ptr,
    N,
    K,
    E,
    stride_x: tl.int64,
    stride_e: tl.int64,
    stride_row: tl.int64,
    stride_y: tl.int64,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    BIAS: tl.constexpr,
    K_INNER: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_m = tl.load(num_tiles_ptr).to(tl.int32)
    num_n = tl.cdiv(N, BLOCK_N)
    if TMA:
        if K_INNER:
            desc = describe_weight(w_ptr, E, N, K, stride_e, stride_row, BLOCK_N, BLOCK_K)
        else:
            desc = describe_weight(w_ptr, E, K, N, stride_e, stride_row, BLOCK_K, BLOCK_N)
    else:
        desc = None
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        m, tile_n = pick_tile(tile, num_m, num_n, GROUP_M)
        e = tl.load(tile_expert_ptr + m)
        row = tl.load(tile_start_ptr + m) + tl.arange(0, BLOCK_M)
        end = tl.load(tile_end_ptr + m)
        real = tl.minimum(row, end - 1)
        source = real
        if GATHER:
            source = tl.load(in_row_ptr + real)
        n0 = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + source[:, None] * stride_x + k[None, :], mask=(k < K)[None, :], other=0)
            w = load_weight(
                w_ptr, desc, e, n0, k0, N, K, stride_e, stride_row, K_INNER, TMA, BLOCK_N, BLOCK_K
            )
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        n = n0 + tl.arange(0, BLOCK_N)
        if BIAS:
            acc += tl.load(bias_ptr + e.to(tl.int64) * N + n, mask=n < N, other=0).to(tl.float32)[None, :]
        target = row
        if SCATTER:
            target = tl.load(out_row_ptr + real)
        y = acc.to(y_ptr.dtype.element_ty)
        tl.store(
            y_ptr + target[:, None] * stride_y + n[None, :], y, mask=(row < end)[:, None] & (n < N)[None, :]
        )


def rows_gemm(
    x: Tensor,
    weight: Tensor,
    tiles: Tiles,
    out: Tensor,
    *,
    transposed: bool = False,
    bias: Tensor | None = None,
    in_row: Tensor | None = None,
    out_row: Tensor | None = None,
) -> Tensor:
    """Fill out's rows with the product of x's rows and weight (E, N, K), or (E, K, N) when `transposed`.

    in_row, out_row (S,) int64: which row of x row s reads, which row of `out` it writes; None means s. Rows of no
    expert are not written.
    """
    weight = weight.contiguous()
    E, (N, K) = weight.shape[0], weight.shape[:0:-1] if transposed else weight.shape[1:]
    tma = launch.use_descriptors(weight)
    if tma:
        launch.allocate_descriptors(x.device)
    rows_gemm_kernel[
        lambda meta: launch.persistent(
            x.device, tiles.most * triton.cdiv(N, meta["BLOCK_N"]), 4 if tiles.block_m <= 32 else 2
        )
    ](
        x,
        weight,
        weight if bias is None else bias,
        out,
        tiles.start if in_row is None else in_row,
        tiles.start if out_row is None else out_row,
        tiles.expert,
        tiles.start,
        tiles.end,
        tiles.total,
        N,
        K,
        E,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        GATHER=in_row is not None,
        SCATTER=out_row is not None,
        BIAS=bias is not None,
        K_INNER=not transposed,
        TMA=tma,
        PRECISION=launch.precision(x),
        BLOCK_M=tiles.block_m,
        GROUP_M=8,
    )
    return out
