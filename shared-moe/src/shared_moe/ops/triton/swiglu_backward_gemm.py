# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Backward through the second matrix and the SwiGLU of an expert in one pass.

With g = W2ᵀ grad_y, a = silu(gate) · up and w the combine weight of the row: writes the gradient of gate and up under
w · g, w · a (what the gradient of W2 needs), and Σ_f g · a (the gradient of w) column block by column block.

The columns of g are finished a quarter at a time: with all of them, gate, up and what becomes of them would not fit the
registers.

Shapes: T tokens, S rows sorted by expert, O output width, F hidden width, E experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton import launch
from shared_moe.ops.triton.rows_gemm import describe_weight, load_weight
from shared_moe.ops.triton.tiles import Tiles, pick_tile

COLUMNS = 128
"""Hidden columns of a tile: not tuned, because the partial sums are laid out by it."""


def configs() -> list[triton.Config]:
    if launch.interpreting():
        return [triton.Config({"BLOCK_K": 16}, num_warps=4, num_stages=1)]
    return [
        triton.Config({"BLOCK_K": k}, num_warps=warps, num_stages=stages)
        for k, warps, stages in ((64, 4, 4), (64, 8, 3), (128, 8, 3), (32, 4, 4))
    ]


@triton.jit
def halves(x):
    """The left and the right half of the columns of a tile."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def finish(g, f0, row, end, weight, hidden_ptr, grad_hidden_ptr, scaled_ptr, stride_hidden, stride_scaled, F):
    """Writes what follows from a part of g, whose first column is f0; returns its Σ_f g · a by row."""
    f = f0 + tl.arange(0, g.shape[1])
    inside = (row < end)[:, None] & (f < F)[None, :]
    at = row[:, None] * stride_hidden + f[None, :]
    gate = tl.load(hidden_ptr + at, mask=inside, other=0).to(tl.float32)
    up = tl.load(hidden_ptr + at + F, mask=inside, other=0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    a = silu * up
    dtype = scaled_ptr.dtype.element_ty
    tl.store(scaled_ptr + row[:, None] * stride_scaled + f[None, :], (a * weight).to(dtype), mask=inside)
    weighted = g * weight
    slope = sigmoid + silu * (1 - sigmoid)
    tl.store(grad_hidden_ptr + at, (weighted * up * slope).to(dtype), mask=inside)
    tl.store(grad_hidden_ptr + at + F, (weighted * silu).to(dtype), mask=inside)
    return tl.sum(g * a, 1)


@triton.autotune(
    configs(), ["F", "O", "BLOCK_M"], {"early_config_prune": launch.pruner()}, cache_results=True
)
@triton.jit
def swiglu_backward_gemm_kernel(
    grad_ptr,
    w_ptr,
    hidden_ptr,
    weight_ptr,
    grad_hidden_ptr,
    scaled_ptr,
    dots_ptr,
    token_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    tile_end_ptr,
    num_tiles_ptr,
    F,
    O,
    E,
    stride_grad: tl.int64,
    stride_e: tl.int64,
    stride_row: tl.int64,
    stride_hidden: tl.int64,
    stride_scaled: tl.int64,
    stride_dots: tl.int64,
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
        desc = describe_weight(w_ptr, E, O, F, stride_e, stride_row, BLOCK_K, BLOCK_N)
    else:
        desc = None
    for tile in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        m, tile_n = pick_tile(tile, num_m, num_n, GROUP_M)
        e = tl.load(tile_expert_ptr + m)
        row = tl.load(tile_start_ptr + m) + tl.arange(0, BLOCK_M)
        end = tl.load(tile_end_ptr + m)
        token = tl.load(token_ptr + tl.minimum(row, end - 1))
        f0 = tile_n * BLOCK_N
        g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for o0 in range(0, O, BLOCK_K):
            o = o0 + tl.arange(0, BLOCK_K)
            grad = tl.load(
                grad_ptr + token[:, None] * stride_grad + o[None, :], mask=(o < O)[None, :], other=0
            )
            w = load_weight(w_ptr, desc, e, f0, o0, F, O, stride_e, stride_row, False, TMA, BLOCK_N, BLOCK_K)
            g = tl.dot(grad, w, g, input_precision=PRECISION)
        weight = tl.load(weight_ptr + row, mask=row < end, other=0)[:, None]
        to = row, end, weight, hidden_ptr, grad_hidden_ptr, scaled_ptr, stride_hidden, stride_scaled, F
        left, right = halves(g)
        one, two = halves(left)
        three, four = halves(right)
        part = BLOCK_N // 4
        dots = finish(one, f0, *to) + finish(two, f0 + part, *to)
        dots += finish(three, f0 + 2 * part, *to) + finish(four, f0 + 3 * part, *to)
        tl.store(dots_ptr + tile_n.to(tl.int64) * stride_dots + row, dots, mask=row < end)


def swiglu_backward_gemm(
    grad_TO: Tensor, weight_EOF: Tensor, hidden_SH: Tensor, weight_S: Tensor, token_S: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of hidden (S, 2F), weight · a (S, F), gradient of the combine weights (S,)).

    weight_S: float32. Rows of no expert hold undefined values in the first two and 0 in the last.
    """
    weight = weight_EOF.contiguous()
    E, O, F = weight.shape
    S = token_S.shape[0]
    grad_hidden, scaled = torch.empty_like(hidden_SH), hidden_SH.new_empty(S, F)
    dots = torch.zeros(triton.cdiv(F, COLUMNS), S, dtype=torch.float32, device=grad_TO.device)
    tma = launch.use_descriptors(weight)
    if tma:
        launch.allocate_descriptors(grad_TO.device)
    swiglu_backward_gemm_kernel[launch.persistent(grad_TO.device, tiles.most * dots.shape[0], tiles.block_m)](
        grad_TO,
        weight,
        hidden_SH,
        weight_S,
        grad_hidden,
        scaled,
        dots,
        token_S,
        tiles.expert,
        tiles.start,
        tiles.end,
        tiles.total,
        F,
        O,
        E,
        grad_TO.stride(0),
        weight.stride(0),
        weight.stride(1),
        hidden_SH.stride(0),
        scaled.stride(0),
        dots.stride(0),
        TMA=tma,
        PRECISION=launch.precision(grad_TO),
        BLOCK_M=tiles.block_m,
        GROUP_M=8,
        BLOCK_N=COLUMNS,
    )
    return grad_hidden, scaled, dots.sum(0)
