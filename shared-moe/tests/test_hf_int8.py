"""transformers models with int8 experts: quantised, saved, loaded."""

import json

import pytest
import torch
from torch import nn

import shared_moe.hf as hf
from shared_moe.errors import InputError, RefusedError, ShapeError, UnreadableError

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
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8},
}
CARD = "# Tiny\nRandom weights, for tests."


def tiny(family, **changes):
    config = transformers.AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | changes))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=hf.register())
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1 or not p.any():
                p.normal_(0, 0.2)
    torch.set_rng_state(state)
    return model.eval()


def experts_of(model):
    return model.model.layers[0].mlp.experts


def tokens(B=2, L=11):
    return torch.randint(1, 97, (B, L), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens() if ids is None else ids).logits


def dequantized(model, family, **changes):
    """The original with the values of the int8 weights: what a quantised model should compute."""
    twin = tiny(family, **changes)
    for ours, theirs in zip(model.model.layers, twin.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(ours.mlp.experts, name) * getattr(ours.mlp.experts, f"{name}_scale")[..., None]
            parameter = getattr(theirs.mlp.experts, name)
            parameter.data = weight.mT.contiguous() if theirs.mlp.experts.is_transposed else weight
    return twin


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [3, 40], ids=["few tokens", "many tokens"])
def test_it_computes_with_the_quantized_weights(family, length):
    model = hf.quantize_experts(tiny(family))
    ids = tokens(1, length)
    torch.testing.assert_close(
        logits(model, ids), logits(dequantized(model, family), ids), rtol=1e-3, atol=1e-3
    )
    assert not torch.equal(logits(model, ids), logits(tiny(family), ids))


def test_other_constants_and_norms_take_the_general_path():
    changes = {"swiglu_limit": 0.5, "swiglu_alpha": 1.0}
    model = hf.quantize_experts(tiny("gpt_oss", **changes))
    torch.testing.assert_close(
        logits(model), logits(dequantized(model, "gpt_oss", **changes)), rtol=1e-3, atol=1e-3
    )


def test_only_the_experts_change():
    model, original = hf.quantize_experts(tiny("qwen3_moe")), tiny("qwen3_moe")
    types = {name: p.dtype for name, p in model.named_parameters()}
    assert {n for n, d in types.items() if d == torch.int8} == {n for n in types if ".experts." in n}
    for name, p in original.named_parameters():
        if ".experts." not in name:
            assert torch.equal(p, model.get_parameter(name))
    assert [g.num_experts for g in hf.find_gates(model)] == [8, 8]


def test_generation_with_a_cache_equals_generation_without():
    model = hf.quantize_experts(tiny("qwen3_moe"))
    out = [
        model.generate(tokens(L=5), max_new_tokens=8, do_sample=False, use_cache=cache)
        for cache in (True, False)
    ]
    assert torch.equal(*out)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_it_is_the_same_model(family, tmp_path):
    model = hf.quantize_experts(tiny(family))
    hf.save_quantized(tmp_path / "model", model, CARD)
    loaded = hf.load_quantized(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(model))
    assert type(loaded) is type(model)
    assert not loaded.training
    assert {n: p.dtype for n, p in loaded.named_parameters()} == {
        n: p.dtype for n, p in model.named_parameters()
    }
    prompt = tokens(1, 4)
    assert torch.equal(*(m.generate(prompt, max_new_tokens=4, do_sample=False) for m in (loaded, model)))
    hf.save_quantized(tmp_path / "model", loaded, CARD)  # the same model once more
    other = hf.quantize_experts(tiny(family, initializer_range=0.5))
    with pytest.raises(RefusedError, match="different model"):
        hf.save_quantized(tmp_path / "model", other, CARD)


def test_bfloat16_is_kept(tmp_path):
    model = hf.quantize_experts(tiny("qwen3_moe").to(torch.bfloat16))
    assert experts_of(model).gate_up_proj_scale.dtype == torch.float32
    hf.save_quantized(tmp_path / "model", model, CARD)
    loaded = hf.load_quantized(tmp_path / "model")
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model))


def test_a_damaged_or_foreign_folder_is_refused(tmp_path):
    from shared_moe import hub

    folder = hf.save_quantized(tmp_path / "model", hf.quantize_experts(tiny("qwen3_moe")), CARD)
    weights = folder / hub.WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(UnreadableError, match="damaged"):
        hf.load_quantized(folder)
    weights.write_bytes(whole)
    config = json.loads((folder / hub.CONFIG).read_text())
    assert "_name_or_path" not in config["model"]
    for change, error, words in [
        ({"architecture": "NoSuchModel"}, InputError, "NoSuchModel"),
        ({"int8_experts": []}, UnreadableError, "unknown"),
        ({"model": config["model"] | {"vocab_size": 98}}, UnreadableError, "wrong shape"),
        ({"model": config["model"] | {"num_hidden_layers": 3}}, UnreadableError, "missing"),
    ]:
        (folder / hub.CONFIG).write_text(json.dumps(config | change))
        with pytest.raises(error, match=words):
            hf.load_quantized(folder)
    hub.save_pretrained(tmp_path / "other", nn.Linear(2, 2), {}, CARD)
    with pytest.raises(UnreadableError, match="save_quantized"):
        hf.load_quantized(tmp_path / "other")


def test_training_it_is_refused():
    model = hf.quantize_experts(tiny("qwen3_moe")).train()
    ids = tokens()
    loss = model(ids, labels=ids).loss
    with pytest.raises(InputError, match="no gradient"):
        loss.backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_and_nothing_changes(bad):
    model = tiny("qwen3_moe")
    last = model.model.layers[1].mlp.experts
    last.down_proj.data[5, 3, 2] = bad
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.experts\.down_proj.*expert 5.*row 3"):
        hf.quantize_experts(model)
    assert experts_of(model).gate_up_proj.dtype == torch.float32


def test_what_cannot_be_quantized_is_refused(tmp_path):
    with pytest.raises(InputError, match="no experts"):
        hf.quantize_experts(nn.Linear(2, 2))
    model = tiny("qwen3_moe")
    with pytest.raises(InputError, match="no int8 experts"):
        hf.save_quantized(tmp_path / "model", model, CARD)
    with pytest.raises(InputError, match="int8 already"):
        hf.quantize_experts(hf.quantize_experts(model))
    with pytest.raises(InputError, match="CPU"):
        hf.quantize_experts(tiny("qwen3_moe").to("meta"))
    with pytest.raises(ShapeError, match="before its experts are quantised"):
        logits(model.to(torch.bfloat16))
