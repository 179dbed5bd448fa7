import numpy as np
import pytest
from PIL import Image
from pyramids import tissue_picture, write_pyramid

from mammoth_path.data.slides import open_slide
from mammoth_path.data.tiles import magnification, mpp_of_power, tile_grid, tissue_fraction
from mammoth_path.data.tissue import TissueMask, find_tissue, pen_mask, tissue_mask
from mammoth_path.errors import NoTissueError, ScaleError
from shared_moe.errors import InputError


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    path = write_pyramid(tmp_path_factory.mktemp("slides") / "block.svs", tissue_picture(2048))
    with open_slide(path) as opened:
        yield opened


def test_the_block_is_found(slide):
    found = find_tissue(slide)
    truth = np.zeros((1024, 1024), bool)
    truth[256:768, 256:768] = True
    overlap = (found.mask_HW & truth).sum() / (found.mask_HW | truth).sum()
    assert overlap > 0.97


def test_a_slide_full_of_tissue_is_not_split_in_two():
    rng = np.random.default_rng(0)
    full = (np.array([190, 90, 150]) + rng.integers(-25, 25, (300, 300, 3))).astype(np.uint8)
    assert tissue_mask(full).mean() > 0.99


@pytest.mark.parametrize("colour", [(255, 255, 255), (245, 245, 243), (128, 128, 128)])
def test_glass_and_grey_are_no_tissue(colour):
    assert not tissue_mask(np.full((200, 200, 3), colour, np.uint8)).any()


@pytest.mark.parametrize("ink", [(30, 140, 60), (30, 60, 200), (230, 10, 20), (10, 10, 10)])
def test_pen_is_no_tissue(ink):
    picture = np.full((200, 200, 3), 245, np.uint8)
    picture[80:120] = ink
    assert pen_mask(picture)[80:120].all()
    assert not tissue_mask(picture).any()


def test_no_tissue_is_said(tmp_path):
    path = write_pyramid(tmp_path / "white.svs", np.full((1024, 1024, 3), 250, np.uint8))
    with open_slide(path) as white, pytest.raises(NoTissueError, match=r"white\.svs: no tissue"):
        find_tissue(white)


def test_real_pens_and_empty_slides(shared_data):
    folder = shared_data / "pathology" / "tissue-masks"

    def share(name):
        return tissue_mask(np.asarray(Image.open(folder / name).convert("RGB"))).mean()

    assert share("almost-white-1.png") < 0.02
    assert 0.05 < share("tcga-lung-rgb.png") < 0.9
    for name in ("tcga-green-pen.png", "tcga-red-pen.png"):
        picture = np.asarray(Image.open(folder / name).convert("RGB"))
        assert pen_mask(picture).mean() > 0.05
        assert 0.5 < share(name) < 0.9
    for name in ("no-tissue.png", "no-tissue2.png", "no-tissue-green-pen.png", "no-tissue-line.png"):
        assert share(name) < 0.03
    assert share("no-tissue-red-pen.png") < 0.15
    assert 0.1 < share("wsi-blue-pen.png") < 0.4


def test_the_pale_edge_of_a_red_mark_is_ink_and_a_few_red_cells_are_not():
    picture = np.full((300, 300, 3), 245, np.uint8)
    picture[50:150, 50:250] = (200, 20, 30)
    picture[40:50, 50:250] = (240, 180, 185)
    assert not tissue_mask(picture).any()
    tissue = np.full((300, 300, 3), (215, 130, 150), np.uint8)
    tissue[100:104, 100:104] = (190, 30, 40)
    assert tissue_mask(tissue).mean() > 0.99


def test_tiles_cover_the_tissue_in_level_0_pixels(slide):
    grid = tile_grid(slide, find_tissue(slide), mpp=1.0, size_px=128)
    assert grid.size_level0_px == 256
    assert grid.coords_N2.dtype == np.int64
    assert len(grid) == 16
    assert grid.coords_N2.min(0).tolist() == [512, 512]
    assert grid.coords_N2.max(0).tolist() == [1280, 1280]
    assert grid.read(slide, 0).shape == (128, 128, 3)
    assert grid.folder_name == "10x_128px_0px_overlap"


def test_overlap_moves_the_step(slide):
    grid = tile_grid(slide, None, mpp=0.5, size_px=256, overlap_px=128, min_tissue=0)
    steps = np.unique(np.diff(np.unique(grid.coords_N2[:, 0])))
    assert steps.tolist() == [128]
    assert grid.coords_N2.max() + 256 == 2048


def test_tissue_fraction_by_hand():
    mask = np.zeros((10, 10), bool)
    mask[:, :5] = True
    tissue = TissueMask(mask, (10.0, 10.0), np.zeros((10, 10, 3), np.uint8))
    assert tissue_fraction(tissue, np.array([[0, 0], [30, 0], [50, 0]]), 40).tolist() == [1.0, 0.5, 0.0]


def test_nothing_to_tile_is_said_at_once(slide, tmp_path):
    with pytest.raises(NoTissueError, match=r"smaller than one tile of 4096 px"):
        tile_grid(slide, find_tissue(slide), mpp=1.0, size_px=2048)
    speck = np.full((1024, 1024, 3), 245, np.uint8)
    speck[500:560, 500:560] = (200, 100, 160)
    with (
        open_slide(write_pyramid(tmp_path / "speck.svs", speck)) as small,
        pytest.raises(NoTissueError, match="0 tiles of 512 px"),
    ):
        tile_grid(small, find_tissue(small), mpp=0.5, size_px=512)


def test_scale_and_sizes_are_checked(slide):
    with pytest.raises(ScaleError, match=r"0\.25 um/px were asked for"):
        tile_grid(slide, None, mpp=0.25)
    with pytest.raises(InputError, match="overlap_px=256"):
        tile_grid(slide, None, size_px=256, overlap_px=256)


@pytest.mark.parametrize(
    ("mpp", "power"), [(0.125, 80), (0.25, 40), (0.5, 20), (1.0, 10), (2.0, 5), (5.0, 2)]
)
def test_magnifications(mpp, power):
    assert magnification(mpp) == power
    assert mpp_of_power(10 / mpp) == pytest.approx(mpp)
