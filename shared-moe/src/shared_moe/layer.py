"""The MoE layer: a router names experts, the experts answer. Shapes: T tokens, D width."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from shared_moe.routing.routing import Routing


class MoE(nn.Module):
    """router(x) -> Routing, experts(x, Routing) -> y, plus an optional shared expert that every token visits.

    `shared` is any module from (T, D) to (T, D). Nothing is stored for later: the routing is returned.
    """

    def __init__(
        self,
        router: Callable[..., Routing],
        experts: Callable[[Tensor, Routing], Tensor],
        shared: Callable[[Tensor], Tensor] | None = None,
    ):
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor, **context: Any) -> tuple[Tensor, Routing]:
        """(..., D) -> (y (..., D), Routing over the flattened tokens). `context` goes to the router."""
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TD, **context)
        y_TD = self.experts(x_TD, routing)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view(x.shape), routing
