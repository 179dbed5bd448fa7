"""The MoE layer: router, experts, shared expert."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared_moe.errors import InputError
from shared_moe.experts import FFNExperts
from shared_moe.layer import MoE
from shared_moe.routing import TopKRouter


def layer(**options):
    g = torch.Generator().manual_seed(0)
    router = TopKRouter(6, 4, 2, generator=g, **options)
    return MoE(router, FFNExperts(6, 8, 4, generator=g))


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6), (2, 3, 4, 6), (0, 6), (2, 0, 6), (6,)])
def test_any_leading_shape(shape):
    moe = layer()
    x = torch.randn(shape)
    y, routing = moe(x)
    assert y.shape == x.shape
    assert routing.expert_ids_TK.shape == (x.numel() // 6, 2)
    flat, _ = moe(x.reshape(-1, 6))
    assert torch.equal(flat.view(shape), y)


def test_tokens_do_not_influence_each_other():
    moe, x = layer(), torch.randn(64, 6)
    y, _ = moe(x)
    order = torch.randperm(64)
    shuffled, _ = moe(x[order])
    torch.testing.assert_close(shuffled, y[order])


def test_identical_experts_with_normalised_weights_are_one_network():
    moe, x = layer(), torch.randn(9, 6)
    with torch.no_grad():
        for parameter in moe.experts.parameters():
            parameter.copy_(parameter[:1].expand_as(parameter))
    y, _ = moe(x)
    gate, up = (x @ moe.experts.gate_up_proj[0].t()).chunk(2, dim=1)
    torch.testing.assert_close(y, (nn.functional.silu(gate) * up) @ moe.experts.down_proj[0].t())


def test_shared_expert_and_its_gate():
    moe, x = layer(), torch.randn(9, 6)
    routed, _ = moe(x)
    shared, gate = nn.Linear(6, 6), nn.Linear(6, 1)
    with_shared, _ = MoE(moe.router, moe.experts, shared)(x)
    torch.testing.assert_close(with_shared, routed + shared(x))
    gated, _ = MoE(moe.router, moe.experts, shared, gate)(x)
    torch.testing.assert_close(gated, routed + gate(x).sigmoid() * shared(x))
    with pytest.raises(InputError, match="shared_gate"):
        MoE(moe.router, moe.experts, shared_gate=gate)


def test_gradients_reach_router_and_experts_and_survive_checkpointing():
    moe, x = layer(), torch.randn(9, 6, requires_grad=True)
    leaves = [x, *moe.parameters()]
    y, routing = moe(x)
    grads = torch.autograd.grad(y.square().sum(), leaves)
    assert all(g.any() for g in grads)
    again, recomputed = checkpoint(moe, x, use_reentrant=False)
    assert torch.equal(recomputed.expert_ids_TK, routing.expert_ids_TK)
    for a, b in zip(grads, torch.autograd.grad(again.square().sum(), leaves), strict=True):
        assert torch.equal(a, b)


def test_context_goes_to_the_router():
    moe = layer(jitter=0.5)
    x = torch.randn(9, 6)
    one, two, three = (moe(x, generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    with pytest.raises(TypeError):
        moe(x, unknown=1)


def test_state_dict_round_trip():
    moe, other = layer(), MoE(TopKRouter(6, 4, 2), FFNExperts(6, 8, 4))
    other.load_state_dict(moe.state_dict())
    x = torch.randn(9, 6)
    assert torch.equal(moe(x)[0], other(x)[0])


def test_compiles_whole():
    torch._dynamo.reset()
    moe, x = layer(), torch.randn(9, 6)
    y, routing = torch.compile(moe, fullgraph=True, backend="aot_eager")(x)
    expected, expected_routing = moe(x)
    torch.testing.assert_close(y, expected)
    assert torch.equal(routing.expert_ids_TK, expected_routing.expert_ids_TK)
