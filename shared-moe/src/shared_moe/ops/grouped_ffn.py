"""The experts of a layer: every token visits its experts, and their answers are added up.

    y_t = Σ_k w_tk (W2_e act(W1_e x_t + b1_e) + b2_e),  e = expert_ids_tk

Shapes: T tokens, K slots a token, S = T·K assignments in expert order, D width, F hidden width, E experts,
H rows of the first matrix (2F when gated, else F). Weights lie as in transformers: gate_up (E, H, D), down (E, D, F).
"""

import torch
from torch import Tensor

from shared_moe import native
from shared_moe.errors import ShapeError
from shared_moe.ops.activations import activate, activate_backward, check_activation
from shared_moe.ops.backend import choose_backend
from shared_moe.ops.combine import _positions, combine_rows
from shared_moe.ops.grouped_linear import groups
from shared_moe.ops.sort import _sort_by_expert


def _is_swiglu(activation: str, gated: bool) -> bool:
    return gated and activation == "silu"


def _activate_into(h_SH: Tensor, a_SF: Tensor, activation: str, gated: bool) -> None:
    if not (_is_swiglu(activation, gated) and native.swiglu_forward(h_SH, a_SF)):
        a_SF.copy_(activate(h_SH, activation, gated))


@torch.library.custom_op("shared_moe::grouped_ffn", mutates_args=())
def _grouped_ffn(
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    down_EDF: Tensor,
    gate_up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    activation: str,
    gated: bool,
    for_backward: bool,
) -> tuple[Tensor, Tensor]:
    K = expert_ids_TK.shape[1]
    order, counts = _sort_by_expert(expert_ids_TK, gate_up_EHD.shape[0])
    S, H = expert_ids_TK.numel(), gate_up_EHD.shape[1]
    hidden_SH = x_TD.new_empty(S if for_backward else 0, H)
    rows_SD = x_TD.new_empty(S, x_TD.shape[1])
    first, second = gate_up_EHD.unbind(0), down_EDF.unbind(0)
    token_S = order // K
    for e, rows in groups(counts):
        x = x_TD.index_select(0, token_S[rows])
        h = hidden_SH[rows] if for_backward else x.new_empty(len(x), H)
        torch.mm(x, first[e].t(), out=h)
        if gate_up_bias_EH is not None:
            h += gate_up_bias_EH[e]
        a = x.new_empty(len(x), down_EDF.shape[2])
        _activate_into(h, a, activation, gated)
        torch.mm(a, second[e].t(), out=rows_SD[rows])
        if down_bias_ED is not None:
            rows_SD[rows] += down_bias_ED[e]
    position = _positions(order, int(counts.sum())).view(expert_ids_TK.shape)
    return combine_rows(rows_SD, position, weights_TK), hidden_SH


@_grouped_ffn.register_fake
def _(
    x_TD,
    gate_up_EHD,
    down_EDF,
    gate_up_bias_EH,
    down_bias_ED,
    expert_ids_TK,
    weights_TK,
    activation,
    gated,
    for_backward,
):
    S = expert_ids_TK.numel() if for_backward else 0
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format), x_TD.new_empty(
        S, gate_up_EHD.shape[1]
    )


@torch.library.custom_op("shared_moe::grouped_ffn_backward", mutates_args=())
def _grouped_ffn_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    down_EDF: Tensor,
    gate_up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    hidden_SH: Tensor,
    activation: str,
    gated: bool,
    needs_x: bool,
    needs_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    T, K = expert_ids_TK.shape
    E, H, D = gate_up_EHD.shape
    F = down_EDF.shape[2]
    order, counts = _sort_by_expert(expert_ids_TK, E)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    token_S = order // K
    weight_S = weights_TK.reshape(-1).index_select(0, order).to(wide)
    grad_weight_S = weight_S.new_zeros(order.shape[0])
    grad_rows_SD = x_TD.new_empty(order.shape[0] if needs_x else 0, D)
    grad_first = x_TD.new_empty((E, H, D) if needs_weights else 0)
    grad_second = x_TD.new_empty((E, D, F) if needs_weights else 0)
    grad_first_bias = x_TD.new_zeros((E, H) if gate_up_bias_EH is not None else 0)
    grad_second_bias = x_TD.new_zeros((E, D) if down_bias_ED is not None else 0)
    first, second = gate_up_EHD.unbind(0), down_EDF.unbind(0)
    first_grads = grad_first.unbind(0) if needs_weights else ()
    second_grads = grad_second.unbind(0) if needs_weights else ()
    for e, rows in groups(counts):
        grad = grad_TD.index_select(0, token_S[rows])
        h, w = hidden_SH[rows], weight_S[rows]
        grad_a = torch.mm(grad, second[e])
        grad_h, scaled = torch.empty_like(h), torch.empty_like(grad_a)
        if not (
            _is_swiglu(activation, gated)
            and native.swiglu_backward(h, grad_a, w, grad_h, scaled, grad_weight_S[rows])
        ):
            _activation_backward(h, grad_a, w, grad_h, scaled, grad_weight_S[rows], activation, gated)
        if down_bias_ED is not None:
            grad_weight_S[rows] += (grad @ down_bias_ED[e]).to(wide)
            grad_second_bias[e] = (grad.to(wide) * w[:, None]).sum(0).to(grad.dtype)
        if gate_up_bias_EH is not None:
            grad_first_bias[e] = grad_h.sum(0)
        if needs_weights:
            torch.mm(grad.t(), scaled, out=second_grads[e])
            torch.mm(grad_h.t(), x_TD.index_select(0, token_S[rows]), out=first_grads[e])
        if needs_x:
            torch.mm(grad_h, first[e], out=grad_rows_SD[rows])
    if needs_weights:
        for e, n in enumerate(counts.tolist()):
            if n == 0:
                first_grads[e].zero_()
                second_grads[e].zero_()
    grad_x = x_TD.new_empty(0)
    if needs_x:
        position = _positions(order, int(counts.sum())).view(T, K)
        grad_x = combine_rows(grad_rows_SD, position, None)
    grad_weights = torch.zeros_like(weights_TK, memory_format=torch.contiguous_format)
    grad_weights.view(-1)[order] = grad_weight_S.to(weights_TK.dtype)
    return grad_x, grad_first, grad_second, grad_first_bias, grad_second_bias, grad_weights


def _activation_backward(
    h_SH: Tensor,
    grad_SF: Tensor,
    weight_S: Tensor,
    grad_h_SH: Tensor,
    scaled_SF: Tensor,
    grad_weight_S: Tensor,
    activation: str,
    gated: bool,
) -> None:
    weighted = (grad_SF.to(weight_S.dtype) * weight_S[:, None]).to(grad_SF.dtype)
    grad_h_SH.copy_(activate_backward(weighted, h_SH, activation, gated))
    wide_a = activate(h_SH, activation, gated).to(weight_S.dtype)
    scaled_SF.copy_(wide_a * weight_S[:, None])
    grad_weight_S.copy_((wide_a * grad_SF.to(weight_S.dtype)).sum(1))


@_grouped_ffn_backward.register_fake
def _(
    grad_TD,
    x_TD,
    gate_up_EHD,
    down_EDF,
    gate_up_bias_EH,
    down_bias_ED,
    expert_ids_TK,
    weights_TK,
    hidden_SH,
    activation,
    gated,
    needs_x,
    needs_weights,
):
    E, H, D = gate_up_EHD.shape
    return (
        x_TD.new_empty(x_TD.shape if needs_x else 0),
        x_TD.new_empty((E, H, D) if needs_weights else 0),
        x_TD.new_empty((E, D, down_EDF.shape[2]) if needs_weights else 0),
        x_TD.new_empty((E, H) if gate_up_bias_EH is not None else 0),
        x_TD.new_empty((E, D) if down_bias_ED is not None else 0),
        torch.empty_like(weights_TK, memory_format=torch.contiguous_format),
    )


def _setup(ctx, inputs, output) -> None:
    *tensors, activation, gated, _ = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.activation, ctx.gated = activation, gated


def _backward(ctx, grad_TD: Tensor, _):
    needs = ctx.needs_input_grad
    grads = _grouped_ffn_backward(
        grad_TD.contiguous(), *ctx.saved_tensors, ctx.activation, ctx.gated, needs[0], needs[1] or needs[2]
    )
    grad_x, grad_first, grad_second, grad_first_bias, grad_second_bias, grad_weights = grads
    return (
        grad_x if needs[0] else None,
        grad_first if needs[1] else None,
        grad_second if needs[2] else None,
        grad_first_bias if needs[3] else None,
        grad_second_bias if needs[4] else None,
        None,
        grad_weights if needs[6] else None,
        None,
        None,
        None,
    )


_grouped_ffn.register_autograd(_backward, setup_context=_setup)


def _reference(
    x_TD, gate_up_EHD, down_EDF, gate_up_bias_EH, down_bias_ED, expert_ids_TK, weights_TK, activation, gated
) -> Tensor:
    _sort_by_expert(expert_ids_TK, gate_up_EHD.shape[0])
    y_TD = torch.zeros_like(x_TD)
    for e in range(gate_up_EHD.shape[0]):
        for k in range(expert_ids_TK.shape[1]):
            t = (expert_ids_TK[:, k] == e).nonzero()[:, 0]
            h = x_TD[t] @ gate_up_EHD[e].t()
            if gate_up_bias_EH is not None:
                h = h + gate_up_bias_EH[e]
            out = activate(h, activation, gated) @ down_EDF[e].t()
            if down_bias_ED is not None:
                out = out + down_bias_ED[e]
            y_TD = y_TD.index_add(0, t, (out * weights_TK[t, k, None]).to(y_TD.dtype))
    return y_TD


def grouped_ffn(
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    down_EDF: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    gate_up_bias_EH: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    backend: str = "auto",
) -> Tensor:
    """y_t = Σ_k w_tk FFN_{e_tk}(x_t): (T, D) -> (T, D), in x's dtype.

    gate_up (E, H, D) and down (E, D, F), H = 2F when gated (gate rows first) else F; any strides.
    expert_ids: int64 (T, K), -1 or E for no expert; weights (T, K), of any float dtype.
    activation: silu, gelu, gelu_tanh, relu, or gpt_oss (gate and up interleaved, clamped).
    Sums over k ascend in float32 or wider: bitwise repeatable. Under autocast x and the weights are cast first.
    Differentiable in x, weights, biases and combine weights; an expert without tokens gets a zero gradient.

    Raises `ShapeError` when shapes or dtypes disagree, `InputError` for an expert id out of range.
    """
    check_activation(activation, gated)
    device = x_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_TD, gate_up_EHD, down_EDF = (t.to(dtype) for t in (x_TD, gate_up_EHD, down_EDF))
        gate_up_bias_EH = None if gate_up_bias_EH is None else gate_up_bias_EH.to(dtype)
        down_bias_ED = None if down_bias_ED is None else down_bias_ED.to(dtype)
    _check(x_TD, gate_up_EHD, down_EDF, gate_up_bias_EH, down_bias_ED, expert_ids_TK, weights_TK, gated)
    arguments = (x_TD, gate_up_EHD, down_EDF, gate_up_bias_EH, down_bias_ED, expert_ids_TK, weights_TK)
    if choose_backend(backend) == "reference":
        return _reference(*arguments, activation, gated)
    for_backward = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in arguments if t is not expert_ids_TK
    )
    return _grouped_ffn(x_TD.contiguous(), *arguments[1:], activation, gated, for_backward)[0]


def _check(x, gate_up, down, gate_up_bias, down_bias, ids, weights, gated: bool) -> None:
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise ShapeError(
            f"expected x (T, D), gate_up (E, H, D), down (E, D, F); got {tuple(x.shape)}, {tuple(gate_up.shape)}, "
            f"{tuple(down.shape)}"
        )
    E, H, D = gate_up.shape
    F = down.shape[2]
    if x.shape[1] != D or down.shape[:2] != (E, D) or (2 * F if gated else F) != H:
        raise ShapeError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)} do not fit: expected "
            f"(T, D), (E, {'2F' if gated else 'F'}, D), (E, D, F)"
        )
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ShapeError(f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}; they must be the same")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape != weights.shape or ids.dtype != torch.int64:
        raise ShapeError(
            f"expert_ids must be int64 ({x.shape[0]}, K) and weights the same shape; got {ids.dtype} "
            f"{tuple(ids.shape)} and {tuple(weights.shape)}"
        )
    for name, bias, shape in (("gate_up_bias", gate_up_bias, (E, H)), ("down_bias", down_bias, (E, D))):
        if bias is not None and tuple(bias.shape) != shape:
            raise ShapeError(f"{name} {tuple(bias.shape)} must be {shape}")
