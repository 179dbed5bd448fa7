import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from shared_moe import hub
from shared_moe.checkpoint import inspect_checkpoint
from shared_moe.cli import app
from shared_moe.erc import erc, gate_half
from shared_moe.errors import InputError, UnreadableError
from shared_moe.experts import FFNExperts
from shared_moe.layer import MoE
from shared_moe.routing import TopKRouter

SCRIPT = Path(sys.executable).with_name("shared-moe")
COMMON = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "olmoe": {"num_experts": 6},
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 12, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 6, "head_dim": 8},
    "granitemoe": {"num_local_experts": 6},
}


def call(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def checkpoint(folder: Path, family: str = "olmoe", **options) -> tuple[Path, torch.nn.Module]:
    config = transformers.AutoConfig.for_model(family, **COMMON, **FAMILIES[family], num_experts_per_tok=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3, generator=g)
    model.save_pretrained(folder, **options)
    return folder, model


def parts(model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(router, gate matrices (E, F, D)) of each layer, from the model in memory."""
    from shared_moe.hf import find_gates

    found = []
    for gate in find_gates(model):
        experts = model.get_submodule(gate.experts)
        first = next(p for n, p in experts.named_parameters() if "gate_up" in n or "input_linear" in n)
        if getattr(experts, "is_transposed", False):
            first = first.transpose(1, 2)
        gates = gate_half(first) if getattr(experts, "is_concatenated", True) else first[:, ::2]
        found.append((gate.weight_ED.detach(), gates.detach()))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_agrees_with_the_model_in_memory(tmp_path, family):
    folder, model = checkpoint(tmp_path / family, family)
    found = inspect_checkpoint(folder)
    assert found.model_type == family
    assert len(found.layers) == 2
    for layer, (router, gates) in zip(found.layers, parts(model), strict=True):
        assert layer.num_experts == 6
        assert layer.router_shape == [6, 16]
        norms = router.norm(dim=1)
        assert layer.router_norms == pytest.approx(
            (norms.min().item(), norms.mean().item(), norms.max().item())
        )
        expected = erc(router, gates, noise=False)
        assert layer.diagonal_dominant == pytest.approx(expected.diagonal_dominant.item())
        assert layer.coupling_loss == pytest.approx(expected.relative.item(), rel=1e-4)
        assert layer.epsilon == pytest.approx(expected.epsilon_E.mean().item(), rel=1e-4)
        cosine = torch.nn.functional.cosine_similarity(router[:, None], router[None], dim=-1)
        assert layer.router_cosine == pytest.approx((cosine.sum().item() - 6) / 30, abs=1e-5)
        assert layer.near_duplicates == []
        assert layer.notes == []


def test_inspect_counts_bytes_and_reads_shards(tmp_path):
    folder, model = checkpoint(tmp_path / "one")
    shards, _ = checkpoint(tmp_path / "many", max_shard_size="4KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    whole, sharded = inspect_checkpoint(folder), inspect_checkpoint(shards)
    assert whole.layers == sharded.layers
    assert whole.bytes == sharded.bytes == sum(4 * p.numel() for p in model.parameters())
    experts = model.model.layers[0].mlp.experts
    assert whole.layers[0].bytes == sum(4 * p.numel() for p in experts.parameters())


def test_inspect_finds_upcycled_experts_and_collapsed_routers(tmp_path):
    experts = FFNExperts(8, 16, 4, generator=torch.Generator().manual_seed(0))
    router = TopKRouter(8, 4, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        experts.gate_up_proj[3] = experts.gate_up_proj[1] * (1 + 1e-3)
        router.weight.copy_(router.weight[:1].expand(4, 8))
    folder = hub.save_pretrained(tmp_path / "m", MoE(router, experts), {}, "card")
    (layer,) = inspect_checkpoint(folder).layers
    assert [(i, j) for i, j, _ in layer.near_duplicates] == [(1, 3)]
    assert layer.router_cosine == pytest.approx(1, abs=1e-5)
    assert layer.epsilon == pytest.approx(0, abs=1e-6)


def test_inspect_measures_coupling_of_our_own_layers(tmp_path):
    for gated in (True, False):
        layer = MoE(TopKRouter(8, 4, 2), FFNExperts(8, 8, 4, gated=gated))
        with torch.no_grad():
            layer.router.weight.copy_(3 * torch.eye(4, 8))
            for e in range(4):
                layer.experts.gate_up_proj[e, :8, e] += 5
                layer.experts.gate_up_proj[e, 8:, (e + 1) % 4] += 50  # the up half does not count
        folder = hub.save_pretrained(tmp_path / str(gated), layer, {}, "card")
        (found,) = inspect_checkpoint(folder).layers
        assert found.diagonal_dominant == 1
        assert found.coupling_loss == 0


def test_quick_reads_no_expert(tmp_path):
    folder, _ = checkpoint(tmp_path / "m")
    (layer, _) = inspect_checkpoint(folder, quick=True).layers
    assert layer.router_norms is not None
    assert layer.near_duplicates is None
    assert layer.diagonal_dominant is None


def test_packed_experts_are_listed_with_a_note(tmp_path):
    tensors = {
        "model.layers.0.mlp.router.weight": torch.ones(4, 8),
        "model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(4, 16, 2, 4, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    (layer,) = inspect_checkpoint(tmp_path).layers
    assert layer.num_experts == 4
    assert layer.bytes == 4 * 16 * 2 * 4
    assert "packed" in layer.notes[0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), r"config\.json: missing"),
        (lambda f: (f / "config.json").write_text("{"), "not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), r"no \*\.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "unpickled"),
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
            "truncated",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"GIF89a"), "not a safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"a": 1}'), "not an index"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "x-1.safetensors"}}'
            ),
            "1 of 1 shards are missing, such as x-1",
        ),
    ],
)
def test_what_is_no_checkpoint_gets_one_clear_error(tmp_path, spoil, message):
    folder, _ = checkpoint(tmp_path / "m")
    spoil(folder)
    with pytest.raises(UnreadableError, match=message):
        inspect_checkpoint(folder)


def test_dense_models_damaged_models_and_missing_folders(tmp_path):
    save_file({"model.layers.0.mlp.gate_proj.weight": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnreadableError, match="no experts among its 1 tensors"):
        inspect_checkpoint(tmp_path)
    with pytest.raises(UnreadableError, match="not a folder"):
        inspect_checkpoint(tmp_path / "gone")
    ours = hub.save_pretrained(tmp_path / "ours", FFNExperts(4, 4, 2), {}, "card")
    tensors = load_file(ours / "model.safetensors")
    save_file({k: v + 1 for k, v in tensors.items()}, ours / "model.safetensors")
    with pytest.raises(UnreadableError, match="damaged or replaced"):
        inspect_checkpoint(ours)


def test_inspect_command_prints_text_and_json(tmp_path):
    folder, _ = checkpoint(tmp_path / "m")
    text = call("inspect", folder)
    assert text.exit_code == 0
    assert "2 MoE layers" in text.stdout
    assert "model.layers.1.mlp: 6 experts" in text.stdout
    assert "near-duplicate experts: none" in text.stdout
    data = json.loads(call("inspect", folder, "--json").stdout)
    assert [layer["num_experts"] for layer in data["layers"]] == [6, 6]


def test_doctor_says_what_runs_and_why(monkeypatch):
    facts = json.loads(call("doctor", "--json").stdout)
    assert facts["torch"] == torch.__version__
    assert facts["cpu"]["threads"] == torch.get_num_threads()
    assert facts["cuda"]["available"] == torch.cuda.is_available()
    assert {"combine", "grouped_ffn", "grouped_linear", "sort_by_expert"} <= facts["ops"].keys()
    assert facts["ops"]["grouped_ffn"]["backend"] == "torch"
    text = call("doctor").stdout
    assert "grouped_ffn      torch: no GPU; " in text
    monkeypatch.setenv("SHARED_MOE_BACKEND", "reference")
    facts = json.loads(call("doctor", "--json").stdout)
    assert facts["ops"]["grouped_ffn"] == {"backend": "reference", "why": "set by SHARED_MOE_BACKEND"}


def test_doctor_names_the_extra_of_what_is_missing(monkeypatch):
    import importlib.util

    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pyarrow" else original(name, *a)
    )
    assert "not installed (extra trace)" in call("doctor").stdout


@pytest.mark.parametrize("options", [[], ["--backward", "--dtype", "bfloat16"]])
def test_bench_times_every_method_against_dense(options):
    small = ["--tokens", 16, "--dim", 16, "--hidden", 16, "--experts", 4, "--top-k", 2, "--rounds", 1]
    result = json.loads(call("bench", *small, *options, "--json").stdout)
    timings = {t["method"]: t for t in result["timings"]}
    assert {
        "dense",
        "shared-moe",
        "loop over experts with index_add",
        "transformers grouped_mm",
    } <= timings.keys()
    assert timings["dense"]["ratio_to_dense"] == 1
    assert all(t["seconds"] > 0 for t in timings.values())
    assert result["settings"]["backward"] == bool(options)
    text = call("bench", *small, *options).stdout
    assert "x dense" in text
    assert "shared-moe, reference backend" in text


def test_the_methods_of_the_bench_agree():
    from shared_moe.bench import _index_add, _transformers_grouped_mm
    from shared_moe.ops import grouped_ffn

    g = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(*s, generator=g) for s in ((9, 8), (4, 24, 8), (4, 8, 12)))
    weights, ids = torch.rand(9, 4, generator=g).topk(2)
    ours = grouped_ffn(x, gate_up, down, ids, weights)
    torch.testing.assert_close(_index_add(x, gate_up, down, ids, weights), ours)
    torch.testing.assert_close(_transformers_grouped_mm(gate_up, down)(x, ids, weights), ours)


def test_help_shows_examples_and_bad_usage_ends_with_2():
    for command in ("doctor", "bench", "inspect"):
        result = call(command, "--help")
        assert result.exit_code == 0
        assert "Example" in result.stdout
        assert "--json" in result.stdout
    assert call("bench", "--tokens", 0).exit_code == 2
    assert call("bench", "--dtype", "int8").exit_code == 2
    assert call("inspect").exit_code == 2
    assert isinstance(call("bench", "--top-k", 99).exception, InputError)
    odd = json.loads(call("bench", "--dim", 7, "--tokens", 4, "--rounds", 1, "--json").stdout)
    assert "transformers grouped_mm" not in [t["method"] for t in odd["timings"]]


def test_the_console_script_turns_errors_into_exit_codes(tmp_path):
    done = subprocess.run([SCRIPT, "inspect", tmp_path / "gone"], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "not a folder" in done.stderr


def test_the_readmes_example_runs(tmp_path, monkeypatch):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(readme.split("```python\n")[1].split("```")[0], {})
    assert (tmp_path / "report" / "index.html").stat().st_size > 1000
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
