"""Gate, choice and normalisation of top-k routers as one op for GPUs; the CPU composes torch functions.

Shapes: T tokens, E experts, K chosen.
"""

import torch
from torch import Tensor

from shared_moe.ops.backend import resolve


def stable_top_k(scores_TE: Tensor, top_k: int) -> Tensor:
    """Indices (T, K) of the largest scores in descending order; ties go to the lowest index, on every device."""
    return torch.sort(scores_TE, dim=1, descending=True, stable=True).indices[:, :top_k]


def gate(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, sigmoid: bool, normalise: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, weights, probs) of a softmax or sigmoid router, from torch functions. Arguments as in `topk_gate`."""
    probs_TE = logits_TE.sigmoid() if sigmoid else logits_TE.softmax(1)
    ids_TK = stable_top_k(probs_TE if bias_E is None else probs_TE + bias_E, top_k)
    return ids_TK, chosen_weights(probs_TE, ids_TK, normalise, scale), probs_TE


def chosen_weights(probs_TE: Tensor, ids_TK: Tensor, normalise: bool, scale: float) -> Tensor:
    """The chosen experts' gate values, divided by their sum where asked, times the scale."""
    weights_TK = probs_TE.gather(1, ids_TK)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True).clamp_min(
            torch.finfo(weights_TK.dtype).tiny
        )
    return weights_TK * scale


def expert_counts(expert_ids_TK: Tensor, num_experts: int) -> Tensor:
    """Assignments of each expert (E,), int64; ids of -1 and E are not counted. Does not wait for a GPU."""
    ids = expert_ids_TK.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, torch.where(ids < 0, num_experts, ids), torch.ones_like(ids))[:num_experts]


@torch.library.custom_op("shared_moe::topk_gate", mutates_args=())
def topk_gate(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    sigmoid: bool,
    normalise: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ids (T, K), weights (T, K), probs (T, E), counts (E,)) from logits in float32 or float64."""
    if _fits_kernel(logits_TE, backend):
        from shared_moe.ops.triton.topk import topk

        return topk(logits_TE, top_k, sigmoid, bias_E, normalise, scale)
    ids_TK, weights_TK, probs_TE = gate(logits_TE, bias_E, top_k, sigmoid, normalise, scale)
    return ids_TK.contiguous(), weights_TK, probs_TE, expert_counts(ids_TK, logits_TE.shape[1])


def _fits_kernel(scores_TE: Tensor, backend: str) -> bool:
    if resolve("topk_route", backend, scores_TE) != "triton":
        return False
    from shared_moe.ops.triton.topk import MOST_EXPERTS

    return scores_TE.shape[1] <= MOST_EXPERTS


@topk_gate.register_fake
def _(logits_TE, bias_E, top_k, sigmoid, normalise, scale, backend):
    T, E = logits_TE.shape
    ids = logits_TE.new_empty(T, top_k, dtype=torch.int64)
    counts = logits_TE.new_empty(E, dtype=torch.int64)
    return ids, logits_TE.new_empty(T, top_k), torch.empty_like(logits_TE), counts


@torch.library.custom_op("shared_moe::topk_gate_backward", mutates_args=())
def _topk_gate_backward(
    grad_weights_TK: Tensor,
    grad_probs_TE: Tensor,
    probs_TE: Tensor,
    ids_TK: Tensor,
    sigmoid: bool,
    normalise: bool,
    scale: float,
    backend: str,
) -> Tensor:
    if _fits_kernel(probs_TE, backend):
        from shared_moe.ops.triton.topk import topk_backward

        return topk_backward(probs_TE, ids_TK, grad_weights_TK, grad_probs_TE, sigmoid, normalise, scale)
    grad_TK = grad_weights_TK * scale
    if normalise:
        chosen_TK = probs_TE.gather(1, ids_TK)
        total_T1 = chosen_TK.sum(1, keepdim=True)
        tiny = torch.finfo(probs_TE.dtype).tiny
        shift_T1 = (grad_TK * chosen_TK).sum(1, keepdim=True) / total_T1.clamp_min(tiny)
        grad_TK = (grad_TK - torch.where(total_T1 < tiny, 0, shift_T1)) / total_T1.clamp_min(tiny)
    grad_TE = grad_probs_TE.scatter_add(1, ids_TK, grad_TK)
    if sigmoid:
        return grad_TE * probs_TE * (1 - probs_TE)
    return probs_TE * (grad_TE - (grad_TE * probs_TE).sum(1, keepdim=True))


@_topk_gate_backward.register_fake
def _(grad_weights_TK, grad_probs_TE, probs_TE, ids_TK, sigmoid, normalise, scale, backend):
    return torch.empty_like(probs_TE)


def _topk_setup(ctx, inputs, output) -> None:
    ids_TK, _, probs_TE, counts_E = output
    ctx.save_for_backward(probs_TE, ids_TK)
    ctx.mark_non_differentiable(ids_TK, counts_E)
    ctx.options = inputs[3:]


def _topk_backward(ctx, _, grad_weights_TK: Tensor, grad_probs_TE: Tensor, __):
    grad = _topk_gate_backward(grad_weights_TK, grad_probs_TE, *ctx.saved_tensors, *ctx.options)
    return grad, None, None, None, None, None, None


topk_gate.register_autograd(_topk_backward, setup_context=_topk_setup)


@torch.library.custom_op("shared_moe::kern_gate", mutates_args=())
def kern_gate(
    scores_TE: Tensor, gamma: Tensor, top_k: int, eps: float, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """KERN: (ids (T, K), -1 where the weight is zero; weights (T, K); gates (T, E); counts (E,))."""
    if _fits_kernel(scores_TE, backend):
        from shared_moe.ops.triton.kern import kern

        return kern(scores_TE, gamma, top_k, eps)
    normed_TE = scores_TE / (torch.linalg.vector_norm(scores_TE, dim=1, keepdim=True) + eps)
    gates_TE = gamma * normed_TE.relu()
    ids_TK = stable_top_k(normed_TE, top_k)
    weights_TK = gates_TE.gather(1, ids_TK)
    ids_TK = torch.where(weights_TK == 0, -1, ids_TK)
    return ids_TK, weights_TK, gates_TE, expert_counts(ids_TK, scores_TE.shape[1])


@kern_gate.register_fake
def _(scores_TE, gamma, top_k, eps, backend):
    T, E = scores_TE.shape
    ids = scores_TE.new_empty(T, top_k, dtype=torch.int64)
    counts = scores_TE.new_empty(E, dtype=torch.int64)
    return ids, scores_TE.new_empty(T, top_k), torch.empty_like(scores_TE), counts


@torch.library.custom_op("shared_moe::kern_gate_backward", mutates_args=())
def _kern_gate_backward(
    grad_weights_TK: Tensor,
    grad_gates_TE: Tensor,
    scores_TE: Tensor,
    gamma: Tensor,
    ids_TK: Tensor,
    eps: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if _fits_kernel(scores_TE, backend):
        from shared_moe.ops.triton.kern import kern_backward

        grad, grad_gamma = kern_backward(scores_TE, gamma, ids_TK, grad_weights_TK, grad_gates_TE, eps)
        return grad, grad_gamma.to(gamma.dtype)
    held = ids_TK >= 0
    grad_TE = grad_gates_TE.scatter_add(1, ids_TK.clamp(min=0), torch.where(held, grad_weights_TK, 0))
    length_T1 = torch.linalg.vector_norm(scores_TE, dim=1, keepdim=True)
    total_T1 = length_T1 + eps
    normed_TE = scores_TE / total_T1
    grad_gamma = (grad_TE * normed_TE.relu()).sum()
    grad_TE = torch.where(normed_TE > 0, grad_TE * gamma, 0)
    along_T1 = (grad_TE * scores_TE).sum(1, keepdim=True)
    pull_T1 = torch.where(length_T1 > 0, along_T1 / (length_T1 * total_T1.square()), 0)
    return grad_TE / total_T1 - scores_TE * pull_T1, grad_gamma.to(gamma.dtype)


@_kern_gate_backward.register_fake
def _(grad_weights_TK, grad_gates_TE, scores_TE, gamma, ids_TK, eps, backend):
    return torch.empty_like(scores_TE), torch.empty_like(gamma)


def _kern_setup(ctx, inputs, output) -> None:
    scores_TE, gamma, _, ctx.eps, ctx.backend = inputs
    ctx.save_for_backward(scores_TE, gamma, output[0])
    ctx.mark_non_differentiable(output[0], output[3])


def _kern_backward(ctx, _, grad_weights_TK: Tensor, grad_gates_TE: Tensor, __):
    grads = _kern_gate_backward(grad_weights_TK, grad_gates_TE, *ctx.saved_tensors, ctx.eps, ctx.backend)
    return *grads, None, None, None


kern_gate.register_autograd(_kern_backward, setup_context=_kern_setup)
