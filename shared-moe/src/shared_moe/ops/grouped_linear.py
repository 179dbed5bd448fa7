"""One matrix an expert, applied to rows that are sorted by expert.

Shapes: S rows, D input width, F output width, E experts.
"""

import torch
from torch import Tensor

from shared_moe import native
from shared_moe.errors import ShapeError
from shared_moe.ops.backend import autocast, choose_backend, resolve
from shared_moe.ops.products import (
    bias_rows,
    check_counts,
    grouped_rows,
    grouped_weight_gradient,
    groups,
    use_grouped_mm,
)


def _has_rows(counts_E: Tensor, S: int) -> Tensor:
    return (torch.arange(S, device=counts_E.device) < counts_E.sum())[:, None]


@torch.library.custom_op("shared_moe::grouped_linear", mutates_args=())
def _grouped_linear(x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor, backend: str) -> Tensor:
    S, F = x_SD.shape[0], weight_EFD.shape[1]
    check_counts(counts_E, S)
    if resolve("grouped_linear", backend, x_SD) == "triton":
        from shared_moe.ops.triton.linear import forward

        return forward(x_SD, weight_EFD, counts_E)
    if use_grouped_mm(x_SD, weight_EFD):
        return torch.where(_has_rows(counts_E, S), grouped_rows(x_SD, weight_EFD, counts_E), 0)
    y_SF = x_SD.new_empty(S, F)
    weights, end = weight_EFD.unbind(0), 0
    for e, rows in groups(counts_E):
        torch.mm(x_SD[rows], weights[e].t(), out=y_SF[rows])
        end = rows.stop
    y_SF[end:] = 0
    return y_SF


@_grouped_linear.register_fake
def _(x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor, backend: str) -> Tensor:
    return x_SD.new_empty(x_SD.shape[0], weight_EFD.shape[1])


@torch.library.custom_op("shared_moe::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad_SF: Tensor,
    x_SD: Tensor,
    weight_EFD: Tensor,
    counts_E: Tensor,
    backend: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    S, D = x_SD.shape
    if resolve("grouped_linear", backend, x_SD) == "triton":
        from shared_moe.ops.triton.linear import backward

        return backward(grad_SF, x_SD, weight_EFD, counts_E, needs_x, needs_weight)
    if use_grouped_mm(grad_SF, x_SD, weight_EFD):
        by_column = weight_EFD.transpose(1, 2)
        grad_x = grouped_rows(grad_SF, by_column, counts_E) if needs_x else x_SD.new_empty(0)
        grad_weight = grouped_weight_gradient(grad_SF, x_SD, counts_E) if needs_weight else x_SD.new_empty(0)
        return torch.where(_has_rows(counts_E, S), grad_x, 0) if needs_x else grad_x, grad_weight
    grad_x = x_SD.new_empty((S, D) if needs_x else 0)
    grad_weight = x_SD.new_empty(weight_EFD.shape if needs_weight else 0)
    weights, end = weight_EFD.unbind(0), 0
    for e, rows in groups(counts_E):
        if needs_x:
            torch.mm(grad_SF[rows], weights[e], out=grad_x[rows])
        if needs_weight:
            torch.mm(native.transposed(grad_SF[rows]), x_SD[rows], out=grad_weight[e])
        end = rows.stop
    if needs_x:
        grad_x[end:] = 0
    if needs_weight:
        zero_empty(grad_weight, counts_E)
    return grad_x, grad_weight


def zero_empty(grad_E: Tensor, counts_E: Tensor) -> None:
    """Zero the gradient of every expert without rows, in place."""
    for e, n in enumerate(counts_E.tolist()):
        if n == 0:
            grad_E[e].zero_()


@_grouped_linear_backward.register_fake
def _(
    grad_SF: Tensor,
    x_SD: Tensor,
    weight_EFD: Tensor,
    counts_E: Tensor,
    backend: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    return (
        x_SD.new_empty(x_SD.shape if needs_x else 0),
        x_SD.new_empty(weight_EFD.shape if needs_weight else 0),
    )


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_SF: Tensor):
    needs_x, needs_weight, _, _ = ctx.needs_input_grad
    with torch.autocast(grad_SF.device.type, enabled=False):
        grad_x, grad_weight = _grouped_linear_backward(
            grad_SF.contiguous(), *ctx.saved_tensors, ctx.backend, needs_x, needs_weight
        )
    return grad_x if needs_x else None, grad_weight if needs_weight else None, None, None


_grouped_linear.register_autograd(_backward, setup_context=_setup)


def _reference(x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    check_counts(counts_E, x_SD.shape[0])
    *parts, rest = x_SD.split([*counts_E.tolist(), x_SD.shape[0] - int(counts_E.sum())])
    answers = [rows @ weight.t() for rows, weight in zip(parts, weight_EFD, strict=True)]
    return torch.cat([*answers, x_SD.new_zeros(len(rest), weight_EFD.shape[1])])


def grouped_linear(
    x_SD: Tensor,
    weight_EFD: Tensor,
    counts_E: Tensor,
    bias_EF: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """y_s = W_e(s) x_s + b_e(s): (S, D) rows sorted by expert -> (S, F).

    counts_E: int64, rows of each expert; rows past their sum give zeros. An expert without rows gets a zero gradient.
    Raises `ShapeError` when shapes or dtypes disagree, `InputError` for counts that are negative or too large (on the
    CPU; on a GPU the check would stall the stream).
    """
    x_SD, weight_EFD, bias_EF = autocast(x_SD, weight_EFD, bias_EF)
    if x_SD.dim() != 2 or weight_EFD.dim() != 3 or x_SD.shape[1] != weight_EFD.shape[2]:
        raise ShapeError(
            f"x {tuple(x_SD.shape)} and weight {tuple(weight_EFD.shape)} must be (S, D) and (E, F, D)"
        )
    if x_SD.dtype != weight_EFD.dtype:
        raise ShapeError(f"x is {x_SD.dtype}, weight is {weight_EFD.dtype}; they must be the same")
    if counts_E.shape != weight_EFD.shape[:1] or counts_E.dtype != torch.int64:
        raise ShapeError(
            f"counts must be int64 of shape ({weight_EFD.shape[0]},), got {counts_E.dtype} {tuple(counts_E.shape)}"
        )
    if bias_EF is not None and bias_EF.shape != weight_EFD.shape[:2]:
        raise ShapeError(f"bias {tuple(bias_EF.shape)} must be {tuple(weight_EFD.shape[:2])}")
    with torch.autocast(x_SD.device.type, enabled=False):
        chosen = choose_backend("grouped_linear", backend)
        if chosen == "reference":
            y_SF = _reference(x_SD, weight_EFD, counts_E)
        else:
            y_SF = _grouped_linear(x_SD.contiguous(), weight_EFD, counts_E, chosen)
        if bias_EF is None:
            return y_SF
        return y_SF + bias_rows(bias_EF, counts_E, x_SD.shape[0]).to(y_SF.dtype)
