"""Mixture-of-Experts core: routers, experts, losses, dispatch and kernels for CPU and GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_moe.layer import MoE
    from shared_moe.routing import Routing, SlotRouting
    from shared_moe.trace import RoutingTrace

__version__ = "0.1.0"

_HOME = {
    "MoE": "shared_moe.layer",
    "Routing": "shared_moe.routing",
    "RoutingTrace": "shared_moe.trace",
    "SlotRouting": "shared_moe.routing",
}
__all__ = ["MoE", "Routing", "RoutingTrace", "SlotRouting"]


def __getattr__(name: str) -> Any:
    """Public names, imported at first use: `import shared_moe` alone loads nothing heavy."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
