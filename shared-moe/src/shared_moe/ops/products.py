"""How the products of an expert with its rows are computed: one at a time, or all in torch's grouped_mm.

One at a time is fastest on the CPU and takes every dtype and stride, but must know the row counts. grouped_mm leaves
the counts on the device, so a GPU never waits; it takes bfloat16 in aligned memory.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor

from shared_moe.errors import InputError


def groups(counts_E: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for every expert that has rows."""
    start = 0
    for e, n in enumerate(counts_E.tolist()):
        if n:
            yield e, slice(start, start + n)
            start += n


def check_counts(counts_E: Tensor, rows: int) -> None:
    """Raises `InputError` for a negative count or more rows than there are; on the CPU only."""
    if counts_E.device.type != "cpu" or counts_E.numel() == 0:
        return
    if int(counts_E.min()) < 0:
        raise InputError(
            f"counts holds {int(counts_E.min())}; an expert cannot have a negative number of rows "
            "(decreasing offsets?)"
        )
    if int(counts_E.sum()) > rows:
        raise InputError(f"counts add up to {int(counts_E.sum())}, but there are {rows} rows")


def fits_grouped_mm(*tensors: Tensor) -> bool:
    """Contiguous, 16-byte aligned bfloat16 with rows of a multiple of 16 bytes."""
    return all(
        t.dtype == torch.bfloat16
        and t.is_contiguous()
        and t.shape[-1] * t.element_size() % 16 == 0
        and t.data_ptr() % 16 == 0
        for t in tensors
    )


def use_grouped_mm(*tensors: Tensor) -> bool:
    return tensors[0].device.type != "cpu" and fits_grouped_mm(*tensors)


def offsets(counts_E: Tensor) -> Tensor:
    return counts_E.cumsum(0).to(torch.int32)


def grouped_rows(x_SD: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """W_e x_s by grouped_mm: (S, F). Rows past the last expert's are undefined."""
    return nnf.grouped_mm(x_SD, weight_EFD.transpose(1, 2), offs=offsets(counts_E))


def grouped_weight_gradient(grad_SF: Tensor, x_SD: Tensor, counts_E: Tensor) -> Tensor:
    """Σ over each expert's rows of grad_s x_sᵀ by grouped_mm: (E, F, D), exactly zero for an expert without rows."""
    grad_EFD = nnf.grouped_mm(grad_SF.t(), x_SD, offs=offsets(counts_E))
    return grad_EFD.masked_fill_((counts_E == 0)[:, None, None], 0)


def bias_rows(bias_EF: Tensor, counts_E: Tensor, rows: int) -> Tensor:
    """The bias of each row's expert: (rows, F); zeros past the last expert's rows."""
    row_S = torch.arange(rows, device=bias_EF.device)
    expert_S = torch.searchsorted(counts_E.cumsum(0), row_S, right=True)
    padded_EF = torch.cat([bias_EF, bias_EF.new_zeros(1, bias_EF.shape[1])])
    return padded_EF.index_select(0, expert_S)
