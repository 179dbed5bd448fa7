"""Experts with int8 weights for inference on the CPU: symmetric, one scale an output channel.

    W ≈ scale · q,  q in -127 to 127,  scale = max |row of W| / 127

Up to `FEW_ROWS` rows an expert a native pass reads the weights once, at memory speed, with the rows rounded to 16 bits;
for more, and without a compiler, one expert at a time is widened (exactly) and multiplied by torch.

Shapes: T tokens, K slots a token, S rows in expert order, D width, F hidden width, O output width, E experts, H rows of
a matrix (for the first one 2F when gated, else F).
"""

import torch
from torch import Tensor

from shared_moe import native
from shared_moe.errors import InputError, ShapeError
from shared_moe.ops.activations import activate, check_activation
from shared_moe.ops.combine import combine_rows
from shared_moe.ops.grouped_ffn import check_ffn
from shared_moe.ops.products import bias_rows, check_counts, groups
from shared_moe.ops.sort import check_range, positions, sort_op

FEW_ROWS = 16  # up to this many rows an expert, reading the weights costs more than multiplying


def quantize_int8(weight_EHD: Tensor) -> tuple[Tensor, Tensor]:
    """(q int8 (E, H, D), scale float32 (E, H)) with |W − scale · q| ≤ scale / 2; a row of zeros has scale 0.

    Any float dtype and strides, on the CPU. Raises as `check_quantizable` does.
    """
    check_quantizable(weight_EHD)
    q_EHD = torch.empty(weight_EHD.shape, dtype=torch.int8)
    scale_EH = torch.empty(weight_EHD.shape[:2], dtype=torch.float32)
    for e, weight in enumerate(weight_EHD.detach().unbind(0)):
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        scale_EH[e] = wide.abs().amax(1) / 127
        divisor = torch.where(scale_EH[e] > 0, scale_EH[e], 1).to(wide.dtype)
        q_EHD[e] = (wide / divisor[:, None]).round_().clamp_(-127, 127)
    return q_EHD, scale_EH


def check_quantizable(weight_EHD: Tensor) -> None:
    """Raises `ShapeError` unless weights are floats of shape (E, H, D), `InputError` unless finite and on the CPU."""
    if weight_EHD.dim() != 3 or not weight_EHD.is_floating_point() or weight_EHD.numel() == 0:
        raise ShapeError(
            f"weights must be floats of shape (E, H, D), got {weight_EHD.dtype} {tuple(weight_EHD.shape)}"
        )
    check_device(weight_EHD)
    for e, weight in enumerate(weight_EHD.detach().unbind(0)):
        finite = weight.isfinite().all(1)
        if not finite.all():
            row = int(finite.logical_not().nonzero()[0])
            raise InputError(
                f"the weights of expert {e} hold NaN or infinity in row {row}; int8 needs finite weights"
            )


def check_device(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise InputError(f"int8 experts run on the CPU, but this is on {tensor.device}; move it with .cpu()")


def _rows_times_weights(
    x_SD: Tensor, weight_EHD: Tensor, scale_EH: Tensor, counts_E: Tensor, bias_EH: Tensor | None
) -> Tensor:
    _, H, D = weight_EHD.shape
    y_SH = x_SD.new_zeros(x_SD.shape[0], H)
    done = FEW_ROWS if native.int8_linear(x_SD, weight_EHD, scale_EH, counts_E, FEW_ROWS, y_SH) else 0
    wide = x_SD.dtype if x_SD.dtype in (torch.bfloat16, torch.float64) else torch.float32
    widened_HD = None
    for e, rows in groups(counts_E):
        if rows.stop - rows.start <= done:
            continue
        if widened_HD is None:
            widened_HD = x_SD.new_empty(H, D, dtype=wide)
        widened_HD.copy_(weight_EHD[e])
        y_SH[rows] = torch.mm(x_SD[rows].to(wide), widened_HD.t()) * scale_EH[e]
    return y_SH if bias_EH is None else y_SH + bias_rows(bias_EH, counts_E, x_SD.shape[0]).to(y_SH.dtype)


@torch.library.custom_op("shared_moe::int8_linear", mutates_args=())
def _int8_linear(
    x_SD: Tensor, weight_EHD: Tensor, scale_EH: Tensor, counts_E: Tensor, bias_EH: Tensor | None
) -> Tensor:
    check_counts(counts_E, x_SD.shape[0])
    return _rows_times_weights(x_SD, weight_EHD, scale_EH, counts_E, bias_EH)


@_int8_linear.register_fake
def _(x_SD, weight_EHD, scale_EH, counts_E, bias_EH):
    return x_SD.new_empty(x_SD.shape[0], weight_EHD.shape[1])


@torch.library.custom_op("shared_moe::int8_ffn", mutates_args=())
def _int8_ffn(
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    gate_up_scale_EH: Tensor,
    down_EOF: Tensor,
    down_scale_EO: Tensor,
    gate_up_bias_EH: Tensor | None,
    down_bias_EO: Tensor | None,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    activation: str,
    gated: bool,
) -> Tensor:
    (T, K), E = expert_ids_TK.shape, gate_up_EHD.shape[0]
    plain = gated and activation == "silu" and gate_up_bias_EH is None and down_bias_EO is None
    if plain and T <= FEW_ROWS and x_TD.shape[1] == down_EOF.shape[1]:
        check_range(expert_ids_TK, E)
        y_TO = torch.empty_like(x_TD)
        if native.int8_swiglu(
            x_TD, expert_ids_TK, gate_up_EHD, gate_up_scale_EH, down_EOF, down_scale_EO, weights_TK, y_TO
        ):
            return y_TO
    order, counts = sort_op(expert_ids_TK, E)
    rows_SD = x_TD.index_select(0, order // K)
    h_SH = _rows_times_weights(rows_SD, gate_up_EHD, gate_up_scale_EH, counts, gate_up_bias_EH)
    a_SF = activate(h_SH, activation, gated)
    rows_SO = _rows_times_weights(a_SF, down_EOF, down_scale_EO, counts, down_bias_EO)
    return combine_rows(rows_SO, positions(order, counts).view(T, K), weights_TK)


@_int8_ffn.register_fake
def _(
    x_TD,
    gate_up_EHD,
    gate_up_scale_EH,
    down_EOF,
    down_scale_EO,
    gate_up_bias_EH,
    down_bias_EO,
    expert_ids_TK,
    weights_TK,
    activation,
    gated,
):
    return x_TD.new_empty(x_TD.shape[0], down_EOF.shape[1])


def _no_backward(ctx, grad):
    raise InputError(
        "int8 experts are for inference and have no gradient: train the original weights and quantise them "
        "afterwards, or run under torch.no_grad()"
    )


_int8_linear.register_autograd(_no_backward)
_int8_ffn.register_autograd(_no_backward)


def int8_linear(
    x_SD: Tensor,
    weight_EHD: Tensor,
    scale_EH: Tensor,
    counts_E: Tensor,
    bias_EH: Tensor | None = None,
) -> Tensor:
    """y_s = scale_e(s) · (W_e(s) x_s) + b_e(s): (S, D) rows sorted by expert -> (S, H), in x's dtype; on the CPU.

    weight and scale as from `quantize_int8`; counts_E: int64, rows of each expert; rows past their sum give zeros.
    Raises `ShapeError` when shapes or dtypes disagree, `InputError` for counts that are negative or too large, for
    tensors on another device, and in a backward pass through it.
    """
    _check(x_SD, "weight", weight_EHD, scale_EH, bias_EH)
    if x_SD.dim() != 2 or x_SD.shape[1] != weight_EHD.shape[2]:
        raise ShapeError(
            f"x {tuple(x_SD.shape)} and weight {tuple(weight_EHD.shape)} must be (S, D) and (E, H, D)"
        )
    if counts_E.shape != weight_EHD.shape[:1] or counts_E.dtype != torch.int64:
        raise ShapeError(
            f"counts must be int64 of shape ({weight_EHD.shape[0]},), got {counts_E.dtype} {tuple(counts_E.shape)}"
        )
    return _int8_linear(x_SD.contiguous(), weight_EHD, scale_EH, counts_E.contiguous(), bias_EH)


def int8_ffn(
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    gate_up_scale_EH: Tensor,
    down_EOF: Tensor,
    down_scale_EO: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    gate_up_bias_EH: Tensor | None = None,
    down_bias_EO: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """`grouped_ffn` with int8 weights: (T, D) -> (T, O), in x's dtype. For inference, on the CPU.

    The four arguments after x as from `quantize_int8`; the rest as in `grouped_ffn`. How far the result can lie from
    that of the original weights, `int8_error_bound` tells.
    Raises `ShapeError` when shapes or dtypes disagree, `InputError` for an expert id out of range, for tensors on
    another device, and in a backward pass through it.
    """
    check_activation(activation, gated)
    _check(x_TD, "gate_up", gate_up_EHD, gate_up_scale_EH, gate_up_bias_EH)
    _check(x_TD, "down", down_EOF, down_scale_EO, down_bias_EO)
    check_ffn(x_TD, gate_up_EHD, down_EOF, expert_ids_TK, weights_TK, gated)
    return _int8_ffn(
        x_TD.contiguous(),
        gate_up_EHD,
        gate_up_scale_EH,
        down_EOF,
        down_scale_EO,
        gate_up_bias_EH,
        down_bias_EO,
        expert_ids_TK,
        weights_TK,
        activation,
        gated,
    )


def _check(x: Tensor, name: str, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    for tensor in (x, weight, scale):
        check_device(tensor)
    if weight.dtype != torch.int8 or scale.dtype != torch.float32 or not x.is_floating_point():
        raise ShapeError(
            f"{name} is {weight.dtype}, its scale {scale.dtype}, x {x.dtype}; expected int8, float32 and a float (to "
            "change a model's dtype, do so before its experts are quantised)"
        )
    if weight.dim() != 3 or not (weight.is_contiguous() and scale.is_contiguous()):
        raise ShapeError(f"{name} {tuple(weight.shape)} must be (E, H, D), and it and its scale contiguous")
    for what, tensor in (("scale", scale), ("bias", bias)):
        if tensor is not None and tensor.shape != weight.shape[:2]:
            raise ShapeError(f"{name}'s {what} is {tuple(tensor.shape)}; expected {tuple(weight.shape[:2])}")


LIPSCHITZ = {"silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13, "relu": 1.0, "identity": 1.0}
"""Activation -> the most by which its slope exceeds zero, rounded up."""


def int8_error_bound(
    x_TD: Tensor,
    gate_up_EHD: Tensor,
    gate_up_scale_EH: Tensor,
    down_EOF: Tensor,
    down_scale_EO: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    gate_up_bias_EH: Tensor | None = None,
    down_bias_EO: Tensor | None = None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """How far each value of `int8_ffn` can lie from `grouped_ffn` with the original weights: (T, O), float64.

    It holds for every input and needs only what was quantised. With q̂ for the quantised layer, L the activation's
    largest slope and ε the rounding of rows to 16 bits (max |x| / 65534 a value):

        |h − ĥ| ≤ scale/2 · ‖x‖₁ + ‖row of Ŵ₁‖₁ ε(x)                               =: δ
        |a − â| ≤ L δ_gate (|û| + δ_up) + |act(ĝ)| δ_up                            =: α   (L δ when not gated)
        |y − ŷ| ≤ Σ_f (|Ŵ₂| + scale/2) α + scale/2 · ‖â‖₁ + ‖row of Ŵ₂‖₁ ε(â)

    summed over the token's experts with the sizes of their weights. Biases are kept as they are and add nothing; the
    rounding of x's dtype comes on top. Raises `InputError` for an activation without a bound (gpt_oss).
    """
    check_ffn(x_TD, gate_up_EHD, down_EOF, expert_ids_TK, weights_TK, gated)
    if activation not in LIPSCHITZ:
        raise InputError(f"there is no error bound for {activation!r}; there is for {', '.join(LIPSCHITZ)}")
    slope = LIPSCHITZ[activation]
    bound_TO = torch.zeros(x_TD.shape[0], down_EOF.shape[1], dtype=torch.float64)
    for e in expert_ids_TK.unique().tolist():
        if not 0 <= e < gate_up_EHD.shape[0]:
            continue
        t, k = torch.where(expert_ids_TK == e)
        x = x_TD[t].double()
        scale_1, scale_2 = gate_up_scale_EH[e].double(), down_scale_EO[e].double()
        first, second = gate_up_EHD[e] * scale_1[:, None], down_EOF[e] * scale_2[:, None]
        h = x @ first.t()
        if gate_up_bias_EH is not None:
            h = h + gate_up_bias_EH[e].double()
        rounding = x.abs().amax(1, keepdim=True) / 65534 * first.abs().sum(1)
        delta = x.abs().sum(1, keepdim=True) * scale_1 / 2 + rounding
        if gated:
            gate, up = h.chunk(2, 1)
            delta_gate, delta_up = delta.chunk(2, 1)
            act = activate(gate, activation, gated=False).abs() + slope * delta_gate
            a = act * (up.abs() + delta_up)
            alpha = slope * delta_gate * (up.abs() + delta_up) + act * delta_up
        else:
            alpha = slope * delta
            a = activate(h, activation, gated=False).abs() + alpha
        row_bound = alpha @ (second.abs() + scale_2[:, None] / 2).t() + a.sum(1, keepdim=True) * scale_2 / 2
        row_bound += a.amax(1, keepdim=True) / 65534 * second.abs().sum(1)
        bound_TO.index_add_(0, t, row_bound * weights_TK[t, k, None].abs().double())
    return bound_TO
