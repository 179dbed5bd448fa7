"""DTFD-MIL (Zhang et al., CVPR 2022): pseudo-bags answer first; what they distil is pooled again.

Shapes: B bags, M tokens, D width, C outputs, P pseudo-bags, K distilled tokens.
"""

import torch
from torch import Tensor, nn

from mammoth_path.errors import ConfigError
from mammoth_path.model.aggregators.abmil import GatedScores
from mammoth_path.model.aggregators.base import Pooled, masked_softmax, real_tokens, take


class DTFD(nn.Module):
    """Each bag is dealt into `pseudo_bags` parts: at random in training, in turn otherwise. Every part has its own
    attention vector and answer (side answers), and hands on

    distil="maxmin"   the tokens most and least in favour of the part's answer (by class activation)
    distil="mean"     its attention vector
    over which a second attention pools. Parts that get no token, in bags smaller than `pseudo_bags`, do not count.
    """

    def __init__(
        self,
        dim: int,
        outputs: int,
        *,
        pseudo_bags: int = 8,
        distil: str = "maxmin",
        width: int = 384,
        dropout: float = 0.25,
    ):
        super().__init__()
        if distil not in ("maxmin", "mean"):
            raise ConfigError(f"distil={distil!r}; expected maxmin or mean")
        self.out_dim = dim
        self.pseudo_bags, self.distil = pseudo_bags, distil
        self.first = GatedScores(dim, width=width, dropout=dropout)
        self.first_head = nn.Linear(dim, outputs)
        self.second = GatedScores(dim, width=width, dropout=dropout)

    def forward(
        self,
        h_BMD: Tensor,
        mask_BM: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        **_,
    ) -> Pooled:
        real_BM = real_tokens(h_BMD, mask_BM)
        member_BPM = self._deal(real_BM, generator)
        part_BP = member_BPM.any(2)
        first_BPM = masked_softmax(self.first.logits(h_BMD).transpose(1, 2), member_BPM)
        vector_BPD = first_BPM @ h_BMD
        side_BPC = self.first_head(vector_BPD)
        if self.distil == "mean":
            tokens, counts = vector_BPD, part_BP
        else:
            index_BK = self._extremes(h_BMD, first_BPM, member_BPM, side_BPC)
            tokens, counts = take(h_BMD, index_BK), part_BP.repeat(1, 2)
        second_BK = masked_softmax(self.second.logits(tokens)[..., 0], counts)
        vector = torch.einsum("bk,bkd->bd", second_BK, tokens)
        if self.distil == "mean":
            attention = torch.einsum("bp,bpm->bm", second_BK, first_BPM)
        else:
            attention = torch.zeros_like(real_BM, dtype=h_BMD.dtype).scatter_add(1, index_BK, second_BK)
        return Pooled(vector, attention, side_BPC, part_BP)

    def _deal(self, real_BM: Tensor, generator: torch.Generator | None) -> Tensor:
        """(B, P, M): token m is in part p."""
        if self.training:
            draw = torch.rand(real_BM.shape, generator=generator).to(real_BM.device)
            order = draw.masked_fill(~real_BM, 2).argsort(1).argsort(1)
        else:
            order = real_BM.cumsum(1) - 1
        parts = torch.arange(self.pseudo_bags, device=real_BM.device)[:, None]
        return (order[:, None] % self.pseudo_bags == parts) & real_BM[:, None]

    @torch.no_grad()
    def _extremes(self, h_BMD: Tensor, first_BPM: Tensor, member_BPM: Tensor, side_BPC: Tensor) -> Tensor:
        """(B, 2P): index of the token most in favour of each part's answer, then of the one least in favour."""
        activation_BMC = h_BMD @ self.first_head.weight.t()
        weighted_BPMC = first_BPM[..., None] * activation_BMC[:, None]
        if side_BPC.shape[-1] > 1:
            weighted_BPMC = weighted_BPMC.log_softmax(-1)
        answer = side_BPC.argmax(-1)[..., None, None].expand(-1, -1, h_BMD.shape[1], 1)
        favour_BPM = weighted_BPMC.gather(-1, answer)[..., 0]
        most = favour_BPM.masked_fill(~member_BPM, float("-inf")).argmax(2)
        least = favour_BPM.masked_fill(~member_BPM, float("inf")).argmin(2)
        return torch.cat([most, least], 1)
