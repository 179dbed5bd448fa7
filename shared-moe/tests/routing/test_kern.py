"""What KERN has to fulfil, property by property."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_moe.errors import InputError
from shared_moe.losses import load_balance
from shared_moe.routing import KernRouter, topk_route
from shared_moe.routing.kern import dead_token_fraction


def identity_router(experts, k, **options) -> KernRouter:
    """Scores are the input itself."""
    router = KernRouter(experts, experts, k, bias=False, **options).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
    return router


def scores(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(experts=st.integers(1, 20), gamma=st.floats(-3, 3), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_squared_weights_are_bounded_by_gamma(experts, gamma, seed):
    router = identity_router(experts, experts)
    with torch.no_grad():
        router.gamma.fill_(gamma)
    s = scores(6, experts, seed=seed)
    total = router(s).probs_TE.square().sum(1)
    assert (total <= gamma**2 + 1e-9).all()
    positive = router(s.abs() + 0.1).probs_TE.square().sum(1)
    torch.testing.assert_close(positive, torch.full_like(positive, gamma**2), rtol=1e-4, atol=1e-9)


@given(scale=st.floats(0.1, 100))
@settings(max_examples=20, deadline=None)
def test_scale_invariance_in_contrast_with_softmax(scale):
    s = scores(5, 8)
    router = identity_router(8, 3, eps=0.0)
    torch.testing.assert_close(router(s * scale).weights_TK, router(s).weights_TK, rtol=1e-9, atol=1e-12)
    if abs(scale - 1) > 0.05:
        assert (topk_route(s * scale, 3).weights_TK - topk_route(s, 3).weights_TK).abs().max() > 1e-3


def test_the_frame_holds_softmax_and_sigmoid():
    s = scores(20, 8)
    softmax = identity_router(8, 8, phi="exp", norm="l1")
    torch.testing.assert_close(softmax(s).probs_TE, s.softmax(1), rtol=0, atol=1e-12)
    assert softmax.is_simplex
    sigmoid = identity_router(8, 8, phi="sigmoid", norm="none")
    torch.testing.assert_close(sigmoid(s).probs_TE, s.sigmoid(), rtol=0, atol=1e-12)
    tanh = identity_router(8, 8, phi="tanh", norm="none")
    torch.testing.assert_close(tanh(s).probs_TE, s.tanh(), rtol=0, atol=1e-12)


def test_no_derivative_along_the_scores():
    router = identity_router(8, 8, eps=0.0)
    s = scores(4, 8)
    _, tangent = torch.func.jvp(lambda s: router(s).probs_TE, (s,), (s,))
    assert tangent.abs().max() < 1e-12


def test_jacobian_and_no_saturation():
    router = identity_router(6, 6, eps=0.0)
    s = scores(1, 6).abs() + 0.1
    jacobian = torch.autograd.functional.jacobian(lambda s: router(s).probs_TE[0], s)[:, 0]
    unit = s[0] / s.norm()
    torch.testing.assert_close(jacobian, (torch.eye(6).double() - torch.outer(unit, unit)) / s.norm())

    def slope(other, softmax):
        s = torch.tensor([[0.01, other, other]], dtype=torch.float64)
        gate = (lambda s: s.softmax(1)) if softmax else (lambda s: identity_router(3, 3, eps=0.0)(s).probs_TE)
        return torch.autograd.functional.jacobian(lambda s: gate(s)[0, 0], s)[0, 0].item()

    assert slope(6.0, softmax=False) > 0.1
    assert slope(6.0, softmax=True) < 0.01


def test_gammas_gradient_is_the_inner_product():
    router = identity_router(8, 8)
    s, upstream = scores(9, 8), scores(9, 8, seed=1)
    (router(s).probs_TE * upstream).sum().backward()
    relu = (s / (s.norm(dim=1, keepdim=True) + 1e-6)).relu()
    torch.testing.assert_close(router.gamma.grad, (relu * upstream).sum())


def test_permuting_experts_permutes_the_gates():
    s, order = scores(7, 8), torch.randperm(8, generator=torch.Generator().manual_seed(3))
    router = identity_router(8, 3)
    torch.testing.assert_close(router(s[:, order]).probs_TE, router(s).probs_TE[:, order])


def test_all_experts_with_positive_scores_is_no_top_k():
    s = scores(7, 8).abs()
    router = identity_router(8, 8)
    routing = router(s)
    dense = torch.zeros_like(s).scatter(1, routing.expert_ids_TK, routing.weights_TK)
    torch.testing.assert_close(dense, routing.probs_TE)


@pytest.mark.parametrize(("experts", "expected"), [(8, 0.50), (32, 0.45), (256, 0.16)])
def test_scale_after_the_top_8(experts, expected):
    routing = identity_router(experts, 8)(scores(20_000, experts))
    assert routing.weights_TK.square().sum(1).mean().item() == pytest.approx(expected, abs=0.01)
    assert routing.probs_TE.square().sum(1).mean().item() == pytest.approx(0.5, abs=0.01)


def test_zero_scores_and_dead_tokens():
    router = identity_router(4, 2)
    x = torch.zeros(2, 4, dtype=torch.float64)
    x[1] = -1.0
    x.requires_grad_()
    routing = router(x)
    assert (routing.weights_TK == 0).all()
    assert (routing.expert_ids_TK == -1).all()
    assert dead_token_fraction(routing) == 1
    routing.probs_TE.sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad[1] == 0).all()
    assert router.weight.grad.isfinite().all()


def test_nan_shows_in_its_token_alone():
    s = scores(3, 4)
    s[1, 0] = float("nan")
    weights = identity_router(4, 2)(s).weights_TK
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


def test_zero_weight_pairs_are_dropped_from_dispatch():
    routing = identity_router(4, 3)(torch.tensor([[2.0, -1, -1, 1]], dtype=torch.float64))
    assert routing.expert_ids_TK.tolist() == [[0, 3, -1]]
    assert routing.weights_TK[0, 2] == 0


def test_a_negative_gamma_flips_the_output_and_not_the_choice():
    router = identity_router(6, 2)
    s = scores(5, 6)
    before = router(s)
    with torch.no_grad():
        router.gamma.neg_()
    after = router(s)
    assert torch.equal(before.expert_ids_TK, after.expert_ids_TK)
    torch.testing.assert_close(before.weights_TK, -after.weights_TK)


def test_norm_over_the_chosen():
    s = scores(5, 6).abs()
    weights = identity_router(6, 2, norm_over="topk", eps=0.0)(s).weights_TK
    torch.testing.assert_close(weights.square().sum(1), torch.ones(5, dtype=torch.float64))


def test_bad_arguments_and_no_claims_of_probability():
    with pytest.raises(InputError, match="top_k is 5 of 4"):
        KernRouter(4, 4, 5)
    with pytest.raises(InputError, match="phi='gelu'"):
        KernRouter(4, 4, 2, phi="gelu")
    router = identity_router(4, 2)
    assert not router.is_simplex
    routing = router(scores(5, 4))
    with pytest.raises(InputError, match="pass logits"):
        load_balance(routing.probs_TE, routing.expert_ids_TK)
    assert load_balance(routing.logits_TE.softmax(1), routing.expert_ids_TK) > 0


def test_half_precision_is_computed_in_float32():
    router = KernRouter(16, 8, 2, generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 16) * 1e-3
    half = router.bfloat16()(x.bfloat16())
    assert half.weights_TK.dtype == torch.float32
    assert half.probs_TE.square().sum(1).max() <= 1
