"""MAMMOTH: a soft, multi-head, slot-routed mixture of low-rank experts in the place of a MIL model's linear layer
(Shao et al., ICLR 2026, arXiv 2603.22198).

Shapes: B bags, N patches, D encoder width, D_out output width, H heads, E experts, S slots an expert, d_s slot width,
P = d_s/H, Q = D_out/H, r rank.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mammoth_path.errors import ConfigError, EmptyBagError, FeatureWidthError, encoders_of_width
from mammoth_path.model.budget import auto_rank, matched_rank
from shared_moe.errors import ShapeError
from shared_moe.experts import LowRankExperts
from shared_moe.ops.slot_mix import CHUNK, stream_slots
from shared_moe.routing import SlotRouter, SlotRouting

EPS = 1e-5


class Mammoth(nn.Module):
    """Drop-in for `Linear(input_dim, dim)` and its activation, in two outputs:

    keep_slots=True   (B, N, D) -> (B, E·S, D_out), one vector a slot, expert-major: the paper's output
    keep_slots=False  (B, N, D) -> (B, N, D_out), slots recombined to patches

    rank         "auto" (the paper's budget formula, some 20 % above the linear layer at width 1024), "match" (never
                 more parameters than the linear layer), or a number
    norm         "pre": RMS norm, then ReLU (the published code); "post": LayerNorm of ReLU (the paper); "none"
    query_norm   "layer" or "rms", with a learned scale and no shift, or "none"
    scale        factor on the routing logits; a number (0 switches routing off), or "learned"
    init         "default": fan-in of each head's factors, zero biases; "official": the distributions of the published
                 code, for parity tests
    Raises `ConfigError` when the numbers do not fit together; a misspelt argument is a `TypeError`.
    """

    def __init__(
        self,
        input_dim: int,
        dim: int = 512,
        *,
        num_experts: int = 30,
        num_slots: int = 10,
        num_heads: int = 16,
        slot_dim: int = 256,
        rank: int | str = "auto",
        dropout: float = 0.1,
        slot_dropout: float = 0.0,
        keep_slots: bool = True,
        share_factors: bool = True,
        norm: str = "pre",
        query_norm: str = "layer",
        scale: float | str = 1.0,
        init: str = "default",
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        _check_choices(norm=norm, query_norm=query_norm, init=init, rank=rank, scale=scale)
        for name, value in {"slot_dim": slot_dim, "dim": dim}.items():
            if num_heads < 1 or value % num_heads:
                raise ConfigError(f"num_heads={num_heads} does not divide {name}={value}")
        if num_experts < 1 or num_slots < 1:
            raise ConfigError(f"num_experts={num_experts}, num_slots={num_slots}; expected at least 1 each")
        sizes = {"experts": num_experts, "slot_dim": slot_dim}
        if rank == "auto":
            rank = auto_rank(input_dim, dim, **sizes)
        elif rank == "match":
            rank = matched_rank(
                input_dim, dim, **sizes, slots=num_slots, heads=num_heads, share=share_factors
            )
        if not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"rank={rank}; expected at least 1, 'auto' or 'match'")
        self.input_dim, self.dim, self.rank = input_dim, dim, rank
        self.num_experts, self.num_slots, self.num_heads = num_experts, num_slots, num_heads
        self.keep_slots, self.norm, self.query_norm = keep_slots, norm, query_norm
        self.query = nn.Linear(input_dim, slot_dim)
        self.query_scale = nn.Parameter(torch.ones(slot_dim))
        self.router = SlotRouter(
            slot_dim,
            num_experts,
            num_slots,
            heads=num_heads,
            norm="layer",
            scale=scale if scale == "learned" else float(scale),
            dropout=slot_dropout,
            generator=generator,
        )
        self.experts = LowRankExperts(
            num_experts,
            num_heads,
            slot_dim // num_heads,
            dim // num_heads,
            rank,
            share_factors=share_factors,
            generator=generator,
        )
        self.out_scale = nn.Parameter(torch.ones(num_experts, dim))
        self.dropout = nn.Dropout(dropout)
        nn.init.xavier_uniform_(self.query.weight, generator=generator)
        nn.init.zeros_(self.query.bias)
        if init == "official":
            self._init_official(generator)

    def _init_official(self, generator: torch.Generator | None) -> None:
        nn.init.xavier_uniform_(self.router.slots, generator=generator)
        for factor in (self.experts.down, self.experts.up):
            nn.init.kaiming_uniform_(factor, a=5**0.5, generator=generator)
        nn.init.normal_(self.experts.down_bias, generator=generator)
        bound = self.rank**-0.5
        nn.init.uniform_(self.experts.up_bias, -bound, bound, generator=generator)

    def queries(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Normalised query vectors (B, N, d_s). Masked rows are replaced before the projection, so that whatever they
        hold has no effect and gets no gradient."""
        if mask_BN is not None:
            x_BND = x_BND.masked_fill(~mask_BN[..., None], 0)
        z = self.query(x_BND)
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.query_norm == "layer":
            wide = nnf.layer_norm(wide, wide.shape[-1:], self.query_scale.to(wide.dtype), eps=EPS)
        elif self.query_norm == "rms":
            wide = nnf.normalize(wide, dim=-1) * wide.shape[-1] ** 0.5 * self.query_scale
        return wide

    def expert_outputs(self, u_BHMP: Tensor) -> Tensor:
        """Mixed slots (B, H, E·S, P) through the experts, before the norm: (B, E, S, H, Q)."""
        return self.experts(u_BHMP.unflatten(2, (self.num_experts, self.num_slots)))

    def finish(self, v_BESHQ: Tensor) -> Tensor:
        """Norm, activation and dropout over an expert's concatenated heads: (B, E, S, D_out)."""
        v = v_BESHQ.flatten(3)
        scale = self.out_scale[:, None]
        if self.norm == "none":
            return v
        if self.norm == "pre":
            v = torch.relu(nnf.normalize(v, dim=-1) * self.dim**0.5 * scale)
        else:
            v = nnf.layer_norm(torch.relu(v), (self.dim,), eps=EPS) * scale
        return self.dropout(v)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        form: str = "fused",
        chunk: int = CHUNK,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """x (B, N, D) or one bag (N, D); mask (B, N) or (N,), True = real patch. `generator` draws the slot dropout.

        form: "fused", "streamed" (chunks; memory does not grow with N beyond the queries) or "reference"; they agree.
        Raises `FeatureWidthError` for another encoder's features, `EmptyBagError` for a bag without real patches,
        `ShapeError` for a mask of the wrong shape.
        """
        single = x.dim() == 2
        x_BND, mask_BN = self._check(x, mask)
        z_BND = self.queries(x_BND, mask_BN)
        dropped = self.router.draw_dropped(z_BND, generator)
        mixing = "reference" if dropped is not None and form == "streamed" else form
        u_BHMP = self.router.mix(z_BND, mask_BN, dropped_BHNS=dropped, form=mixing, chunk=chunk)
        v_BESHQ = self.expert_outputs(u_BHMP)
        out_BESD = self.finish(v_BESHQ)
        if self.keep_slots:
            y = out_BESD.flatten(1, 2)
        else:
            y = self._to_patches(z_BND, out_BESD, mask_BN, dropped, form, chunk)
        return y[0] if single else y

    def _to_patches(self, z_BND, out_BESD, mask_BN, dropped, form: str, chunk: int) -> Tensor:
        values = out_BESD.flatten(1, 2).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        if form == "streamed" and dropped is None:
            parts = [self.router.unmix(part, values) for part in z_BND.split(chunk, dim=1)]
            y = torch.cat(parts, dim=1)
        else:
            y = self.router.unmix(
                z_BND, values, dropped_BHNS=dropped, form="fused" if form == "streamed" else form
            )
        return y if mask_BN is None else y.masked_fill(~mask_BN[..., None], 0)

    def routing(self, x: Tensor, mask: Tensor | None = None) -> SlotRouting:
        """The exact dispatch and combine weights (B, H, N, E·S), stored: N·H·E·S numbers."""
        x_BND, mask_BN = self._check(x, mask)
        return self.router(self.queries(x_BND, mask_BN), mask_BN)

    @torch.no_grad()
    def patch_weights(
        self, x: Tensor, slot_attention_BM: Tensor, mask: Tensor | None = None, *, chunk: int = CHUNK
    ) -> tuple[Tensor, Tensor]:
        """What attention over slots means for patches, exactly, in memory that does not grow with N · E·S.

        Returns scores (B, N): a_n = Σ_m A_m (1/H) Σ_h dispatch_nhm, which sums to ΣA over the real patches; and
        experts (B, N, E): each patch's dispatch divided by its sum over heads and slots, summed over an expert's slots
        and heads, so that a patch's row sums to 1.
        """
        x_BND, mask_BN = self._check(x, mask)
        z = self.router.split(self.queries(x_BND, mask_BN))
        slots = self.router.prototypes().to(z.dtype)
        lse_BHM, _ = stream_slots(z, slots, self.router.scale, mask_BN, chunk)
        scores, experts = [], []
        for start in range(0, z.shape[2], chunk):
            part = z[:, :, start : start + chunk]
            logits = torch.einsum("hsp,bhnp->bhns", slots, part) * self.router.scale
            dispatch = (logits - lse_BHM[:, :, None]).exp()
            if mask_BN is not None:
                dispatch = dispatch * mask_BN[:, None, start : start + chunk, None]
            scores.append(
                torch.einsum("bhnm,bm->bn", dispatch, slot_attention_BM.to(z.dtype)) / self.num_heads
            )
            by_expert = dispatch.sum(1).unflatten(-1, (self.num_experts, -1)).sum(-1)
            tiny = torch.finfo(z.dtype).tiny
            experts.append(by_expert / by_expert.sum(-1, keepdim=True).clamp_min(tiny))
        return torch.cat(scores, 1), torch.cat(experts, 1)

    def _check(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if x.dim() not in (2, 3):
            raise ShapeError(f"x must be (N, D) or (B, N, D), got {tuple(x.shape)}")
        if x.shape[-1] != self.input_dim:
            raise FeatureWidthError(
                f"features are {x.shape[-1]} wide, the model expects input_dim={self.input_dim}: "
                f"{encoders_of_width(x.shape[-1])}; {encoders_of_width(self.input_dim)}"
            )
        if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != torch.bool):
            raise ShapeError(
                f"mask must be bool of shape {tuple(x.shape[:-1])}, got {mask.dtype} {tuple(mask.shape)}"
            )
        x_BND = x[None] if x.dim() == 2 else x
        mask_BN = mask[None] if mask is not None and x.dim() == 2 else mask
        if x_BND.shape[1] == 0:
            raise EmptyBagError("the bag holds no patch")
        if mask_BN is not None and not torch.compiler.is_compiling():
            empty = (~mask_BN.any(1)).nonzero()[:, 0].tolist()
            if empty:
                raise EmptyBagError(
                    f"bag {', '.join(map(str, empty))} of the batch holds no real patch (all masked)"
                )
        return x_BND, mask_BN


def _check_choices(*, norm: str, query_norm: str, init: str, rank: int | str, scale: float | str) -> None:
    for name, value, allowed in (
        ("norm", norm, ("pre", "post", "none")),
        ("query_norm", query_norm, ("layer", "rms", "none")),
        ("init", init, ("default", "official")),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r}; expected {', '.join(allowed)}")
    if isinstance(rank, str) and rank not in ("auto", "match"):
        raise ConfigError(f"rank={rank!r}; expected 'auto', 'match' or a number")
    if isinstance(scale, str) and scale != "learned":
        raise ConfigError(f"scale={scale!r}; expected a number or 'learned'")
