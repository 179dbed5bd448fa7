import io
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from shared_moe import plots
from shared_moe.errors import InputError, MissingExtra
from shared_moe.routing import Routing
from shared_moe.trace import RoutingTrace


@pytest.fixture
def trace():
    trace = RoutingTrace()
    for step in range(3):
        for layer, E in (("blocks.0", 4), ("blocks.1", 6)):
            ids = (torch.arange(10)[:, None] * (step + 1) + torch.arange(2)) % (E - 1)
            probs = torch.full((10, E), 1 / E)
            weights = torch.tensor([[0.3, 0.7]]).expand(10, 2)
            trace.record(layer, Routing(ids, weights, probs, probs.log()), ["even", "odd"] * 5)
        trace.step += 1
    return trace


def png(figure) -> np.ndarray:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return np.asarray(Image.open(out).convert("RGB"))


def test_load_bars_show_the_loads_in_percent(trace):
    figure = plots.load_bars(trace)
    assert len(figure.axes) == 2
    for axes, layer in zip(figure.axes, trace.layers, strict=True):
        np.testing.assert_allclose([bar.get_height() for bar in axes.patches], 100 * trace.load(layer))
        assert axes.lines[0].get_ydata()[0] == pytest.approx(100 / trace.num_experts[layer])
        assert axes.get_ylabel() == "load (%)"
    assert figure.axes[-1].get_xlabel() == "expert"
    assert png(figure).std() > 0


def test_kind_heatmap_shows_p_expert_given_kind(trace):
    figure = plots.kind_heatmap(trace, "blocks.1")
    axes = figure.axes[0]
    kinds, share = trace.by_kind("blocks.1")
    np.testing.assert_allclose(axes.images[0].get_array(), 100 * share)
    assert [t.get_text() for t in axes.get_yticklabels()] == kinds == ["even", "odd"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("expert", "kind")
    assert "%" in figure.axes[1].get_ylabel()
    assert png(figure).std() > 0


def test_over_time_shows_entropy_and_idle_experts(trace):
    top, bottom = plots.over_time(trace).axes
    for i, E in enumerate((4, 6)):
        np.testing.assert_array_equal(top.lines[i].get_xdata(), [0, 1, 2])
        np.testing.assert_allclose(top.lines[i].get_ydata(), [math.log(E)] * 3, rtol=1e-6)
        expected = [100 * len(trace.dead_experts(f"blocks.{i}", s)) / E for s in range(3)]
        np.testing.assert_allclose(bottom.lines[i].get_ydata(), expected)
    assert "nats" in top.get_ylabel()
    assert "%" in bottom.get_ylabel()
    assert bottom.get_xlabel() == "step"


def test_depth_and_time_shows_the_expert_of_greatest_weight(trace):
    figure = plots.depth_and_time(trace, steps=[1])
    shown = figure.axes[0].images[0].get_array()
    expected = [trace.replay(layer, 1)[0][:, 1].numpy() for layer in trace.layers]
    np.testing.assert_array_equal(shown, expected)
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("token", "layer")
    assert plots.depth_and_time(trace).axes[0].images[0].get_array().shape == (2, 30)
    assert png(figure).std() > 0


def test_depth_and_time_thins_long_traces_and_skips_empty_slots():
    trace = RoutingTrace()
    ids = torch.arange(4500)[:, None] % 3 - 1
    probs = torch.full((4500, 2), 0.5)
    trace.record("l", Routing(ids, torch.ones(4500, 1), probs, probs.log()))
    axes = plots.depth_and_time(trace).axes[0]
    shown = axes.images[0].get_array()
    assert shown.shape == (1, 1500)
    assert np.isnan(np.ma.filled(shown, np.nan)).all()
    assert axes.get_xlabel() == "token (1 in 3 shown)"


def test_nothing_to_draw_is_said(trace):
    with pytest.raises(InputError, match="nothing to draw"):
        plots.load_bars(RoutingTrace())
    with pytest.raises(InputError, match="no layer 'x'"):
        plots.over_time(trace, ["x"])
    with pytest.raises(InputError, match="no token was recorded in steps"):
        plots.depth_and_time(trace, steps=[99])
    bare = RoutingTrace()
    bare.record("l", Routing(torch.zeros(1, 1, dtype=torch.int64), *[torch.ones(1, 1)] * 3))
    with pytest.raises(InputError, match="pass kinds"):
        plots.kind_heatmap(bare, "l")


def test_matplotlib_is_imported_only_when_something_is_drawn(trace, monkeypatch):
    check = "import sys, shared_moe.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"shared-moe\[viz\]"):
        plots.load_bars(trace)
