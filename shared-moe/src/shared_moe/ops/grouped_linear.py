"""One matrix an expert, applied to rows that are sorted by expert.

Shapes: S rows, D input width, F output width, E experts.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from shared_moe.errors import InputError, ShapeError
from shared_moe.ops.backend import choose_backend


def groups(counts_E: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for every expert that has rows."""
    start = 0
    for e, n in enumerate(counts_E.tolist()):
        if n:
            yield e, slice(start, start + n)
            start += n


def _check_counts(counts_E: Tensor, rows: int) -> None:
    if counts_E.numel() and int(counts_E.min()) < 0:
        raise InputError(
            f"counts holds {int(counts_E.min())}; an expert cannot have a negative number of rows"
        )
    if int(counts_E.sum()) > rows:
        raise InputError(f"counts add up to {int(counts_E.sum())}, but there are {rows} rows")


@torch.library.custom_op("shared_moe::grouped_linear", mutates_args=())
def _grouped_linear(x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    _check_counts(counts_E, x_SD.shape[0])
    y_SF = x_SD.new_zeros(x_SD.shape[0], weight_EFD.shape[1])
    weights = weight_EFD.unbind(0)
    for e, rows in groups(counts_E):
        torch.mm(x_SD[rows], weights[e].t(), out=y_SF[rows])
    return y_SF


@_grouped_linear.register_fake
def _(x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return x_SD.new_empty(x_SD.shape[0], weight_EFD.shape[1])


@torch.library.custom_op("shared_moe::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad_SF: Tensor, x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x = torch.zeros_like(x_SD, memory_format=torch.contiguous_format)
    grad_weight = torch.zeros_like(weight_EFD, memory_format=torch.contiguous_format)
    weights = weight_EFD.unbind(0)
    for e, rows in groups(counts_E):
        torch.mm(grad_SF[rows], weights[e], out=grad_x[rows])
        torch.mm(grad_SF[rows].t(), x_SD[rows], out=grad_weight[e])
    return grad_x, grad_weight


@_grouped_linear_backward.register_fake
def _(grad_SF: Tensor, x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(x_SD, memory_format=torch.contiguous_format),
        torch.empty_like(weight_EFD, memory_format=torch.contiguous_format),
    )


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_SF: Tensor):
    grad_x, grad_weight = _grouped_linear_backward(grad_SF.contiguous(), *ctx.saved_tensors)
    return grad_x, grad_weight, None


_grouped_linear.register_autograd(_backward, setup_context=_setup)


def _reference(x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    _check_counts(counts_E, x_SD.shape[0])
    parts = [x_SD[rows] @ weight_EFD[e].t() for e, rows in groups(counts_E)]
    rest = x_SD.shape[0] - int(counts_E.sum())
    return torch.cat([*parts, x_SD.new_zeros(rest, weight_EFD.shape[1])])


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
    Raises `ShapeError` when shapes or dtypes disagree, `InputError` for counts that are negative or too large.
    """
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
    apply = _reference if choose_backend(backend) == "reference" else _grouped_linear
    y_SF = apply(x_SD, weight_EFD, counts_E)
    if bias_EF is None:
        return y_SF
    if bias_EF.shape != weight_EFD.shape[:2]:
        raise ShapeError(f"bias {tuple(bias_EF.shape)} must be {tuple(weight_EFD.shape[:2])}")
    padded_EF = torch.cat([bias_EF, bias_EF.new_zeros(1, bias_EF.shape[1])])
    ends_E = counts_E.cumsum(0)
    expert_S = torch.searchsorted(ends_E, torch.arange(x_SD.shape[0], device=x_SD.device), right=True)
    return y_SF + padded_EF[expert_S].to(y_SF.dtype)
