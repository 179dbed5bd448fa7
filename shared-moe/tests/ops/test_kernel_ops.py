"""Ops that only GPUs take by default, on the CPU: torch's checks of a custom op, and their written-out gradients."""

import pytest
import torch

from shared_moe.ops import topk_route
from shared_moe.ops.lowrank import lowrank_experts
from shared_moe.ops.spectral import spectral_linear

OPS = torch.ops.shared_moe
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
"""For ops whose first output holds integers; torch's fourth check adds the outputs up in the first one's dtype."""


def rand(*shape: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()


def lowrank_arguments(shared: bool) -> tuple:
    down = ((3, 5, 2), (3, 2)) if shared else ((4, 3, 5, 2), (4, 3, 2))
    return tuple(rand(*shape) for shape in ((2, 3, 4, 3, 5), *down, (4, 3, 2, 6), (4, 3, 6)))


SPECTRUM_IDS = torch.tensor([[0, 2], [1, -1], [3, 3], [4, 0], [2, 1]])


def spectral_arguments() -> tuple:
    return rand(5, 6), rand(7, 3), rand(3, 6), rand(4, 3), SPECTRUM_IDS, rand(5, 2)


TOPK = [
    (bias, sigmoid, normalise)
    for bias in (False, True)
    for sigmoid in (False, True)
    for normalise in (False, True)
]


def topk_arguments(bias: bool, sigmoid: bool, normalise: bool) -> tuple:
    shift = rand(6).detach() if bias else None
    return rand(7, 6), shift, 3, sigmoid, normalise, 1.5, "torch"


@pytest.mark.parametrize("options", TOPK)
def test_topk_gate(options):
    arguments = topk_arguments(*options)
    torch.library.opcheck(OPS.topk_gate.default, arguments, test_utils=CHECKS)
    compiled = torch.compile(topk_route.topk_gate, backend="aot_eager", fullgraph=True)
    for a, b in zip(compiled(*arguments), topk_route.topk_gate(*arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda x: topk_route.topk_gate(x, *arguments[1:])[1:3], arguments[0])


def test_kern_gate():
    arguments = (rand(7, 6), rand(1).detach().abs().squeeze().requires_grad_(), 3, 1e-3, "torch")
    torch.library.opcheck(OPS.kern_gate.default, arguments, test_utils=CHECKS)
    assert torch.autograd.gradcheck(
        lambda x, g: topk_route.kern_gate(x, g, *arguments[2:])[1:3], arguments[:2]
    )


@pytest.mark.parametrize("shared", [False, True])
def test_lowrank_experts(shared):
    arguments = lowrank_arguments(shared)
    torch.library.opcheck(OPS.lowrank_experts.default, (*arguments, "torch"))
    assert torch.autograd.gradcheck(lambda *a: OPS.lowrank_experts(*a, "torch"), arguments)
    torch.testing.assert_close(OPS.lowrank_experts(*arguments, "torch"), lowrank_experts(*arguments))


def test_spectral_linear():
    arguments = spectral_arguments()
    torch.library.opcheck(OPS.spectral_linear.default, (*arguments, "torch"))
    assert torch.autograd.gradcheck(lambda *a: OPS.spectral_linear(*a, "torch"), arguments)
    torch.testing.assert_close(OPS.spectral_linear(*arguments, "torch"), spectral_linear(*arguments))
