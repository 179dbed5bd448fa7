"""Routing kernels against the torch functions, and the counting sort against a stable sort."""

import pytest
import torch

from shared_moe.ops.sort import sort_op
from shared_moe.ops.topk_route import gate, kern_gate, topk_gate
from shared_moe.ops.triton.sort import sort
from shared_moe.routing import KernRouter, topk_route

KERNELS = (
    "topk_kernel",
    "topk_backward_kernel",
    "kern_kernel",
    "kern_backward_kernel",
    "count_kernel",
    "place_kernel",
)


def scores(T, E, seed=0):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed))


def gradients(outputs, inputs):
    g = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=g).to(o) for o in outputs]
    return torch.autograd.grad(outputs, inputs, grads)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("sigmoid", [True, False], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize(("T", "E", "K"), [(1, 1, 1), (5, 7, 3), (33, 64, 8), (3, 100, 100), (2, 1000, 2)])
def test_topk(T, E, K, sigmoid, normalise, device):
    for bias in (None, scores(1, E, 5)[0].to(device)):
        logits = scores(T, E).to(device).requires_grad_()
        ids, weights, probs, counts = topk_gate(logits, bias, K, sigmoid, normalise, 1.5, "triton")
        wide = logits.detach().double().requires_grad_()
        wide_bias = None if bias is None else bias.double()
        expected_ids, expected_weights, expected_probs = gate(wide, wide_bias, K, sigmoid, normalise, 1.5)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(probs.double(), expected_probs, atol=1e-6, rtol=1e-5)
        assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=E))
        (found,) = gradients((weights, probs), logits)
        (expected,) = gradients((expected_weights, expected_probs), wide)
        torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("sigmoid", [True, False], ids=["sigmoid", "softmax"])
def test_ties_and_broken_logits_as_on_the_cpu(sigmoid, device):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [
            [1.0, 1, 1, 1, 0],
            [0, nan, 5, 1, 2],
            [-inf, 3, -inf, -inf, -inf],
            [inf, 0, inf, 1, 2],
            [-inf] * 5,
            [nan] * 5,
        ],
        device=device,
    )
    for normalise in (True, False):
        ids, weights, probs, _ = topk_gate(logits, None, 3, sigmoid, normalise, 1.0, "triton")
        expected = gate(logits, None, 3, sigmoid, normalise, 1.0)
        assert torch.equal(ids, expected[0])
        torch.testing.assert_close(weights, expected[1], equal_nan=True)
        torch.testing.assert_close(probs, expected[2], equal_nan=True)


@pytest.mark.parametrize(("T", "E", "K"), [(1, 1, 1), (6, 5, 2), (40, 24, 8)])
def test_kern(T, E, K, device):
    s = scores(T, E)
    s[0] = -s[0].abs()  # a token that no expert serves
    if T > 2:
        s[1] = 0
        s[2, 0] = float("nan")
    router = KernRouter(4, E, K, bias=False)
    found_s, gamma = s.to(device).requires_grad_(), torch.tensor(-1.5, device=device, requires_grad=True)
    ids, weights, gates, counts = kern_gate(found_s, gamma, K, router.eps, "triton")
    wide, wide_gamma = (
        s.double().requires_grad_(),
        torch.tensor(-1.5, dtype=torch.float64, requires_grad=True),
    )
    router.weight, router.gamma = torch.nn.Parameter(torch.eye(E, dtype=torch.float64)), None
    router.gamma = torch.nn.Parameter(wide_gamma.detach())
    routing = router(wide)
    assert torch.equal(ids.cpu(), routing.expert_ids_TK)
    torch.testing.assert_close(
        weights.double().cpu(), routing.weights_TK, atol=1e-6, rtol=1e-5, equal_nan=True
    )
    torch.testing.assert_close(gates.double().cpu(), routing.probs_TE, atol=1e-6, rtol=1e-5, equal_nan=True)
    assert torch.equal(counts.cpu(), torch.bincount(ids.cpu()[ids.cpu() >= 0], minlength=E))
    found = gradients((weights, gates), (found_s, gamma))
    expected = gradients((routing.weights_TK, routing.probs_TE), (wide, router.gamma))
    finite = ~s.isnan().any(1)
    torch.testing.assert_close(found[0].double().cpu()[finite], expected[0][finite], atol=3e-6, rtol=1e-4)


def test_kern_gamma_gradient(device):
    s, gamma = scores(12, 9).to(device).requires_grad_(), torch.tensor(0.7, device=device, requires_grad=True)
    _, weights, gates, _ = kern_gate(s, gamma, 3, 1e-6, "triton")
    (found,) = gradients((weights, gates), (gamma,))
    wide, wide_gamma = s.detach().double().requires_grad_(), gamma.detach().double().requires_grad_()
    _, weights, gates, _ = kern_gate(wide, wide_gamma, 3, 1e-6, "torch")
    (expected,) = gradients((weights, gates), (wide_gamma,))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_router_reaches_the_kernel(device):
    logits = scores(7, 12).to(device)
    fused, plain = (topk_route(logits, 3, backend=backend) for backend in ("triton", "torch"))
    assert torch.equal(fused.expert_ids_TK, plain.expert_ids_TK)
    torch.testing.assert_close(fused.weights_TK, plain.weights_TK)
    assert fused.counts_E is not None
    assert int(fused.counts_E.sum()) == 21


@pytest.mark.parametrize(
    ("T", "K", "E"), [(1, 1, 1), (9, 2, 3), (200, 3, 5), (100, 4, 64), (40, 2, 300), (30, 1, 1024)]
)
def test_sort_is_stable(T, K, E, device):
    g = torch.Generator().manual_seed(E)
    for ids in (
        torch.randint(-1, E + 1, (T, K), generator=g),
        torch.full((T, K), E - 1),
        torch.full((T, K), -1),
    ):
        order, counts = sort(ids.to(device), E)
        expected_order, expected_counts = sort_op(ids, E)
        assert torch.equal(order.cpu(), expected_order)
        assert torch.equal(counts.cpu(), expected_counts)


def test_sorting_nothing(device):
    order, counts = sort(torch.empty(0, 2, dtype=torch.int64, device=device), 4)
    assert order.shape == (0,)
    assert counts.tolist() == [0, 0, 0, 0]
