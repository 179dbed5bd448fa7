"""What MAMMOTH has to fulfil, property by property."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mammoth_path.errors import ConfigError, EmptyBagError, FeatureWidthError
from mammoth_path.interference import expert_gradients
from mammoth_path.model import Mammoth, MILModel
from mammoth_path.model.budget import linear_parameters, mammoth_parameters, matched_rank
from shared_moe.errors import ShapeError

SMALL = {"num_experts": 3, "num_slots": 2, "num_heads": 4, "slot_dim": 16, "rank": 3, "dropout": 0.0}
FORMS = ("reference", "fused", "streamed")
MODES = pytest.mark.parametrize("keep_slots", [True, False], ids=["slots", "patches"])


def build(input_dim: int = 10, dim: int = 32, *, seed: int = 0, **options) -> Mammoth:
    generator = torch.Generator().manual_seed(seed)
    return Mammoth(input_dim, dim, **{**SMALL, **options}, generator=generator).double().eval()


def bag(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@given(order=st.permutations(range(9)))
@settings(max_examples=15, deadline=None)
def test_permuting_patches(order):
    x = bag(1, 9, 10)
    close(build()(x[:, order]), build()(x))
    patches = build(keep_slots=False)
    close(patches(x[:, order]), patches(x)[:, order])


@pytest.mark.parametrize("times", [2, 5])
def test_duplicating_every_patch_leaves_the_slots(times):
    x = bag(1, 6, 10)
    close(build()(x.repeat(1, times, 1)), build()(x))


@MODES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
def test_masked_rows_have_no_effect_and_no_gradient(keep_slots, form, poison):
    model = build(keep_slots=keep_slots)
    x = bag(2, 8, 10)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    x[1, 5:] = poison
    x.requires_grad_()
    y = model(x, mask, form=form)
    alone = model(x[1, :5].detach(), form=form)
    close(y[1] if keep_slots else y[1, :5], alone)
    y.square().sum().backward()
    assert torch.equal(x.grad[1, 5:], torch.zeros(3, 10, dtype=torch.float64))
    assert x.grad[1, :5].abs().min() > 0


def test_dispatch_and_combine_are_distributions():
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    routing = build().routing(bag(2, 7, 10), mask)
    close(routing.dispatch_BHNS.sum(2), torch.ones(2, 4, 6, dtype=torch.float64))
    assert routing.dispatch_BHNS[0, :, 4:].abs().max() == 0
    close(routing.combine_BHNS.sum(3), mask[:, None].double().expand(2, 4, 7))


def test_a_bag_of_one_patch():
    model = build(num_slots=4)
    x = bag(1, 1, 10)
    y = model(x).unflatten(1, (3, 4))
    close(y, y[:, :, :1].expand_as(y))
    z = model.router.split(model.queries(x))
    u = z.expand(-1, -1, 12, -1)
    close(y, model.finish(model.expert_outputs(u)))


def test_one_slot_gives_every_patch_the_same_and_no_scale_gives_the_mean():
    x = bag(1, 9, 10)
    y = build(num_experts=1, num_slots=1, keep_slots=False)(x)
    close(y, y[:, :1].expand_as(y))
    flat = build(scale=0.0)
    z = flat.queries(x)
    u = flat.router.mix(z)
    close(u, flat.router.split(z).mean(2, keepdim=True).expand_as(u))


@MODES
@pytest.mark.parametrize("chunk", [1, 7, 23])
def test_forms_agree_forward_and_backward(keep_slots, chunk):
    model = build(keep_slots=keep_slots, scale="learned")
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[1, 9:] = False
    results = []
    for form in FORMS:
        x = bag(2, 23, 10).requires_grad_()
        y = model(x, mask, form=form, chunk=chunk)
        gradients = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
        results.append((y, *gradients))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            close(a, b, 1e-8)


def test_streamed_memory_does_not_grow_with_the_bag():
    """Beyond the queries, the largest tensor of the streamed form is one chunk's logits, whatever N."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor):
                    self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
            return out

    model = build()
    seen = []
    for n in (10_000, 100_000):
        z = torch.randn(1, n, 16, dtype=torch.float64)
        with Largest() as largest, torch.no_grad():
            model.router.mix(z, form="streamed", chunk=512)
        seen.append(largest.numel)
        assert largest.numel < 4 * 6 * n, "the whole logits matrix was stored"
    assert seen[0] < 10_000 * 16 + 1
    assert seen[1] <= 100_000 * 16


def test_linear_layer_commutes_with_mean_pooling():
    """Norms off, scale 0, factors of full rank from an SVD: every slot is W mean(x)."""
    D, heads = 8, 2
    model = build(
        D,
        8,
        num_experts=2,
        num_slots=1,
        num_heads=heads,
        slot_dim=8,
        rank=4,
        norm="none",
        query_norm="none",
        scale=0.0,
    )
    W = bag(8, 8)
    with torch.no_grad():
        model.query.weight.copy_(torch.eye(8))
        for h in range(heads):
            block = torch.zeros(4, 4, dtype=torch.float64) + W[h * 4 : h * 4 + 4, h * 4 : h * 4 + 4]
            U, s, V = torch.linalg.svd(block)
            model.experts.down[h].copy_((V.t() * s).reshape(4, 4))
            model.experts.up[:, h].copy_(U.t())
    x = bag(1, 11, D)
    blocks = torch.block_diag(W[:4, :4], W[4:, 4:])
    close(model(x), (x.mean(1) @ blocks.t())[:, None].expand(1, 2, 8))


@MODES
def test_gradcheck_of_every_parameter_and_the_bag(keep_slots):
    model = build(
        5,
        8,
        num_experts=2,
        num_slots=2,
        num_heads=2,
        slot_dim=4,
        rank=2,
        keep_slots=keep_slots,
        scale="learned",
    )
    mask = torch.tensor([[True, True, True, False]])
    x = bag(1, 4, 5).requires_grad_()
    names = [n for n, _ in model.named_parameters()]

    def run(x, *values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x, mask))

    values = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert torch.autograd.gradcheck(run, (x, *values), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("share", [True, False])
def test_instance_gradients_add_up_to_autograds(share):
    model = build(share_factors=share)
    weights = bag(6, 32, seed=3)
    left, right, whole = expert_gradients(model, bag(9, 10), lambda y: (y * weights).sum())
    total = torch.einsum("hnr,ehnq->ehrq" if share else "ehnr,ehnq->ehrq", left, right)
    close(total, whole)


@pytest.mark.parametrize(
    ("width", "rank", "count"),
    [
        (512, 8, 364_176),
        (768, 13, 507_872),
        (1024, 17, 635_936),
        (1536, 25, 892_064),
        (2048, 34, 1_163_824),
        (2560, 42, 1_419_952),
    ],
)
def test_budget_table(width, rank, count):
    with torch.device("meta"):
        model = Mammoth(width)
    assert model.rank == rank
    assert sum(p.numel() for p in model.parameters()) == count


@given(
    width=st.integers(200, 3000),
    heads=st.sampled_from([1, 4, 16]),
    experts=st.integers(1, 40),
    slots=st.integers(1, 12),
    share=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_match_never_exceeds_the_linear_layer_and_is_the_largest(width, heads, experts, slots, share):
    sizes = {"experts": experts, "slots": slots, "heads": heads, "slot_dim": 64, "share": share}
    try:
        rank = matched_rank(width, 256, **sizes)
    except ConfigError:
        assert mammoth_parameters(width, 256, rank=1, **sizes) > linear_parameters(width, 256)
        return
    assert mammoth_parameters(width, 256, rank=rank, **sizes) <= linear_parameters(width, 256)
    assert mammoth_parameters(width, 256, rank=rank + 1, **sizes) > linear_parameters(width, 256)


def test_match_at_the_width_of_uni():
    with torch.device("meta"):
        model = Mammoth(1024, rank="match")
    assert (model.rank, sum(p.numel() for p in model.parameters())) == (9, 510_880)


@MODES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_near_float32_and_finite(keep_slots, dtype):
    model = build(64, 32, keep_slots=keep_slots).float()
    x = bag(1, 50, 64).float()
    with torch.autocast("cpu", dtype=dtype):
        y = model(x)
        huge = model(x * 1e4)
    assert (y.float() - model(x)).abs().max() < 2e-2 * model(x).abs().max()
    assert huge.isfinite().all()


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="num_expert"):
        Mammoth(64, num_expert=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 does not divide slot_dim=256"),
        ({"num_heads": 32, "dim": 100}, "does not divide dim=100"),
        ({"rank": 0}, "rank=0"),
        ({"dim": 256}, "rank='auto' gives 0"),
        ({"dim": 128}, "rank='auto' gives"),
        ({"dim": 256, "rank": "match"}, "rank='match' cannot be met"),
        ({"norm": "batch"}, "norm='batch'"),
        ({"scale": "soft"}, "scale='soft'"),
        ({"num_slots": 0}, "num_slots=0"),
    ],
)
def test_numbers_that_do_not_fit_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Mammoth(1024, **options)


def test_a_width_that_heads_do_not_divide_is_fine():
    assert build(166)(bag(1, 4, 166)).shape == (1, 6, 32)


def test_bags_that_do_not_fit_are_named():
    model = build(1024)
    with pytest.raises(FeatureWidthError, match=r"1536 wide.*input_dim=1024.*UNI2.*UNI"):
        model(bag(1, 3, 1536))
    with pytest.raises(EmptyBagError, match="no patch"):
        model(bag(1, 0, 1024))
    with pytest.raises(EmptyBagError, match="bag 1 of the batch"):
        model(bag(2, 3, 1024), torch.tensor([[True] * 3, [False] * 3]))
    with pytest.raises(ShapeError, match="mask must be bool"):
        model(bag(2, 3, 1024), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"\(N, D\) or \(B, N, D\)"):
        model(bag(1024))


@MODES
@pytest.mark.parametrize("patches", [1, 2, 5])
@pytest.mark.parametrize("slot_dropout", [0.5, 0.9])
def test_few_patches_and_much_slot_dropout_stay_finite(keep_slots, patches, slot_dropout):
    model = build(slot_dropout=slot_dropout, keep_slots=keep_slots, num_slots=10).train()
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        x = bag(2, patches, 10).requires_grad_()
        y = model(x, generator=generator)
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()


def test_slot_dropout_forms_agree_and_eval_draws_nothing():
    model = build(slot_dropout=0.5).train()
    outputs = [model(bag(1, 9, 10), form=f, generator=torch.Generator().manual_seed(4)) for f in FORMS[:2]]
    close(*outputs)
    state = torch.get_rng_state()
    model.eval()(bag(1, 9, 10))
    assert torch.equal(state, torch.get_rng_state())


def test_single_bag_has_no_batch_axis():
    model = build()
    x = bag(5, 10)
    close(model(x), model(x[None])[0])


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("query_norm", ["layer", "rms"])
def test_norms_follow_their_formulas(norm, query_norm):
    model = build(norm=norm, query_norm=query_norm)
    with torch.no_grad():
        model.out_scale.uniform_(0.5, 2)
        model.query_scale.uniform_(0.5, 2)
    x = bag(1, 7, 10)
    raw = model.query(x)
    if query_norm == "layer":
        centred = raw - raw.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * model.query_scale
    else:
        expected = raw / raw.square().mean(-1, keepdim=True).sqrt() * model.query_scale
    close(model.queries(x), expected, 1e-8)
    v = model.expert_outputs(model.router.mix(model.queries(x)))
    flat = v.flatten(3)
    if norm == "pre":
        out = (flat / flat.square().mean(-1, keepdim=True).sqrt() * model.out_scale[:, None]).relu()
    else:
        r = flat.relu() - flat.relu().mean(-1, keepdim=True)
        out = r / (r.square().mean(-1, keepdim=True) + 1e-5).sqrt() * model.out_scale[:, None]
    close(model(x), out.flatten(1, 2), 1e-8)


def test_patch_weights_equal_the_stored_dispatch():
    model = build()
    mask = torch.ones(2, 13, dtype=torch.bool)
    mask[0, 8:] = False
    x, attention = bag(2, 13, 10), torch.rand(2, 6, dtype=torch.float64).softmax(1)
    scores, experts = model.patch_weights(x, attention, mask, chunk=5)
    dispatch = model.routing(x, mask).dispatch_BHNS
    close(scores, torch.einsum("bhnm,bm->bn", dispatch, attention) / 4)
    close(scores.sum(1), torch.ones(2, dtype=torch.float64))
    by_expert = dispatch.sum(1).unflatten(-1, (3, 2)).sum(-1)
    close(experts, by_expert / by_expert.sum(-1, keepdim=True).clamp_min(1e-300))


def test_same_seed_same_module():
    assert all(
        torch.equal(a, b) for a, b in zip(build(seed=5).parameters(), build(seed=5).parameters(), strict=True)
    )


@pytest.mark.parametrize("keep_slots", [True, False])
def test_parity_with_the_published_package(keep_slots):
    """Runs only where a user has installed mammoth-moe, whose licence is not commercial. Its option of factors that are
    not shared fails inside mammoth-moe 0.1.2 itself, so there is nothing to compare with."""
    published = pytest.importorskip("mammoth", reason="mammoth-moe (CC BY-NC-ND) is not installed")
    theirs = published.Mammoth(
        input_dim=64, dim=128, num_experts=4, num_slots=3, num_heads=4, slot_dim=32, lora_rank=6, auto_rank=False,
        dropout=0.0, keep_slots=keep_slots,
    ).eval()  # fmt: skip
    ours = Mammoth(
        64, 128, num_experts=4, num_slots=3, num_heads=4, slot_dim=32, rank=6, dropout=0.0, keep_slots=keep_slots,
    ).eval()  # fmt: skip
    layers = theirs.expert_heads.lora_layers
    pairs = [
        (ours.query.weight, theirs.wq.weight),
        (ours.query.bias, theirs.wq.bias),
        (ours.query_scale, theirs.norm.gamma),
        (ours.router.slot_scale, theirs.slot_norm.gamma),
        (ours.router.slots, theirs.slot_embeds.permute(1, 0, 2, 3).flatten(1, 2)),
        (ours.experts.down, layers.shared_weight),
        (ours.experts.down_bias, layers.shared_bias),
        (ours.experts.up, layers.expert_weights),
        (ours.experts.up_bias, layers.bias.reshape(ours.experts.up_bias.shape)),
        (ours.out_scale, theirs.expert_heads.norm.gamma),
    ]
    with torch.no_grad():
        for mine, other in pairs:
            mine.copy_(other.reshape(mine.shape))
    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x).reshape(ours(x).shape), rtol=0, atol=1e-5)


def test_mil_model_takes_it_as_a_switch():
    model = MILModel(10, 2, layer="mammoth", aggregator="mean", dim=32, layer_options=SMALL).eval()
    assert model(torch.randn(2, 5, 10)).logits_BC.shape == (2, 2)
