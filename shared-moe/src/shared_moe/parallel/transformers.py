"""The experts of a transformers model over ranks (extra `hf`). Shapes: T tokens, D width, K chosen, R rows received."""

from typing import Any

import torch
from torch import Tensor, nn

from shared_moe import hf
from shared_moe.errors import InputError
from shared_moe.parallel.experts import ParallelExperts
from shared_moe.parallel.group import ExpertGroup
from shared_moe.routing.routing import Routing


class TransformersExperts(ParallelExperts):
    """`ParallelExperts` that is called, and calls its experts, as transformers does."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """(T, D), (T, K), (T, K) -> (T, D)."""
        blank_TE = top_k_weights.new_zeros(()).expand(len(top_k_weights), self.num_experts)
        routing = Routing(top_k_index.to(torch.int64), top_k_weights, blank_TE, blank_TE)
        return self._ask(hidden_states, routing)  # pyright: ignore[reportCallIssue]

    def _arguments(self, x_RD: Tensor, routing: Routing) -> tuple[Any, ...]:
        return x_RD, routing.expert_ids_TK, routing.weights_TK


def spread_transformers(model: nn.Module, group: ExpertGroup) -> list[TransformersExperts]:
    """Spread the experts of every MoE layer of a transformers model over the ranks, in place; returns them in order.

    The model, whole and equal on every rank, is set to `experts_implementation="shared_moe"`. Names in `full_state` stay
    those of the model, so that its checkpoints can be read by `from_pretrained`. Raises `MissingExtra` without
    transformers, `InputError` for a model without experts or of a kind that takes no part in its experts interface.
    """
    name = hf.register()
    gates = hf.find_gates(model)
    setter = getattr(model, "set_experts_implementation", None)
    if not gates or setter is None:
        raise InputError(f"{type(model).__name__} has no experts that transformers lets others implement")
    setter(name)
    layers = []
    for gate in gates:
        layers.append(TransformersExperts(model.get_submodule(gate.experts), group))
        model.set_submodule(gate.experts, layers[-1])
    return layers
