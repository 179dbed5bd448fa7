"""DSMIL (Li et al., CVPR 2021): tokens attend to the critical one of each class.

Shapes: B bags, M tokens, D width, C outputs, Q query width.
"""

import torch
from torch import Tensor, nn

from mammoth_path.model.aggregators.base import Pooled, masked_softmax, real_tokens, take


class DSMIL(nn.Module):
    """A max-pooled instance classifier (first stream, a side answer) names each class's critical token; the second
    stream weighs the tokens by their similarity to it. The head sees the vectors of all classes at once."""

    def __init__(self, dim: int, outputs: int, *, width: int = 384, dropout: float = 0.25):
        super().__init__()
        self.out_dim = outputs * dim
        self.instance = nn.Linear(dim, outputs)
        self.query = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.Tanh())
        self.value = nn.Sequential(nn.Dropout(dropout), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, h_BMD: Tensor, mask_BM: Tensor | None = None, **_) -> Pooled:
        real = real_tokens(h_BMD, mask_BM)
        best_BC, critical_BC = self.instance(h_BMD).masked_fill(~real[..., None], float("-inf")).max(1)
        query_BMQ = self.query(h_BMD)
        logits_BCM = take(query_BMQ, critical_BC) @ query_BMQ.mT / query_BMQ.shape[-1] ** 0.5
        attention_BCM = masked_softmax(logits_BCM, real[:, None])
        vector_BCD = torch.einsum("bcm,bmd->bcd", attention_BCM, self.value(h_BMD))
        return Pooled(vector_BCD.flatten(1), attention_BCM, best_BC[:, None])
