"""Training reaches every aggregator, with the losses that are its own."""

import numpy as np
import pytest
import torch

from mammoth_path.cli import AGGREGATOR_HELP
from mammoth_path.data.bags import BagSet
from mammoth_path.model.aggregators import AGGREGATORS
from mammoth_path.train import TrainOptions, fit


def needles(bags: int = 24, dim: int = 6) -> BagSet:
    """Bags of which the positive ones hold one patch that stands out."""
    draws = np.random.default_rng(0)
    features, labels = [], []
    for number in range(bags):
        x = draws.normal(size=(int(draws.integers(5, 9)), dim)).astype(np.float32)
        if number % 2:
            x[0, 0] += 8
        features.append(x)
        labels.append(number % 2)
    names = [str(n) for n in range(bags)]
    return BagSet(features, np.asarray(labels), names, names, ["negative", "positive"])


@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_it_learns_bags_with_a_needle(aggregator):
    bags = needles()
    options = TrainOptions(
        layer="linear", aggregator=aggregator, dim=16, dropout=0.0, epochs=40, learning_rate=8e-3, seed=1
    )
    model = fit(bags, options).model
    with torch.no_grad():
        found = [int(model(torch.from_numpy(x)[None]).logits_BC.argmax()) for x in bags.features]
    assert np.mean(np.asarray(found) == bags.labels) >= 0.9


def test_the_help_names_every_aggregator():
    assert all(name in AGGREGATOR_HELP for name in AGGREGATORS)
