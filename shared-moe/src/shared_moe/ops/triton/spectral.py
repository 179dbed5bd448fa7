# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The first product of a spectral linear map with each token's mixed spectrum as its epilogue: z = (x Vᵀ) · Σ_k w_k s_k.

Shapes: T tokens, D width in, R rank, E experts, K experts of a token.
"""

import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton import launch
from shared_moe.ops.triton.tiles import pick_tile

HELD = 2
"""Tiles that a program holds in float32: the product and its scale."""


@triton.autotune(
    launch.gemm_configs(),
    ["R", "D", "BLOCK_M"],
    {"early_config_prune": launch.pruner(HELD)},
    cache_results=True,
)
@triton.jit
def spectral_kernel(
    x_ptr,
    v_ptr,
    scales_ptr,
    ids_ptr,
    weights_ptr,
    y_ptr,
    T,
    R,
    D,
    E,
    stride_x: tl.int64,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    num_m, num_n = tl.cdiv(T, BLOCK_M), tl.cdiv(R, BLOCK_N)
    m, n = pick_tile(tl.program_id(0), num_m, num_n, GROUP_M)
    t = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = tl.minimum(t, T - 1)
    r = n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for d0 in range(0, D, BLOCK_K):
        d = d0 + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + real[:, None] * stride_x + d[None, :], mask=(d < D)[None, :], other=0)
        v_at = v_ptr + r[None, :].to(tl.int64) * D + d[:, None]
        v = tl.load(v_at, mask=(r < R)[None, :] & (d < D)[:, None], other=0)
        acc = tl.dot(x, v, acc, input_precision=PRECISION)
    scale = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + real * K + k)
        held = (expert >= 0) & (expert < E)
        weight = tl.load(weights_ptr + real * K + k)
        at = scales_ptr + expert[:, None] * R + r[None, :]
        spectrum = tl.load(at, mask=held[:, None] & (r < R)[None, :], other=0).to(tl.float32)
        scale += tl.where(held, weight, 0.0)[:, None] * spectrum
    y = (acc * scale).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + t[:, None] * R + r[None, :], y, mask=(t < T)[:, None] & (r < R)[None, :])


def scaled_projection(
    x_TD: Tensor, v_RD: Tensor, scales_ER: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """(T, R), in x's dtype. weights_TK: float32."""
    (T, D), R = x_TD.shape, v_RD.shape[0]
    z = x_TD.new_empty(T, R)
    if T == 0:
        return z
    block_m = launch.block_rows(T, 1)
    spectral_kernel[lambda meta: (triton.cdiv(T, block_m) * triton.cdiv(R, meta["BLOCK_N"]),)](
        x_TD,
        v_RD.contiguous(),
        scales_ER.contiguous(),
        expert_ids_TK.contiguous(),
        weights_TK.contiguous(),
        z,
        T,
        R,
        D,
        scales_ER.shape[0],
        x_TD.stride(0),
        K=expert_ids_TK.shape[1],
        PRECISION=launch.precision(x_TD),
        BLOCK_M=block_m,
        GROUP_M=8,
    )
    return z
