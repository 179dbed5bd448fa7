"""Attention-based pooling with a gate (Ilse et al., ICML 2018). Shapes: B bags, M tokens, D width, A attentions."""

import torch
from torch import Tensor, nn

from mammoth_path.model.aggregators.base import Pooled, masked_softmax, real_tokens


class GatedScores(nn.Module):
    """(..., D) -> (..., A): w · (tanh(V h) * sigmoid(U h)), the attention logits."""

    def __init__(self, dim: int, *, width: int = 384, attentions: int = 1, dropout: float = 0.25):
        super().__init__()
        self.value, self.gate = nn.Linear(dim, width), nn.Linear(dim, width)
        self.score = nn.Linear(width, attentions)
        self.dropout = nn.Dropout(dropout)

    def logits(self, h: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.value(h))) * self.dropout(torch.sigmoid(self.gate(h)))
        return self.score(hidden)


class GatedAttention(GatedScores):
    """ABMIL: the attention-weighted mean of the tokens."""

    def __init__(self, dim: int, outputs: int, *, width: int = 384, dropout: float = 0.25):
        super().__init__(dim, width=width, dropout=dropout)
        self.out_dim = dim

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None, **_) -> Pooled:
        attention = masked_softmax(self.logits(h_BMD)[..., 0], real_tokens(h_BMD, mask_BM))
        return Pooled(torch.einsum("bm,bmd->bd", attention, h_BMD), attention)
