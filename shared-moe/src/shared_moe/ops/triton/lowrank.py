# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Low-rank experts on slots in one pass: v = (u Φ + c) W + b, the middle never leaving the chip.

Shapes: B batch, H heads, E experts, S slots an expert, P width in, R rank, Q width out.
"""

import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton.launch import power_of_2, precision

WIDEST = 256
"""Largest width in, and largest rank, that a program holds."""


def warps(block_p: int, block_r: int) -> int:
    """Warps of a program that holds a factor of (block_p, block_r)."""
    return 4 if block_p * block_r <= 64 * 64 else 8


@triton.jit
def lowrank_kernel(
    u_ptr,
    down_ptr,
    down_bias_ptr,
    up_ptr,
    up_bias_ptr,
    v_ptr,
    H,
    E,
    S,
    P,
    R,
    Q,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    e, h, b = group % E, group // E % H, group // E // H
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    p = tl.arange(0, BLOCK_P).to(tl.int64)
    r = tl.arange(0, BLOCK_R).to(tl.int64)
    u_at = u_ptr + group * S * P + s[:, None].to(tl.int64) * P + p[None, :]
    u = tl.load(u_at, mask=(s < S)[:, None] & (p < P)[None, :], other=0)
    owner = h if SHARED else e * H + h
    down_at = down_ptr + owner * P * R + p[:, None] * R + r[None, :]
    down = tl.load(down_at, mask=(p < P)[:, None] & (r < R)[None, :], other=0)
    down_bias = tl.load(down_bias_ptr + owner * R + r, mask=r < R, other=0).to(tl.float32)
    middle = (tl.dot(u, down, input_precision=PRECISION) + down_bias[None, :]).to(u.dtype)
    expert_head = e * H + h
    for first in range(0, Q, BLOCK_Q):
        q = first + tl.arange(0, BLOCK_Q)
        up_at = up_ptr + expert_head * R * Q + r[:, None] * Q + q[None, :]
        up = tl.load(up_at, mask=(r < R)[:, None] & (q < Q)[None, :], other=0)
        up_bias = tl.load(up_bias_ptr + expert_head * Q + q, mask=q < Q, other=0).to(tl.float32)
        v = tl.dot(middle, up, input_precision=PRECISION) + up_bias[None, :]
        at = v_ptr + (((b * E + e) * S + s[:, None]) * H + h) * Q + q[None, :]
        tl.store(at, v.to(v_ptr.dtype.element_ty), mask=(s < S)[:, None] & (q < Q)[None, :])


def lowrank(u: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    """(B, H, E, S, P) -> (B, E, S, H, Q); factors as in `ops.lowrank_experts`."""
    B, H, E, S, P = u.shape
    R, Q = up.shape[2:]
    v = u.new_empty(B, E, S, H, Q)
    if v.numel() == 0:
        return v
    block_s = min(64, power_of_2(S))
    lowrank_kernel[(B * H * E, triton.cdiv(S, block_s))](
        u.contiguous(),
        down.contiguous(),
        down_bias.contiguous(),
        up.contiguous(),
        up_bias.contiguous(),
        v,
        H,
        E,
        S,
        P,
        R,
        Q,
        SHARED=down.dim() == 3,
        PRECISION=precision(u),
        BLOCK_S=block_s,
        BLOCK_P=power_of_2(P),
        BLOCK_R=power_of_2(R),
        BLOCK_Q=min(64, power_of_2(Q)),
        num_warps=warps(power_of_2(P), power_of_2(R)),
    )
    return v
