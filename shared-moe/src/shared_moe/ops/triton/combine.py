# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Weighted sum of each token's rows, k ascending in float32, and its gradients.

Shapes: T tokens, K slots a token, S rows, D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton.launch import power_of_2


@triton.jit
def combine_kernel(
    rows_ptr,
    position_ptr,
    weights_ptr,
    y_ptr,
    T,
    D,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in range(K):
        row = tl.load(position_ptr + t * K + k, mask=t < T, other=-1)
        value = tl.load(rows_ptr + row[:, None] * D + d[None, :], mask=inside & (row >= 0)[:, None], other=0)
        value = value.to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + t * K + k, mask=t < T, other=0)[:, None]
        acc += tl.where((row >= 0)[:, None], value, 0.0)
    tl.store(y_ptr + t[:, None] * D + d[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside)


def combine(rows_SD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """y_t = Σ_k w_tk rows[position_tk]; a position of -1 adds nothing; no weights mean ones. (T, D)"""
    (T, K), D = position_TK.shape, rows_SD.shape[1]
    y_TD = rows_SD.new_empty(T, D)
    if y_TD.numel() == 0:
        return y_TD
    block_t, block_d = (16, 16) if rows_SD.device.type == "cpu" else (4, min(512, power_of_2(D)))
    combine_kernel[(triton.cdiv(T, block_t), triton.cdiv(D, block_d))](
        rows_SD,
        position_TK.contiguous(),
        rows_SD if weights_TK is None else weights_TK.to(torch.float32).contiguous(),
        y_TD,
        T,
        D,
        K=K,
        WEIGHTED=weights_TK is not None,
        BLOCK_T=block_t,
        BLOCK_D=block_d,
    )
    return y_TD


@triton.jit
def combine_backward_kernel(
    grad_ptr,
    rows_ptr,
    order_ptr,
    count_ptr,
    weights_ptr,
    grad_rows_ptr,
    grad_weights_ptr,
    S,
    D,
    K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    held = s < tl.load(count_ptr)
    assignment = tl.load(order_ptr + s, mask=s < S, other=0)
    weight = tl.load(weights_ptr + assignment, mask=s < S, other=0)
    dot = tl.zeros((BLOCK_S,), tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        inside = held[:, None] & (d < D)[None, :]
        grad = tl.load(grad_ptr + (assignment // K)[:, None] * D + d[None, :], mask=inside, other=0).to(
            tl.float32
        )
        row = tl.load(rows_ptr + s[:, None] * D + d[None, :], mask=inside, other=0).to(tl.float32)
        dot += tl.sum(grad * row, 1)
        out = tl.where(held[:, None], grad * weight[:, None], 0.0).to(grad_rows_ptr.dtype.element_ty)
        tl.store(grad_rows_ptr + s[:, None] * D + d[None, :], out, mask=(s < S)[:, None] & (d < D)[None, :])
    tl.store(grad_weights_ptr + assignment, dot.to(grad_weights_ptr.dtype.element_ty), mask=s < S)


def combine_backward(
    grad_TD: Tensor, rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the rows (zero for rows of no expert) and of the weights."""
    (S, D), K = rows_SD.shape, weights_TK.shape[1]
    grad_rows = torch.empty_like(rows_SD)
    grad_weights = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    if S == 0:
        return grad_rows, grad_weights
    block_s, block_d = (16, 16) if rows_SD.device.type == "cpu" else (4, min(512, power_of_2(D)))
    combine_backward_kernel[(triton.cdiv(S, block_s),)](
        grad_TD,
        rows_SD,
        order_S,
        counts_E.sum(),
        weights_TK.to(torch.float32).contiguous(),
        grad_rows,
        grad_weights,
        S,
        D,
        K=K,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
    )
    return grad_rows, grad_weights
