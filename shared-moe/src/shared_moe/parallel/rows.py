"""Rows of tokens on their way to other ranks and back, with gradients.

Shapes: T tokens, K slots a token, R rows sent, D width.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from shared_moe.ops.combine import combine_rows
from shared_moe.parallel.group import ExpertGroup


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R, position_TK)
        return x_TD.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, *grad_RD: Tensor) -> Any:
        return collect(*grad_RD, *ctx.saved_tensors), None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, token_R: Tensor, position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(token_R, position_TK)
        return combine_rows(rows_RD.contiguous(), position_TK, None)

    @staticmethod
    def backward(ctx: Any, *grad_TD: Tensor) -> Any:
        return spread(*grad_TD, *ctx.saved_tensors), None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: ExpertGroup, sends: list[int], receives: list[int], operation: str
    ) -> Tensor:
        ctx.group, ctx.sends, ctx.receives, ctx.operation = group, sends, receives, operation
        return group.exchange(rows, sends, receives, operation)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        back = exchange(grad[0], ctx.group, ctx.receives, ctx.sends, f"{ctx.operation}, backward")
        return back, None, None, None, None


def spread(x_TD: Tensor, token_R: Tensor, position_TK: Tensor) -> Tensor:
    """One row for each rank that a token visits: (T, D) -> (R, D). The gradient is `collect`."""
    return _Spread.apply(x_TD, token_R, position_TK)


def collect(rows_RD: Tensor, token_R: Tensor, position_TK: Tensor) -> Tensor:
    """Add up each token's rows, in a fixed order and in float32 or wider: (R, D) -> (T, D). The gradient is `spread`."""
    return _Collect.apply(rows_RD, token_R, position_TK)


def exchange(
    rows: Tensor, group: ExpertGroup, sends: list[int], receives: list[int], operation: str
) -> Tensor:
    """`ExpertGroup.exchange` with its gradient, the way back."""
    return _Exchange.apply(rows, group, sends, receives, operation)
