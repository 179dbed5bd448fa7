"""The expert layer with all experts in one grouped product: nothing waits for a GPU's row counts.

Takes bfloat16 in aligned memory (`products.fits_grouped_mm`). Rows of assignments without an expert lie last and hold
undefined values; they are masked wherever they could reach a result.

Shapes as in `ffn_each`.
"""

import torch
from torch import Tensor

from shared_moe.ops.activations import activate
from shared_moe.ops.combine import combine_rows
from shared_moe.ops.ffn_each import weighted_activation_backward
from shared_moe.ops.products import grouped_rows, grouped_weight_gradient
from shared_moe.ops.sort import positions, sort_op


def _expert_of_rows(counts_E: Tensor, S: int) -> Tensor:
    """Each row's expert (S,); E for a row without one."""
    return torch.searchsorted(counts_E.cumsum(0), torch.arange(S, device=counts_E.device), right=True)


def _bias_rows(bias: Tensor, expert_S: Tensor) -> Tensor:
    return bias.index_select(0, expert_S.clamp(max=bias.shape[0] - 1))


def _bias_gradient(rows: Tensor, expert_S: Tensor, E: int) -> Tensor:
    """Sum of each expert's rows as one product, which adds in a fixed order."""
    member_ES = torch.arange(E, device=rows.device)[:, None] == expert_S
    clean = torch.where((expert_S < E)[:, None], rows, 0)
    return (member_ES.to(torch.float32) @ clean.to(torch.float32)).to(rows.dtype)


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
    T, K = expert_ids_TK.shape
    E = first_EHD.shape[0]
    order, counts = sort_op(expert_ids_TK, E)
    expert_S = _expert_of_rows(counts, T * K)
    hidden_SH = grouped_rows(x_TD.index_select(0, order // K), first_EHD, counts)
    if first_bias_EH is not None:
        hidden_SH = hidden_SH + _bias_rows(first_bias_EH, expert_S)
    rows_SO = grouped_rows(activate(hidden_SH, activation, gated), second_EOF, counts)
    if second_bias_EO is not None:
        rows_SO = rows_SO + _bias_rows(second_bias_EO, expert_S)
    y_TO = combine_rows(rows_SO, positions(order, counts).view(T, K), weights_TK)
    return y_TO, hidden_SH if keep_hidden else hidden_SH.new_empty(0, hidden_SH.shape[1])


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
    T, K = expert_ids_TK.shape
    E = first_EHD.shape[0]
    order, counts = sort_op(expert_ids_TK, E)
    expert_S = _expert_of_rows(counts, T * K)
    weight_S = weights_TK.reshape(-1).index_select(0, order).to(torch.float32)
    grad_SO = grad_TO.index_select(0, order // K)
    grad_a = grouped_rows(grad_SO, second_EOF.transpose(1, 2), counts)
    grad_h, scaled, grad_weight_S = weighted_activation_backward(
        hidden_SH, grad_a, weight_S, activation, gated
    )
    grad_first, grad_second, grad_x, grad_first_bias, grad_second_bias = (x_TD.new_empty(0) for _ in range(5))
    if second_bias_EO is not None:
        grad_weight_S = grad_weight_S + (grad_SO.float() * _bias_rows(second_bias_EO, expert_S)).sum(1)
        grad_second_bias = _bias_gradient(grad_SO * weight_S[:, None], expert_S, E).to(x_TD.dtype)
    if first_bias_EH is not None:
        grad_first_bias = _bias_gradient(grad_h, expert_S, E)
    if needs_weights:
        grad_second = grouped_weight_gradient(grad_SO, scaled, counts)
        grad_first = grouped_weight_gradient(grad_h, x_TD.index_select(0, order // K), counts)
    if needs_x:
        grad_rows_SD = grouped_rows(grad_h, first_EHD.transpose(1, 2), counts)
        grad_x = combine_rows(grad_rows_SD, positions(order, counts).view(T, K), None)
    grad_weights = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    grad_weights.view(-1)[order] = torch.where(expert_S < E, grad_weight_S, 0).to(weights_TK.dtype)
    return grad_x, grad_first, grad_second, grad_first_bias, grad_second_bias, grad_weights
