"""log Gamma(a) samples with their derivative in a, on a GPU."""

from ctypes import c_int64

import torch
from torch import Tensor

from shared_moe.ops.cuda.launch import launch


@torch.library.custom_op("shared_moe::log_gamma_sample", mutates_args=())
def sample_op(a: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """(log g, d log g / da) of g ~ Gamma(a), float64; `seed` (1,) int64 fixes the sample."""
    a = a.contiguous()
    value, slope = torch.empty_like(a), torch.empty_like(a)
    n = a.numel()
    if n:
        blocks = min(-(-n // 128), 65535)
        launch("dirichlet.cu", "log_gamma", blocks, 128, a, seed, value, slope, c_int64(n))
    return value, slope


@sample_op.register_fake
def _(a: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_value: Tensor, _):
    return grad_value * ctx.saved_tensors[0], None


sample_op.register_autograd(_backward, setup_context=_setup)


def log_gamma_sample(a: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """log g of g ~ Gamma(a), float64, differentiable in a; the seed is drawn from the generator on the GPU."""
    seed = torch.randint(2**63 - 1, (1,), device=a.device, generator=generator)
    return sample_op(a, seed)[0]
