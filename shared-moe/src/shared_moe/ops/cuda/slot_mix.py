"""Attention of rows to columns on a GPU, for mixing instances into slots and back.

Shapes: B batch, H heads, R rows (queries), C columns (keys and values), P width, V width of the values. Float32.
"""

import ctypes
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor

from shared_moe.ops.cuda.launch import launch

THREADS, TILE = 256, 64
"""As in attention_tiles.cuh."""

WIDTHS = (16, 32, 64, 128)
"""Widths that there are kernels for; a head takes the next wider one."""

MANY_BLOCKS, FEW_TILES = 2048, 8
"""A loop is cut until there are so many blocks, but not into shares of fewer tiles than that."""


class Sizes(ctypes.Structure):
    """As in attention_tiles.cuh."""

    _fields_ = [
        *((name, c_int64) for name in ("batches", "heads", "rows", "columns", "splits")),
        ("width", c_int),
        ("values", c_int),
    ]


class Matrix(ctypes.Structure):
    """As in attention_tiles.cuh."""

    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64)]


def _matrix(t: Tensor) -> Matrix:
    return Matrix(t.data_ptr(), *t.stride()[:3])


def _last_contiguous(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _tiles(length: int) -> int:
    return -(-length // TILE)


def num_splits(blocks: int, looped: int) -> int:
    """Into how many shares a loop over `looped` rows or columns is cut, so that a GPU gets many blocks.

    It depends on sizes alone, so that results do not vary from GPU to GPU.
    """
    return max(1, min(-(-MANY_BLOCKS // max(1, blocks)), _tiles(looped) // FEW_TILES))


def _launch(kernel: str, stats: Tensor, sizes: Sizes, tiled: int, *rest) -> None:
    blocks = sizes.batches * sizes.heads * _tiles(tiled) * sizes.splits
    widest = next(w for w in WIDTHS if w >= max(sizes.width, sizes.values))
    if blocks:
        launch(f"slot_mix_{widest}.cu", kernel, blocks, THREADS, stats, sizes, *rest)


def _mask_argument(mask_BC: Tensor | None) -> c_void_p | Tensor:
    return c_void_p() if mask_BC is None else mask_BC


def _sizes(q: Tensor, k: Tensor, v: Tensor, tiled: int, looped: int) -> Sizes:
    B, H, R, P = q.shape
    splits = num_splits(B * H * _tiles(tiled), looped)
    return Sizes(B, H, R, k.shape[2], splits, P, v.shape[3])


@torch.library.custom_op("shared_moe::slot_attend", mutates_args=())
def attend_op(
    q_BHRP: Tensor, k_BHCP: Tensor, v_BHCV: Tensor | None, mask_BC: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(softmax over the columns of q · k, times v (B, H, R, V); logsumexp of the logits (B, H, R)).

    Without v the values are the keys. Columns where the mask is False are not seen; a row that sees none gives 0.
    """
    q, k = _last_contiguous(q_BHRP), _last_contiguous(k_BHCP)
    v = k if v_BHCV is None else _last_contiguous(v_BHCV)
    mask = None if mask_BC is None else mask_BC.contiguous()
    B, H, R, _ = q.shape
    sizes = _sizes(q, k, v, R, k.shape[2])
    out = q.new_empty(sizes.splits * B, H, R, v.shape[3])
    lse = q.new_empty(sizes.splits * B, H, R)
    _launch(
        "slot_forward", lse, sizes, R, _matrix(q), _matrix(k), _matrix(v), _mask_argument(mask), _matrix(out)
    )
    if sizes.splits == 1:
        return out, lse
    return _merged(out.unflatten(0, (-1, B)), lse.unflatten(0, (-1, B)))


def _merged(out_SBHRV: Tensor, lse_SBHR: Tensor) -> tuple[Tensor, Tensor]:
    lse = lse_SBHR.logsumexp(0)
    share = torch.where(lse_SBHR == -torch.inf, 0, lse_SBHR - lse.where(lse != -torch.inf, 0)).exp()
    share = torch.where(lse_SBHR == -torch.inf, 0, share)
    return (out_SBHRV * share[..., None]).sum(0), lse


@attend_op.register_fake
def _(q_BHRP, k_BHCP, v_BHCV, mask_BC):
    v = k_BHCP if v_BHCV is None else v_BHCV
    B, H, R, _ = q_BHRP.shape
    return q_BHRP.new_empty(B, H, R, v.shape[3]), q_BHRP.new_empty(B, H, R)


@torch.library.custom_op("shared_moe::slot_attend_backward", mutates_args=())
def attend_backward_op(
    grad_BHRV: Tensor,
    q_BHRP: Tensor,
    k_BHCP: Tensor,
    v_BHCV: Tensor | None,
    mask_BC: Tensor | None,
    out_BHRV: Tensor,
    lse_BHR: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; without v that of k holds both and the last one is empty."""
    grad, q, k = (_last_contiguous(t) for t in (grad_BHRV, q_BHRP, k_BHCP))
    v = k if v_BHCV is None else _last_contiguous(v_BHCV)
    mask = _mask_argument(None if mask_BC is None else mask_BC.contiguous())
    mean = (grad * out_BHRV).sum(-1)
    (B, H, R, P), (C, V) = q.shape, v.shape[2:]
    lse = lse_BHR.contiguous()
    inputs = (_matrix(q), _matrix(k), _matrix(v), mask, _matrix(grad), mean)

    sizes = _sizes(q, k, v, R, C)
    grad_q = q.new_empty(sizes.splits * B, H, R, P)
    _launch("slot_backward_rows", lse, sizes, R, *inputs, _matrix(grad_q))

    sizes = _sizes(q, k, v, C, R)
    grad_k = q.new_empty(sizes.splits * B, H, C, P)
    grad_v = q.new_empty(0) if v_BHCV is None else q.new_empty(sizes.splits * B, H, C, V)
    to_v = Matrix() if v_BHCV is None else _matrix(grad_v)
    _launch("slot_backward_columns", lse, sizes, C, *inputs, _matrix(grad_k), to_v)
    return _summed(grad_q, B), _summed(grad_k, B), grad_v if v_BHCV is None else _summed(grad_v, B)


def _summed(parts: Tensor, batch: int) -> Tensor:
    return parts if parts.shape[0] == batch else parts.unflatten(0, (-1, batch)).sum(0)


@attend_backward_op.register_fake
def _(grad_BHRV, q_BHRP, k_BHCP, v_BHCV, mask_BC, out_BHRV, lse_BHR):
    grad_v = q_BHRP.new_empty(0) if v_BHCV is None else q_BHRP.new_empty(v_BHCV.shape)
    return q_BHRP.new_empty(q_BHRP.shape), q_BHRP.new_empty(k_BHCP.shape), grad_v


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_BHRV: Tensor, _):
    grad_q, grad_k, grad_v = attend_backward_op(grad_BHRV, *ctx.saved_tensors)
    return grad_q, grad_k, None if ctx.saved_tensors[2] is None else grad_v, None


attend_op.register_autograd(_backward, setup_context=_setup)


def attend(q_BHRP: Tensor, k_BHCP: Tensor, v_BHCV: Tensor | None, mask_BC: Tensor | None = None) -> Tensor:
    """softmax over the columns of q · k, times v (the keys without one): (B, H, R, V), differentiable in all three."""
    return attend_op(q_BHRP, k_BHCP, v_BHCV, mask_BC)[0]
