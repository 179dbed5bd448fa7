"""What ERC has to fulfil, property by property."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from shared_moe.erc import erc, gate_half, noise_bound
from shared_moe.errors import InputError, ShapeError


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def layer(n, d=6, f=5, seed=0):
    g = seeded(seed)
    return (
        torch.randn(n, d, dtype=torch.float64, generator=g),
        torch.randn(n, f, d, dtype=torch.float64, generator=g),
    )


def double_loop(R, W, alpha, seed):
    n = len(R)
    u = torch.empty_like(R).uniform_(-1, 1, generator=seeded(seed))
    proxies = []
    for i in range(n):
        nearest = min((R[i] - R[j]).norm() for j in range(n) if j != i) if n > 1 else torch.zeros(())
        proxies.append(R[i] * (1 + nearest / (2 * R[i].norm()) * u[i]))
    M = [[(W[j] @ proxies[i]).norm() for j in range(n)] for i in range(n)]
    total = torch.zeros((), dtype=R.dtype)
    for i in range(n):
        for j in range(n):
            if i != j:
                total += (M[i][j] - alpha * M[i][i]).clamp_min(0) + (M[j][i] - alpha * M[i][i]).clamp_min(0)
    return total / n**2


@pytest.mark.parametrize("n", [1, 2, 3, 17])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("fused", [False, True])
def test_vectorised_equals_the_double_loop(n, alpha, fused):
    R, W = layer(n)
    gate = gate_half(torch.cat([W, torch.randn_like(W)], 1)) if fused else W
    found = erc(R, gate, alpha=alpha, generator=seeded(7)).loss
    torch.testing.assert_close(found, double_loop(R, W, alpha, 7), rtol=0, atol=1e-12)


@given(seed=st.integers(0, 200), n=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_not_negative_and_falling_in_alpha(seed, n):
    R, W = layer(n, seed=seed)
    values = [erc(R, W, alpha=a, generator=seeded(seed)).loss for a in (0.0, 0.3, 0.7, 1.0, 2.0)]
    assert all(v >= 0 for v in values)
    assert all(a >= b - 1e-12 for a, b in pairwise(values))


def test_a_dominant_diagonal_costs_nothing():
    R = 3 * torch.eye(4, dtype=torch.float64)
    W = torch.diag_embed(torch.eye(4, dtype=torch.float64))
    found = erc(R, W, alpha=0.5, generator=seeded())
    assert found.loss == 0
    assert found.diagonal_dominant == 1


@given(factor=st.floats(0.01, 100))
@settings(max_examples=20, deadline=None)
def test_homogeneous_in_both(factor):
    R, W = layer(5)
    base = erc(R, W, generator=seeded(3)).loss
    torch.testing.assert_close(erc(R * factor, W, generator=seeded(3)).loss, base * factor)
    torch.testing.assert_close(erc(R, W * factor, generator=seeded(3)).loss, base * factor)
    torch.testing.assert_close(noise_bound(R * factor), noise_bound(R))
    torch.testing.assert_close(
        erc(R * factor, W, generator=seeded(3)).relative, erc(R, W, generator=seeded(3)).relative
    )


@given(seed=st.integers(0, 500), n=st.integers(2, 8))
@settings(max_examples=40, deadline=None)
def test_proxies_stay_in_their_own_cluster(seed, n):
    R, _ = layer(n, seed=seed)
    epsilon = noise_bound(R)
    u = torch.empty_like(R).uniform_(-1, 1, generator=seeded(seed))
    proxy = R * (1 + epsilon[:, None] * u)
    distance = torch.cdist(R, R).fill_diagonal_(float("inf")).amin(1)
    assert ((proxy - R).norm(dim=1) <= distance / 2 + 1e-9).all()
    assert (torch.cdist(proxy, R).argmin(1) == torch.arange(n)).all()


def test_permuting_experts_with_their_noise():
    R, W = layer(6)
    order = torch.randperm(6, generator=seeded(1))
    torch.testing.assert_close(erc(R[order], W[order], noise=False).loss, erc(R, W, noise=False).loss)


def test_gradcheck_and_no_gradient_for_satisfied_pairs():
    R, W = layer(4)
    R.requires_grad_()
    W.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda R, W: erc(R, W, alpha=0.7, detach_bound=False, generator=seeded(5)).loss, (R, W)
    )
    strong = torch.diag_embed(10 * torch.eye(4, dtype=torch.float64)).requires_grad_()
    rows = torch.eye(4, dtype=torch.float64).requires_grad_()
    erc(rows, strong, generator=seeded()).loss.backward()
    assert rows.grad.abs().max() == 0
    assert strong.grad.abs().max() == 0


def test_gradient_through_the_bound_only_on_request():
    R, W = layer(4)
    R.requires_grad_()
    grads = [
        torch.autograd.grad(erc(R, W, detach_bound=flag, generator=seeded(5)).loss, R)[0]
        for flag in (True, False)
    ]
    assert not torch.allclose(*grads)


def test_routing_uses_the_clean_rows():
    R, W = layer(4)
    x = torch.randn(9, 6, dtype=torch.float64)
    before = x @ R.t()
    erc(R, W, generator=seeded())
    assert torch.equal(before, x @ R.t())


def test_equal_rows_and_a_zero_row_stay_finite():
    R, W = layer(4)
    R[1] = R[0]
    R[2] = 0
    R.requires_grad_()
    W.requires_grad_()
    found = erc(R, W, detach_bound=False, generator=seeded())
    found.loss.backward()
    assert found.loss.isfinite()
    assert R.grad.isfinite().all()
    assert W.grad.isfinite().all()
    assert noise_bound(R)[:3].tolist() == [0, 0, 0]


def test_cost_is_n_squared_whatever_the_tokens():
    R, W = layer(8, d=16, f=12)
    with FlopCounterMode(display=False) as counter:
        erc(R, W, generator=seeded())
    assert counter.get_total_flops() == 2 * 8 * 8 * 16 * 12


def test_optimising_the_loss_alone_reaches_dominance():
    g = seeded(0)
    R = torch.randn(16, 64, generator=g).requires_grad_()
    W = (torch.randn(16, 32, 64, generator=g) / 8).requires_grad_()
    optimiser = torch.optim.Adam([R, W], 1e-2)
    for _ in range(400):
        found = erc(R, W, alpha=0.5, generator=g)
        optimiser.zero_grad()
        found.loss.backward()
        optimiser.step()
    assert found.loss < 1e-3
    assert found.diagonal_dominant == 1


def test_half_precision_is_computed_in_float32():
    R, W = layer(5)
    found = erc(R.bfloat16(), W.bfloat16(), noise=False).loss
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, erc(R.bfloat16().float(), W.bfloat16().float(), noise=False).loss)


def test_upcycled_experts_have_equal_columns():
    R, W = layer(4)
    found = erc(R, W[:1].expand(4, -1, -1), alpha=1.0, noise=False)
    torch.testing.assert_close(found.norms_EE, found.norms_EE[:, :1].expand(4, 4))


def test_bad_arguments():
    R, W = layer(4)
    with pytest.raises(InputError, match="alpha is -1"):
        erc(R, W, alpha=-1)
    with pytest.raises(ShapeError, match=r"\(E, D\), \(E, F, D\)"):
        erc(R, W[:3])
