"""Add up the experts' answers for each token, in a fixed order and with at least float32 accumulation.

Shapes: T tokens, K slots a token, S = T·K rows in expert order, D width.
"""

import torch
from torch import Tensor

from shared_moe import native
from shared_moe.errors import ShapeError
from shared_moe.ops.backend import choose_backend, resolve
from shared_moe.ops.products import check_counts
from shared_moe.ops.sort import positions


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
def _combine(rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor, backend: str) -> Tensor:
    check_counts(counts_E, rows_SD.shape[0])
    position = positions(order_S, counts_E)
    if resolve("combine", backend, rows_SD) == "triton":
        from shared_moe.ops.triton.combine import combine

        return combine(rows_SD.contiguous(), position.view(weights_TK.shape), weights_TK)
    return combine_rows(rows_SD.contiguous(), position.view(weights_TK.shape), weights_TK)


@_combine.register_fake
def _(rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor, backend: str) -> Tensor:
    return rows_SD.new_empty(weights_TK.shape[0], rows_SD.shape[1])


@torch.library.custom_op("shared_moe::combine_backward", mutates_args=())
def _combine_backward(
    grad_TD: Tensor, rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    if resolve("combine", backend, rows_SD) == "triton":
        from shared_moe.ops.triton.combine import combine_backward

        return combine_backward(grad_TD.contiguous(), rows_SD.contiguous(), order_S, counts_E, weights_TK)
    K, S = weights_TK.shape[1], rows_SD.shape[0]
    wide = torch.promote_types(rows_SD.dtype, torch.float32)
    has_row = (torch.arange(S, device=order_S.device) < counts_E.sum())[:, None]
    grad = grad_TD.index_select(0, order_S // K).to(wide)
    weights = weights_TK.reshape(-1)[order_S, None].to(wide)
    grad_rows = torch.where(has_row, grad * weights, 0).to(rows_SD.dtype)
    dots = torch.where(has_row, grad * rows_SD.to(wide), 0).sum(1)
    grad_weights = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
    grad_weights.view(-1)[order_S] = dots.to(weights_TK.dtype)
    return grad_rows, grad_weights


@_combine_backward.register_fake
def _(
    grad_TD: Tensor, rows_SD: Tensor, order_S: Tensor, counts_E: Tensor, weights_TK: Tensor, backend: str
) -> tuple[Tensor, Tensor]:
    grad_rows = torch.empty_like(rows_SD, memory_format=torch.contiguous_format)
    return grad_rows, torch.empty_like(weights_TK, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_TD: Tensor):
    rows_SD, order_S, counts_E, weights_TK = ctx.saved_tensors
    grad_rows, grad_weights = _combine_backward(grad_TD, rows_SD, order_S, counts_E, weights_TK, ctx.backend)
    return grad_rows, None, None, grad_weights, None


_combine.register_autograd(_backward, setup_context=_setup)


def combine(
    rows_SD: Tensor,
    order_S: Tensor,
    counts_E: Tensor,
    weights_TK: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """Weighted sum of each token's rows: (S, D) in the order of `sort_by_expert` -> (T, D).

    rows_SD holds one row an assignment, S = T·K; rows past `counts.sum()` are not read. Sums run over k ascending
    in float32 or wider, so the result is bitwise repeatable. Differentiable in the rows and the weights.
    Raises `ShapeError` when shapes or dtypes disagree, `InputError` for counts that are negative or too large.
    """
    if weights_TK.dim() != 2 or rows_SD.dim() != 2 or rows_SD.shape[0] != weights_TK.numel():
        raise ShapeError(
            f"rows {tuple(rows_SD.shape)} must hold T·K rows of the weights {tuple(weights_TK.shape)}"
        )
    if counts_E.dim() != 1 or not order_S.dtype == counts_E.dtype == torch.int64:
        raise ShapeError(
            f"order and counts must be int64 and counts (E,), got {order_S.dtype}, {counts_E.dtype} "
            f"{tuple(counts_E.shape)}"
        )
    if order_S.shape != (rows_SD.shape[0],):
        raise ShapeError(f"order {tuple(order_S.shape)} must be ({rows_SD.shape[0]},)")
    return _combine(rows_SD, order_S, counts_E, weights_TK, choose_backend("combine", backend))
