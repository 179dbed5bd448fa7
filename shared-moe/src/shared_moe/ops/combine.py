"""Add up the experts' answers for each token, in a fixed order and with at least float32 accumulation.

Shapes: T tokens, K slots a token, S = T·K rows in expert order, D width.
"""

import torch
from torch import Tensor

from shared_moe import native
from shared_moe.errors import ShapeError


def _positions(order_S: Tensor, count: int) -> Tensor:
    """Where each assignment's row lies; -1 for an assignment without an expert."""
    position = torch.full_like(order_S, -1)
    position[order_S[:count]] = torch.arange(count, device=order_S.device)
    return position


def combine_rows(rows_SD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """y_t = Σ_k w_tk rows[position_tk], k ascending; a position of -1 adds nothing; no weights mean ones."""
    T, K = position_TK.shape
    y_TD = rows_SD.new_empty(T, rows_SD.shape[1])
    if native.combine(rows_SD, position_TK, weights_TK, y_TD):
        return y_TD
    wide = torch.promote_types(rows_SD.dtype, torch.float32)
    total_TD = torch.zeros(T, rows_SD.shape[1], dtype=wide, device=rows_SD.device)
    if rows_SD.shape[0] == 0:
        return total_TD.to(rows_SD.dtype)
    for k in range(K):
        position = position_TK[:, k]
        taken = rows_SD.index_select(0, position.clamp(min=0)).to(wide)
        if weights_TK is not None:
            taken = taken * weights_TK[:, k, None].to(wide)
        total_TD += torch.where(position[:, None] >= 0, taken, 0)
    return total_TD.to(rows_SD.dtype)


@torch.library.custom_op("shared_moe::combine", mutates_args=())
def _combine(rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor) -> Tensor:
    position = _positions(order_S, int(counts_E.sum()))
    return combine_rows(rows_SD.contiguous(), position.view(weights_TK.shape), weights_TK)


@_combine.register_fake
def _(rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor) -> Tensor:
    return rows_SD.new_empty(weights_TK.shape[0], rows_SD.shape[1])


@torch.library.custom_op("shared_moe::combine_backward", mutates_args=())
def _combine_backward(
    grad_TD: Tensor, rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    K = weights_TK.shape[1]
    taken = order_S[: int(counts_E.sum())]
    grad_rows = torch.zeros_like(rows_SD)
    grad_weights = torch.zeros_like(weights_TK)
    grad = grad_TD.index_select(0, taken // K)
    wide = torch.promote_types(rows_SD.dtype, torch.float32)
    weights = weights_TK.reshape(-1)[taken, None]
    grad_rows[: len(taken)] = (grad.to(wide) * weights.to(wide)).to(rows_SD.dtype)
    dots = (grad.to(wide) * rows_SD[: len(taken)].to(wide)).sum(1)
    grad_weights.view(-1)[taken] = dots.to(weights_TK.dtype)
    return grad_rows, grad_weights


@_combine_backward.register_fake
def _(
    grad_TD: Tensor, rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows_SD), torch.empty_like(weights_TK)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_TD: Tensor):
    rows_SD, order_S, counts_E, weights_TK = ctx.saved_tensors
    grad_rows, grad_weights = _combine_backward(
        grad_TD.contiguous(), rows_SD.contiguous(), order_S, counts_E, weights_TK.contiguous()
    )
    return grad_rows, None, None, grad_weights


_combine.register_autograd(_backward, setup_context=_setup)


def combine(rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum of each token's rows: (S, D) in the order of `sort_by_expert` -> (T, D).

    rows_SD holds one row an assignment, S = T·K; rows past `counts.sum()` are not read. Sums run over k ascending
    in float32 or wider, so the result is bitwise repeatable. Differentiable in the rows and the weights.
    Raises `ShapeError` when the shapes disagree.
    """
    if weights_TK.dim() != 2 or rows_SD.dim() != 2 or rows_SD.shape[0] != weights_TK.numel():
        raise ShapeError(
            f"rows {tuple(rows_SD.shape)} must hold T·K rows of the weights {tuple(weights_TK.shape)}"
        )
    if order_S.shape != (rows_SD.shape[0],):
        raise ShapeError(f"order {tuple(order_S.shape)} must be ({rows_SD.shape[0]},)")
    return _combine(rows_SD, order_S, counts_E, weights_TK)
