import pytest
import torch

from mammoth_path.errors import ConfigError, EmptyBagError, FeatureWidthError
from mammoth_path.model import MILModel
from mammoth_path.model.mammoth import Mammoth

OPTIONS = {"num_experts": 3, "num_slots": 2, "num_heads": 4, "slot_dim": 16, "rank": 3}
ARMS = [("linear", {}), ("mlp", OPTIONS), ("mammoth", OPTIONS), ("mammoth", {**OPTIONS, "keep_slots": False})]
AGGREGATORS = ["mean", "max", "abmil"]


def build(layer, options, aggregator, classes=3):
    generator = torch.Generator().manual_seed(0)
    model = MILModel(
        10, classes, layer=layer, aggregator=aggregator, dim=32, layer_options=options, generator=generator
    )
    return model.double().eval()


@pytest.mark.parametrize(("layer", "options"), ARMS)
@pytest.mark.parametrize("aggregator", AGGREGATORS)
def test_padding_changes_nothing_and_patch_scores_sum_to_one(layer, options, aggregator):
    model = build(layer, options, aggregator)
    x = torch.randn(2, 7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False
    x[1, 4:] = float("nan")
    out = model(x, mask)
    alone = model(x[1:, :4])
    torch.testing.assert_close(out.logits_BC[1:], alone.logits_BC, rtol=0, atol=1e-9)
    torch.testing.assert_close(out.attention_BM.sum(1), torch.ones(2, dtype=torch.float64))
    scores, experts = model.patch_scores(x, mask)
    torch.testing.assert_close(scores.sum(1), torch.ones(2, dtype=torch.float64))
    assert scores[1, 4:].abs().max() == 0
    torch.testing.assert_close(scores[1:, :4], model.patch_scores(x[1:, :4])[0], rtol=0, atol=1e-9)
    assert (experts is not None) == isinstance(model.layer, Mammoth)
    if experts is not None:
        torch.testing.assert_close(experts[0].sum(-1), torch.ones(7, dtype=torch.float64))


def test_mean_of_a_linear_layer_by_hand():
    model = build("linear", {}, "mean")
    x = torch.randn(1, 5, 10, dtype=torch.float64)
    h = (x[0] @ model.layer[0].weight.t() + model.layer[0].bias).relu()
    expected = h.mean(0) @ model.head.weight.t() + model.head.bias
    torch.testing.assert_close(model(x).logits_BC[0], expected)


def test_max_shares_are_the_features_won():
    pool = build("linear", {}, "max").aggregator
    h = torch.tensor([[[5.0, 0, 0, 9], [1, 7, 0, 0], [0, 0, 3, 0]]])
    out = pool(h)
    pooled, share = out.vector, out.attention
    assert pooled.tolist() == [[5, 7, 3, 9]]
    assert share.tolist() == [[0.5, 0.25, 0.25]]


def test_the_mlp_has_mammoths_parameter_count_at_most():
    mlp, mammoth = build("mlp", OPTIONS, "mean").layer, build("mammoth", OPTIONS, "mean").layer
    count = [sum(p.numel() for p in m.parameters()) for m in (mlp, mammoth)]
    assert count[0] <= count[1] < count[0] + 43  # one more hidden unit would not fit


def test_standardisation_is_saved_and_applied():
    model = build("linear", {}, "mean")
    x = torch.randn(1, 5, 10, dtype=torch.float64)
    expected = model(x).logits_BC
    mean, std = torch.randn(10).double(), torch.rand(10).double() + 0.5
    model.standardise(mean, std)
    torch.testing.assert_close(model(x * std + mean).logits_BC, expected)
    assert {"feature_mean", "feature_std"} <= model.state_dict().keys()


def test_what_does_not_fit_is_named():
    model = build("linear", {}, "mean")
    with pytest.raises(FeatureWidthError, match="features are 1024 wide, the model expects 10"):
        model(torch.zeros(1, 3, 1024))
    with pytest.raises(EmptyBagError):
        model(torch.zeros(1, 0, 10).double())
    with pytest.raises(ConfigError, match="aggregator='median'"):
        MILModel(10, 2, layer="linear", aggregator="median")
    with pytest.raises(ConfigError, match="layer='conv'"):
        MILModel(10, 2, layer="conv")
