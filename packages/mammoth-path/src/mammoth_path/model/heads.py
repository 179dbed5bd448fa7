"""What a model answers: a class, a grade, or how long. Each head turns the scores of a bag into a loss and an answer.

Shapes: B bags, C classes or grades, K time bins, O outputs (scores a bag). Survival targets are (B, 2): time, event (1, or
0 where the time is that of the last sight).
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from mammoth_path.errors import ConfigError
from shared_moe.errors import ShapeError


class Classification(nn.Module):
    """Softmax over C classes; targets are class indices."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.outputs = num_classes

    def loss(self, logits_BO: Tensor, target_B: Tensor) -> Tensor:
        return nnf.cross_entropy(logits_BO, target_B)

    def answer(self, logits_BO: Tensor, temperature: float = 1.0) -> Tensor:
        """Class probabilities (B, C)."""
        return (logits_BO / temperature).softmax(1)


class Ordinal(nn.Module):
    """C ordered grades by one score and C - 1 rising thresholds (proportional odds, McCullagh 1980); targets are grade
    indices. P(grade <= k) = sigmoid(threshold_k - score)."""

    outputs = 1

    def __init__(self, num_classes: int):
        super().__init__()
        if num_classes < 2:
            raise ConfigError(f"num_classes={num_classes}; grades need at least 2")
        share = torch.arange(1, num_classes) / num_classes
        self.first = nn.Parameter(torch.logit(share[:1]))
        self.log_gaps = nn.Parameter(torch.logit(share).diff().log())

    @property
    def thresholds(self) -> Tensor:
        """(C - 1,), rising."""
        return torch.cat([self.first, self.first + self.log_gaps.exp().cumsum(0)])

    def log_probabilities(self, logits_BO: Tensor, temperature: float = 1.0) -> Tensor:
        """(B, C), from differences of sigmoids that never cancel."""
        below = (self.thresholds - logits_BO) / temperature
        lower = nnf.pad(nnf.logsigmoid(below), (0, 1))
        upper = nnf.pad(nnf.logsigmoid(-below), (1, 0))
        gap = nnf.pad(torch.log(-torch.expm1(-below.diff(dim=1))), (1, 1))
        return lower + upper + gap

    def loss(self, logits_BO: Tensor, target_B: Tensor) -> Tensor:
        return nnf.nll_loss(self.log_probabilities(logits_BO), target_B)

    def answer(self, logits_BO: Tensor, temperature: float = 1.0) -> Tensor:
        """Grade probabilities (B, C)."""
        return self.log_probabilities(logits_BO, temperature).exp()


class DiscreteSurvival(nn.Module):
    """Hazards of K time bins. `edges`: the K - 1 times between them, in the unit of the targets; the last bin is open.

    Likelihood as in Zadeh & Schmid (2020): an event lives through the earlier bins and falls in its own; who is lost from
    sight lives through the bin of that time.
    """

    edges_E: Tensor

    def __init__(self, edges: Sequence[float]):
        super().__init__()
        if not len(edges) or any(b <= a for a, b in itertools.pairwise(edges)) or edges[0] <= 0:
            raise ConfigError(f"edges={list(edges)}; expected rising positive times between the bins")
        self.outputs = len(edges) + 1
        self.register_buffer("edges_E", torch.tensor(edges, dtype=torch.float64), persistent=False)

    def loss(self, logits_BO: Tensor, target_B2: Tensor) -> Tensor:
        _check_survival(target_B2)
        bin_B1 = torch.bucketize(target_B2[:, :1].double().contiguous(), self.edges_E, right=True)
        event_B = target_B2[:, 1].to(logits_BO.dtype)
        lived = nnf.logsigmoid(-logits_BO).cumsum(1)
        lived_B = lived.gather(1, bin_B1)[:, 0]
        own_B = logits_BO.gather(1, bin_B1)[:, 0]
        before_B = lived_B - nnf.logsigmoid(-own_B)
        return -(event_B * (before_B + nnf.logsigmoid(own_B)) + (1 - event_B) * lived_B).mean()

    def answer(self, logits_BO: Tensor, temperature: float = 1.0) -> Tensor:
        """Probability of living through each bin (B, K)."""
        return nnf.logsigmoid(-logits_BO).cumsum(1).exp()

    def risk(self, logits_BO: Tensor) -> Tensor:
        """(B,), higher for shorter expected survival."""
        return -self.answer(logits_BO).sum(1)


class Cox(nn.Module):
    """One log-hazard a bag, relative to the others; negative partial log-likelihood an event, ties by Efron (1977).

    A mini-batch compares its own bags only, so let it hold several events.
    """

    outputs = 1

    def loss(self, logits_BO: Tensor, target_B2: Tensor) -> Tensor:
        _check_survival(target_B2)
        time_B, died_B = target_B2[:, 0], target_B2[:, 1] > 0
        log_risk_B = logits_BO[:, 0]
        if not died_B.any():
            return log_risk_B.sum() * 0
        risk_B = (log_risk_B - log_risk_B.detach().max()).exp()
        total = log_risk_B.new_zeros(())
        for t in time_B[died_B].unique():
            tied = died_B & (time_B == t)
            at_risk, own = risk_B[time_B >= t].sum(), risk_B[tied].sum()
            d = int(tied.sum())
            steps = torch.arange(d, device=risk_B.device, dtype=risk_B.dtype) / d
            total = total - log_risk_B[tied].sum() + (at_risk - steps * own).log().sum()
            total = total + d * log_risk_B.detach().max()
        return total / died_B.sum()

    def answer(self, logits_BO: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-hazard (B, 1)."""
        return logits_BO

    def risk(self, logits_BO: Tensor) -> Tensor:
        return logits_BO[:, 0]


Head = Classification | Ordinal | DiscreteSurvival | Cox
TASKS = ("classification", "ordinal", "survival", "cox")


def build_head(task: str, num_classes: int, edges: Sequence[float] = ()) -> Head:
    """num_classes: classes or grades (survival and cox have none); edges: the times between the bins of survival.

    Raises `ConfigError` for another task or numbers that do not fit.
    """
    if task == "classification":
        if num_classes < 1:
            raise ConfigError(f"num_classes={num_classes}; expected at least 1")
        return Classification(num_classes)
    if task == "ordinal":
        return Ordinal(num_classes)
    if task == "survival":
        return DiscreteSurvival(edges)
    if task == "cox":
        return Cox()
    raise ConfigError(f"task={task!r}; there are: {', '.join(TASKS)}")


def _check_survival(target_B2: Tensor) -> None:
    if target_B2.dim() != 2 or target_B2.shape[1] != 2:
        raise ShapeError(f"survival targets must be (B, 2): time and event, got {tuple(target_B2.shape)}")
