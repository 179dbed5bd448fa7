"""A bag as a sequence and as a square, bag by bag. Shapes: B bags, M tokens, D width, S side of the largest square."""

import torch
from torch import Tensor


def pack(h_BMD: Tensor, real_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Real tokens first, in their order, zeros after them: (h, real, index that `unpack` needs)."""
    index = (~real_BM).to(torch.uint8).argsort(dim=1, stable=True)
    real = real_BM.gather(1, index)
    packed = h_BMD.gather(1, index[..., None].expand_as(h_BMD))
    return packed.masked_fill(~real[..., None], 0), real, index


def unpack(values_BM: Tensor, index_BM: Tensor) -> Tensor:
    """Values of packed tokens back at the places they came from."""
    return torch.zeros_like(values_BM).scatter(1, index_BM, values_BM)


def square_places(real_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row and column (B, M) of each packed token in the smallest square that holds its bag, and the sides (B, 1)."""
    count = real_BM.sum(1, keepdim=True)
    side = count.to(torch.float64).sqrt().ceil().long()
    rank = torch.arange(real_BM.shape[1], device=real_BM.device)[None]
    return rank // side, rank % side, side


def scatter_cells(h_BMD: Tensor, cell_BM: Tensor, real_BM: Tensor, cells: int) -> Tensor:
    """Tokens into their cells (B, cells, D), zeros where there is none; masked tokens go nowhere."""
    cell = torch.where(real_BM, cell_BM, cells)
    out = h_BMD.new_zeros(len(h_BMD), cells + 1, h_BMD.shape[-1])
    return out.scatter(1, cell[..., None].expand_as(h_BMD), h_BMD)[:, :cells]


def gather_cells(cells_BLD: Tensor, cell_BM: Tensor, real_BM: Tensor) -> Tensor:
    """The cell of each token (B, M, D), zeros for masked tokens."""
    cell = torch.where(real_BM, cell_BM, 0)
    found = cells_BLD.gather(1, cell[..., None].expand(-1, -1, cells_BLD.shape[-1]))
    return found.masked_fill(~real_BM[..., None], 0)
