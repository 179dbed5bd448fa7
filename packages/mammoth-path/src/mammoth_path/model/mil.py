"""Multiple-instance models: a task-specific layer (linear, MLP or MAMMOTH), an aggregator, a head.

Shapes: B bags, N patches, D encoder width, M tokens after the layer (N, or E·S slots), C classes, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from mammoth_path.errors import ConfigError, EmptyBagError, FeatureWidthError, encoders_of_width
from mammoth_path.model.aggregators import AGGREGATORS, Pooled, build_aggregator
from mammoth_path.model.budget import mammoth_parameters, mlp_width
from mammoth_path.model.heads import TASKS, build_head
from mammoth_path.model.mammoth import Mammoth
from shared_moe.errors import ShapeError

LAYERS = ("linear", "mlp", "mammoth")
__all__ = ["AGGREGATORS", "LAYERS", "TASKS", "MILModel", "MILOutput"]


@dataclass(frozen=True)
class MILOutput:
    """logits (B, C) and the aggregator's attention over its tokens (B, M), which sums to 1 over the real ones (of the
    most probable class, where every class has its own).

    For training: side_logits (B, K, C) with side_mask (B, K), further answers that the bag's label supervises, and
    losses, terms to add to the bag's.
    """

    logits_BC: Tensor
    attention_BM: Tensor
    side_logits_BKC: Tensor | None = None
    side_mask_BK: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)


class MILModel(nn.Module):
    """encoder features -> layer -> aggregator -> head, on padded mini-batches with masks.

    layer               "linear" (Linear, ReLU, dropout), "mlp" (two layers with MAMMOTH's parameter count) or "mammoth"
    aggregator          one of `AGGREGATORS`; aggregator_options are its own arguments
    layer_options       arguments of `Mammoth` (for "mlp": of the Mammoth whose size it takes)
    task, edges         what the head answers, and the times between its bins: see `build_head`
    temperature         divides the logits of class and grade probabilities; see `calibrate`
    allow_nonspatial    let an aggregator that reads patches in their order (transmil, rrt) take MAMMOTH's slots, which
                        have none

    Raises `ConfigError` when these do not fit together.
    """

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(
        self,
        input_dim: int,
        num_classes: int,
        *,
        layer: str = "mammoth",
        aggregator: str = "abmil",
        dim: int = 512,
        layer_options: dict[str, Any] | None = None,
        aggregator_options: dict[str, Any] | None = None,
        dropout: float = 0.25,
        task: str = "classification",
        edges: Sequence[float] = (),
        temperature: float = 1.0,
        allow_nonspatial: bool = False,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.config = {
            "input_dim": input_dim,
            "num_classes": num_classes,
            "layer": layer,
            "aggregator": aggregator,
            "dim": dim,
            "layer_options": dict(layer_options or {}),
            "aggregator_options": dict(aggregator_options or {}),
            "dropout": dropout,
            "task": task,
            "edges": list(edges),
            "temperature": temperature,
            "allow_nonspatial": allow_nonspatial,
        }
        self.input_dim, self.task, self.temperature = input_dim, task, temperature
        self.answers = build_head(task, num_classes, edges)
        self.layer = _build_layer(layer, input_dim, dim, dict(layer_options or {}), dropout, generator)
        self.aggregator = build_aggregator(
            aggregator,
            dim,
            self.answers.outputs,
            dropout=dropout,
            options=aggregator_options,
            generator=generator,
        )
        if self.routes_slots and getattr(self.aggregator, "ordered", False) and not allow_nonspatial:
            raise ConfigError(
                f"aggregator={aggregator!r} reads patches in their order, and MAMMOTH's slots have none: use "
                "layer_options keep_slots=False, another aggregator, or allow_nonspatial=True"
            )
        self.head = nn.Linear(cast(int, self.aggregator.out_dim), self.answers.outputs)
        self.register_buffer("feature_mean", torch.zeros(input_dim))
        self.register_buffer("feature_std", torch.ones(input_dim))
        nn.init.xavier_uniform_(self.head.weight, generator=generator)
        nn.init.zeros_(self.head.bias)

    def standardise(self, mean_D: Tensor, std_D: Tensor) -> None:
        """Let the model subtract `mean` and divide by `std`, both taken from its training bags; they are saved with it."""
        self.feature_mean.copy_(mean_D)
        self.feature_std.copy_(torch.where(std_D > 0, std_D, 1))

    def calibrate(self, temperature: float) -> None:
        """Divide logits by `temperature` in `answer`; it is saved with the model."""
        self.temperature = self.config["temperature"] = temperature

    @property
    def routes_slots(self) -> bool:
        return isinstance(self.layer, Mammoth) and self.layer.keep_slots

    def forward(
        self,
        x_BND: Tensor,
        mask_BN: Tensor | None = None,
        *,
        labels_B: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> MILOutput:
        """x (B, N, D), mask (B, N) True = real patch; labels are for the losses of an aggregator that has its own.

        Raises what `Mammoth.forward` raises.
        """
        self._check(x_BND, mask_BN)
        x_BND = (x_BND - self.feature_mean) / self.feature_std
        if isinstance(self.layer, Mammoth):
            tokens = self.layer(x_BND, mask_BN, generator=generator)
        else:
            tokens = self.layer(x_BND if mask_BN is None else x_BND.masked_fill(~mask_BN[..., None], 0))
        real_BM = None if self.routes_slots else mask_BN
        pooled: Pooled = self.aggregator(tokens, real_BM, labels_B=labels_B, generator=generator)
        logits = self.score(pooled.vector)
        attention = self._one_attention(pooled.attention, logits)
        return MILOutput(logits, attention, pooled.side_logits_BKC, pooled.side_mask_BK, pooled.losses)

    def score(self, vector: Tensor) -> Tensor:
        """Pooled vectors (B, D), or one an output (B, O, D), through the head's linear layer: (B, O)."""
        if vector.dim() == 2:
            return self.head(vector)
        return (vector * self.head.weight).sum(-1) + self.head.bias

    def _one_attention(self, attention: Tensor, logits_BO: Tensor) -> Tensor:
        if attention.dim() == 2:
            return attention
        if self.task != "classification":
            return attention.mean(1)
        return attention[torch.arange(len(attention)), logits_BO.argmax(1)]

    def loss(
        self,
        x_BND: Tensor,
        mask_BN: Tensor | None,
        target: Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The training loss of a mini-batch: the head's, that of the side answers, and the aggregator's own."""
        labels = target if self.task == "classification" else None
        out = self.forward(x_BND, mask_BN, labels_B=labels, generator=generator)
        total = self.answers.loss(out.logits_BC, target)
        if out.side_logits_BKC is not None:
            total = total + self._side_loss(out.side_logits_BKC, out.side_mask_BK, target)
        return total + sum(out.losses.values())

    def _side_loss(self, side_BKC: Tensor, mask_BK: Tensor | None, target: Tensor) -> Tensor:
        if mask_BK is None:
            mask_BK = side_BKC.new_ones(side_BKC.shape[:2], dtype=torch.bool)
        terms = []
        for k in range(side_BKC.shape[1]):
            there = mask_BK[:, k]
            if there.any():
                terms.append(self.answers.loss(side_BKC[there, k], target[there]) * there.sum())
        return torch.stack(terms).sum() / mask_BK.sum()

    def answer(self, logits_BC: Tensor) -> Tensor:
        """Calibrated class or grade probabilities (B, C); survival of each bin (B, K); or Cox's log-hazard (B, 1)."""
        return self.answers.answer(logits_BC, self.temperature)

    @torch.no_grad()
    def patch_scores(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The share of each patch in the bag's vector (B, N), summing to 1, and for MAMMOTH its experts (B, N, E).

        Exact: attention over slots is carried to the patches through the dispatch weights. Call it in `eval()`.
        """
        attention = self.forward(x_BND, mask_BN).attention_BM
        x_BND = (x_BND - self.feature_mean) / self.feature_std
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
