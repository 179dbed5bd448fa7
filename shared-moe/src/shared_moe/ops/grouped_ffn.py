"""The experts of a layer: every token visits its experts, and their answers are added up.

    y_t = Σ_k w_tk (W2_e act(W1_e x_t + b1_e) + b2_e),  e = expert_ids_tk

Shapes: T tokens, K slots a token, S = T·K assignments in expert order, D width, F hidden width, O output width (D in a
transformer), E experts, H rows of the first matrix (2F when gated, else F). Weights lie as in transformers: gate_up
(E, H, D), down (E, O, F).
"""

import torch
from torch import Tensor

from shared_moe.errors import ShapeError
from shared_moe.ops import ffn_each, ffn_together
from shared_moe.ops.activations import activate, check_activation
from shared_moe.ops.backend import autocast, choose_backend, resolve
from shared_moe.ops.products import use_grouped_mm
from shared_moe.ops.sort import sort_op


def _implementation(backend: str, x_TD: Tensor, gate_up_EHD: Tensor, down_EOF: Tensor):
    if resolve("grouped_ffn", backend, x_TD) == "triton":
        from shared_moe.ops.triton import ffn

        return ffn
    return ffn_together if use_grouped_mm(x_TD, gate_up_EHD, down_EOF) else ffn_each


@torch.library.custom_op("shared_moe::grouped_ffn", mutates_args=())
def _grouped_ffn(
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    down_EOF: Tensor,
    gate_up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    activation: str,
    gated: bool,
    for_backward: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _implementation(backend, x_TD, gate_up_EHD, down_EOF).forward(
        x_TD,
        gate_up_EHD,
        down_EOF,
        gate_up_bias_EH,
        down_bias_ED,
        expert_ids_TK,
        weights_TK,
        activation,
        gated,
        for_backward,
    )


@_grouped_ffn.register_fake
def _(
    x_TD,
    gate_up_EHD,
    down_EOF,
    gate_up_bias_EH,
    down_bias_ED,
    expert_ids_TK,
    weights_TK,
    activation,
    gated,
    for_backward,
    backend,
):
    S = expert_ids_TK.numel() if for_backward else 0
    return x_TD.new_empty(x_TD.shape[0], down_EOF.shape[1]), x_TD.new_empty(S, gate_up_EHD.shape[1])


@torch.library.custom_op("shared_moe::grouped_ffn_backward", mutates_args=())
def _grouped_ffn_backward(
    grad_TO: Tensor,
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    down_EOF: Tensor,
    gate_up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    hidden_SH: Tensor,
    activation: str,
    gated: bool,
    needs_x: bool,
    needs_weights: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _implementation(backend, x_TD, gate_up_EHD, down_EOF).backward(
        grad_TO,
        x_TD,
        gate_up_EHD,
        down_EOF,
        gate_up_bias_EH,
        down_bias_ED,
        expert_ids_TK,
        weights_TK,
        hidden_SH,
        activation,
        gated,
        needs_x,
        needs_weights,
    )


@_grouped_ffn_backward.register_fake
def _(
    grad_TO,
    x_TD,
    gate_up_EHD,
    down_EOF,
    gate_up_bias_EH,
    down_bias_ED,
    expert_ids_TK,
    weights_TK,
    hidden_SH,
    activation,
    gated,
    needs_x,
    needs_weights,
    backend,
):
    E, H, D = gate_up_EHD.shape
    return (
        x_TD.new_empty(x_TD.shape if needs_x else 0),
        x_TD.new_empty((E, H, D) if needs_weights else 0),
        x_TD.new_empty(down_EOF.shape if needs_weights else 0),
        x_TD.new_empty((E, H) if gate_up_bias_EH is not None else 0),
        x_TD.new_empty(down_EOF.shape[:2] if down_bias_ED is not None else 0),
        torch.empty_like(weights_TK, memory_format=torch.contiguous_format),
    )


def _setup(ctx, inputs, output) -> None:
    *tensors, activation, gated, _, backend = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else a zero gradient as large as the hidden rows is made for nothing
    ctx.activation, ctx.gated, ctx.backend = activation, gated, backend


def _backward(ctx, grad_TO: Tensor | None, _):
    needs = ctx.needs_input_grad
    if grad_TO is None:
        return (None,) * len(needs)
    with torch.autocast(grad_TO.device.type, enabled=False):
        grads = _grouped_ffn_backward(
            grad_TO.contiguous(),
            *ctx.saved_tensors,
            ctx.activation,
            ctx.gated,
            needs[0],
            needs[1] or needs[2],
            ctx.backend,
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
        None,
    )


_grouped_ffn.register_autograd(_backward, setup_context=_setup)


def _reference(
    x_TD, gate_up_EHD, down_EOF, gate_up_bias_EH, down_bias_ED, expert_ids_TK, weights_TK, activation, gated
) -> Tensor:
    E = gate_up_EHD.shape[0]
    sort_op(expert_ids_TK, E)  # refuses ids out of range
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    columns = []
    for ids_T, weights_T in zip(expert_ids_TK.unbind(1), weights_TK.unbind(1), strict=True):
        column_TO = x_TD.new_zeros(x_TD.shape[0], down_EOF.shape[1], dtype=wide)
        for e in range(E):
            t = (ids_T == e).nonzero()[:, 0]
            h = x_TD[t] @ gate_up_EHD[e].t()
            if gate_up_bias_EH is not None:
                h = h + gate_up_bias_EH[e]
            out = activate(h, activation, gated) @ down_EOF[e].t()
            if down_bias_ED is not None:
                out = out + down_bias_ED[e]
            column_TO = column_TO.index_copy(0, t, out.to(wide) * weights_T[t, None].to(wide))
        columns.append(column_TO)
    zero_TO = x_TD.new_zeros(x_TD.shape[0], down_EOF.shape[1], dtype=wide)
    return sum(columns, zero_TO).to(x_TD.dtype)


def grouped_ffn(
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    down_EOF: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    gate_up_bias_EH: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
    backend: str = "auto",
) -> Tensor:
    """y_t = Σ_k w_tk FFN_{e_tk}(x_t): (T, D) -> (T, O), in x's dtype.

    gate_up (E, H, D) and down (E, O, F), H = 2F when gated (gate rows first) else F; any strides.
    expert_ids: int64 (T, K), -1 or E for no expert; weights (T, K), of any float dtype.
    activation: silu, gelu, gelu_tanh, relu, identity, or gpt_oss (gate and up interleaved, clamped).
    Sums over k ascend in float32 or wider: bitwise repeatable. Under autocast x and the weights are cast first.
    Differentiable in x, weights, biases and combine weights; an expert without tokens gets a zero gradient.

    Raises `ShapeError` when shapes or dtypes disagree, `InputError` for an expert id out of range.
    """
    check_activation(activation, gated)
    x_TD, gate_up_EHD, down_EOF, gate_up_bias_EH, down_bias_ED = autocast(
        x_TD, gate_up_EHD, down_EOF, gate_up_bias_EH, down_bias_ED
    )
    _check(x_TD, gate_up_EHD, down_EOF, gate_up_bias_EH, down_bias_ED, expert_ids_TK, weights_TK, gated)
    arguments = (x_TD, gate_up_EHD, down_EOF, gate_up_bias_EH, down_bias_ED, expert_ids_TK, weights_TK)
    with torch.autocast(x_TD.device.type, enabled=False):
        chosen = choose_backend("grouped_ffn", backend)
        if chosen == "reference":
            return _reference(*arguments, activation, gated)
        keep = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in arguments if t is not expert_ids_TK
        )
        return _grouped_ffn(x_TD.contiguous(), *arguments[1:], activation, gated, keep, chosen)[0]


def _check(x, gate_up, down, gate_up_bias, down_bias, ids, weights, gated: bool) -> None:
    check_ffn(x, gate_up, down, ids, weights, gated)
    if not x.dtype == gate_up.dtype == down.dtype:
        raise ShapeError(f"x is {x.dtype}, gate_up {gate_up.dtype}, down {down.dtype}; they must be the same")
    shapes = (("gate_up_bias", gate_up_bias, gate_up.shape[:2]), ("down_bias", down_bias, down.shape[:2]))
    for name, bias, shape in shapes:
        if bias is not None and (bias.shape != shape or bias.dtype != x.dtype):
            raise ShapeError(f"{name} is {bias.dtype} {tuple(bias.shape)}; expected {x.dtype} {tuple(shape)}")


def check_ffn(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, gated: bool) -> None:
    """Raises `ShapeError` unless the shapes of an expert layer's tensors fit, whatever the weights' dtype."""
    if x.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise ShapeError(
            f"expected x (T, D), gate_up (E, H, D), down (E, O, F); got {tuple(x.shape)}, {tuple(gate_up.shape)}, "
            f"{tuple(down.shape)}"
        )
    E, H, D = gate_up.shape
    F = down.shape[2]
    if E < 1 or x.shape[1] != D or down.shape[0] != E or (2 * F if gated else F) != H:
        raise ShapeError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)} do not fit: expected "
            f"(T, D), (E, {'2F' if gated else 'F'}, D), (E, O, F)"
        )
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape != weights.shape or ids.dtype != torch.int64:
        raise ShapeError(
            f"expert_ids must be int64 ({x.shape[0]}, K) and weights the same shape; got {ids.dtype} "
            f"{tuple(ids.shape)} and {tuple(weights.shape)}"
        )
    if not weights.is_floating_point():
        raise ShapeError(f"weights are {weights.dtype}; expected a float dtype")
