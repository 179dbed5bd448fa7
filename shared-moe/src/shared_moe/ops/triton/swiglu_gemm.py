# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The first half of a SwiGLU expert in one pass: gather the tokens, both products, silu(gate) · up.

Shapes: T tokens, S rows sorted by expert, D width, F hidden width, E experts.
"""

import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton import launch
from shared_moe.ops.triton.rows_gemm import describe_weight, load_weight
from shared_moe.ops.triton.tiles import Tiles, pick_tile

HELD = 2
"""Tiles that a program holds in float32: gate and up."""


@triton.autotune(
    launch.gemm_configs(),
    ["F", "D", "BLOCK_M"],
    {"early_config_prune": launch.pruner(HELD, 2)},
    cache_results=True,
)
@triton.jit
def swiglu_gemm_kernel(
    x_ptr,
    w_ptr,
    a_ptr,
    hidden_ptr,
    token_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    tile_end_ptr,
    num_tiles_ptr,
    F,
    D,
    E,
    stride_x: tl.int64,
    stride_e: tl.int64,
    stride_row: tl.int64,
    stride_a: tl.int64,
    stride_hidden: tl.int64,
    KEEP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_m = tl.load(num_tiles_ptr).to(tl.int32)
    num_n = tl.cdiv(F, BLOCK_N)
    if TMA:
        desc = describe_weight(w_ptr, E, 2 * F, D, stride_e, stride_row, BLOCK_N, BLOCK_K)
    else:
        desc = None
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        m, tile_n = pick_tile(tile, num_m, num_n, GROUP_M)
        e = tl.load(tile_expert_ptr + m)
        row = tl.load(tile_start_ptr + m) + tl.arange(0, BLOCK_M)
        end = tl.load(tile_end_ptr + m)
        token = tl.load(token_ptr + tl.minimum(row, end - 1))
        f0 = tile_n * BLOCK_N
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for d0 in range(0, D, BLOCK_K):
            d = d0 + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + token[:, None] * stride_x + d[None, :], mask=(d < D)[None, :], other=0)
            w = load_weight(
                w_ptr, desc, e, f0, d0, 2 * F, D, stride_e, stride_row, True, TMA, BLOCK_N, BLOCK_K
            )
            gate = tl.dot(x, w, gate, input_precision=PRECISION)
            w = load_weight(
                w_ptr, desc, e, F + f0, d0, 2 * F, D, stride_e, stride_row, True, TMA, BLOCK_N, BLOCK_K
            )
            up = tl.dot(x, w, up, input_precision=PRECISION)
        f = f0 + tl.arange(0, BLOCK_N)
        inside = (row < end)[:, None] & (f < F)[None, :]
        a = gate * tl.sigmoid(gate) * up
        tl.store(a_ptr + row[:, None] * stride_a + f[None, :], a.to(a_ptr.dtype.element_ty), mask=inside)
        if KEEP:
            at = hidden_ptr + row[:, None] * stride_hidden + f[None, :]
            tl.store(at, gate.to(hidden_ptr.dtype.element_ty), mask=inside)
            tl.store(at + F, up.to(hidden_ptr.dtype.element_ty), mask=inside)


def swiglu_gemm(
    x_TD: Tensor, weight_EHD: Tensor, token_S: Tensor, tiles: Tiles, keep_hidden: bool
) -> tuple[Tensor, Tensor]:
    """(a (S, F), hidden (S, 2F) or (0, 2F)); rows of no expert hold undefined values."""
    weight = weight_EHD.contiguous()
    E, H, D = weight.shape
    F, S = H // 2, token_S.shape[0]
    a, hidden = x_TD.new_empty(S, F), x_TD.new_empty(S if keep_hidden else 0, H)
    tma = launch.use_descriptors(weight)
    if tma:
        launch.allocate_descriptors(x_TD.device)
    swiglu_gemm_kernel[
        lambda meta: launch.persistent(
            x_TD.device, tiles.most * triton.cdiv(F, meta["BLOCK_N"]), tiles.block_m
        )
    ](
        x_TD,
        weight,
        a,
        hidden,
        token_S,
        tiles.expert,
        tiles.start,
        tiles.end,
        tiles.total,
        F,
        D,
        E,
        x_TD.stride(0),
        weight.stride(0),
        weight.stride(1),
        a.stride(0),
        hidden.stride(0),
        KEEP=keep_hidden,
        TMA=tma,
        PRECISION=launch.precision(x_TD),
        BLOCK_M=tiles.block_m,
        GROUP_M=8,
    )
    return a, hidden
