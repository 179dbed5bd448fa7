"""transformers models on our ops (extra `hf`), and their routers found.

>>> from shared_moe import hf
>>> hf.register()
>>> model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="shared_moe")
>>> hf.quantize_experts(model)  # int8 weights, for inference on the CPU

Shapes: T tokens, D width, F hidden width, H rows of the first matrix (2F when gated), E experts, K chosen.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_moe import hub
from shared_moe.errors import InputError, MissingExtra, UnreadableError
from shared_moe.ops import combine, grouped_ffn, grouped_linear, sort_by_expert
from shared_moe.ops.activations import GPT_OSS_ALPHA, GPT_OSS_LIMIT
from shared_moe.ops.int8 import check_quantizable, int8_ffn, int8_linear, quantize_int8

NAME = "shared_moe"
_NAMES: dict[Any, str] = {}
"""transformers' gates and activation classes -> our names of those that `grouped_ffn` fuses; filled by `register`."""


def register() -> str:
    """Make `experts_implementation="shared_moe"` known to transformers; calling it again changes nothing.

    It serves every model whose experts class takes part in transformers' experts interface, in any layout: weights
    transposed or not, gate and up concatenated or interleaved, with or without bias, gate and norm behind the expert.
    Returns the name. Raises `MissingExtra` where transformers is missing or older than 5.
    """
    try:
        from transformers.activations import ACT2FN
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    except ImportError as e:
        raise MissingExtra("transformers 5 or newer", "hf", "running transformers models on our ops") from e
    theirs = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
    }
    _NAMES.update({type(ACT2FN[name]): ours for name, ours in theirs.items()})
    _NAMES.update({_default_apply_gate: "plain", GptOssExperts._apply_gate: "gpt_oss"})
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return NAME


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module as transformers calls it: (T, D), (T, K), (T, K) -> (T, D)."""
    name = _first(self)
    first, down = getattr(self, name), self.down_proj
    bias = getattr(self, f"{name}_bias") if self.has_bias else None
    down_bias = self.down_proj_bias if self.has_bias else None
    if self.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    ids_TK = top_k_index.to(torch.int64)
    if first.dtype == torch.int8:
        scales = getattr(self, f"{name}_scale"), self.down_proj_scale
        return _int8_forward(self, hidden_states, first, down, scales, ids_TK, top_k_weights, bias, down_bias)
    x_TD = hidden_states.to(first.dtype)
    activation = _known_activation(self)
    if activation is not None:
        y_TD = grouped_ffn(
            x_TD,
            first,
            down,
            ids_TK,
            top_k_weights,
            gate_up_bias_EH=bias,
            down_bias_ED=down_bias,
            activation=activation,
            gated=self.has_gate,
        )
        return y_TD.to(hidden_states.dtype)
    order, counts = sort_by_expert(ids_TK, first.shape[0])
    rows_SD = x_TD.index_select(0, order // ids_TK.shape[1])
    h_SH = grouped_linear(rows_SD, first, counts, bias)
    rows_SD = grouped_linear(_between(self, h_SH).to(down.dtype), down, counts, down_bias)
    if self.has_post_expert_norm:
        rows_SD = self.post_expert_norm(rows_SD)
    return combine(rows_SD, order, counts, top_k_weights).to(hidden_states.dtype)


def _int8_forward(self: Any, x_TD, first, down, scales, ids_TK, weights_TK, bias, down_bias) -> Tensor:
    activation = _known_activation(self)
    if activation is not None:
        return int8_ffn(
            x_TD,
            first,
            scales[0],
            down,
            scales[1],
            ids_TK,
            weights_TK,
            gate_up_bias_EH=bias,
            down_bias_EO=down_bias,
            activation=activation,
            gated=self.has_gate,
        )
    order, counts = sort_by_expert(ids_TK, first.shape[0])
    rows_SD = x_TD.index_select(0, order // ids_TK.shape[1])
    h_SH = int8_linear(rows_SD, first, scales[0], counts, bias)
    rows_SD = int8_linear(_between(self, h_SH), down, scales[1], counts, down_bias)
    if self.has_post_expert_norm:
        rows_SD = self.post_expert_norm(rows_SD)
    return combine(rows_SD, order, counts, weights_TK).to(x_TD.dtype)


def _first(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _between(experts: Any, h_SH: Tensor) -> Tensor:
    return experts._apply_gate(h_SH) if experts.has_gate else experts.act_fn(h_SH)


def _known_activation(experts: Any) -> str | None:
    """The name under which `grouped_ffn` fuses what this experts module does between its matrices, if it does."""
    if experts.has_post_expert_norm:
        return None
    gate = _NAMES.get(type(experts)._apply_gate) if experts.has_gate else "plain"
    if gate == "gpt_oss":
        return gate if (experts.alpha, experts.limit) == (GPT_OSS_ALPHA, GPT_OSS_LIMIT) else None
    return None if gate is None else _NAMES.get(type(experts.act_fn))


@torch.no_grad()
def quantize_experts(model: nn.Module) -> nn.Module:
    """Turn the experts of a transformers model into int8, in place, and run them on our ops; returns the model.

    It serves every experts class that takes part in transformers' experts interface, on the CPU and for inference: a
    backward pass raises `InputError`. Everything else in the model stays as it is. Convert the dtype before. The error
    is that of `ops.int8`; save the result with `save_quantized`.
    Raises `InputError` for a model without such experts or with int8 ones already, weights that are not finite, or on
    another device; then nothing has changed.
    """
    found = _experts_of(model)
    if not found:
        raise InputError(
            f"{type(model).__name__} has no experts that take part in transformers' experts interface"
        )
    for name, experts in found.items():
        for matrix in (_first(experts), "down_proj"):
            if getattr(experts, matrix).dtype == torch.int8:
                raise InputError(f"{name}.{matrix} is int8 already")
            try:
                check_quantizable(getattr(experts, matrix))
            except InputError as e:
                raise type(e)(f"{name}.{matrix}: {e}") from e
    register()
    for experts in found.values():
        for matrix in (_first(experts), "down_proj"):
            weight = getattr(experts, matrix)
            _set_int8(experts, matrix, *quantize_int8(weight.mT if experts.is_transposed else weight))
        experts.is_transposed = False
        experts.config._experts_implementation = NAME
    return model


def save_quantized(folder: Path | str, model: Any, card: str, *, overwrite: bool = False) -> Path:
    """Write a model of `quantize_experts` as `hub.save_pretrained` does: safetensors, config and card, all or nothing.

    Raises `InputError` for a model without int8 experts, and what `hub.save_pretrained` raises.
    """
    quantized = [n for n, experts in _experts_of(model).items() if experts.down_proj.dtype == torch.int8]
    if not quantized:
        raise InputError(
            f"{type(model).__name__} has no int8 experts; make them with quantize_experts(model)"
        )
    settings = json.loads(model.config.to_json_string(use_diff=False))
    settings.pop("_name_or_path", None)  # a folder on the machine that made it
    config = {
        "architecture": type(model).__name__,
        "int8_experts": quantized,
        "model": settings,
        "generation": json.loads(model.generation_config.to_json_string()) if model.can_generate() else None,
    }
    return hub.save_pretrained(folder, _tensors(model), config, card, overwrite=overwrite)


def load_quantized(name_or_folder: Path | str, download: bool = False, revision: str | None = None) -> Any:
    """The model that `save_quantized` wrote, ready for inference; found as `hub.load_pretrained` finds it.

    Memory beyond the weights is never needed: the model is built without any and given those of the file.
    Raises `UnreadableError` for a folder of another kind or a file that does not fit the model, `InputError` for an
    architecture that this release of transformers lacks.
    """
    register()
    import transformers

    tensors, config = hub.load_pretrained(name_or_folder, download=download, revision=revision)
    missing = [key for key in ("architecture", "int8_experts", "model") if key not in config]
    if missing:
        raise UnreadableError(f"{name_or_folder}: config lacks {missing}: not written by hf.save_quantized")
    architecture = getattr(transformers, config["architecture"], None)
    if architecture is None:
        raise InputError(
            f"transformers {transformers.__version__} has no {config['architecture']!r}, which {name_or_folder} holds"
        )
    with torch.device("meta"):
        model = architecture(architecture.config_class.from_dict(config["model"]))
        found = _experts_of(model)
        for experts in (found[name] for name in config["int8_experts"] if name in found):
            for matrix in (_first(experts), "down_proj"):
                weight = getattr(experts, matrix)
                weight = torch.empty((weight.mT if experts.is_transposed else weight).shape, dtype=torch.int8)
                _set_int8(experts, matrix, weight, torch.empty(weight.shape[:2]))
            experts.is_transposed = False
            experts.config._experts_implementation = NAME
    hub.check_fit(_tensors(model), tensors, type(model).__name__, name_or_folder)
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if leaf in owner._parameters:
            tensor = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        setattr(owner, leaf, tensor)
    model.tie_weights()
    if config.get("generation"):
        model.generation_config = transformers.GenerationConfig.from_dict(config["generation"])
    return model.eval()


def _experts_of(model: nn.Module) -> dict[str, Any]:
    """The experts modules that take part in transformers' experts interface, by name."""
    flags = ("has_gate", "has_bias", "is_transposed", "down_proj", "config")
    return {n: m for n, m in model.named_modules() if all(hasattr(m, flag) for flag in flags)}


def _set_int8(experts: Any, matrix: str, weight_EHD: Tensor, scale_EH: Tensor) -> None:
    setattr(experts, matrix, nn.Parameter(weight_EHD, requires_grad=False))
    experts.register_buffer(f"{matrix}_scale", scale_EH)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, those too that a state dict leaves out; tied ones once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


@dataclass(frozen=True)
class Gate:
    """One router found in a model.

    name       of the module that decides, `model.layers.3.mlp.gate`
    module     the module itself; hook or replace it
    weight_ED  its matrix, one row an expert
    top_k      experts a token visits, where the module or the model's config says so
    experts    name of the module that holds the experts
    """

    name: str
    module: nn.Module
    weight_ED: nn.Parameter
    top_k: int | None
    experts: str

    @property
    def num_experts(self) -> int:
        return self.weight_ED.shape[0]


def find_gates(model: nn.Module) -> list[Gate]:
    """Every router of a model, in the order of its modules; empty for a dense model.

    Found by structure, not by model family: beside each module called `experts` stands a module with a matrix of one
    row an expert; where several do, the one called a gate or router is meant.
    """
    top_k = _config_top_k(model)
    gates = []
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        count = _count_experts(experts)
        if experts is None or not count:
            continue
        candidates = [
            (path, weight)
            for path, module in block.named_modules()
            if path and not path.startswith("experts")
            for weight in [getattr(module, "weight", None)]
            if isinstance(weight, nn.Parameter) and weight.dim() == 2 and weight.shape[0] == count
        ]
        if not candidates:
            continue
        path, weight = min(candidates, key=lambda c: (not _sounds_like_a_gate(c[0]), c[0].count(".")))
        # a matrix may lie inside the router (`router.layer`): the router is the child of the block
        router = getattr(block, path.split(".")[0])
        prefix = f"{name}." if name else ""
        k = getattr(router, "top_k", getattr(block, "top_k", top_k))
        gates.append(Gate(prefix + path.split(".")[0], router, weight, k, prefix + "experts"))
    return gates


def _sounds_like_a_gate(path: str) -> bool:
    return any(word in path.split(".")[0] for word in ("gate", "router"))


def _count_experts(experts: Any) -> int:
    if isinstance(experts, nn.ModuleList | nn.ModuleDict):
        return len(experts)
    if not isinstance(experts, nn.Module):
        return 0
    stacks = [p.shape[0] for p in experts.parameters() if p.dim() == 3]
    return stacks[0] if stacks else int(getattr(experts, "num_experts", 0) or 0)


def _config_top_k(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    get_text = getattr(config, "get_text_config", None)
    config = get_text() if callable(get_text) else config
    names = ("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts")
    return next((k for name in names if isinstance(k := getattr(config, name, None), int)), None)
