"""transformers models on our ops (extra `hf`), and their routers found.

>>> from shared_moe import hf
>>> hf.register()
>>> model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="shared_moe")

Shapes: T tokens, D width, F hidden width, H rows of the first matrix (2F when gated), E experts, K chosen.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared_moe.errors import MissingExtra
from shared_moe.ops import combine, grouped_ffn, grouped_linear, sort_by_expert
from shared_moe.ops.activations import GPT_OSS_ALPHA, GPT_OSS_LIMIT

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
    first = self.gate_up_proj if self.has_gate else self.up_proj
    down = self.down_proj
    bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    down_bias = self.down_proj_bias if self.has_bias else None
    if self.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    x_TD = hidden_states.to(first.dtype)
    ids_TK = top_k_index.to(torch.int64)
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
    a_SF = self._apply_gate(h_SH) if self.has_gate else self.act_fn(h_SH)
    rows_SD = grouped_linear(a_SF.to(down.dtype), down, counts, down_bias)
    if self.has_post_expert_norm:
        rows_SD = self.post_expert_norm(rows_SD)
    return combine(rows_SD, order, counts, top_k_weights).to(hidden_states.dtype)


def _known_activation(experts: Any) -> str | None:
    """The name under which `grouped_ffn` fuses what this experts module does between its matrices, if it does."""
    if experts.has_post_expert_norm:
        return None
    gate = _NAMES.get(type(experts)._apply_gate) if experts.has_gate else "plain"
    if gate == "gpt_oss":
        return gate if (experts.alpha, experts.limit) == (GPT_OSS_ALPHA, GPT_OSS_LIMIT) else None
    return None if gate is None else _NAMES.get(type(experts.act_fn))


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
