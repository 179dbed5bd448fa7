"""CLAM (Lu et al., Nature BME 2021): gated attention whose extremes also train instance classifiers.

Shapes: B bags, M tokens, D width, C classes, A attentions (1, or one a class), K extreme tokens.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mammoth_path.model.aggregators.abmil import GatedScores
from mammoth_path.model.aggregators.base import Pooled, masked_softmax, real_tokens, take


class Clam(nn.Module):
    """One attention (CLAM-SB), or one a class and a vector each (multi=True, CLAM-MB).

    With class labels: the `instances` tokens of highest attention in the bag's class are taken as positive, those of
    lowest as negative, the highest of every other class as negative, and an instance classifier a class learns them by
    a smooth hinge loss. A bag of n tokens lends at most n/2 to each side, one of a single token none. The sum is
    bag_weight · bag + (1 - bag_weight) · instance, up to the factor bag_weight. Works on slots as on patches.
    """

    def __init__(
        self,
        dim: int,
        outputs: int,
        *,
        multi: bool = False,
        width: int = 384,
        dropout: float = 0.25,
        instances: int = 8,
        bag_weight: float = 0.7,
    ):
        super().__init__()
        self.out_dim = dim
        self.multi, self.instances, self.bag_weight = multi, instances, bag_weight
        self.scores = GatedScores(
            dim, width=width, attentions=outputs if multi and outputs > 1 else 1, dropout=dropout
        )
        self.instance_classifiers = nn.ModuleList(nn.Linear(dim, 2) for _ in range(outputs))

    def forward(
        self, h_BMD: Tensor, mask_BM: Tensor | None = None, *, labels_B: Tensor | None = None, **_
    ) -> Pooled:
        real = real_tokens(h_BMD, mask_BM)
        logits_BAM = self.scores.logits(h_BMD).transpose(1, 2)
        attention_BAM = masked_softmax(logits_BAM, real[:, None])
        vector = torch.einsum("bam,bmd->bad", attention_BAM, h_BMD)
        losses = {}
        if labels_B is not None:
            weight = (1 - self.bag_weight) / self.bag_weight
            losses["instance"] = weight * self.instance_loss(h_BMD, logits_BAM, real, labels_B)
        if logits_BAM.shape[1] == 1:
            vector, attention_BAM = vector[:, 0], attention_BAM[:, 0]
        return Pooled(vector, attention_BAM, losses=losses)

    def instance_loss(self, h_BMD: Tensor, logits_BAM: Tensor, real_BM: Tensor, labels_B: Tensor) -> Tensor:
        """Mean over the bags of at least two tokens (0 when there is none) and over the classes."""
        k = min(self.instances, h_BMD.shape[1])
        lent_B = (real_BM.sum(1) // 2).clamp(max=k)
        lent_BK = (torch.arange(k, device=h_BMD.device) < lent_B[:, None]).to(h_BMD.dtype)
        share_BK = lent_BK / lent_B.clamp(min=1)[:, None]
        loss_B = h_BMD.new_zeros(len(h_BMD))
        for c, classifier in enumerate(self.instance_classifiers):
            logits_BM = logits_BAM[:, min(c, logits_BAM.shape[1] - 1)].detach()
            inside_B = (labels_B == c).to(h_BMD.dtype)
            high, low = (
                (sign * logits_BM).masked_fill(~real_BM, float("-inf")).topk(k).indices for sign in (1, -1)
            )
            positive = inside_B[:, None].expand(-1, k).long()
            high_B = (smooth_hinge(classifier(take(h_BMD, high)), positive) * share_BK).sum(1)
            low_B = (smooth_hinge(classifier(take(h_BMD, low)), torch.zeros_like(positive)) * share_BK).sum(1)
            loss_B = loss_B + torch.where(inside_B > 0, (high_B + low_B) / 2, high_B)
        return loss_B.sum() / (lent_B > 0).sum().clamp(min=1) / len(self.instance_classifiers)


def smooth_hinge(logits_BK2: Tensor, target_BK: Tensor) -> Tensor:
    """Smooth top-1 SVM loss (Berrada et al., 2018) at temperature 1: cross-entropy after a margin of 1, per token."""
    margin = 1 - nnf.one_hot(target_BK, 2).to(logits_BK2.dtype)
    return nnf.cross_entropy((logits_BK2 + margin).flatten(0, 1), target_BK.flatten(), reduction="none").view(
        target_BK.shape
    )
