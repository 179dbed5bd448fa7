# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""`grouped_linear` and its gradients on the grouped products. Shapes as there."""

from torch import Tensor

from shared_moe.ops.triton.rows_gemm import rows_gemm
from shared_moe.ops.triton.tiles import tile_table
from shared_moe.ops.triton.weight_gemm import weight_gemm


def forward(x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """(S, F); rows of no expert are zero."""
    S = x_SD.shape[0]
    return rows_gemm(x_SD, weight_EFD, tile_table(counts_E, S), x_SD.new_zeros(S, weight_EFD.shape[1]))


def backward(
    grad_SF: Tensor, x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and the weights, empty where not needed."""
    grad_x, grad_weight = x_SD.new_empty(0), x_SD.new_empty(0)
    if needs_x:
        tiles = tile_table(counts_E, x_SD.shape[0])
        grad_x = rows_gemm(grad_SF, weight_EFD, tiles, x_SD.new_zeros(x_SD.shape), transposed=True)
    if needs_weight:
        grad_weight = weight_gemm(grad_SF, x_SD, counts_E)
    return grad_x, grad_weight
