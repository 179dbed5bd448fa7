import numpy as np
import pytest
import torch
from sklearn import metrics

from mammoth_path import train
from mammoth_path.data.bags import BagSet
from mammoth_path.evaluate import (
    auroc,
    balanced_accuracy,
    calibration_error,
    cross_validate,
    draw_cases,
    estimate,
    kappa,
    paired_difference,
)
from mammoth_path.fit_cohort import fit_cohort
from mammoth_path.train import TrainOptions, fit, load_model, predict_probabilities, save_model
from shared_moe.errors import InputError, RefusedError, UnreadableError

SMALL = {"num_experts": 2, "num_slots": 2, "num_heads": 2, "slot_dim": 8, "rank": 2}


def options(**changes) -> TrainOptions:
    defaults = {"dim": 16, "layer_options": SMALL, "epochs": 6, "learning_rate": 3e-3, "batch_size": 4}
    return TrainOptions(**{**defaults, **changes})


def easy_bags(count=24, shift=2.0, seed=0):
    """Positive bags hold a few shifted instances."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    features = []
    for y in labels:
        x = rng.normal(size=(int(rng.integers(4, 9)), 5)).astype(np.float32) * 3 + 10
        x[:2, 0] += 6 * shift * y
        features.append(x)
    names = [str(i) for i in range(count)]
    return BagSet(features, labels, names, names, ["no", "yes"])


@pytest.mark.parametrize("layer", ["linear", "mammoth"])
def test_it_learns_what_can_be_learned(layer):
    layer_options = SMALL if layer == "mammoth" else {}
    model = fit(
        easy_bags(40), options(layer=layer, layer_options=layer_options, aggregator="max", epochs=40)
    ).model
    test = easy_bags(40, seed=1)
    assert auroc(test.labels, predict_probabilities(model, test)) > 0.9


def test_same_seed_same_weights_and_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    first, second, other = (fit(easy_bags(), options(seed=s)).model for s in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("patience", [0, 3])
def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path, monkeypatch, patience):
    chosen = options(patience=patience, epochs=8)
    whole = fit(easy_bags(), chosen, tmp_path / "whole")
    real, calls = train._epoch, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(train, "_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(easy_bags(), chosen, tmp_path / "cut")
    monkeypatch.setattr(train, "_epoch", real)
    resumed = fit(easy_bags(), chosen, tmp_path / "cut", resume=True)
    for a, b in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert (tmp_path / "cut" / "log.csv").read_text() == (tmp_path / "whole" / "log.csv").read_text()


def test_resuming_with_other_options_or_a_damaged_state(tmp_path):
    fit(easy_bags(), options(epochs=1), tmp_path)
    with pytest.raises(InputError, match=r"other options \(epochs\)"):
        fit(easy_bags(), options(epochs=2), tmp_path, resume=True)
    (tmp_path / train.STATE).write_bytes(b"broken")
    with pytest.raises(UnreadableError, match="cannot resume"):
        fit(easy_bags(), options(epochs=1), tmp_path, resume=True)


def test_early_stopping_returns_the_best_epoch():
    noise = easy_bags(40, shift=0.0)
    trained = fit(noise, options(patience=2, epochs=60, learning_rate=0.03))
    losses = [h["val_loss"] for h in trained.history]
    assert len(losses) < 60
    assert len(losses) - 1 - int(np.argmin(losses)) == 2
    _, val = train._split(noise, options(patience=2))
    assert train.evaluate_loss(trained.model, val) == pytest.approx(min(losses), abs=1e-6)


def test_standardisation_comes_from_the_training_bags():
    bags = easy_bags()
    model = fit(bags, options(epochs=1)).model
    rows = np.concatenate(bags.features)
    assert model.feature_mean.numpy() == pytest.approx(rows.mean(0))
    assert model.feature_std.numpy() == pytest.approx(rows.std(0))


@pytest.mark.parametrize(
    "changes", [{"epochs": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"patience": -1}]
)
def test_bad_options(changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        options(**changes)


def test_a_saved_model_predicts_the_same(tmp_path):
    bags = easy_bags()
    model = fit(bags, options(epochs=1)).model
    save_model(tmp_path / "m", model, bags.classes, "# card", encoder="uni")
    loaded, config = load_model(tmp_path / "m")
    assert np.array_equal(predict_probabilities(loaded, bags), predict_probabilities(model, bags))
    assert (config["encoder"], config["classes"]) == ("uni", ["no", "yes"])


def test_shipped_models_load_and_their_metrics_stand_in_the_config():
    for name, dim in (("ucsb-breast", 708), ("weak-tumour-densenet121", 1024)):
        model, config = load_model(name)
        assert model.input_dim == dim
        assert 0.5 < config["metrics"]["auroc"]["value"] <= 1
    with pytest.raises(InputError, match="ucsb-breast"):
        load_model("no-such-model")


def test_a_cohort_is_measured_and_carded(tmp_path):
    folder = fit_cohort(easy_bags(), options(epochs=2), tmp_path, folds=2)
    card = (folder / "README.md").read_text()
    assert "2-fold cross-validation" in card
    assert "not a medical device" in card
    assert "| auroc |" in card


def test_nothing_is_trained_over(tmp_path):
    fit_cohort(easy_bags(), options(epochs=1), tmp_path / "a")
    with pytest.raises(RefusedError, match=r"model exists"):
        fit_cohort(easy_bags(), options(epochs=1, seed=1), tmp_path / "a")
    fit_cohort(easy_bags(), options(epochs=1, seed=1), tmp_path / "a", overwrite=True)
    fit(easy_bags(), options(epochs=1), tmp_path / "run")
    with pytest.raises(RefusedError, match="--resume"):
        fit(easy_bags(), options(epochs=1), tmp_path / "run")


def test_measures_equal_scikit_learns():
    rng = np.random.default_rng(0)
    labels, probs = rng.integers(0, 3, 60), rng.dirichlet(np.ones(3), 60)
    probs[:5] = probs[5:10]  # ties
    expected = np.mean([metrics.roc_auc_score(labels == c, probs[:, c]) for c in range(3)])
    assert auroc(labels, probs) == pytest.approx(expected)
    binary = labels % 2
    two = np.stack([1 - probs[:, 0].round(1), probs[:, 0].round(1)], 1)
    assert auroc(binary, two) == pytest.approx(metrics.roc_auc_score(binary, two[:, 1]))
    assert balanced_accuracy(labels, probs) == pytest.approx(
        metrics.balanced_accuracy_score(labels, probs.argmax(1))
    )
    assert kappa(labels, labels[:, None] == np.arange(3)) == 1
    assert np.isnan(auroc(np.zeros(4, int), np.full((4, 2), 0.5)))


def test_calibration_limits():
    labels = np.array([1, 1, 1, 0])
    assert calibration_error(labels, np.array([[0.25, 0.75]] * 4)) == pytest.approx(0)
    assert calibration_error(labels, np.array([[0.0, 1.0]] * 4)) == pytest.approx(0.25)


def test_intervals_hold_the_value_and_draw_whole_cases():
    rng = np.random.default_rng(0)
    labels = np.arange(80) % 2
    score = labels + rng.normal(size=80)
    probs = np.stack([-score, score], 1)
    cases = [str(i // 2) for i in range(80)]
    found = estimate("auroc", labels, [probs], cases, draws=300)
    assert found.low < found.value < found.high
    assert found.high - found.low > 0.05
    for draw in draw_cases(cases, 3, 0):
        times = np.bincount(draw, minlength=80).reshape(40, 2)
        assert np.array_equal(times[:, 0], times[:, 1])
    noisy = probs + rng.normal(size=probs.shape)
    both = estimate("auroc", labels, [probs, noisy], cases, draws=10)
    assert both.value == pytest.approx((auroc(labels, probs) + auroc(labels, noisy)) / 2)
    worse = np.stack([-rng.normal(size=80), rng.normal(size=80)], 1)
    gain = paired_difference(labels, [probs], [worse], cases, draws=300)
    assert gain.low > 0
    same = paired_difference(labels, [probs], [probs], cases, draws=50)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    with pytest.raises(InputError, match="auroc, balanced_accuracy"):
        estimate("f1", labels, [probs], cases)


def test_cross_validation_predicts_every_bag_once():
    (probs,) = cross_validate(easy_bags(), options(epochs=1), folds=3)
    assert probs.sum(1) == pytest.approx(1, abs=1e-5)
