# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""The expert layer on Triton kernels: SwiGLU fused into its products, everything else between grouped products.

Nothing waits for the row counts. The second product scatters its rows to their assignments, token by token, so that
the combine reads them in order. Rows of assignments without an expert are never written; they are masked wherever they
could reach a result.

Shapes as in `ops.ffn_each`.
"""

import torch
from torch import Tensor

from shared_moe.ops.activations import activate
from shared_moe.ops.ffn_each import weighted_activation_backward
from shared_moe.ops.sort import sort_op
from shared_moe.ops.triton.combine import combine
from shared_moe.ops.triton.rows_gemm import rows_gemm
from shared_moe.ops.triton.swiglu_backward_gemm import swiglu_backward_gemm
from shared_moe.ops.triton.swiglu_gemm import swiglu_gemm
from shared_moe.ops.triton.tiles import tile_table
from shared_moe.ops.triton.weight_gemm import weight_gemm


def _own_position(expert_ids_TK: Tensor, E: int) -> Tensor:
    """Each assignment's number (T, K), -1 without an expert: where a scattered row lies."""
    number = torch.arange(expert_ids_TK.numel(), device=expert_ids_TK.device).view(expert_ids_TK.shape)
    return torch.where((expert_ids_TK >= 0) & (expert_ids_TK < E), number, -1)


def _fuses(activation: str, gated: bool, bias: Tensor | None) -> bool:
    return gated and activation == "silu" and bias is None


def forward(
    x_TD: Tensor,
    first_EHD: Tensor,
    second_EOF: Tensor,
    first_bias_EH: Tensor | None,
    second_bias_EO: Tensor | None,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    activation: str,
    gated: bool,
    keep_hidden: bool,
) -> tuple[Tensor, Tensor]:
    """(y (T, O), hidden (S, H) if kept else (0, H))."""
    S, K = expert_ids_TK.numel(), expert_ids_TK.shape[1]
    E, H = first_EHD.shape[:2]
    if S == 0:
        return x_TD.new_zeros(x_TD.shape[0], second_EOF.shape[1]), x_TD.new_empty(0, H)
    order, counts = sort_op(expert_ids_TK, E)
    tiles, token = tile_table(counts, S), order // K
    if _fuses(activation, gated, first_bias_EH):
        a_SF, hidden_SH = swiglu_gemm(x_TD, first_EHD, token, tiles, keep_hidden)
    else:
        hidden_SH = rows_gemm(x_TD, first_EHD, tiles, x_TD.new_zeros(S, H), bias=first_bias_EH, in_row=token)
        a_SF = activate(hidden_SH, activation, gated).contiguous()
    rows_SO = x_TD.new_empty(S, second_EOF.shape[1])
    rows_gemm(a_SF, second_EOF, tiles, rows_SO, bias=second_bias_EO, out_row=order)
    y_TO = combine(rows_SO, _own_position(expert_ids_TK, E), weights_TK)
    return y_TO, hidden_SH if keep_hidden else hidden_SH.new_empty(0, H)


def backward(
    grad_TO: Tensor,
    x_TD: Tensor,
    first_EHD: Tensor,
    second_EOF: Tensor,
    first_bias_EH: Tensor | None,
    second_bias_EO: Tensor | None,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    hidden_SH: Tensor,
    activation: str,
    gated: bool,
    needs_x: bool,
    needs_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, both matrices, both biases and the combine weights; empty where not needed."""
    S, K = expert_ids_TK.numel(), expert_ids_TK.shape[1]
    E, F = first_EHD.shape[0], second_EOF.shape[2]
    order, counts = sort_op(expert_ids_TK, E)
    tiles, token = tile_table(counts, S), order // K
    held_S1 = (torch.arange(S, device=order.device) < counts.sum())[:, None]
    weight_S = weights_TK.reshape(-1).index_select(0, order).to(torch.float32)
    if _fuses(activation, gated, first_bias_EH):
        grad_h, scaled, grad_weight_S = swiglu_backward_gemm(
            grad_TO, second_EOF, hidden_SH, weight_S, token, tiles
        )
    else:
        grad_a = rows_gemm(grad_TO, second_EOF, tiles, x_TD.new_zeros(S, F), transposed=True, in_row=token)
        grad_h, scaled, grad_weight_S = weighted_activation_backward(
            hidden_SH, grad_a, weight_S, activation, gated
        )
        grad_h = grad_h.contiguous()
    grad_first, grad_second, grad_x, grad_first_bias, grad_second_bias = (x_TD.new_empty(0) for _ in range(5))
    if second_bias_EO is not None:
        grad_SO = grad_TO.index_select(0, token)
        grad_second_bias = _bias_gradient(grad_SO * weight_S[:, None], counts).to(x_TD.dtype)
        padded = torch.cat([second_bias_EO, second_bias_EO.new_zeros(1, second_bias_EO.shape[1])])
        grad_weight_S = grad_weight_S + (
            grad_SO.float() * padded.index_select(0, _expert_of_rows(counts, S))
        ).sum(1)
    if first_bias_EH is not None:
        grad_first_bias = _bias_gradient(torch.where(held_S1, grad_h, 0), counts).to(x_TD.dtype)
    if needs_weights:
        grad_second = weight_gemm(grad_TO, scaled, counts, g_row=token)
        grad_first = weight_gemm(grad_h, x_TD, counts, x_row=token)
    if needs_x:
        rows_SD = rows_gemm(
            grad_h, first_EHD, tiles, x_TD.new_empty(S, x_TD.shape[1]), transposed=True, out_row=order
        )
        grad_x = combine(rows_SD, _own_position(expert_ids_TK, E), None)
    grad_weights = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    grad_weights.view(-1)[order] = torch.where(held_S1[:, 0], grad_weight_S, 0).to(weights_TK.dtype)
    return grad_x, grad_first, grad_second, grad_first_bias, grad_second_bias, grad_weights


def _expert_of_rows(counts_E: Tensor, S: int) -> Tensor:
    """Each row's expert (S,); E for a row without one."""
    return torch.searchsorted(counts_E.cumsum(0), torch.arange(S, device=counts_E.device), right=True)


def _bias_gradient(rows: Tensor, counts_E: Tensor) -> Tensor:
    """Sum of each expert's rows, as the gradient of a product with rows of ones: one order of adding up."""
    ones = rows.new_ones(rows.shape[0], 16)
    return weight_gemm(rows.contiguous(), ones, counts_E)[:, :, 0]
