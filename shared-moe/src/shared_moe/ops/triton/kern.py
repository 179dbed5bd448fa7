# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""KERN routing in one pass: g = γ relu(s / (|s| + eps)), the K largest, those of weight zero dropped; its gradient.

Shapes: T tokens, E experts, K chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton.launch import power_of_2
from shared_moe.ops.triton.topk import block_tokens, pick_top_k


@triton.jit
def kern_kernel(
    scores_ptr,
    gamma_ptr,
    ids_ptr,
    weights_ptr,
    gates_ptr,
    counts_ptr,
    T,
    E,
    eps,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    real = (t < T) & (e < E)
    scores = tl.load(scores_ptr + t * E + e, mask=real, other=0).to(tl.float32)
    normed = scores / (tl.sqrt(tl.sum(scores * scores, 1))[:, None] + eps)
    gates = tl.load(gamma_ptr) * tl.where(normed < 0, 0.0, normed)
    ids, weights, taken = pick_top_k(normed, gates, e < E, K, BLOCK_T, BLOCK_E, BLOCK_K)
    ids = tl.where(weights == 0, -1, ids)
    kept = (t < T) & (slot < K)
    tl.store(ids_ptr + t * K + slot, ids, mask=kept)
    tl.store(weights_ptr + t * K + slot, weights, mask=kept)
    tl.store(gates_ptr + t * E + e, gates, mask=real)
    seen = tl.sum((taken & real & (gates != 0)).to(tl.int64), 0)[None, :]
    tl.atomic_add(counts_ptr + e, seen, mask=(e < E) & (seen > 0), sem="relaxed")


def kern(scores_TE: Tensor, gamma: Tensor, top_k: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids (T, K) int64 with -1 where the weight is zero, weights (T, K), gates (T, E), counts (E,) int64)."""
    T, E = scores_TE.shape
    new = scores_TE.new_empty
    ids, weights = new(T, top_k, dtype=torch.int64), new(T, top_k, dtype=torch.float32)
    gates = new(T, E, dtype=torch.float32)
    counts = torch.zeros(E, dtype=torch.int64, device=scores_TE.device)
    if T == 0:
        return ids, weights, gates, counts
    block_t = block_tokens(E)
    kern_kernel[(triton.cdiv(T, block_t),)](
        scores_TE.contiguous(),
        gamma.to(torch.float32),
        ids,
        weights,
        gates,
        counts,
        T,
        E,
        eps,
        K=top_k,
        BLOCK_T=block_t,
        BLOCK_E=power_of_2(E),
        BLOCK_K=power_of_2(top_k, least=1),
    )
    return ids, weights, gates, counts


@triton.jit
def kern_backward_kernel(
    scores_ptr,
    gamma_ptr,
    ids_ptr,
    grad_weights_ptr,
    grad_gates_ptr,
    grad_scores_ptr,
    grad_gamma_ptr,
    T,
    E,
    eps,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    t = rows[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    real = (t < T) & (e < E)
    scores = tl.load(scores_ptr + t * E + e, mask=real, other=0).to(tl.float32)
    grad = tl.load(grad_gates_ptr + t * E + e, mask=real, other=0).to(tl.float32)
    for k in tl.static_range(K):
        hit = e == tl.load(ids_ptr + t * K + k, mask=t < T, other=-1)
        grad += tl.where(hit, tl.load(grad_weights_ptr + t * K + k, mask=t < T, other=0), 0.0)
    length = tl.sqrt(tl.sum(scores * scores, 1))[:, None]
    total = length + eps
    normed = scores / total
    tl.store(grad_gamma_ptr + rows, tl.sum(tl.where(normed > 0, grad * normed, 0.0), 1), mask=rows < T)
    grad = tl.where(normed > 0, grad * tl.load(gamma_ptr), 0.0)
    along = tl.sum(grad * scores, 1)[:, None]
    pull = tl.where(length > 0, along / (length * total * total), 0.0)
    tl.store(grad_scores_ptr + t * E + e, grad / total - scores * pull, mask=real)


def kern_backward(
    scores_TE: Tensor,
    gamma: Tensor,
    ids_TK: Tensor,
    grad_weights_TK: Tensor,
    grad_gates_TE: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(gradient of the scores (T, E), of γ ()), float32."""
    (T, E), K = scores_TE.shape, ids_TK.shape[1]
    grad = scores_TE.new_empty(T, E, dtype=torch.float32)
    grad_gamma_T = torch.zeros(T, dtype=torch.float32, device=scores_TE.device)
    if T:
        block_t = block_tokens(E)
        kern_backward_kernel[(triton.cdiv(T, block_t),)](
            scores_TE.contiguous(),
            gamma.to(torch.float32),
            ids_TK,
            grad_weights_TK.contiguous(),
            grad_gates_TE.contiguous(),
            grad,
            grad_gamma_T,
            T,
            E,
            eps,
            K=K,
            BLOCK_T=block_t,
            BLOCK_E=power_of_2(E),
        )
    return grad, grad_gamma_T.sum()
