"""What DirMoE has to fulfil, property by property."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_moe.errors import InputError
from shared_moe.experts import FFNExperts
from shared_moe.layer import MoE
from shared_moe.routing import DirichletRouter
from shared_moe.routing.dirichlet import (
    CONCENTRATION_RANGE,
    _log_mix,
    dirichlet_kl,
    relaxed_bernoulli,
    sample_dirichlet,
)
from shared_moe.routing.dirichlet_calibration import (
    expected_simpson,
    ratio_from_mass,
    scale_from_simpson,
    scale_from_variance,
)
from shared_moe.routing.schedules import DirichletSchedule


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def build(dim=8, experts=6, k=2, seed=0, **options) -> DirichletRouter:
    return DirichletRouter(dim, experts, k, generator=seeded(seed), **options).double()


def trained(**options) -> DirichletRouter:
    """With heads that are not zero any more."""
    router = build(**options)
    with torch.no_grad():
        for p in (router.high, router.low, router.decoder):
            p.normal_(0, 0.5, generator=seeded(9))
        router.weight.normal_(0, 1, generator=seeded(8))
    return router


@pytest.mark.parametrize("mode", ["dense", "sparse"])
@pytest.mark.parametrize("level", [-50.0, -5.0, 0.0, 5.0, 50.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_weights_are_a_distribution_whatever_the_logits_and_concentrations(mode, level, scale):
    router = trained(mode=mode, scale=scale, ratio=27.0)
    with torch.no_grad():
        router.bias.copy_(torch.linspace(-1, 1, 6) * 10 + level)
    x = torch.randn(40, 8, dtype=torch.float64, generator=seeded(1)).requires_grad_()
    routing = router(x, generator=seeded(2))
    assert (routing.weights_TK >= 0).all()
    torch.testing.assert_close(
        routing.weights_TK.sum(1), torch.ones(40, dtype=torch.float64), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        routing.probs_TE.sum(1), torch.ones(40, dtype=torch.float64), rtol=0, atol=1e-6
    )
    (routing.weights_TK.square().sum() + router.auxiliary_loss(routing)).backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in router.parameters())


@given(
    a=st.lists(st.floats(1e-3, 1e4), min_size=4, max_size=4),
    b=st.lists(st.floats(1e-3, 1e4), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_kl_is_not_negative_and_zero_for_equals(a, b):
    a, b = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    assert dirichlet_kl(a, b).item() > -1e-6
    assert dirichlet_kl(a, a).item() == 0
    if ((a - b).abs() / b).max() > 0.1:
        assert dirichlet_kl(a, b).item() > 0


def test_kl_matches_torch_and_monte_carlo():
    a, b = (
        torch.tensor([[0.7, 2.0, 5.0]], dtype=torch.float64),
        torch.tensor([[1.0, 1.0, 3.0]], dtype=torch.float64),
    )
    p, q = torch.distributions.Dirichlet(a), torch.distributions.Dirichlet(b)
    torch.testing.assert_close(dirichlet_kl(a, b), torch.distributions.kl_divergence(p, q))
    theta = sample_dirichlet(a.expand(100_000, 3), seeded())
    ratio = p.log_prob(theta) - q.log_prob(theta)
    assert abs(ratio.mean() - dirichlet_kl(a, b)[0]) < 3 * ratio.std() / math.sqrt(len(ratio))


@pytest.mark.parametrize(
    ("E", "k", "m", "v"), [(8, 2, 0.9, 0.01), (8, 2, 0.9, 0.0225), (16, 3, 0.7, 0.02), (32, 1, 0.5, 0.1)]
)
def test_mass_and_variance_of_the_active_set(E, k, m, v):
    ratio = ratio_from_mass(m, E, k)
    scale = scale_from_variance(m, v, E, k)
    b = torch.ones(E, dtype=torch.float64)
    b[:k] = ratio
    mass = sample_dirichlet((scale * b).expand(100_000, E), seeded())[:, :k].sum(1)
    n = len(mass)
    assert abs(mass.mean() - m) < 3 * math.sqrt(v / n)
    spread = ((mass - m) ** 2).std() / math.sqrt(n)
    assert abs(mass.var() - v) < 3 * spread
    simpson = sample_dirichlet((scale * b).expand(100_000, E), seeded(1)).square().sum(1)
    assert abs(simpson.mean() - expected_simpson(scale, b.tolist())) < 3 * simpson.std() / math.sqrt(n)


def test_a_known_example_and_round_trip():
    assert ratio_from_mass(0.9, 8, 2) == pytest.approx(27)
    for h in (0.13, 0.3, 0.9):
        scale = scale_from_simpson(h, 8)
        assert expected_simpson(scale, [1.0] * 8) == pytest.approx(h)


@given(b=st.lists(st.floats(0.1, 30), min_size=2, max_size=8))
@settings(max_examples=30, deadline=None)
def test_simpson_falls_with_the_scale_between_its_limits(b):
    values = [expected_simpson(10.0**e, b) for e in range(-8, 9)]
    assert all(x > y for x, y in pairwise(values))
    total, squares = sum(b), sum(x * x for x in b)
    assert values[0] == pytest.approx(1, abs=1e-4)
    assert values[-1] == pytest.approx(squares / total**2, abs=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ratio_from_mass(0.0, 8, 2),
        lambda: ratio_from_mass(1.0, 8, 2),
        lambda: ratio_from_mass(0.9, 8, 0),
        lambda: ratio_from_mass(0.9, 8, 8),
        lambda: ratio_from_mass(0.9, 8, 1.5),
        lambda: scale_from_variance(0.9, 0.09, 8, 2),
        lambda: scale_from_variance(0.9, 0.0, 8, 2),
        lambda: scale_from_simpson(1 / 8, 8),
        lambda: scale_from_simpson(1.0, 8),
        lambda: build(k=1.5),
        lambda: build(k=7),
        lambda: build(mode="both"),
        lambda: build(top_k=7),
        lambda: DirichletSchedule(0),
    ],
)
def test_bad_numbers_are_refused(call):
    with pytest.raises(InputError):
        call()


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.01])
def test_gates_open_with_the_sigmoid_of_their_logit_at_any_temperature(temperature):
    logits = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
    z = relaxed_bernoulli(logits.expand(100_000, 3), temperature, seeded())
    share = (z > 0.5).double().mean(0)
    sigma = (share * (1 - share) / 100_000).sqrt()
    assert ((share - logits.sigmoid()).abs() < 3.5 * sigma).all()
    if temperature == 0.01:
        assert (torch.minimum(z, 1 - z) < 0.01).double().mean() > 0.95


def test_one_open_gate_gives_that_expert_alone():
    router = build(temperature=0.01)
    with torch.no_grad():
        router.weight.zero_()
        router.bias.fill_(-40.0)
        router.bias[3] = 40.0
    x = torch.randn(10, 8, dtype=torch.float64)
    routing = router(x, generator=seeded())
    assert (routing.probs_TE[:, 3] > 1 - 1e-6).all()
    experts = FFNExperts(8, 4, 6).double()
    y, _ = MoE(router, experts)(x, generator=seeded())
    alone = experts(
        x,
        type(routing)(
            torch.full((10, 1), 3), torch.ones(10, 1).double(), routing.probs_TE, routing.logits_TE
        ),
    )
    torch.testing.assert_close(y, alone, rtol=1e-5, atol=1e-6)


def test_all_gates_open_and_equal_levels_is_a_plain_dirichlet():
    theta = sample_dirichlet(torch.full((5, 4), 2.0), seeded())
    torch.testing.assert_close(_log_mix(torch.zeros(5, 4).double(), theta).exp(), theta)


def test_dense_and_sparse_coincide_as_the_temperature_falls():
    x = torch.randn(200, 8, dtype=torch.float64, generator=seeded(1))
    rows = []
    for mode in ("dense", "sparse"):
        router = trained(mode=mode, temperature=1e-3, k_max=6)
        routing = router(x, generator=seeded(2))
        full = torch.zeros(200, 7, dtype=torch.float64)
        rows.append(full.scatter_add(1, routing.expert_ids_TK % 7, routing.weights_TK)[:, :6])
    assert ((rows[0] - rows[1]).abs().max(1).values < 1e-3).double().mean() > 0.97


@pytest.mark.parametrize("power", [1, 2])
def test_implicit_gradient_agrees_with_the_closed_form(power):
    a = torch.tensor([0.8, 1.5, 3.0], dtype=torch.float64, requires_grad=True)
    theta = sample_dirichlet(a.expand(400_000, 3), seeded())
    (found,) = torch.autograd.grad(theta[:, 0].pow(power).mean(), a)
    total = a.sum()
    closed = a[0] / total if power == 1 else a[0] * (a[0] + 1) / (total * (total + 1))
    (expected,) = torch.autograd.grad(closed, a)
    assert (found - expected).abs().max() < 0.01 * expected.abs().max() + 2e-4


def test_penalty_gradient_has_the_sign_of_the_excess():
    router = build(k=2)
    x = torch.randn(1, 8, dtype=torch.float64)
    for bias, sign in ((5.0, 1), (-5.0, -1)):
        with torch.no_grad():
            router.bias.fill_(bias)
        (grad,) = torch.autograd.grad(router(x, generator=seeded()).losses["sparsity"], router.bias)
        assert (grad.sign() == sign).all()


def test_permuting_experts_leaves_the_inference_output():
    router, experts = trained().eval(), FFNExperts(8, 4, 6).double()
    x = torch.randn(12, 8, dtype=torch.float64)
    y, routing = MoE(router, experts)(x)
    order = torch.randperm(6, generator=seeded(3))
    with torch.no_grad():
        for p in (
            router.weight,
            router.bias,
            router.high,
            router.low,
            experts.gate_up_proj,
            experts.down_proj,
        ):
            p.copy_(p[order].clone())
    y2, permuted = MoE(router, experts)(x)
    torch.testing.assert_close(permuted.probs_TE, routing.probs_TE[:, order])
    torch.testing.assert_close(y2, y)


def test_same_seed_same_output_and_eval_draws_nothing():
    router = trained()
    x = torch.randn(9, 8, dtype=torch.float64)
    state = torch.get_rng_state()
    a, b, c = (router(x, generator=seeded(s)).weights_TK for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    router.eval()
    assert torch.equal(router(x).weights_TK, router(x).weights_TK)
    assert torch.equal(state, torch.get_rng_state())


def test_tokens_do_not_see_one_another_at_inference():
    router = trained().eval()
    x = torch.randn(9, 8, dtype=torch.float64)
    halves = torch.cat([router(x[:4]).weights_TK, router(x[4:]).weights_TK])
    torch.testing.assert_close(router(x).weights_TK, halves)


def test_tokens_do_not_see_one_another_given_the_noise():
    z = relaxed_bernoulli(torch.randn(6, 4).double(), 0.5, seeded())
    theta = sample_dirichlet(torch.rand(6, 4) + 0.5, seeded())
    together = _log_mix(z.log(), theta)
    torch.testing.assert_close(
        together, torch.cat([_log_mix(z[:2].log(), theta[:2]), _log_mix(z[2:].log(), theta[2:])])
    )


def test_inference_rule():
    router = trained().eval()
    x = torch.randn(50, 8, dtype=torch.float64)
    routing = router(x)
    open_gates = routing.logits_TE > 0
    none = ~open_gates.any(1)
    open_gates[none] = torch.nn.functional.one_hot(routing.logits_TE[none].argmax(1), 6).bool()
    assert torch.equal(routing.probs_TE > 0, open_gates)
    a = router.posterior(x, open_gates.double()) * open_gates
    torch.testing.assert_close(routing.probs_TE, a / a.sum(1, keepdim=True))
    router.top_k = 3
    exact = router(x)
    assert (exact.expert_ids_TK >= 0).all()
    torch.testing.assert_close(exact.weights_TK.sum(1), torch.ones(50, dtype=torch.float64))
    enough = open_gates.sum(1) >= 3
    best = routing.probs_TE[enough].topk(3).indices.sort(1).values
    assert torch.equal(exact.expert_ids_TK[enough].sort(1).values, best)


def test_sparse_mode_runs_at_most_k_max_and_at_least_one():
    router = trained(mode="sparse", k_max=3)
    routing = router(torch.randn(300, 8, dtype=torch.float64), generator=seeded())
    active = (routing.expert_ids_TK >= 0).sum(1)
    assert routing.expert_ids_TK.shape == (300, 3)
    assert active.min() >= 1
    assert active.max() <= 3
    assert (routing.weights_TK[routing.expert_ids_TK < 0] == 0).all()


def test_the_start_is_the_prior_with_k_open_gates():
    router = build(experts=16, k=4)
    routing = router(torch.randn(2000, 8, dtype=torch.float64), generator=seeded())
    assert routing.losses["kl"].item() == pytest.approx(0, abs=1e-9)
    assert routing.logits_TE.sigmoid().sum(1).mean().item() == pytest.approx(4, abs=0.1)


def test_weighted_sum_of_the_terms():
    router = trained(beta_theta=0.5, sparsity_weight=0.2, reconstruction_weight=0.1, beta_z=0.3)
    routing = router(torch.randn(5, 8, dtype=torch.float64), generator=seeded())
    terms = routing.losses
    assert set(terms) == {"kl", "sparsity", "reconstruction", "gate_kl"}
    expected = (
        0.5 * terms["kl"] + 0.2 * terms["sparsity"] + 0.1 * terms["reconstruction"] + 0.3 * terms["gate_kl"]
    )
    torch.testing.assert_close(router.auxiliary_loss(routing), expected)
    assert all(v >= 0 for v in terms.values())
    router.eval()
    assert router.auxiliary_loss(router(torch.randn(5, 8).double())) == 0


def test_one_expert_and_a_fraction():
    one = DirichletRouter(8, 1, 1)
    torch.testing.assert_close(one(torch.randn(4, 8)).weights_TK, torch.ones(4, 1))
    fraction = DirichletRouter(8, 4, 1.5, ratio=10.0, scale=0.5)
    assert fraction(torch.randn(4, 8)).losses["sparsity"].isfinite()


def test_half_precision_is_computed_in_float32():
    routing = DirichletRouter(8, 4, 2).bfloat16()(torch.randn(5, 8).bfloat16(), generator=seeded())
    assert routing.weights_TK.dtype == torch.float32
    torch.testing.assert_close(routing.weights_TK.sum(1), torch.ones(5))


def test_schedule_reaches_its_ends_and_is_saved_with_the_model():
    schedule = DirichletSchedule(100)
    assert schedule.temperature(0) == 1
    assert schedule.temperature(25) == pytest.approx(10**-0.5)
    assert schedule.temperature(50) == schedule.temperature(100) == pytest.approx(0.1)
    assert schedule.a_lo(0, 27, 27) == 27
    assert schedule.a_lo(50, 27, 27) == schedule.a_lo(90, 27, 27) == pytest.approx(1)
    router = build(schedule=schedule)
    router.step.fill_(25)
    other = build(schedule=schedule)
    other.load_state_dict(router.state_dict())
    assert other.current_temperature() == router.current_temperature() < 1


def test_concentrations_stay_in_their_clamp():
    low, high = CONCENTRATION_RANGE
    for scale in (1e-9, 1e9):
        router = trained(scale=scale, ratio=27.0)
        a = router.posterior(torch.randn(5, 8).double(), torch.rand(5, 6).double())
        assert low <= a.min()
        assert a.max() <= high


def test_the_penalty_brings_the_expected_count_to_k():
    router = DirichletRouter(8, 8, 2, generator=seeded(), sparsity_weight=0.01)
    with torch.no_grad():
        router.bias.fill_(3.0)  # all gates open at the start
    optimiser = torch.optim.Adam(router.parameters(), 0.05)
    g = seeded(1)
    for _ in range(500):
        routing = router(torch.randn(64, 8, generator=g), generator=g)
        optimiser.zero_grad()
        router.auxiliary_loss(routing).backward()
        optimiser.step()
    counts = [
        relaxed_bernoulli(router(torch.randn(500, 8, generator=g), generator=g).logits_TE, 1.0, g)
        .sum(1)
        .mean()
        for _ in range(4)
    ]
    assert torch.stack(counts).mean().item() == pytest.approx(2, rel=0.1)
