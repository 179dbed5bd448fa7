"""Every aggregator on one interface: what holds for all, then each against an independent reference."""

import numpy as np
import pytest
import torch
from torch import nn

from mammoth_path.errors import ConfigError
from mammoth_path.model import MILModel
from mammoth_path.model.aggregators import AGGREGATORS, build_aggregator, wikg
from mammoth_path.model.aggregators.nystrom import NystromAttention, pseudo_inverse
from mammoth_path.model.aggregators.order import pack, unpack

D, C = 16, 3
ORDERED = ("transmil", "rrt")
SMALL = {
    "clam-sb": {"width": 8, "instances": 2},
    "clam-mb": {"width": 8, "instances": 2},
    "dsmil": {"width": 8},
    "dtfd": {"width": 8, "pseudo_bags": 3},
    "transmil": {"heads": 4, "landmarks": 6},
    "ilra": {"heads": 4, "latents": 5},
    "rrt": {"regions": 2, "heads": 4, "width": 8},
    "wikg": {"neighbours": 3, "width": 8},
}
ALL = list(AGGREGATORS)


def build(name, outputs=C, dim=D, **options):
    generator = torch.Generator().manual_seed(3)
    options = {**SMALL.get(name, {}), **options}
    aggregator = build_aggregator(name, dim, outputs, options=options, generator=generator)
    return aggregator.double().eval()


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unequal_bags():
    """Bags of 11, 1, 5 and 2 tokens, the real ones scattered over 11 places; what is masked differs by bag."""
    mask = torch.zeros(4, 11, dtype=torch.bool)
    rng = np.random.default_rng(0)
    for b, count in enumerate((11, 1, 5, 2)):
        mask[b, np.sort(rng.permutation(11)[:count])] = True
    return draw(4, 11, D), mask


def same(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
def test_a_bag_depends_on_neither_its_batch_mates_nor_padding(name):
    aggregator = build(name)
    h, mask = unequal_bags()
    labels = torch.tensor([0, 1, 2, 1])
    out = aggregator(h, mask, labels_B=labels)
    instance = []
    for b in range(4):
        real = mask[b]
        alone = aggregator(h[b : b + 1, real], labels_B=labels[b : b + 1])
        same(out.vector[b], alone.vector[0])
        same(out.attention[b][..., real], alone.attention[0])
        assert out.attention[b][..., ~real].abs().sum() == 0
        if out.side_logits_BKC is not None:
            there = slice(None) if out.side_mask_BK is None else out.side_mask_BK[b]
            alone_there = slice(None) if alone.side_mask_BK is None else alone.side_mask_BK[0]
            same(out.side_logits_BKC[b, there], alone.side_logits_BKC[0, alone_there])
        if real.sum() > 1:
            instance += list(alone.losses.values())
    if instance:
        same(out.losses["instance"], torch.stack(instance).mean())
    same(out.attention.sum(-1), torch.ones_like(out.attention[..., 0]))
    assert out.vector.shape[-1] == aggregator.out_dim


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("layer", ["linear", "mlp", "slots", "patches"])
def test_every_layer_under_every_aggregator(name, layer):
    """Padding that holds NaN, holes in the mask and a bag of one patch, through the whole model."""
    mammoth = {"num_experts": 3, "num_slots": 2, "num_heads": 4, "slot_dim": 16, "rank": 3}
    generator = torch.Generator().manual_seed(0)
    model = MILModel(
        10,
        C,
        layer="mammoth" if layer in ("slots", "patches") else layer,
        aggregator=name,
        dim=D,
        layer_options={} if layer == "linear" else {**mammoth, "keep_slots": layer != "patches"},
        aggregator_options=SMALL.get(name, {}),
        allow_nonspatial=True,
        generator=generator,
    )
    model = model.double().eval()
    _, mask = unequal_bags()
    x = draw(4, 11, 10).masked_fill(~mask[..., None], float("nan"))
    out = model(x, mask)
    scores, _ = model.patch_scores(x, mask)
    for b in range(4):
        alone = x[b : b + 1, mask[b]]
        same(out.logits_BC[b], model(alone).logits_BC[0])
        same(scores[b, mask[b]], model.patch_scores(alone)[0][0])
    same(scores.sum(1), torch.ones(4).double())
    model.loss(x, mask, torch.tensor([0, 1, 2, 1]), generator=generator).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert sum(p.grad is not None for p in model.parameters()) > 2


@pytest.mark.parametrize("name", ALL)
def test_padding_gets_no_gradient(name):
    h, mask = unequal_bags()
    h.requires_grad_()
    out = build(name)(h, mask, labels_B=torch.tensor([0, 1, 2, 1]))
    (out.vector.square().sum() + sum(out.losses.values())).backward()
    assert h.grad is not None
    assert h.grad.isfinite().all()
    assert h.grad[~mask].abs().max() == 0
    assert (h.grad[0].abs().sum(-1) > 0).any()


@pytest.mark.parametrize("name", [n for n in ALL if n not in (*ORDERED, "dtfd")])
def test_order_does_not_matter(name):
    aggregator, h = build(name), draw(1, 9, D)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    first, second = aggregator(h), aggregator(h[:, order])
    same(first.vector, second.vector)
    same(first.attention[..., order], second.attention)


@pytest.mark.parametrize("name", ORDERED)
def test_what_reads_the_order_refuses_slots(name):
    h = draw(1, 9, D)
    assert (build(name)(h).vector - build(name)(h.flip(1)).vector).abs().max() > 1e-6
    options = {"num_experts": 3, "num_slots": 2, "num_heads": 4, "slot_dim": 8, "rank": 3}
    with pytest.raises(ConfigError, match="keep_slots=False"):
        MILModel(10, 2, aggregator=name, dim=16, layer_options=options)
    MILModel(10, 2, aggregator=name, dim=16, layer_options={**options, "keep_slots": False})


@pytest.mark.parametrize("name", ALL)
def test_one_seed_one_start_and_another_width(name):
    states = [build(name).state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][k], v) for k, v in states[1].items())
    wide = build(name, dim=32, outputs=1)
    assert wide(draw(2, 6, 32)).vector.shape == (2, wide.out_dim)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("median", {}, "clam-sb, clam-mb, dsmil"),
        ("abmil", {"heads": 3}, "heads"),
        ("mean", {"width": 3}, "width"),
        ("dtfd", {"distil": "none"}, "distil='none'"),
        ("ilra", {"heads": 5}, "heads=5 does not divide dim=16"),
        ("transmil", {"heads": 5}, "heads=5 does not divide dim=16"),
        ("rrt", {"heads": 5}, "heads=5 does not divide dim=16"),
    ],
)
def test_what_does_not_fit_is_named(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_aggregator(name, 16, 2, options=options)


def test_clam_pools_as_abmil_does_and_learns_from_its_extremes():
    clam, abmil, h = build("clam-sb"), build("abmil", width=8), draw(3, 7, D)
    abmil.load_state_dict(clam.scores.state_dict())
    same(clam(h).vector, abmil(h).vector)
    labels = torch.tensor([2, 0, 1])
    found = clam(h, labels_B=labels).losses["instance"]
    total = 0.0
    for b in range(3):
        order = clam(h).attention[b].argsort(descending=True)
        top, low = h[b, order[:2]], h[b, order[-2:]]
        for c, classifier in enumerate(clam.instance_classifiers):
            terms = []
            for tokens, target in ((top, int(labels[b] == c)), (low, 0)):
                if tokens is low and labels[b] != c:
                    continue
                scores = classifier(tokens)
                own, other = scores[:, target], scores[:, 1 - target]
                terms.append((torch.logaddexp(own, other + 1) - own).mean())
            total += torch.stack(terms).mean() / C / 3
    same(found, 0.3 / 0.7 * total)
    assert build("clam-sb")(h).losses == {}


def test_clam_of_many_branches_has_one_vector_a_class():
    clam, h = build("clam-mb"), draw(2, 7, D)
    out = clam(h)
    assert out.vector.shape == (2, C, D)
    logits = clam.scores.logits(h)
    for c in range(C):
        same(out.vector[:, c], torch.einsum("bm,bmd->bd", logits[..., c].softmax(1), h))
    model = MILModel(10, C, layer="linear", aggregator="clam-mb", dim=D).double().eval()
    score = model.score(out.vector)
    same(score[:, 1], out.vector[:, 1] @ model.head.weight[1] + model.head.bias[1])


def test_one_token_lends_no_instance():
    assert build("clam-mb")(draw(2, 1, D), labels_B=torch.tensor([0, 1])).losses["instance"] == 0


def test_dsmil_by_hand():
    dsmil, h = build("dsmil"), draw(1, 6, D)
    out = dsmil(h)
    scores, q, v = dsmil.instance(h[0]), dsmil.query(h[0]), dsmil.value(h[0])
    for c in range(C):
        critical = scores[:, c].argmax()
        attention = (q @ q[critical] / q.shape[1] ** 0.5).softmax(0)
        same(out.vector[0].view(C, D)[c], attention @ v)
        same(out.side_logits_BKC[0, 0, c], scores[critical, c])


def test_dtfd_deals_and_distils():
    dtfd, h = build("dtfd"), draw(1, 8, D)
    out = dtfd(h)
    weight, bias = dtfd.first_head.weight, dtfd.first_head.bias
    chosen = []
    for p in range(3):
        part = torch.arange(p, 8, 3)
        attention = dtfd.first.logits(h[0, part])[:, 0].softmax(0)
        answer = attention @ h[0, part] @ weight.t() + bias
        same(out.side_logits_BKC[0, p], answer)
        activation = (attention[:, None] * (h[0, part] @ weight.t())).softmax(1)[:, answer.argmax()]
        chosen.append((part[activation.argmax()], part[activation.argmin()]))
    tokens = torch.stack([m for m, _ in chosen] + [m for _, m in chosen])
    second = dtfd.second.logits(h[0, tokens])[:, 0].softmax(0)
    same(out.vector[0], second @ h[0, tokens])
    whole = build("dtfd", pseudo_bags=1, distil="mean")
    same(whole(h).vector[0], whole.first.logits(h[0])[:, 0].softmax(0) @ h[0])


def test_dtfd_deals_anew_in_training_from_the_generator():
    dtfd, h = build("dtfd").train(), draw(2, 9, D)
    for part in dtfd.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    first, again, other = (
        dtfd(h, generator=torch.Generator().manual_seed(s)).side_logits_BKC for s in (1, 1, 2)
    )
    same(first, again)
    assert (first - other).abs().max() > 1e-6


def test_pseudo_inverse_and_its_zero_rows():
    a = torch.softmax(3 * draw(2, 5, 5), -1)
    torch.testing.assert_close(pseudo_inverse(a, 30), torch.linalg.pinv(a), rtol=0, atol=1e-6)
    padded = torch.zeros(2, 7, 7, dtype=torch.float64)
    padded[:, :5, :5] = a
    found = pseudo_inverse(padded, 6)
    same(found[:, :5, :5], pseudo_inverse(a, 6))
    assert found[:, 5:].abs().max() == found[:, :, 5:].abs().max() == 0


def test_nystrom_attention_is_exact_on_short_sequences():
    attention = NystromAttention(D, heads=4, landmarks=12, iterations=40).double()
    x = 0.5 * draw(1, 9, D)
    y, first = attention(x, torch.ones(1, 9, dtype=torch.bool))
    q, k, v = (t.view(9, 4, 4).transpose(0, 1) for t in attention.qkv(x[0]).chunk(3, -1))
    weights = (q @ k.mT / 2).softmax(-1)
    local = attention.local(attention.qkv(x).chunk(3, -1)[2].mT).mT
    expected = attention.out((weights @ v).transpose(0, 1).flatten(1) + local[0])
    torch.testing.assert_close(y[0], expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(first[0], weights[:, 0].mean(0), rtol=0, atol=1e-4)


def test_the_square_is_convolved_as_a_picture():
    places, h = build("transmil").places, draw(1, 9, D)
    picture = h.mT.view(1, D, 3, 3)
    expected = picture + sum(c(picture) for c in places.convolutions)
    same(places(h, torch.ones(1, 9, dtype=torch.bool)), expected.flatten(2).mT)


def test_packing_keeps_the_order_and_can_be_undone():
    h, mask = unequal_bags()
    packed, real, index = pack(h, mask)
    for b in range(4):
        same(packed[b, real[b]], h[b, mask[b]])
    values = packed[..., 0]
    same(unpack(values, index)[mask], h[..., 0][mask])


def test_regions_do_not_look_at_each_other():
    """16 tokens in 2 x 2 regions of 2 x 2 cells: without the round across regions, a token hears its own region only."""
    rrt, h = build("rrt", layers=1, kernel=3), draw(1, 16, D).requires_grad_()
    seen = {}
    rrt.last_norm.register_forward_pre_hook(lambda _, inputs: seen.update(tokens=inputs[0]))
    nn.init.zeros_(rrt.across.out.weight)
    rrt(h)
    (gradient,) = torch.autograd.grad(seen["tokens"][0, 0].sum(), h)
    heard = gradient[0].abs().sum(-1).nonzero()[:, 0].tolist()
    assert heard == [0, 1, 4, 5]


def test_wikg_by_hand_and_in_chunks(monkeypatch):
    graph, h = build("wikg"), draw(1, 7, D)
    out = graph(h)
    head, tail = graph.head(h[0]), graph.tail(h[0])
    joined = []
    for m in range(7):
        fit = tail @ head[m] / D**0.5
        near = fit.topk(3).indices
        weight = fit[near].softmax(0)[:, None]
        edge = weight * tail[near] + (1 - weight) * head[m]
        gate = torch.tanh(head[m] + edge)
        heard = ((tail[near] * gate).sum(-1) / D**0.5).softmax(0) @ tail[near]
        joined.append(
            nn.functional.leaky_relu(graph.by_sum(head[m] + heard))
            + nn.functional.leaky_relu(graph.by_product(head[m] * heard))
        )
    same(out.vector, graph.pool(graph.norm(torch.stack(joined)[None])).vector)
    monkeypatch.setattr(wikg, "CHUNK", 2)
    same(graph(h).vector, out.vector)


def test_ilra_mixes_all_tokens_through_its_latents():
    ilra, h = build("ilra", layers=1, latents=1), draw(1, 6, D)
    out = ilra(h)
    tokens = ilra.spread[0](h, ilra.gather[0](ilra.latents[0][None], h))
    same(out.vector, ilra.pool(ilra.seed[None], tokens)[:, 0])
    moved = h.clone()
    moved[0, 5] *= -1
    assert (ilra(moved).vector - out.vector).abs().max() > 1e-6
