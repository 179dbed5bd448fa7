import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mammoth_path.errors import ConfigError
from mammoth_path.model import MILModel
from mammoth_path.model.heads import TASKS, Classification, Cox, DiscreteSurvival, Ordinal, build_head
from shared_moe.errors import ShapeError

TIMES = torch.tensor([[1.0, 1], [2, 1], [2, 1], [3, 0], [4, 1], [4, 1], [4, 1], [5, 0]], dtype=torch.float64)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_two_grades_are_logistic_regression():
    head, score = Ordinal(2).double(), draw(6, 1)
    target = torch.tensor([0, 1, 1, 0, 1, 0])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        score[:, 0] - head.thresholds[0], target.double()
    )
    torch.testing.assert_close(head.loss(score, target), expected)


def test_grades_are_differences_of_cumulative_odds():
    head, score = Ordinal(4).double(), draw(5, 1)
    torch.testing.assert_close(head.answer(torch.zeros(1, 1).double()), torch.full((1, 4), 0.25).double())
    below = torch.sigmoid(head.thresholds - score)
    whole = torch.cat([torch.zeros(5, 1), below, torch.ones(5, 1)], 1)
    torch.testing.assert_close(head.answer(score), whole.diff(dim=1))
    expected = (head.answer(torch.tensor([[-50.0]])) * torch.arange(4)).sum().item()
    assert expected == pytest.approx(0, abs=1e-9)


@given(score=st.floats(-1e4, 1e4), temperature=st.floats(0.05, 20))
@settings(max_examples=60, deadline=None)
def test_grades_never_cancel(score, temperature):
    head = Ordinal(5).double()
    logits = torch.tensor([[score]], dtype=torch.float64, requires_grad=True)
    log_p = head.log_probabilities(logits, temperature)
    assert log_p.logsumexp(1).item() == pytest.approx(0, abs=1e-9)
    log_p.sum().backward()
    assert logits.grad.isfinite().all()


def survival_by_loops(logits, target, edges):
    total = 0.0
    for row, (time, event) in zip(logits.tolist(), target.tolist(), strict=True):
        hazards = [1 / (1 + math.exp(-v)) for v in row]
        own = sum(time >= e for e in edges)
        likelihood = math.prod(1 - h for h in hazards[:own])
        total -= math.log(likelihood * (hazards[own] if event else 1 - hazards[own]))
    return total / len(logits)


def test_discrete_survival_by_loops():
    edges = [1.5, 3.0, 4.5]
    head, logits = DiscreteSurvival(edges), draw(8, 4)
    assert head.loss(logits, TIMES).item() == pytest.approx(survival_by_loops(logits, TIMES, edges))
    survival = head.answer(logits)
    assert (survival.diff(dim=1) < 0).all()
    torch.testing.assert_close(survival, (1 - logits.sigmoid()).cumprod(1))
    higher = logits.clone()
    higher[0] += 1
    assert head.risk(higher)[0] > head.risk(logits)[0]


def efron_by_loops(score, target):
    times, events, risk = target[:, 0].tolist(), target[:, 1].tolist(), score.exp().tolist()
    total = 0.0
    for t in sorted({t for t, e in zip(times, events, strict=True) if e}):
        tied = [i for i in range(len(times)) if times[i] == t and events[i]]
        at_risk = sum(risk[i] for i in range(len(times)) if times[i] >= t)
        own = sum(risk[i] for i in tied)
        for step, i in enumerate(tied):
            total += math.log(at_risk - step / len(tied) * own) - score[i].item()
    return total / sum(events)


def test_cox_with_ties_by_loops():
    head, logits = Cox(), draw(8, 1)
    assert head.loss(logits, TIMES).item() == pytest.approx(efron_by_loops(logits[:, 0], TIMES))
    torch.testing.assert_close(head.loss(logits + 300, TIMES), head.loss(logits, TIMES))
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.loss(logits[order], TIMES[order]), head.loss(logits, TIMES))


def test_without_an_event_cox_has_nothing_to_learn():
    logits = draw(3, 1).requires_grad_()
    loss = Cox().loss(logits, torch.tensor([[1.0, 0], [2, 0], [3, 0]]))
    loss.backward()
    assert loss == 0
    assert logits.grad.abs().sum() == 0


@pytest.mark.parametrize("task", TASKS)
def test_gradients(task):
    head = build_head(task, 3, (1.5, 3.5)).double()
    target = torch.tensor([0, 2, 1, 1, 0, 2, 1, 0]) if task in ("classification", "ordinal") else TIMES
    logits = draw(8, head.outputs).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: head.loss(v, target), logits)


def test_temperature_flattens_and_keeps_the_answer():
    logits = 5 * draw(20, 3)
    for head in (Classification(3), Ordinal(3).double()):
        own = logits[:, : head.outputs]
        sharp, flat = head.answer(own), head.answer(own, 4.0)
        torch.testing.assert_close(flat.sum(1), torch.ones(20).double())
        assert flat.max(1).values.mean() < sharp.max(1).values.mean()
    assert torch.equal(Classification(3).answer(logits, 4.0).argmax(1), logits.argmax(1))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("aggregator", ["mean", "clam-mb", "dsmil", "dtfd"])
def test_every_head_on_aggregators_with_answers_of_their_own(task, aggregator):
    model = MILModel(
        6,
        3,
        layer="linear",
        aggregator=aggregator,
        dim=8,
        task=task,
        edges=(1.5, 3.5) if task == "survival" else (),
    ).double()
    target = torch.tensor([0, 2, 1, 1, 0, 2, 1, 0]) if task in ("classification", "ordinal") else TIMES
    mask = torch.arange(5)[None] < torch.tensor([5, 1, 3, 2, 5, 4, 1, 5])[:, None]
    loss = model.loss(draw(8, 5, 6), mask, target)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert model.head.weight.grad.abs().sum() > 0
    rebuilt = MILModel(**model.config).double()
    rebuilt.load_state_dict(model.state_dict())
    x = draw(2, 4, 6)
    answers = [m.eval().answer(m(x).logits_BC).detach().numpy() for m in (model, rebuilt)]
    assert np.array_equal(*answers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("grading", 3), "classification, ordinal, survival, cox"),
        (("classification", 0), "num_classes=0"),
        (("ordinal", 1), "at least 2"),
        (("survival", 1, ()), "edges="),
        (("survival", 1, (3.0, 2.0)), r"edges=\[3.0, 2.0\]"),
        (("survival", 1, (0.0, 2.0)), "positive"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_head(*arguments)


def test_survival_targets_are_times_and_events():
    for head in (Cox(), DiscreteSurvival([1.0])):
        with pytest.raises(ShapeError, match="time and event"):
            head.loss(torch.zeros(3, head.outputs), torch.zeros(3))
