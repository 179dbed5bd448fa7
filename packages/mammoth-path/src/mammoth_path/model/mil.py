"""Multiple-instance models: a task-specific layer (linear, MLP or MAMMOTH), an aggregator, a head.

Shapes: B bags, N patches, D encoder width, M tokens after the layer (N, or E·S slots), C classes, E experts.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mammoth_path.errors import ConfigError, EmptyBagError, FeatureWidthError, encoders_of_width
from mammoth_path.model.aggregators import build_aggregator
from mammoth_path.model.budget import mammoth_parameters, mlp_width
from mammoth_path.model.mammoth import Mammoth
from shared_moe.errors import ShapeError

LAYERS = ("linear", "mlp", "mammoth")


@dataclass(frozen=True)
class MILOutput:
    """logits (B, C) and the aggregator's attention over its tokens (B, M), which sums to 1 over the real ones."""

    logits_BC: Tensor
    attention_BM: Tensor


class MILModel(nn.Module):
    """encoder features -> layer -> aggregator -> class logits, on padded mini-batches with masks.

    layer          "linear" (Linear, ReLU, dropout), "mlp" (two layers with MAMMOTH's parameter count) or "mammoth"
    aggregator     "mean", "max" or "abmil"
    layer_options  arguments of `Mammoth` (for "mlp": of the Mammoth whose size it takes)
    """

    def __init__(
        self,
        input_dim: int,
        num_classes: int,
        *,
        layer: str = "mammoth",
        aggregator: str = "abmil",
        dim: int = 512,
        layer_options: dict[str, Any] | None = None,
        dropout: float = 0.25,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if num_classes < 1:
            raise ConfigError(f"num_classes={num_classes}; expected at least 1")
        options = dict(layer_options or {})
        self.config = {
            "input_dim": input_dim,
            "num_classes": num_classes,
            "layer": layer,
            "aggregator": aggregator,
            "dim": dim,
            "layer_options": options,
            "dropout": dropout,
        }
        self.input_dim = input_dim
        self.layer = _build_layer(layer, input_dim, dim, options, dropout, generator)
        self.aggregator = build_aggregator(aggregator, dim, dropout=dropout, generator=generator)
        self.head = nn.Linear(dim, num_classes)
        nn.init.xavier_uniform_(self.head.weight, generator=generator)
        nn.init.zeros_(self.head.bias)

    @property
    def routes_slots(self) -> bool:
        return isinstance(self.layer, Mammoth) and self.layer.keep_slots

    def forward(
        self, x_BND: Tensor, mask_BN: Tensor | None = None, *, generator: torch.Generator | None = None
    ) -> MILOutput:
        """x (B, N, D), mask (B, N) True = real patch. Raises what `Mammoth.forward` raises."""
        if isinstance(self.layer, Mammoth):
            tokens = self.layer(x_BND, mask_BN, generator=generator)
        else:
            self._check(x_BND, mask_BN)
            tokens = self.layer(x_BND if mask_BN is None else x_BND.masked_fill(~mask_BN[..., None], 0))
        pooled, attention = self.aggregator(tokens, None if self.routes_slots else mask_BN)
        return MILOutput(self.head(pooled), attention)

    @torch.no_grad()
    def patch_scores(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The share of each patch in the bag's vector (B, N), summing to 1, and for MAMMOTH its experts (B, N, E).

        Exact: attention over slots is carried to the patches through the dispatch weights. Call it in `eval()`.
        """
        attention = self.forward(x_BND, mask_BN).attention_BM
        if not isinstance(self.layer, Mammoth):
            return attention, None
        if not self.layer.keep_slots:
            slots = attention.new_ones(len(x_BND), self.layer.num_experts * self.layer.num_slots)
            return attention, self.layer.patch_weights(x_BND, slots, mask_BN)[1]
        return self.layer.patch_weights(x_BND, attention, mask_BN)

    def _check(self, x_BND: Tensor, mask_BN: Tensor | None) -> None:
        if x_BND.dim() != 3:
            raise ShapeError(f"x must be (B, N, D), got {tuple(x_BND.shape)}")
        if x_BND.shape[-1] != self.input_dim:
            raise FeatureWidthError(
                f"features are {x_BND.shape[-1]} wide, the model expects {self.input_dim}: "
                f"{encoders_of_width(x_BND.shape[-1])}; {encoders_of_width(self.input_dim)}"
            )
        if mask_BN is not None and (mask_BN.shape != x_BND.shape[:2] or mask_BN.dtype != torch.bool):
            raise ShapeError(
                f"mask must be bool of shape {tuple(x_BND.shape[:2])}, got {tuple(mask_BN.shape)}"
            )
        if x_BND.shape[1] == 0 or (mask_BN is not None and not bool(mask_BN.any(1).all())):
            raise EmptyBagError("a bag of the batch holds no real patch")


def _build_layer(
    name: str, input_dim: int, dim: int, options: dict, dropout: float, generator: torch.Generator | None
) -> nn.Module:
    if name == "mammoth":
        return Mammoth(input_dim, dim, generator=generator, **options)
    if name == "linear":
        widths = [input_dim, dim]
    elif name == "mlp":
        peer = Mammoth(input_dim, dim, **options)
        size = mammoth_parameters(
            input_dim,
            dim,
            experts=peer.num_experts,
            slots=peer.num_slots,
            heads=peer.num_heads,
            slot_dim=peer.query.out_features,
            rank=peer.rank,
            share=peer.experts.down.dim() == 3,
        )
        widths = [input_dim, mlp_width(input_dim, dim, size), dim]
    else:
        raise ConfigError(f"layer={name!r}; there are: {', '.join(LAYERS)}")
    parts: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        linear = nn.Linear(wide, narrow)
        nn.init.xavier_uniform_(linear.weight, generator=generator)
        nn.init.zeros_(linear.bias)
        parts += [linear, nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*parts)
