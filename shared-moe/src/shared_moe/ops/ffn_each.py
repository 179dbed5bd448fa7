"""The expert layer one expert at a time: any dtype and stride; on the CPU with native passes between the products.

Each expert's rows are gathered, multiplied, activated and multiplied again while they are in the cache; each expert's
weight gradient is written straight to its place, so no full-size gradient is ever added up.

Shapes: T tokens, K slots a token, S = T·K assignments in expert order, D width, F hidden width, O output width, E experts,
H rows of the first matrix (2F when gated, else F).
"""

import torch
from torch import Tensor

from shared_moe import native
from shared_moe.ops.activations import activate, activate_backward
from shared_moe.ops.combine import combine_rows
from shared_moe.ops.products import groups
from shared_moe.ops.sort import positions, sort_op

FEW_ROWS = 8  # up to this many rows an expert, reading the weights costs more than multiplying


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
    E, H, D = first_EHD.shape
    O, F = second_EOF.shape[1:]
    order, counts = sort_op(expert_ids_TK, E)
    position_TK = positions(order, counts).view(T, K)
    swiglu = gated and activation == "silu"
    if swiglu and D == O and not keep_hidden and first_bias_EH is None and second_bias_EO is None:
        y_TO = x_TD.new_empty(T, O)
        if int(counts.max()) <= FEW_ROWS and native.swiglu_few_rows(
            x_TD, first_EHD, second_EOF, order, counts, position_TK, weights_TK, y_TO
        ):
            return y_TO, x_TD.new_empty(0, H)
    hidden_SH = x_TD.new_empty(T * K if keep_hidden else 0, H)
    rows_SO = x_TD.new_empty(T * K, O)
    token_S = order // K
    first, second = first_EHD.unbind(0), second_EOF.unbind(0)
    for e, rows in groups(counts):
        x = x_TD.index_select(0, token_S[rows])
        h = hidden_SH[rows] if keep_hidden else x.new_empty(len(x), H)
        torch.mm(x, first[e].t(), out=h)
        if first_bias_EH is not None:
            h += first_bias_EH[e]
        a = x.new_empty(len(x), F)
        if not (swiglu and native.swiglu_forward(h, a)):
            a = activate(h, activation, gated)
        torch.mm(a, second[e].t(), out=rows_SO[rows])
        if second_bias_EO is not None:
            rows_SO[rows] += second_bias_EO[e]
    if keep_hidden:
        hidden_SH[int(counts.sum()) :] = 0
    return combine_rows(rows_SO, position_TK, weights_TK), hidden_SH


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
    E, H, D = first_EHD.shape
    O, F = second_EOF.shape[1:]
    order, counts = sort_op(expert_ids_TK, E)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    token_S = order // K
    weight_S = weights_TK.reshape(-1).index_select(0, order).to(wide)
    grad_weight_S = weight_S.new_zeros(T * K)
    grad_rows_SD = x_TD.new_empty(T * K if needs_x else 0, D)
    grad_first = x_TD.new_empty((E, H, D) if needs_weights else 0)
    grad_second = x_TD.new_empty((E, O, F) if needs_weights else 0)
    grad_first_bias = x_TD.new_zeros((E, H) if first_bias_EH is not None else 0)
    grad_second_bias = x_TD.new_zeros((E, O) if second_bias_EO is not None else 0)
    first, second = first_EHD.unbind(0), second_EOF.unbind(0)
    first_grads = grad_first.unbind(0) if needs_weights else ()
    second_grads = grad_second.unbind(0) if needs_weights else ()
    for e, rows in groups(counts):
        grad = grad_TO.index_select(0, token_S[rows])
        h, w = hidden_SH[rows], weight_S[rows]
        grad_a = torch.mm(grad, second[e])
        grad_h, scaled = torch.empty_like(h), torch.empty_like(grad_a)
        swiglu = gated and activation == "silu"
        if not (swiglu and native.swiglu_backward(h, grad_a, w, grad_h, scaled, grad_weight_S[rows])):
            grad_h, scaled, grad_weight_S[rows] = weighted_activation_backward(
                h, grad_a, w, activation, gated
            )
        if second_bias_EO is not None:
            grad_weight_S[rows] += grad.to(wide) @ second_bias_EO[e].to(wide)
            grad_second_bias[e] = (grad.to(wide) * w[:, None]).sum(0)
        if first_bias_EH is not None:
            grad_first_bias[e] = grad_h.sum(0)
        if needs_weights:
            x = x_TD.index_select(0, token_S[rows])
            torch.mm(native.transposed(grad), scaled, out=second_grads[e])
            torch.mm(native.transposed(grad_h), x, out=first_grads[e])
        if needs_x:
            torch.mm(grad_h, first[e], out=grad_rows_SD[rows])
    if needs_weights:
        for e, n in enumerate(counts.tolist()):
            if n == 0:
                first_grads[e].zero_()
                second_grads[e].zero_()
    grad_x = x_TD.new_empty(0)
    if needs_x:
        grad_x = combine_rows(grad_rows_SD, positions(order, counts).view(T, K), None)
    grad_weights = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    grad_weights.view(-1)[order] = grad_weight_S.to(weights_TK.dtype)
    return grad_x, grad_first, grad_second, grad_first_bias, grad_second_bias, grad_weights


def weighted_activation_backward(
    h_SH: Tensor, grad_SF: Tensor, weight_S: Tensor, activation: str, gated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """With a = activate(h): (gradient of h under weight · grad, weight · a, Σ_f grad · a)."""
    weight_S1 = weight_S[:, None]
    weighted = (grad_SF.to(weight_S.dtype) * weight_S1).to(grad_SF.dtype)
    a_SF = activate(h_SH, activation, gated).to(weight_S.dtype)
    grad_h = activate_backward(weighted, h_SH, activation, gated)
    return grad_h, (a_SF * weight_S1).to(h_SH.dtype), (a_SF * grad_SF.to(weight_S.dtype)).sum(1)
