import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shared_moe.errors import InputError, ShapeError
from shared_moe.losses import load_balance
from shared_moe.routing import DenseRouter, KernRouter, SigmoidTopKRouter, TopKRouter, topk_route
from shared_moe.routing.topk import expert_counts


def logits(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(tokens=st.integers(0, 6), experts=st.integers(1, 9), data=st.data())
@settings(max_examples=50, deadline=None)
def test_softmax_top_k_by_hand(tokens, experts, data):
    k = data.draw(st.integers(1, experts))
    x = logits(tokens, experts, seed=tokens * 10 + experts)
    for normalised in (True, False):
        routing = topk_route(x, k, norm_topk_prob=normalised)
        probs = x.softmax(1)
        expected = probs.topk(k, dim=1).values
        if normalised:
            expected = expected / expected.sum(1, keepdim=True)
        torch.testing.assert_close(routing.weights_TK, expected)
        torch.testing.assert_close(
            probs.gather(1, routing.expert_ids_TK).sort(1).values, probs.topk(k).values.sort(1).values
        )
        assert torch.equal(routing.logits_TE, x)


def test_sigmoid_top_k_by_hand():
    x = logits(5, 8)
    routing = topk_route(x, 3, scoring="sigmoid", scale=2.5)
    best = x.sigmoid().topk(3).values
    torch.testing.assert_close(routing.weights_TK, 2.5 * best / best.sum(1, keepdim=True))


def test_ties_go_to_the_lowest_index():
    x = torch.tensor([[1.0, 3, 3, 3, 1], [0, 0, 0, 0, 0]])
    assert topk_route(x, 3).expert_ids_TK.tolist() == [[1, 2, 3], [0, 1, 2]]
    many = topk_route(torch.zeros(4, 256), 8)
    assert (many.expert_ids_TK == torch.arange(8)).all()


@pytest.mark.parametrize("score", ["max", "top2"])
def test_group_limited_choice_stays_in_the_best_groups(score):
    x = logits(50, 12)
    routing = topk_route(x, 3, num_groups=4, top_k_groups=2, group_score=score)
    probs = x.softmax(1).view(50, 4, 3)
    best = probs.topk(1 if score == "max" else 2).values.sum(2).topk(2).indices
    allowed = torch.zeros(50, 4, dtype=torch.bool).scatter_(1, best, True)
    assert allowed.gather(1, routing.expert_ids_TK // 3).all()
    inside = probs.masked_fill(~allowed[..., None], -1).view(50, 12).topk(3).indices
    assert torch.equal(inside, routing.expert_ids_TK)
    one_group = topk_route(x, 3, num_groups=1)
    assert torch.equal(one_group.expert_ids_TK, topk_route(x, 3).expert_ids_TK)


def test_selection_bias_moves_the_choice_and_not_the_weights():
    x = torch.zeros(1, 4)
    bias = torch.tensor([0.0, 0, 1, 0])
    routing = topk_route(x, 1, selection_bias_E=bias, norm_topk_prob=False)
    assert routing.expert_ids_TK.item() == 2
    assert routing.weights_TK.item() == 0.25


@pytest.mark.parametrize("recompute", [False, True])
def test_bias_balancing_counts_each_token_once(recompute):
    router = SigmoidTopKRouter(4, 6, 2, bias_balancing=True, generator=torch.Generator().manual_seed(0))
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    kept = []

    def run(x):
        routing = router(x)
        kept.append(routing)
        return routing.weights_TK.square()

    weights = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
    weights.sum().backward()
    assert len(kept) == (2 if recompute else 1)
    counts = router.update_bias(kept[0], rate=0.01)
    assert counts.sum() == 60
    expected = 0.01 * torch.sign(10 - counts)
    torch.testing.assert_close(router.expert_bias, expected - expected.mean())


def test_bias_balancing_evens_the_load_and_keeps_its_mean_at_zero():
    router = TopKRouter(4, 8, 1, bias_balancing=True, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        router.weight.mul_(20)
    x = torch.randn(400, 4, generator=torch.Generator().manual_seed(1)) + 1
    first = expert_counts(router(x).expert_ids_TK, 8).max()
    for _ in range(300):
        router.update_bias(router(x), rate=2e-3)
        assert router.expert_bias.mean().abs() < 1e-6
    assert expert_counts(router(x).expert_ids_TK, 8).max() < 0.5 * first
    with pytest.raises(InputError, match="bias_balancing=True"):
        TopKRouter(4, 8, 1).update_bias(router(x))


@pytest.mark.parametrize(("k", "experts"), [(0, 4), (5, 4), (1, 0)])
def test_k_out_of_range(k, experts):
    with pytest.raises(InputError, match=f"top_k is {k} of {experts}"):
        TopKRouter(4, experts, k)


def test_bad_arguments_are_named():
    with pytest.raises(InputError, match="num_groups must divide"):
        topk_route(torch.zeros(2, 6), 2, num_groups=4)
    with pytest.raises(InputError, match="scoring='argmax'"):
        topk_route(torch.zeros(2, 6), 2, scoring="argmax")
    with pytest.raises(ShapeError, match=r"tokens \(T, 4\)"):
        TopKRouter(4, 4, 2)(torch.zeros(3, 5))
    with pytest.raises(ShapeError, match="int64"):
        TopKRouter(4, 4, 2)(torch.zeros(3, 4, dtype=torch.int64))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_non_finite_logits_show_in_that_token_alone(scoring):
    x = logits(4, 5)
    x[1, 2] = float("nan")
    routing = topk_route(x, 2, scoring=scoring)
    assert routing.weights_TK[1].isnan().any()
    assert routing.weights_TK[[0, 2, 3]].isfinite().all()
    assert ((routing.expert_ids_TK >= 0) & (routing.expert_ids_TK < 5)).all()
    closed = logits(2, 3)
    closed[:, 0] = float("-inf")
    assert topk_route(closed, 3, scoring=scoring).weights_TK.sort(1).values[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("router", [TopKRouter, SigmoidTopKRouter, KernRouter])
def test_edges(router):
    assert router(4, 1, 1)(torch.randn(3, 4)).weights_TK.shape == (3, 1)
    assert router(4, 5, 5)(torch.randn(3, 4)).expert_ids_TK.shape == (3, 5)
    empty = router(4, 5, 2)(torch.randn(0, 4))
    assert empty.expert_ids_TK.shape == (0, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopKRouter(8, 6, 2),
        lambda: SigmoidTopKRouter(8, 6, 2),
        lambda: KernRouter(8, 6, 2),
        lambda: DenseRouter(8, 6),
    ],
)
def test_half_precision_gates_in_float32_and_one_graph(make):
    router = make()
    x = torch.randn(10, 8)
    half = router.to(torch.bfloat16)(x.bfloat16())
    assert half.logits_TE.dtype == torch.float32
    expected = x.bfloat16().float() @ router.weight.float().t()
    torch.testing.assert_close(half.logits_TE, expected, rtol=1e-5, atol=1e-6)
    router.float()
    exact = x @ router.weight.t()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(router(x).logits_TE, exact, rtol=1e-5, atol=1e-6)

    def run(x):
        routing = router(x)
        return routing.expert_ids_TK, routing.weights_TK

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x), run(x), strict=True):
        torch.testing.assert_close(a, b)


def test_jitter_is_seeded_and_absent_in_eval():
    router = TopKRouter(8, 6, 2, jitter=0.1)
    x = torch.randn(10, 8)
    a, b, c = (router(x, generator=torch.Generator().manual_seed(s)).logits_TE for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    router.eval()
    assert torch.equal(router(x).logits_TE, x @ router.weight.t())


def test_dense_router_visits_all():
    routing = DenseRouter(4, 3)(torch.randn(5, 4))
    assert routing.expert_ids_TK.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(routing.weights_TK.sum(1), torch.ones(5))


def test_load_balance_equals_transformers():
    x = logits(40, 8).float()
    routing = topk_route(x, 2)
    torch.testing.assert_close(
        load_balance(routing.probs_TE, routing.expert_ids_TK), load_balancing_loss_func((x,), 8, 2)
    )


def test_expert_counts_skip_no_expert():
    ids = torch.tensor([[0, -1], [3, 2], [2, 3]])
    assert expert_counts(ids, 3).tolist() == [1, 0, 2]
