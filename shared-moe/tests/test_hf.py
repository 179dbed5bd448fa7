import sys

import pytest
import torch
from torch import nn

import shared_moe.hf as hf
from shared_moe.errors import MissingExtra

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES = {
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
}


def tiny(family: str, seed: int = 0, **changes):
    config = transformers.AutoConfig.for_model(family, **(COMMON | FAMILIES.get(family, {}) | changes))
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 or not p.any():
                p.normal_(0, 0.2)
    torch.set_rng_state(state)
    return model.eval()


def tokens(B=2, L=11):
    return torch.randint(1, 97, (B, L), generator=torch.Generator().manual_seed(1))


def run(model, implementation, ids):
    """Logits, loss gradient of every parameter."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def registered():
    hf.register()


def check(model, ids, forward=1e-5, backward=1e-4):
    logits, grads = run(model, "eager", ids)
    ours, our_grads = run(model, hf.register(), ids)
    assert logits.std() > 0.1
    torch.testing.assert_close(ours, logits, rtol=forward, atol=forward)
    assert our_grads.keys() == grads.keys()
    assert any("experts" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=backward, atol=backward, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_gradients_as_eager(family):
    check(tiny(family), tokens())


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_gives_the_same_tokens(family):
    model = tiny(family)
    out = {}
    for implementation in ("eager", "shared_moe"):
        model.set_experts_implementation(implementation)
        out[implementation] = model.generate(tokens(L=5), max_new_tokens=12, do_sample=False, use_cache=True)
    assert out["eager"].shape[1] > 5
    assert torch.equal(out["eager"], out["shared_moe"])


def test_it_is_our_function_that_runs(monkeypatch):
    called = []
    original = hf.grouped_ffn
    monkeypatch.setattr(
        hf, "grouped_ffn", lambda *a, **k: called.append(k["activation"]) or original(*a, **k)
    )
    for family in FAMILIES:
        model = tiny(family)
        model.set_experts_implementation("shared_moe")
        model(tokens())
    assert called == ["silu"] * 6 + ["gpt_oss"] * 2


def test_from_config_takes_the_name():
    config = transformers.AutoConfig.for_model("mixtral", **(COMMON | FAMILIES["mixtral"]))
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="shared_moe")
    assert model.config._experts_implementation == "shared_moe"


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "gelu_new", "relu2"])
def test_other_activations(activation):
    check(tiny("mixtral", hidden_act=activation), tokens())


def test_gpt_oss_with_other_constants_takes_the_general_path():
    check(tiny("gpt_oss", swiglu_limit=0.5, swiglu_alpha=1.0), tokens())


class Config:
    _experts_implementation = "eager"


def layout(**flags):
    """An experts module in any layout of transformers' interface, with the reference loop as its own forward."""
    from transformers.integrations.moe import use_experts_implementation

    gated, bias, transposed = (
        flags.get("has_gate", True),
        flags.get("has_bias", False),
        flags.get("is_transposed", False),
    )
    interleaved = not flags.get("is_concatenated", True)

    class Experts(nn.Module):
        def __init__(self, config, E=5, D=6, F=4):
            super().__init__()
            g = torch.Generator().manual_seed(3)
            H = 2 * F if gated else F
            first = torch.randn(E, H, D, generator=g)
            down = torch.randn(E, D, F, generator=g)
            name = "gate_up_proj" if gated else "up_proj"
            setattr(self, name, nn.Parameter(first.transpose(1, 2).contiguous() if transposed else first))
            self.down_proj = nn.Parameter(down.transpose(1, 2).contiguous() if transposed else down)
            if bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, H, generator=g)))
                self.down_proj_bias = nn.Parameter(torch.randn(E, D, generator=g))
            if flags.get("has_post_expert_norm"):
                self.post_expert_norm = nn.LayerNorm(D)
            self.num_experts, self.act_fn = E, transformers.activations.ACT2FN["silu"]

        if interleaved:

            def _apply_gate(self, h):
                return torch.tanh(h[..., ::2]) * h[..., 1::2]

        def forward(self, hidden_states, top_k_index, top_k_weights):
            y = torch.zeros_like(hidden_states)
            first = self.gate_up_proj if gated else self.up_proj
            first_bias = (self.gate_up_proj_bias if gated else self.up_proj_bias) if bias else None
            for t in range(len(y)):
                for e, w in zip(top_k_index[t].tolist(), top_k_weights[t], strict=True):
                    if e == self.num_experts:
                        continue
                    W, V = (m[e].t() if transposed else m[e] for m in (first, self.down_proj))
                    h = nn.functional.linear(hidden_states[t], W, first_bias[e] if bias else None)
                    a = self._apply_gate(h) if gated else self.act_fn(h)
                    out = nn.functional.linear(a, V, self.down_proj_bias[e] if bias else None)
                    if self.has_post_expert_norm:
                        out = self.post_expert_norm(out)
                    y = y.index_add(0, torch.tensor([t]), (out * w)[None])
            return y

    return use_experts_implementation(**flags)(Experts)(Config())


LAYOUTS = [
    {},
    {"is_transposed": True},
    {"has_bias": True},
    {"is_transposed": True, "has_bias": True, "is_concatenated": False},
    {"has_gate": False},
    {"has_gate": False, "has_bias": True, "is_transposed": True},
    {"has_post_expert_norm": True},
]


@pytest.mark.parametrize("flags", LAYOUTS, ids=lambda f: "+".join(f) or "plain")
def test_every_layout_of_the_interface(flags):
    experts = layout(**flags)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(9, 6, generator=g, requires_grad=True)
    ids = torch.stack([torch.randperm(5, generator=g)[:2] for _ in range(9)])
    ids[3, 1] = 5  # transformers' sentinel for an expert on another rank
    ids[4] = 5
    weights = torch.rand(9, 2, generator=g, requires_grad=True)
    inputs = [x, weights, *experts.parameters()]
    results = []
    for forward in (experts, lambda *a: hf.experts_forward(experts, *a)):
        y = forward(x, ids, weights)
        results.append((y, torch.autograd.grad(y.square().sum(), inputs)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags", LAYOUTS, ids=lambda f: "+".join(f) or "plain")
def test_every_layout_in_int8(flags):
    model, twin = nn.ModuleDict({"experts": layout(**flags)}), layout(**flags)
    experts = hf.quantize_experts(model)["experts"]
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    for name in (first, "down_proj"):
        weight = getattr(experts, name) * getattr(experts, f"{name}_scale")[..., None]
        getattr(twin, name).data = weight.mT if twin.is_transposed else weight
    g = torch.Generator().manual_seed(5)
    x, weights = torch.randn(9, 6, generator=g), torch.rand(9, 2, generator=g)
    ids = torch.stack([torch.randperm(6, generator=g)[:2] for _ in range(9)])
    with torch.no_grad():
        y = experts(x, ids, weights)
        torch.testing.assert_close(y, twin(x, ids, weights), rtol=1e-3, atol=1e-3)
        compiled = torch.compile(lambda *a: experts(*a), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, ids, weights), y)


def test_int32_ids_and_wider_inputs_keep_the_dtype():
    experts = layout()
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ids, weights = torch.tensor([[0], [1], [4]], dtype=torch.int32), torch.ones(3, 1)
    y = hf.experts_forward(experts, x, ids, weights)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, experts(x.float(), ids.long(), weights).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_is_followed(family):
    model = tiny(family)
    experts = next(m for n, m in model.named_modules() if n.endswith("experts"))
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(2))
    ids, weights = torch.arange(24).view(12, 2) % 4, torch.full((12, 2), 0.5)
    out = {}
    for implementation in ("eager", "shared_moe"):
        model.set_experts_implementation(implementation)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out[implementation] = experts(x, ids, weights)
    assert out["shared_moe"].dtype == x.dtype
    torch.testing.assert_close(out["shared_moe"], out["eager"].float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("flags", [{}, LAYOUTS[3]], ids=["fused", "general"])
def test_it_compiles_into_one_graph_without_a_warning(flags, recwarn):
    experts = layout(**flags)
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids, weights = torch.arange(18).view(9, 2) % 5, torch.full((9, 2), 0.5)
    compiled = torch.compile(lambda *a: hf.experts_forward(experts, *a), fullgraph=True, backend="aot_eager")
    y = compiled(x, ids, weights)
    expected = hf.experts_forward(experts, x, ids, weights)
    torch.testing.assert_close(y, expected)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected)]
    torch.testing.assert_close(*grads)
    assert [str(w.message) for w in recwarn if "ynamo" in str(w.message)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_repeated_runs_are_bitwise_equal(family):
    model = tiny(family)
    model.set_experts_implementation("shared_moe")
    with torch.no_grad():
        first = model(tokens()).logits
        assert all(torch.equal(model(tokens()).logits, first) for _ in range(5))


def test_bfloat16_stays_near_float32():
    model = tiny("olmoe")
    model.set_experts_implementation("shared_moe")
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(24).view(12, 2) % 8
    weights = torch.full((12, 2), 0.5)
    experts = model.model.layers[0].mlp.experts
    wide = experts(x, ids, weights)
    narrow = experts.to(torch.bfloat16)(x.to(torch.bfloat16), ids, weights.to(torch.bfloat16))
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), wide, rtol=0.05, atol=0.03)


MORE = {
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 8,
    },
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_every_router_of_a_model_is_found(family):
    model = tiny(family, **MORE.get(family, {}))
    settings = FAMILIES.get(family) or MORE[family]
    gates = hf.find_gates(model)
    dense = settings.get("first_k_dense_replace", 0)
    assert len(gates) == 2 - dense
    E = next(v for k, v in settings.items() if "experts" in k and "per_tok" not in k)
    modules = dict(model.named_modules())
    for layer, gate in enumerate(gates, start=dense):
        assert f"layers.{layer}." in gate.name
        assert modules[gate.name] is gate.module
        assert gate.experts in modules
        assert gate.weight_ED.shape == (E, 32)
        assert gate.top_k == 2 + (family == "olmoe")
        assert any(p is gate.weight_ED for p in gate.module.parameters())


@pytest.mark.parametrize("family", MORE)
def test_other_families_agree_with_eager_too(family):
    check(tiny(family, **MORE[family]), tokens())


def test_a_dense_model_has_no_gates():
    assert hf.find_gates(nn.Sequential(nn.Linear(3, 3))) == []
    assert hf.find_gates(tiny("llama")) == []


def test_our_own_layers_are_found():
    from shared_moe.experts import FFNExperts
    from shared_moe.layer import MoE
    from shared_moe.routing import TopKRouter

    layer = MoE(TopKRouter(6, 4, 2), FFNExperts(6, 8, 4))
    (gate,) = hf.find_gates(layer)
    assert (gate.name, gate.experts, gate.top_k, gate.num_experts) == ("router", "experts", 2, 4)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.activations", None)
    with pytest.raises(MissingExtra, match=r"shared-moe\[hf\]"):
        hf.register()


def train(implementation, checkpointing=False, steps=20):
    """Losses of a tiny Qwen3-MoE over its first steps on one batch a step."""
    model = tiny("qwen3_moe").train()
    model.set_experts_implementation(implementation)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
    assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) == checkpointing
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    g = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(steps):
        ids = torch.randint(1, 97, (4, 12), generator=g)
        loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "gradient checkpointing"])
def test_training_follows_the_eager_loss_curve(checkpointing):
    eager, ours = train("eager"), train("shared_moe", checkpointing)
    assert eager[-1] < eager[0] - 0.1
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
