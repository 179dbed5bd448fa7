"""Instance-gradient interference: do the patches of a bag pull one weight matrix in opposing directions?

The paper names the effect; the measures are defined here. Every per-patch gradient is an outer product, so inner
products of gradients are products of inner products, and no D x D_out matrix is ever formed.
Shapes: N patches, D width, E experts, H heads, C tissue classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mammoth_path.model.mammoth import Mammoth
from shared_moe.errors import ShapeError


@dataclass(frozen=True)
class Interference:
    """conflict_rate    share of pairs whose gradients point apart (cosine < 0), weighted by the gradients' norms
    cancellation     1 - ||Σ g_i|| / Σ ||g_i||: 0 when all gradients agree, 1 when they cancel
    class_cosines    mean cosine between patches of two classes (C, C), weighted likewise; None without classes
    """

    conflict_rate: float
    cancellation: float
    class_cosines: Tensor | None = None


def outer_gram(left_NA: Tensor, right_NB: Tensor) -> Tensor:
    """Inner products (N, N) of the gradients g_i = left_i ⊗ right_i."""
    return (left_NA @ left_NA.t()) * (right_NB @ right_NB.t())


def interference(gram_NN: Tensor, class_N: Tensor | None = None) -> Interference:
    """The measures of one set of gradients, given their inner products."""
    gram = gram_NN.double()
    norms = gram.diagonal().clamp_min(0).sqrt()
    weight = torch.outer(norms, norms)
    weight = weight - torch.diag(weight.diagonal())
    total = weight.sum()
    if total == 0:
        return Interference(float("nan"), float("nan"))
    conflict = (weight * (gram < 0)).sum() / total
    cancellation = 1 - gram.sum().clamp_min(0).sqrt() / norms.sum()
    cosines = None
    if class_N is not None:
        if class_N.shape != norms.shape:
            raise ShapeError(f"classes {tuple(class_N.shape)} must be ({len(norms)},)")
        onehot = torch.nn.functional.one_hot(class_N).double()
        off = gram - torch.diag(gram.diagonal())
        cosines = (onehot.t() @ off @ onehot) / (onehot.t() @ weight @ onehot)
    return Interference(conflict.item(), cancellation.item(), cosines)


def linear_interference(
    linear: torch.nn.Linear, x_ND: Tensor, loss: Callable[[Tensor], Tensor], class_N: Tensor | None = None
) -> Interference:
    """Of a linear layer on one bag: g_i = δ_i x_i^T, δ_i the gradient at patch i's pre-activation.

    `loss` maps the pre-activations (N, D_out) to a scalar.
    """
    pre = linear(x_ND).detach().requires_grad_()
    (delta,) = torch.autograd.grad(loss(pre), pre)
    return interference(outer_gram(delta, x_ND.detach()), class_N)


def expert_gradients(
    mammoth: Mammoth, x_ND: Tensor, loss: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The two factors of each patch's gradient at the experts' second matrix, and the whole gradient.

    g_i[e, h] = (Φ^T z_i)_h ⊗ Σ_s dispatch[i, e, h, s] δ[e, h, s]. Returns left (H, N, r) (or (E, H, N, r) when Φ is
    not shared), right (E, H, N, Q), and ∂L/∂W (E, H, r, Q) as autograd gives it.
    `loss` maps the layer's output slots (E·S, D_out) to a scalar. Use `eval()`: dropout would blur the comparison.
    """
    z = mammoth.queries(x_ND[None])
    dispatch = mammoth.router(z).dispatch_BHNS[0].unflatten(-1, (mammoth.num_experts, -1))
    u = mammoth.router.mix(z)
    v = mammoth.expert_outputs(u)
    output = mammoth.finish(v)[0].flatten(0, 1)
    delta, weight_gradient = torch.autograd.grad(loss(output), [v, mammoth.experts.up])
    z_HNP = mammoth.router.split(z)[0]
    down = mammoth.experts.down
    left = (
        torch.einsum("hnp,hpr->hnr", z_HNP, down)
        if down.dim() == 3
        else torch.einsum("hnp,ehpr->ehnr", z_HNP, down)
    )
    right = torch.einsum("hnes,eshq->ehnq", dispatch, delta[0])
    return left.detach(), right.detach(), weight_gradient


def mammoth_interference(
    mammoth: Mammoth, x_ND: Tensor, loss: Callable[[Tensor], Tensor], class_N: Tensor | None = None
) -> list[Interference]:
    """The measures within each expert (its heads' gradients taken together)."""
    left, right, _ = expert_gradients(mammoth, x_ND, loss)
    found = []
    for e in range(mammoth.num_experts):
        factors = left if left.dim() == 3 else left[e]
        gram = sum(outer_gram(factors[h], right[e, h]) for h in range(mammoth.num_heads))
        found.append(interference(torch.as_tensor(gram), class_N))
    return found
