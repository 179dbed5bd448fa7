"""What DirMoE has to fulfil, property by property."""

import dataclasses
import json
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_moe.errors import InputError, ShapeError
from shared_moe.experts import FFNExperts
from shared_moe.hub import load_pretrained, save_pretrained
from shared_moe.layer import MoE
from shared_moe.routing import DirichletRouter, dirichlet
from shared_moe.routing.dirichlet import (
    CONCENTRATION_RANGE,
    GRADIENT_LIMIT,
    dirichlet_kl,
    mix_weights,
    relaxed_gates,
    sample_log_dirichlet,
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


def sample_dirichlet(a, generator):
    return sample_log_dirichlet(a, generator).exp()


def fixed_noise(monkeypatch, gate_NE, theta_NE, rows=slice(None), columns=slice(None)):
    """Noise that is the test's own: the sampler becomes a function of each concentration and its noise alone."""
    monkeypatch.setattr(
        dirichlet, "relaxed_gates", lambda logits, tau, _: (logits + gate_NE[rows][:, columns]) / tau
    )
    monkeypatch.setattr(
        dirichlet,
        "sample_log_dirichlet",
        lambda a, _: (a.log() + theta_NE[rows][:, columns] / a.sqrt()).log_softmax(1),
    )


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
    logits=st.lists(st.floats(-50, 50), min_size=5, max_size=5),
    concentrations=st.lists(st.floats(-3, 4).map(lambda e: 10.0**e), min_size=5, max_size=5),
    temperature=st.sampled_from([1.0, 0.1, 1e-2]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_weights_and_gradients_are_finite_for_any_logits_and_concentrations(
    logits, concentrations, temperature, dtype, seed
):
    logits = torch.tensor([logits], dtype=dtype).expand(20, 5).clone().requires_grad_()
    a = torch.tensor([concentrations], dtype=dtype).expand(20, 5).clone().requires_grad_()
    generator = seeded(seed)
    r = mix_weights(relaxed_gates(logits, temperature, generator), sample_log_dirichlet(a, generator)).exp()
    r = r.to(dtype)
    assert (r >= 0).all()
    torch.testing.assert_close(r.sum(1), torch.ones(20, dtype=dtype), rtol=0, atol=1e-6)
    r.square().sum().backward()
    assert logits.grad.isfinite().all()
    assert a.grad.isfinite().all()


@given(
    logits=st.lists(st.floats(-50, 50), min_size=5, max_size=5),
    scale=st.floats(-4, 4).map(lambda e: 10.0**e),
    ratio=st.floats(0, 4).map(lambda e: 10.0**e),
    temperature=st.sampled_from([1.0, 0.1, 1e-2]),
    mode=st.sampled_from(["dense", "sparse"]),
    k_max=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_a_float32_router_stays_finite(logits, scale, ratio, temperature, mode, k_max, seed):
    router = trained(experts=5, scale=scale, ratio=ratio, temperature=temperature, mode=mode, k_max=k_max)
    router.float()
    with torch.no_grad():
        router.weight.zero_()
        router.bias.copy_(torch.tensor(logits))
    x = torch.randn(20, 8, generator=seeded(1)).requires_grad_()
    routing = router(x, generator=seeded(seed))
    for weights in (routing.weights_TK, routing.probs_TE, router.eval()(x).weights_TK):
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(1), torch.ones(20), rtol=0, atol=1e-6)
    (routing.weights_TK.square().sum() + router.auxiliary_loss(routing)).backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in router.parameters())


def test_tiny_concentrations_are_sampled_without_underflow():
    """E[log θ_i] = ψ(a_i) - ψ(A), about -667 here: most of these θ are below the smallest double."""
    a = torch.tensor([1e-3, 2e-3], dtype=torch.float64)
    log_theta = sample_log_dirichlet(a.expand(100_000, 2), seeded())
    error = log_theta.mean(0) - (a.digamma() - a.sum().digamma())
    assert (error.abs() < 3 * log_theta.std(0) / math.sqrt(100_000)).all()
    assert log_theta.min() < -2000


def test_closed_gates_keep_their_proportions():
    gates = torch.tensor([[-500.0, -501.0, -800.0]])
    r = mix_weights(gates, torch.full((1, 3), -2000.0).double()).exp()
    torch.testing.assert_close(r, torch.tensor([[0.0, -1.0, -300.0]]).double().softmax(1))


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
        lambda: build(k_max=0),
        lambda: build(temperature=0.0),
        lambda: build(ratio=-1.0),
        lambda: build(scale=math.nan),
        lambda: DirichletSchedule(10, scale_start=0.0),
        lambda: DirichletSchedule(0),
    ],
)
def test_bad_numbers_are_refused(call):
    with pytest.raises(InputError):
        call()


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.01])
def test_gates_open_with_the_sigmoid_of_their_logit_at_any_temperature(temperature):
    logits = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
    z = relaxed_gates(logits.expand(100_000, 3), temperature, seeded()).sigmoid()
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
    router = build(experts=4, ratio=1.0, scale=0.8)
    with torch.no_grad():
        router.weight.zero_()
        router.bias.fill_(50.0)
    r = router(torch.zeros(50_000, 8, dtype=torch.float64), generator=seeded()).probs_TE
    n, A = len(r), 4 * 0.8
    assert ((r.mean(0) - 1 / 4).abs() < 3.5 * r.std(0) / math.sqrt(n)).all()
    square, log = r.square(), r.log()
    second = 0.8 * 1.8 / (A * (A + 1))
    assert ((square.mean(0) - second).abs() < 3.5 * square.std(0) / math.sqrt(n)).all()
    mean_log = torch.digamma(torch.tensor(0.8)) - torch.digamma(torch.tensor(A))
    assert ((log.mean(0) - mean_log).abs() < 3.5 * log.std(0) / math.sqrt(n)).all()


def test_dense_and_sparse_coincide_as_the_temperature_falls():
    x = torch.randn(500, 8, dtype=torch.float64, generator=seeded(1))
    rows = []
    for mode in ("dense", "sparse"):
        router = trained(mode=mode, temperature=1e-7, k_max=6)
        routing = router(x, generator=seeded(2))
        full = torch.zeros(500, 7, dtype=torch.float64)
        rows.append(full.scatter_add(1, routing.expert_ids_TK % 7, routing.weights_TK)[:, :6])
    torch.testing.assert_close(*rows, rtol=0, atol=1e-6)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("a", [(0.8, 1.5, 3.0), (0.05, 0.2, 0.1), (40.0, 3.0, 200.0)])
def test_implicit_gradient_agrees_with_the_closed_form(a, power):
    n = 200_000
    a_N3 = torch.tensor(a, dtype=torch.float64).repeat(n, 1).requires_grad_()
    theta = sample_dirichlet(a_N3, seeded())
    (each,) = torch.autograd.grad(theta[:, 0].pow(power).sum(), a_N3)
    a_3 = torch.tensor(a, dtype=torch.float64, requires_grad=True)
    total = a_3.sum()
    closed = a_3[0] / total if power == 1 else a_3[0] * (a_3[0] + 1) / (total * (total + 1))
    (expected,) = torch.autograd.grad(closed, a_3)
    standard_error = each.std(0) / math.sqrt(n)
    assert (standard_error < 0.05 * expected.abs()).all()
    assert ((each.mean(0) - expected).abs() < 3.5 * standard_error).all()


def test_implicit_gradient_agrees_with_finite_differences_of_monte_carlo():
    a, step, n = torch.tensor([0.8, 1.5, 3.0], dtype=torch.float64), 0.1, 400_000
    a_N3 = a.repeat(n, 1).requires_grad_()
    (each,) = torch.autograd.grad(sample_dirichlet(a_N3, seeded())[:, 0].sum(), a_N3)
    shift = torch.tensor([step, 0, 0], dtype=torch.float64)
    up, down = (sample_dirichlet((a + s).expand(n, 3), seeded(1))[:, 0] for s in (shift, -shift))
    slope = (up.mean() - down.mean()) / (2 * step)
    noise = math.hypot((up.std() + down.std()) / (2 * step), each[:, 0].std()) / math.sqrt(n)
    assert abs(each[:, 0].mean() - slope) < 3 * noise + 1e-4  # the step's own error is below 1e-4
    assert noise < 0.05 * slope


def test_the_concentrations_gradient_is_clipped(monkeypatch):
    seen = []
    clip = dirichlet._clip
    monkeypatch.setattr(dirichlet, "_clip", lambda grad: seen.append((grad, clip(grad))) or seen[-1][1])
    router = trained(scale=1e-6, ratio=27.0)
    routing = router(torch.randn(50, 8, dtype=torch.float64), generator=seeded())
    (1e6 * routing.weights_TK[:, 0].sum()).backward()
    ((raw, clipped),) = seen
    assert raw.abs().max() > GRADIENT_LIMIT
    assert clipped.abs().max() == GRADIENT_LIMIT


def test_penalty_gradient_has_the_sign_of_the_excess():
    router = build(k=2)
    x = torch.randn(1, 8, dtype=torch.float64)
    for bias, sign in ((5.0, 1), (-5.0, -1)):
        with torch.no_grad():
            router.bias.fill_(bias)
        (grad,) = torch.autograd.grad(router(x, generator=seeded()).losses["sparsity"], router.bias)
        assert (grad.sign() == sign).all()


@pytest.mark.parametrize("mode", ["dense", "sparse", "eval"])
def test_permuting_experts_permutes_r_and_leaves_y(mode, monkeypatch):
    router = trained() if mode == "eval" else trained(mode=mode)
    router.train(mode != "eval")
    experts = FFNExperts(8, 4, 6).double()
    x, gate, theta = (torch.randn(12, n, dtype=torch.float64, generator=seeded(n)) for n in (8, 6, 6))
    order = torch.randperm(6, generator=seeded(3))
    fixed_noise(monkeypatch, gate, theta)
    y, routing = MoE(router, experts)(x)
    with torch.no_grad():
        for p in (router.weight, router.bias, router.high, router.low):
            p.copy_(p[order].clone())
        router.decoder.copy_(router.decoder[:, order].clone())
        for p in (experts.gate_up_proj, experts.down_proj):
            p.copy_(p[order].clone())
    fixed_noise(monkeypatch, gate, theta, columns=order)
    y2, permuted = MoE(router, experts)(x)
    torch.testing.assert_close(permuted.probs_TE, routing.probs_TE[:, order])
    torch.testing.assert_close(y2, y)
    assert permuted.losses.keys() == routing.losses.keys()
    for name, value in routing.losses.items():
        torch.testing.assert_close(permuted.losses[name], value)


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


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_tokens_do_not_see_one_another_given_the_noise(mode, monkeypatch):
    router = trained(mode=mode)
    x, gate, theta = (torch.randn(12, n, dtype=torch.float64, generator=seeded(n)) for n in (8, 6, 6))
    fixed_noise(monkeypatch, gate, theta)
    whole = router(x)
    parts = []
    for rows in (slice(0, 5), slice(5, 12)):
        fixed_noise(monkeypatch, gate, theta, rows=rows)
        parts.append(router(x[rows]))
    assert torch.equal(torch.cat([p.expert_ids_TK for p in parts]), whole.expert_ids_TK)
    torch.testing.assert_close(torch.cat([p.weights_TK for p in parts]), whole.weights_TK)
    for name, value in whole.losses.items():
        torch.testing.assert_close((5 * parts[0].losses[name] + 7 * parts[1].losses[name]) / 12, value)


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


def test_sparse_mode_follows_its_rule(monkeypatch):
    """One row each: two open; none open (the arg-max); four open, of which the best z θ run."""
    logits = torch.tensor([[3, -0.01, 0.01, -2.0], [-4, -3, -5, -2], [1, 2, 3, 4]]).double()
    theta = torch.tensor([[0.1, 0.7, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1], [0.6, 0.3, 0.06, 0.04]]).double()
    fixed_noise(monkeypatch, logits, theta)
    monkeypatch.setattr(dirichlet, "sample_log_dirichlet", lambda a, _: theta.log())
    router = build(experts=4, mode="sparse", k_max=2)
    with torch.no_grad():
        router.weight.zero_()
        router.bias.zero_()
    routing = router(torch.zeros(3, 8, dtype=torch.float64))
    ids = [sorted(i for i in row if i >= 0) for row in routing.expert_ids_TK.tolist()]
    assert ids == [[0, 2], [3], [0, 1]]
    z_theta = logits.sigmoid() * theta
    for t, chosen in enumerate(ids):
        expected = (z_theta[t, chosen] / z_theta[t, chosen].sum()).sort(descending=True).values
        torch.testing.assert_close(routing.weights_TK[t, : len(chosen)], expected)


def test_sparse_gradients_reach_the_kept_by_r_and_all_by_the_penalty():
    router = build(mode="sparse", k_max=2, ratio=1.0, scale=1.0)  # one level: θ does not depend on the gates
    routing = router(torch.randn(1, 8, dtype=torch.float64), generator=seeded(4))
    kept = torch.zeros(6, dtype=torch.bool)
    kept[routing.expert_ids_TK[routing.expert_ids_TK >= 0]] = True
    assert kept.sum() == 2
    (by_r,) = torch.autograd.grad(routing.weights_TK[0, 0], router.bias, retain_graph=True)
    (by_penalty,) = torch.autograd.grad(routing.losses["sparsity"], router.bias)
    assert torch.equal(by_r.abs() > 1e-12, kept)
    assert (by_penalty != 0).all()


def test_the_reconstruction_target_is_detached():
    router = trained()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    routing = router(x, generator=seeded())
    rebuilt = routing.probs_TE @ router.decoder.t()
    torch.testing.assert_close(routing.losses["reconstruction"], (rebuilt - x).square().mean())
    (found,) = torch.autograd.grad(routing.losses["reconstruction"], x, retain_graph=True)
    (through_r,) = torch.autograd.grad((rebuilt - x.detach()).square().mean(), x)
    torch.testing.assert_close(found, through_r)


def test_the_kl_reaches_the_gates_through_both_arguments():
    """The gradient is the slope of the KL in which posterior and prior see the same moved gates."""
    router = trained()
    x = torch.randn(4, 8, dtype=torch.float64, generator=seeded(1))

    def kl(shift: float) -> torch.Tensor:
        with torch.no_grad():
            router.bias += shift
        value = router(x, generator=seeded()).losses["kl"]
        with torch.no_grad():
            router.bias -= shift
        return value

    (grad,) = torch.autograd.grad(router(x, generator=seeded()).losses["kl"], router.bias)
    slope = (kl(1e-5) - kl(-1e-5)) / 2e-5
    assert grad.sum().item() == pytest.approx(slope.item(), rel=1e-5)


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_nan_shows_in_its_token_alone_and_no_tokens_cost_nothing(mode):
    router = trained(mode=mode)
    x = torch.randn(5, 8, dtype=torch.float64)
    x[2] = math.nan
    for routing in (router(x, generator=seeded()), router.eval()(x)):
        broken = (routing.weights_TK.isnan() & (routing.expert_ids_TK >= 0)).any(1)
        assert broken.tolist() == [False, False, True, False, False]
    empty = router.train()(x[:0])
    assert router.auxiliary_loss(empty) == 0
    with pytest.raises(ShapeError):
        router(torch.randn(5, 7))


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
    router.aux_weight = 2.0
    torch.testing.assert_close(router.auxiliary_loss(routing), 2 * expected)
    router.eval()
    assert router.auxiliary_loss(router(torch.randn(5, 8).double())) == 0


def test_one_expert_and_a_fraction():
    one = DirichletRouter(8, 1, 1)
    torch.testing.assert_close(one(torch.randn(4, 8)).weights_TK, torch.ones(4, 1))
    assert all(v.isfinite() for v in DirichletRouter(8, 4, 4, beta_z=1.0)(torch.randn(4, 8)).losses.values())
    fraction = DirichletRouter(8, 4, 1.5, ratio=10.0, scale=0.5)
    assert fraction(torch.randn(4, 8)).losses["sparsity"].isfinite()


def test_half_precision_is_computed_in_float32():
    routing = DirichletRouter(8, 4, 2).bfloat16()(torch.randn(5, 8).bfloat16(), generator=seeded())
    assert routing.weights_TK.dtype == torch.float32
    torch.testing.assert_close(routing.weights_TK.sum(1), torch.ones(5))


def test_autocast_changes_nothing():
    router = trained().float()
    x = torch.randn(5, 8)
    plain = router(x, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        cast = router(x, generator=seeded())
    assert torch.equal(plain.weights_TK, cast.weights_TK)
    assert {k: v.item() for k, v in plain.losses.items()} == {k: v.item() for k, v in cast.losses.items()}


def test_schedule_reaches_its_ends_and_is_saved_with_the_model(tmp_path):
    schedule = DirichletSchedule(100)
    assert schedule.temperature(0) == 1
    assert schedule.temperature(25) == pytest.approx(10**-0.5)
    assert schedule.temperature(50) == schedule.temperature(100) == pytest.approx(0.1)
    assert schedule.a_lo(0, 27, 27) == 27
    assert schedule.a_lo(50, 27, 27) == schedule.a_lo(90, 27, 27) == pytest.approx(1)
    assert schedule.scale(0, 0.3) == schedule.scale(70, 0.3) == 0.3
    schedule = dataclasses.replace(schedule, scale_start=100.0)
    assert [schedule.scale(t, 0.3) for t in (0, 25, 50, 80)] == pytest.approx([30, 3, 0.3, 0.3])
    router = build(schedule=schedule)
    router.step.fill_(25)
    save_pretrained(tmp_path / "model", router, {"schedule": dataclasses.asdict(schedule)}, "# A router")
    tensors, config = load_pretrained(tmp_path / "model")
    other = build(schedule=DirichletSchedule(**json.loads(json.dumps(config["schedule"]))))
    other.load_state_dict(tensors)
    assert other.current_temperature() == router.current_temperature() < 1
    z = torch.ones(1, 6).double()
    assert torch.equal(other.prior(z), router.prior(z))
    assert not torch.equal(other.prior(z), build(schedule=schedule).prior(z))


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
    logits = router(torch.randn(2000, 8, generator=g), generator=g).logits_TE
    count = relaxed_gates(logits, router.current_temperature(), g).sigmoid().sum(1).mean()
    assert count.item() == pytest.approx(2, rel=0.1)
