"""Expert modules against plain modules."""

import pytest
import torch
import torch.nn.functional as nnf

from shared_moe.errors import InputError
from shared_moe.experts import AdapterExperts, FFNExperts, LoRAExperts
from shared_moe.ops.activations import POINTWISE
from shared_moe.routing import Routing


def routing(T=9, K=2, E=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=g, dtype=torch.float64)
    weights, ids = logits.softmax(1).topk(K, dim=1)
    return Routing(ids, weights, logits.softmax(1), logits)


def plain_sum(routing, expert):
    """Σ_k w_k expert(e_k, t) for every token t."""
    ids, weights = routing.expert_ids_TK, routing.weights_TK
    return torch.stack(
        [sum(weights[t, k] * expert(int(ids[t, k]), t) for k in range(ids.shape[1])) for t in range(len(ids))]
    )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", POINTWISE)
def test_ffn_experts_equal_plain_modules(activation, gated):
    g = torch.Generator().manual_seed(0)
    experts = FFNExperts(6, 8, 4, gated=gated, activation=activation, bias=True, generator=g).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=g)
    x = torch.randn(9, 6, generator=g, dtype=torch.float64)
    act = POINTWISE[activation][0]

    def expert(e, t):
        h = nnf.linear(x[t], experts.gate_up_proj[e], experts.gate_up_proj_bias[e])
        a = act(h[:8]) * h[8:] if gated else act(h)
        return nnf.linear(a, experts.down_proj[e], experts.down_proj_bias[e])

    r = routing()
    torch.testing.assert_close(experts(x, r), plain_sum(r, expert))


def test_parameters_lie_as_in_transformers():
    experts = FFNExperts(6, 8, 4, bias=True)
    shapes = {name: tuple(p.shape) for name, p in experts.named_parameters()}
    assert shapes == {
        "gate_up_proj": (4, 16, 6),
        "down_proj": (4, 6, 8),
        "gate_up_proj_bias": (4, 16),
        "down_proj_bias": (4, 6),
    }


def test_initialisation_follows_the_generator():
    first, again, other = (
        FFNExperts(6, 8, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first.gate_up_proj, again.gate_up_proj)
    assert not torch.equal(first.gate_up_proj, other.gate_up_proj)


def test_bad_arguments_are_refused():
    for arguments in ((0, 8, 4), (6, 0, 4), (6, 8, 0)):
        with pytest.raises(InputError, match="at least 1"):
            FFNExperts(*arguments)
    with pytest.raises(InputError, match="activation"):
        FFNExperts(6, 8, 4, activation="tanh")
    with pytest.raises(InputError, match="gated"):
        FFNExperts(6, 8, 4, activation="gpt_oss", gated=False)


def test_adapters_start_as_no_change_and_learn():
    adapters = AdapterExperts(6, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    x = torch.randn(9, 6, dtype=torch.float64)
    y = adapters(x, routing())
    assert not y.any()
    y.sum().backward()
    assert adapters.down_proj.grad.any()


def test_lora_experts_equal_low_rank_updates():
    g = torch.Generator().manual_seed(0)
    experts = LoRAExperts(6, 3, 4, out_dim=5, alpha=6.0, generator=g).double()
    torch.nn.init.normal_(experts.down_proj, generator=g)
    x = torch.randn(9, 6, generator=g, dtype=torch.float64)
    r = routing()
    expected = plain_sum(r, lambda e, t: 2.0 * experts.down_proj[e] @ (experts.gate_up_proj[e] @ x[t]))
    torch.testing.assert_close(experts(x, r), expected)
