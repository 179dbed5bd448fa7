"""From tokens to one vector a bag: the aggregators by name. `base` says what each takes and gives."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from mammoth_path.errors import ConfigError
from mammoth_path.model.aggregators.abmil import GatedAttention
from mammoth_path.model.aggregators.base import Pooled
from mammoth_path.model.aggregators.clam import Clam
from mammoth_path.model.aggregators.dsmil import DSMIL
from mammoth_path.model.aggregators.dtfd import DTFD
from mammoth_path.model.aggregators.ilra import ILRA
from mammoth_path.model.aggregators.pooling import MaxPool, MeanPool
from mammoth_path.model.aggregators.rrt import RRT
from mammoth_path.model.aggregators.transmil import TransMIL
from mammoth_path.model.aggregators.wikg import WiKG

AGGREGATORS: dict[str, Callable[..., nn.Module]] = {
    "mean": MeanPool,
    "max": MaxPool,
    "abmil": GatedAttention,
    "clam-sb": Clam,
    "clam-mb": partial(Clam, multi=True),
    "dsmil": DSMIL,
    "dtfd": DTFD,
    "transmil": TransMIL,
    "ilra": ILRA,
    "rrt": RRT,
    "wikg": WiKG,
}
WITHOUT_DROPOUT = ("mean", "max", "transmil", "ilra")

__all__ = ["AGGREGATORS", "Pooled", "build_aggregator", "initialise"]


def build_aggregator(
    name: str,
    dim: int,
    outputs: int,
    *,
    dropout: float = 0.25,
    options: dict[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """One of `AGGREGATORS` for tokens of width `dim` and a head of `outputs`. options: its own arguments.

    Raises `ConfigError` for another name or argument.
    """
    if name not in AGGREGATORS:
        raise ConfigError(f"aggregator={name!r}; there are: {', '.join(AGGREGATORS)}")
    shared = {} if name in WITHOUT_DROPOUT else {"dropout": dropout}
    try:
        aggregator = AGGREGATORS[name](dim, outputs, **shared, **(options or {}))
    except TypeError as e:
        raise ConfigError(f"aggregator {name}: {e}") from e
    return initialise(aggregator, generator)


def initialise(module: nn.Module, generator: torch.Generator | None) -> nn.Module:
    """Xavier-uniform weights and zero biases of linear layers and convolutions; learned tokens of variance 1/D."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d):
            nn.init.xavier_uniform_(part.weight, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        own = part.parameters(recurse=False)
        if not isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.LayerNorm):
            for token in own:
                nn.init.normal_(token, std=token.shape[-1] ** -0.5, generator=generator)
    return module
