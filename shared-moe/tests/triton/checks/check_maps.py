"""Low-rank experts and spectral maps against torch functions in float64."""

import pytest
import torch

from shared_moe.ops import lowrank_experts, spectral_linear

KERNELS = ("lowrank_kernel", "spectral_kernel")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3}


def compare(function, leaves, dtype):
    grad = None
    answers = []
    for backend, kind in (("triton", dtype), ("torch", torch.float64)):
        own = [t.detach().to(kind).requires_grad_() for t in leaves]
        y = function(*own, backend)
        if grad is None:
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
        answers.append([y.detach(), *torch.autograd.grad(y, own, grad.to(y.dtype))])
    for a, b in zip(*answers, strict=True):
        scale = b.abs().max().clamp_min(1)
        assert a.shape == b.shape
        assert ((a.double() - b).abs().max() <= TOLERANCE[dtype] * scale).item()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("B", "H", "E", "S", "P", "R", "Q"),
    [(1, 1, 1, 1, 1, 1, 1), (2, 3, 4, 5, 7, 3, 9), (1, 2, 3, 70, 20, 16, 80)],
)
def test_lowrank(B, H, E, S, P, R, Q, shared, dtype, device):
    g = torch.Generator().manual_seed(B)
    owners = (H,) if shared else (E, H)
    shapes = ((B, H, E, S, P), (*owners, P, R), (*owners, R), (E, H, R, Q), (E, H, Q))
    leaves = [(torch.randn(*shape, generator=g) * 0.4).to(device, dtype) for shape in shapes]
    compare(lambda *t: lowrank_experts(*t[:5], backend=t[5]), leaves, dtype)


@pytest.mark.parametrize(
    ("T", "K", "E", "D", "R", "O"), [(1, 1, 1, 1, 1, 1), (9, 3, 4, 20, 13, 11), (70, 2, 5, 16, 40, 8)]
)
def test_spectral(T, K, E, D, R, O, dtype, device):
    g = torch.Generator().manual_seed(T)
    ids = torch.randint(-1, E + 1, (T, K), generator=g).to(device)
    shapes = ((T, D), (O, R), (R, D), (E, R), (T, K))
    leaves = [(torch.randn(*shape, generator=g) * 0.4).to(device, dtype) for shape in shapes]
    compare(
        lambda x, u, v, s, w, backend: spectral_linear(x, u, v, s, ids, w, backend=backend), leaves, dtype
    )
