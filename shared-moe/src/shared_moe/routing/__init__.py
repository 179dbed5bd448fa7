from shared_moe.routing.routing import Routing, SlotRouting

__all__ = ["Routing", "SlotRouting"]
