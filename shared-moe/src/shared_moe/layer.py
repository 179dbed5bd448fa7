"""The MoE layer: a router names experts, the experts answer. Shapes: T tokens, D width."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shared_moe.errors import InputError
from shared_moe.routing.routing import Routing


class MoE(nn.Module):
    """router(x) -> Routing, experts(x, Routing) -> y, plus an optional shared expert that every token visits.

    `shared` is any module from (T, D) to the experts' width; `shared_gate`, a module from (T, D) to (T, 1), scales
    its answer by a sigmoid (Qwen2-MoE). Nothing is stored for later: the routing is returned.
    """

    def __init__(
        self,
        router: Callable[..., Routing],
        experts: Callable[[Tensor, Routing], Tensor],
        shared: Callable[[Tensor], Tensor] | None = None,
        shared_gate: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__()
        if shared_gate is not None and shared is None:
            raise InputError("shared_gate was given without a shared expert to scale")
        self.router, self.experts, self.shared, self.shared_gate = router, experts, shared, shared_gate

    def forward(self, x: Tensor, **context: Any) -> tuple[Tensor, Routing]:
        """(..., D) -> (y (..., D), Routing over the flattened tokens). `context` goes to the router."""
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TD, **context)
        y_TD = self.experts(x_TD, routing)
        if self.shared is not None:
            shared_TD = self.shared(x_TD)
            if self.shared_gate is not None:
                shared_TD = self.shared_gate(x_TD).sigmoid() * shared_TD
            y_TD = y_TD + shared_TD
        return y_TD.view(*x.shape[:-1], y_TD.shape[-1]), routing
