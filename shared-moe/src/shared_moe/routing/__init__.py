"""Routers: modules that say which experts a token visits, and with what weight."""

from shared_moe.routing.dense import DenseRouter
from shared_moe.routing.dirichlet import DirichletRouter
from shared_moe.routing.kern import KernRouter
from shared_moe.routing.routing import Routing, SlotRouting
from shared_moe.routing.slots import SlotRouter
from shared_moe.routing.topk import SigmoidTopKRouter, TopKRouter, topk_route

__all__ = [
    "DenseRouter",
    "DirichletRouter",
    "KernRouter",
    "Routing",
    "SigmoidTopKRouter",
    "SlotRouter",
    "SlotRouting",
    "TopKRouter",
    "topk_route",
]
