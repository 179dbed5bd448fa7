"""A linear map in its singular basis, its spectrum mixed for each token from the experts' spectra.

    y_t = U (Σ_k w_tk s_{e_tk} ⊙ V x_t)

Shapes: T tokens, K experts of a token, D width in, O width out, R rank, E experts.
"""

import torch
from torch import Tensor

from shared_moe.errors import ShapeError
from shared_moe.ops.backend import autocast, choose_backend, resolve


def _mixed_spectrum(scales_ER: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Σ_k w_tk s_{e_tk}: (T, R); an id of -1 or E adds nothing."""
    held_TK = (expert_ids_TK >= 0) & (expert_ids_TK < scales_ER.shape[0])
    taken_TKR = scales_ER[torch.where(held_TK, expert_ids_TK, 0)]
    return (torch.where(held_TK, weights_TK, 0)[..., None] * taken_TKR).sum(1)


def _composed(
    x_TD: Tensor, u_OR: Tensor, v_RD: Tensor, scales_ER: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    mixed_TR = _mixed_spectrum(scales_ER, ids_TK, weights_TK.to(scales_ER.dtype)).to(x_TD.dtype)
    return ((x_TD @ v_RD.t()) * mixed_TR) @ u_OR.t()


@torch.library.custom_op("shared_moe::spectral_linear", mutates_args=())
def _spectral(
    x_TD: Tensor,
    u_OR: Tensor,
    v_RD: Tensor,
    scales_ER: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    backend: str,
) -> Tensor:
    if resolve("spectral_linear", backend, x_TD) == "triton":
        from shared_moe.ops.triton.spectral import scaled_projection

        return scaled_projection(x_TD, v_RD, scales_ER, ids_TK, weights_TK.to(torch.float32)) @ u_OR.t()
    return _composed(x_TD, u_OR, v_RD, scales_ER, ids_TK, weights_TK)


@_spectral.register_fake
def _(x_TD, u_OR, v_RD, scales_ER, ids_TK, weights_TK, backend):
    return x_TD.new_empty(x_TD.shape[0], u_OR.shape[0])


@torch.library.custom_op("shared_moe::spectral_linear_backward", mutates_args=())
def _spectral_backward(
    grad_TO: Tensor,
    x_TD: Tensor,
    u_OR: Tensor,
    v_RD: Tensor,
    scales_ER: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    E, wide = scales_ER.shape[0], scales_ER.dtype
    weights = weights_TK.to(wide)
    mixed_TR = _mixed_spectrum(scales_ER, ids_TK, weights).to(x_TD.dtype)
    plain_TR = x_TD @ v_RD.t()
    grad_scaled_TR = grad_TO @ u_OR
    grad_mixed_TR = (grad_scaled_TR * plain_TR).to(wide)
    grad_plain_TR = grad_scaled_TR * mixed_TR
    held_TK = (ids_TK >= 0) & (ids_TK < E)
    hit_TKE = (ids_TK[..., None] == torch.arange(E, device=ids_TK.device)).to(wide)
    grad_scales = (weights[..., None] * hit_TKE).sum(1).t() @ grad_mixed_TR
    dots_TE = grad_mixed_TR @ scales_ER.t()
    grad_weights = torch.where(held_TK, dots_TE.gather(1, torch.where(held_TK, ids_TK, 0)), 0)
    return (
        grad_plain_TR @ v_RD,
        grad_TO.t() @ (plain_TR * mixed_TR),
        grad_plain_TR.t() @ x_TD,
        grad_scales,
        grad_weights.to(weights_TK.dtype),
    )


@_spectral_backward.register_fake
def _(grad_TO, x_TD, u_OR, v_RD, scales_ER, ids_TK, weights_TK):
    return tuple(t.new_empty(t.shape) for t in (x_TD, u_OR, v_RD, scales_ER, weights_TK))


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:6])


def _backward(ctx, grad_TO: Tensor):
    grad_x, grad_u, grad_v, grad_scales, grad_weights = _spectral_backward(grad_TO, *ctx.saved_tensors)
    return grad_x, grad_u, grad_v, grad_scales, None, grad_weights, None


_spectral.register_autograd(_backward, setup_context=_setup)


def spectral_linear(
    x_TD: Tensor,
    u_OR: Tensor,
    v_RD: Tensor,
    scales_ER: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """(T, D) -> (T, O): project on the singular directions, scale by the token's mixed spectrum, map back.

    u (O, R) and v (R, D), shared by all experts; scales (E, R), one spectrum an expert; expert_ids int64 (T, K), -1 or E
    for no expert; weights (T, K). On a GPU the spectrum is the epilogue of the first product. Differentiable in all
    but the ids. Raises `ShapeError` when shapes disagree.
    """
    (O, R), E = u_OR.shape, scales_ER.shape[0]
    expected = {"v": (v_RD, (R, x_TD.shape[-1])), "scales": (scales_ER, (E, R))}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{name} is {tuple(tensor.shape)}; expected {shape} beside u {(O, R)}")
    if x_TD.dim() != 2 or expert_ids_TK.shape != weights_TK.shape or len(expert_ids_TK) != len(x_TD):
        raise ShapeError(
            f"x {tuple(x_TD.shape)}, expert_ids {tuple(expert_ids_TK.shape)}, weights {tuple(weights_TK.shape)}; "
            "expected (T, D), (T, K), (T, K)"
        )
    backend = choose_backend("spectral_linear", backend)
    if backend == "triton" or (backend == "auto" and x_TD.device.type == "cuda"):
        x, u, v = autocast(x_TD, u_OR, v_RD)
        with torch.autocast(x_TD.device.type, enabled=False):
            return _spectral(x.contiguous(), u, v, scales_ER, expert_ids_TK, weights_TK, backend)
    return _composed(x_TD, u_OR, v_RD, scales_ER, expert_ids_TK, weights_TK)
