"""Low-rank experts on slots. Shapes: B batch, E experts, S slots an expert, H heads, P width in, R rank, Q width out."""

import torch
from torch import Tensor

from shared_moe.ops.backend import autocast, choose_backend, resolve


def _by_einsum(u: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    return torch.einsum("bhesr,ehrq->beshq", _middle(u, down, down_bias), up) + up_bias[:, None]


def _middle(u: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """u Φ + c: (B, H, E, S, R)."""
    if down.dim() == 3:
        return torch.einsum("bhesp,hpr->bhesr", u, down) + down_bias[:, None, None]
    return torch.einsum("bhesp,ehpr->bhesr", u, down) + down_bias.transpose(0, 1)[:, :, None]


@torch.library.custom_op("shared_moe::lowrank_experts", mutates_args=())
def _lowrank(u: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor, backend: str) -> Tensor:
    if resolve("lowrank_experts", backend, u) == "triton":
        from shared_moe.ops.triton.lowrank import WIDEST, lowrank

        if max(u.shape[-1], up.shape[-2]) <= WIDEST:
            return lowrank(u, down, down_bias, up, up_bias)
    return _by_einsum(u, down, down_bias, up, up_bias).contiguous()


@_lowrank.register_fake
def _(u, down, down_bias, up, up_bias, backend):
    B, H, E, S, _ = u.shape
    return u.new_empty(B, E, S, H, up.shape[-1])


@torch.library.custom_op("shared_moe::lowrank_experts_backward", mutates_args=())
def _lowrank_backward(
    grad: Tensor, u: Tensor, down: Tensor, down_bias: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_middle = torch.einsum("beshq,ehrq->bhesr", grad, up)
    grad_up = torch.einsum("bhesr,beshq->ehrq", _middle(u, down, down_bias), grad)
    if down.dim() == 3:
        grad_u = torch.einsum("bhesr,hpr->bhesp", grad_middle, down)
        grad_down = torch.einsum("bhesp,bhesr->hpr", u, grad_middle)
        grad_down_bias = grad_middle.sum((0, 2, 3))
    else:
        grad_u = torch.einsum("bhesr,ehpr->bhesp", grad_middle, down)
        grad_down = torch.einsum("bhesp,bhesr->ehpr", u, grad_middle)
        grad_down_bias = grad_middle.sum((0, 3)).transpose(0, 1)
    grads = (grad_u, grad_down, grad_down_bias, grad_up, grad.sum((0, 2)))
    return tuple(g.contiguous() for g in grads)  # pyright: ignore[reportReturnType]


@_lowrank_backward.register_fake
def _(grad, u, down, down_bias, up):
    E, H, _, Q = up.shape
    tensors = (u, down, down_bias, up)
    return *(t.new_empty(t.shape) for t in tensors), up.new_empty(E, H, Q)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx, grad: Tensor):
    return *_lowrank_backward(grad, *ctx.saved_tensors), None


_lowrank.register_autograd(_backward, setup_context=_setup)


def lowrank_experts(
    u_BHESP: Tensor,
    down: Tensor,
    down_bias: Tensor,
    up_EHRQ: Tensor,
    up_bias_EHQ: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """v = (u Φ + c) W + b, head by head: (B, H, E, S, P) -> (B, E, S, H, Q).

    down Φ is (H, P, R), shared by the experts, or (E, H, P, R); its bias c (H, R) or (E, H, R). On a GPU one kernel
    keeps the middle on the chip.
    """
    backend = choose_backend("lowrank_experts", backend)
    if backend == "triton" or (backend == "auto" and u_BHESP.device.type == "cuda"):
        tensors = autocast(u_BHESP, down, down_bias, up_EHRQ, up_bias_EHQ)
        with torch.autocast(u_BHESP.device.type, enabled=False):
            return _lowrank(*tensors, backend)
    return _by_einsum(u_BHESP, down, down_bias, up_EHRQ, up_bias_EHQ)
