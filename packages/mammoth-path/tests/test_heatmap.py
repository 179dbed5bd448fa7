import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pyramids import tissue_picture, write_pyramid

from mammoth_path.data.features import Bag
from mammoth_path.data.slides import open_slide
from mammoth_path.heatmap import heatmap_figure, paint, percentiles, save_figure, tissue_figure, write_maps
from shared_moe.errors import InputError


@given(x=st.integers(0, 3900), y=st.integers(0, 1900), max_px=st.sampled_from([256, 512, 1000]))
@settings(max_examples=40, deadline=None)
def test_a_patch_is_painted_where_it_lies(x, y, max_px):
    """In level-0 coordinates, at whatever size the overview has."""
    painted = paint(np.array([1.0]), np.array([[x, y]]), 100, (4000, 2000), max_px)
    down = 4000 / max_px
    assert painted.shape == (max_px // 2, max_px)
    rows, columns = np.nonzero(~np.isnan(painted))
    assert columns.min() == pytest.approx(x / down, abs=1)
    assert columns.max() + 1 == pytest.approx((x + 100) / down, abs=1)
    assert rows.min() == pytest.approx(y / down, abs=1)
    assert rows.max() + 1 == pytest.approx((y + 100) / down, abs=1)


def test_overlapping_patches_are_averaged():
    painted = paint(np.array([1.0, 3.0]), np.array([[0, 0], [5, 0]]), 10, (20, 10))
    assert painted[0, 0] == 1
    assert painted[0, 7] == 2
    assert painted[0, 12] == 3
    assert np.isnan(painted[0, 18])


def test_percentiles():
    assert percentiles(np.array([5.0, 1, 9])).tolist() == [0.5, 0, 1]
    assert percentiles(np.array([2.0, 2, 2])).tolist() == [0.5, 0.5, 0.5]
    assert percentiles(np.array([7.0])).tolist() == [0.5]


@pytest.fixture
def slide(tmp_path):
    with open_slide(write_pyramid(tmp_path / "spot.svs", tissue_picture(spot=(640, 384)))) as opened:
        yield opened


def grid_bag(values=None):
    coords = np.stack(np.meshgrid(np.arange(0, 1024, 128), np.arange(0, 1024, 128)), -1).reshape(-1, 2)
    return Bag(
        np.zeros((64, 3), np.float32), coords, {"patch_size_level0": 128, "patch_size": 128, "mpp_um": 0.5}
    )


def test_the_hot_patch_lies_on_the_spot_in_the_picture(slide):
    """The pixel of highest heat in the axes falls inside the dark square drawn at (640, 384)."""
    bag = grid_bag()
    darkness = np.array([255 - slide.read(x * 0.5, y * 0.5, 128, 0.5).mean() for x, y in bag.coords_N2])
    figure = heatmap_figure(slide, darkness, bag, title="t", label="l", note="n")
    image = figure.axes[1].images[1]
    row, column = np.unravel_index(np.nanargmax(image.get_array()), image.get_array().shape)
    left, right, bottom, top = image.get_extent()
    x = left + (column + 0.5) / image.get_array().shape[1] * (right - left)
    y = top + (row + 0.5) / image.get_array().shape[0] * (bottom - top)
    assert 640 <= x <= 768
    assert 384 <= y <= 512
    overview = figure.axes[1].images[0]
    assert overview.get_extent() == image.get_extent()
    assert "µm" in "".join(t.get_text() for t in figure.axes[0].texts)


def test_maps_are_written_and_tissue_classes_are_not_averaged(slide, tmp_path):
    bag = grid_bag()
    scores = np.full(64, 1 / 64)
    paths = write_maps(
        slide, bag, scores, np.random.default_rng(0).dirichlet(np.ones(4), 64), tmp_path / "maps"
    )
    assert [p.name for p in paths] == ["attention.png", "top_patches.png", "experts.png"]
    assert all(min(Image.open(p).size) > 200 for p in paths)
    probs = np.zeros((64, 3))
    probs[:, 0], probs[1::2, 0], probs[1::2, 2] = 1, 0, 1
    overlapping = Bag(bag.features_ND, bag.coords_N2, {**bag.attributes, "patch_size_level0": 200})
    figure = tissue_figure(slide, probs, ("one", "two", "three"), overlapping)
    shown = np.unique(figure.axes[1].images[1].get_array().compressed())
    assert set(shown.tolist()) <= {0, 2}
    save_figure(figure, tmp_path / "tissue.png")


def test_a_bag_without_places_cannot_be_painted(slide):
    with pytest.raises(InputError, match="no coordinates"):
        heatmap_figure(slide, np.ones(2), Bag(np.zeros((2, 3), np.float32)), title="", label="")
