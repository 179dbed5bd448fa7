# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
"""Top-k routing in one pass over the logits: gate, choice, normalisation, histogram; and its gradient.

One program holds whole rows, so E is limited by the registers: `MOST_EXPERTS`.

Shapes: T tokens, E experts, K chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared_moe.ops.triton.launch import power_of_2

MOST_EXPERTS = 2048


def block_tokens(num_experts: int) -> int:
    return max(1, 1024 // power_of_2(num_experts))


@triton.jit
def pick_top_k(
    choice, value, real, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The K largest choices of each row, the lowest index first among equals and NaN above all, as in torch.sort.

    Returns (ids, their values) as (BLOCK_T, BLOCK_K), and which experts were taken (BLOCK_T, BLOCK_E).
    """
    e = tl.arange(0, BLOCK_E)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    left = tl.where(choice != choice, float("inf"), tl.maximum(choice, -3.0e38))
    left = tl.where(real, left, float("-inf"))
    ids = tl.zeros((BLOCK_T, BLOCK_K), tl.int64)
    values = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    taken = tl.zeros((BLOCK_T, BLOCK_E), tl.int1)
    for k in tl.static_range(K):
        best = tl.argmax(left, 1)[:, None]
        hit = e == best
        chosen = tl.sum(tl.where(hit, value, 0.0), 1)[:, None]
        ids = tl.where(slot == k, best.to(tl.int64), ids)
        values = tl.where(slot == k, chosen, values)
        taken = taken | hit
        left = tl.where(hit, float("-inf"), left)
    return ids, values, taken


@triton.jit
def topk_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    probs_ptr,
    counts_ptr,
    T,
    E,
    scale,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    real = (t < T) & (e < E)
    logits = tl.load(logits_ptr + t * E + e, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        probs = tl.sigmoid(logits)
    else:
        probs = tl.exp(logits - tl.max(logits, 1)[:, None])
        probs = probs / tl.sum(probs, 1)[:, None]
    choice = probs
    if BIAS:
        choice = probs + tl.load(bias_ptr + e, mask=e < E, other=0).to(tl.float32)
    ids, weights, taken = pick_top_k(choice, probs, e < E, K, BLOCK_T, BLOCK_E, BLOCK_K)
    if NORMALISE:
        total = tl.sum(weights, 1)[:, None]
        weights = weights / tl.where(total < 1.1754944e-38, 1.1754944e-38, total)
    kept = (t < T) & (slot < K)
    tl.store(ids_ptr + t * K + slot, ids, mask=kept)
    tl.store(weights_ptr + t * K + slot, weights * scale, mask=kept)
    tl.store(probs_ptr + t * E + e, probs, mask=real)
    seen = tl.sum((taken & real).to(tl.int64), 0)[None, :]
    tl.atomic_add(counts_ptr + e, seen, mask=(e < E) & (seen > 0), sem="relaxed")


def topk(
    logits_TE: Tensor, top_k: int, sigmoid: bool, bias_E: Tensor | None, normalise: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids (T, K) int64, weights (T, K), probs (T, E), counts (E,) int64), floats in float32."""
    T, E = logits_TE.shape
    new = logits_TE.new_empty
    ids, weights = new(T, top_k, dtype=torch.int64), new(T, top_k, dtype=torch.float32)
    probs = new(T, E, dtype=torch.float32)
    counts = torch.zeros(E, dtype=torch.int64, device=logits_TE.device)
    if T == 0:
        return ids, weights, probs, counts
    block_t = block_tokens(E)
    topk_kernel[(triton.cdiv(T, block_t),)](
        logits_TE.contiguous(),
        logits_TE if bias_E is None else bias_E.contiguous(),
        ids,
        weights,
        probs,
        counts,
        T,
        E,
        scale,
        K=top_k,
        SIGMOID=sigmoid,
        BIAS=bias_E is not None,
        NORMALISE=normalise,
        BLOCK_T=block_t,
        BLOCK_E=power_of_2(E),
        BLOCK_K=power_of_2(top_k, least=1),
    )
    return ids, weights, probs, counts


@triton.jit
def topk_backward_kernel(
    probs_ptr,
    ids_ptr,
    grad_weights_ptr,
    grad_probs_ptr,
    grad_logits_ptr,
    T,
    E,
    scale,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    real = (t < T) & (e < E)
    probs = tl.load(probs_ptr + t * E + e, mask=real, other=0)
    grad = tl.load(grad_probs_ptr + t * E + e, mask=real, other=0).to(tl.float32)
    total = tl.full((BLOCK_T, 1), 1.0, tl.float32)
    shift = tl.zeros((BLOCK_T, 1), tl.float32)
    if NORMALISE:
        total = tl.zeros((BLOCK_T, 1), tl.float32)
        for k in tl.static_range(K):
            hit = e == tl.load(ids_ptr + t * K + k, mask=t < T, other=0)
            chosen = tl.sum(tl.where(hit, probs, 0.0), 1)[:, None]
            total += chosen
            shift += chosen * tl.load(grad_weights_ptr + t * K + k, mask=t < T, other=0)
        tiny = total < 1.1754944e-38
        total = tl.where(tiny, 1.1754944e-38, total)
        shift = tl.where(tiny, 0.0, shift / total)
    for k in tl.static_range(K):
        hit = e == tl.load(ids_ptr + t * K + k, mask=t < T, other=0)
        chosen = tl.load(grad_weights_ptr + t * K + k, mask=t < T, other=0)
        grad += tl.where(hit, scale * (chosen - shift) / total, 0.0)
    if SIGMOID:
        grad = grad * probs * (1 - probs)
    else:
        grad = probs * (grad - tl.sum(grad * probs, 1)[:, None])
    tl.store(grad_logits_ptr + t * E + e, grad.to(grad_logits_ptr.dtype.element_ty), mask=real)


def topk_backward(
    probs_TE: Tensor,
    ids_TK: Tensor,
    grad_weights_TK: Tensor,
    grad_probs_TE: Tensor,
    sigmoid: bool,
    normalise: bool,
    scale: float,
) -> Tensor:
    """The gradient of the logits (T, E), float32."""
    (T, E), K = probs_TE.shape, ids_TK.shape[1]
    grad = torch.empty_like(probs_TE)
    if T == 0:
        return grad
    block_t = block_tokens(E)
    topk_backward_kernel[(triton.cdiv(T, block_t),)](
        probs_TE,
        ids_TK,
        grad_weights_TK.contiguous(),
        grad_probs_TE.contiguous(),
        grad,
        T,
        E,
        scale,
        K=K,
        SIGMOID=sigmoid,
        NORMALISE=normalise,
        BLOCK_T=block_t,
        BLOCK_E=power_of_2(E),
    )
    return grad
