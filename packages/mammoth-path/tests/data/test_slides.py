import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyramids import damaged_slide, tissue_picture, write_pyramid

from mammoth_path.data.slides import TileError, find_bounds, find_scale, open_slide
from mammoth_path.demo import SLIDE
from mammoth_path.errors import ScaleError, SlideError
from shared_moe.errors import InputError


@pytest.fixture(scope="module")
def gradient(tmp_path_factory):
    """Red rises with x, green with y, one step each 4 pixels: a colour tells where it was read."""
    y, x = np.mgrid[0:1024, 0:1024]
    pixels = np.stack([x // 4, y // 4, np.full_like(x, 100)], -1).astype(np.uint8)
    return write_pyramid(tmp_path_factory.mktemp("slides") / "gradient.svs", pixels)


def test_the_embedded_slide_says_its_scale():
    with open_slide(SLIDE) as slide:
        assert (slide.width_px, slide.height_px, slide.mpp_um) == (2220, 2967, 0.499)
        assert slide.scale.source == "openslide.mpp-x"
        assert slide.power == 20
        assert slide.vendor == "aperio"
        assert "label" in slide.associated
        assert slide.read(100, 100, 64, 0.5).shape == (64, 64, 3)


@given(x=st.floats(0, 440), y=st.floats(0, 440), mpp=st.sampled_from([0.5, 0.565, 0.75, 1.0, 1.3]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_regions_lie_where_micrometres_say(gradient, x, y, mpp):
    """The mean colour of a region is that of its centre, at every scale and at fractions of a pixel."""
    with open_slide(gradient) as slide:
        region = slide.read(x, y, 48, mpp).astype(float)
    centre_px = np.array([x, y]) / 0.5 + 48 * mpp / 0.5 / 2
    assert np.abs(region[..., :2].mean((0, 1)) - (centre_px / 4 - 0.5)).max() < 0.4


def test_whole_pixels_at_level_0_are_copied(gradient):
    with open_slide(gradient) as slide:
        region = slide.read(50, 100, 32, 0.5)
        assert np.array_equal(region, slide.read_level(0, 100, 200, 32, 32))
    assert region[0, 0].tolist() == [25, 50, 100]


def test_the_finer_level_is_taken_and_resampled(tmp_path):
    """At 0.9 um/px a scan of 0.5 must be read from level 0: level 1 (1.0) has lost what is asked for."""
    rng = np.random.default_rng(0)
    checks = np.kron(rng.integers(0, 2, (256, 256)), np.ones((4, 4)))[..., None] * np.full(3, 255)
    path = write_pyramid(tmp_path / "checks.svs", checks.astype(np.uint8))
    with open_slide(path) as slide:
        region = slide.read(100, 100, 200, 0.9)
        whole = slide.read_level(0, 200, 200, 360, 360)
    expected = np.asarray(Image.fromarray(whole).resize((200, 200), Image.Resampling.BILINEAR))
    inside = np.s_[2:-2, 2:-2]  # at the border the slide gives the filter its neighbours
    assert np.abs(region[inside].astype(int) - expected[inside].astype(int)).max() <= 1


def test_beyond_the_slide_it_is_white(gradient):
    with open_slide(gradient) as slide:
        assert (slide.read(505, 0, 40, 0.5)[:, -1] == 255).all()


def test_missing_scale_is_asked_for_and_never_guessed(tmp_path):
    path = write_pyramid(tmp_path / "bare.svs", tissue_picture(), mpp=None, power=None)
    with open_slide(path) as slide:
        assert slide.mpp_um is None
        with pytest.raises(ScaleError, match=r"bare\.svs: the file does not say its scale; give .* --mpp"):
            slide.read(0, 0, 8, 0.5)
    with open_slide(path, mpp=0.25) as slide:
        assert slide.scale.source == "given"
        assert slide.read(0, 0, 8, 0.25).shape == (8, 8, 3)


@pytest.mark.parametrize("mpp", [352.8, 0.001])
def test_absurd_scale_is_no_scale(mpp):
    scale = find_scale({"openslide.mpp-x": str(mpp)}, None, None)
    assert scale.mpp_um is None
    assert "no microscope" in scale.source
    with pytest.raises(ScaleError, match="outside"):
        find_scale({}, None, mpp)


@pytest.mark.parametrize("text", ["", "nan", "inf", "-1", "0", "abc"])
def test_scales_that_are_no_numbers_count_as_missing(text):
    assert find_scale({"openslide.mpp-x": text, "aperio.MPP": text}, None, None).mpp_um is None


def test_power_and_scale_that_disagree_are_reported():
    assert "does not go with" in (find_scale({"openslide.mpp-x": "0.5"}, 40, None).warning or "")
    assert find_scale({"openslide.mpp-x": "0.25"}, 40, None).warning is None


@pytest.mark.parametrize(
    ("resolution", "unit", "expected"),
    [
        ((20000, 20000), "CENTIMETER", 0.5),
        ((50800, 50800), "INCH", 0.5),
        (((200000, 7), (200000, 7)), "CENTIMETER", 0.35),
        ((20000, 20000), "NONE", None),
        ((72, 72), "INCH", None),
    ],
)
def test_tiff_resolution_is_a_rational_with_a_unit(tmp_path, resolution, unit, expected):
    import tifffile

    tifffile.imwrite(
        tmp_path / "a.tif", tissue_picture(512), tile=(256, 256), photometric="rgb", metadata=None,
        resolution=resolution, resolutionunit=unit,
    )  # fmt: skip
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.mpp_um == (None if expected is None else pytest.approx(expected))


def test_pixels_that_are_not_square_have_no_one_scale():
    properties = {"openslide.mpp-x": "0.5", "openslide.mpp-y": "1"}
    scale = find_scale(properties, None, None)
    assert scale.mpp_um is None
    assert "not square" in scale.source
    assert find_scale(properties, None, 0.5).mpp_um == 0.5
    assert find_scale({**properties, "openslide.mpp-y": "0.503"}, None, None).mpp_um == 0.5


def test_bounds_of_the_scanned_part():
    found = {"x": "120", "y": "3", "width": "5000", "height": "4000"}
    properties = {f"openslide.bounds-{side}": value for side, value in found.items()}
    assert find_bounds(properties) == (120, 3, 5000, 4000)
    assert find_bounds({}) is None
    with open_slide(SLIDE) as slide:
        assert slide.bounds_px is None


def test_finer_than_the_scan_is_refused(gradient):
    with (
        open_slide(gradient) as slide,
        pytest.raises(ScaleError, match=r"0\.25 um/px was asked for, .* 0\.5"),
    ):
        slide.read(0, 0, 8, 0.25)


def test_a_level_that_does_not_exist(gradient):
    with open_slide(gradient) as slide, pytest.raises(InputError, match=r"no level 7; .*1: 512 x 512"):
        slide.read_level(7, 0, 0, 8, 8)


def test_files_that_are_no_slides(tmp_path):
    (tmp_path / "notes.svs").write_text("not a slide")
    with pytest.raises(SlideError, match=r"notes\.svs: not a slide"):
        open_slide(tmp_path / "notes.svs")
    with pytest.raises(SlideError, match="no such file"):
        open_slide(tmp_path / "absent.svs")
    cut = tmp_path / "cut.svs"
    cut.write_bytes(SLIDE.read_bytes()[:300_000])
    with pytest.raises(SlideError, match=r"cut\.svs"), open_slide(cut) as slide:
        slide.read(0, 0, 64, 0.5)


def test_one_bad_tile_does_not_spoil_the_handle(tmp_path):
    """OpenSlide refuses a handle after an error; the slide opens the file again."""
    with open_slide(damaged_slide(tmp_path / "jpeg.svs")) as slide:
        with pytest.raises(TileError, match="cannot be decoded"):
            slide.read(0, 0, 64, 0.5)
        assert slide.read(256, 256, 64, 0.5).mean() < 200


def test_one_bad_tile_does_not_spoil_the_overview(tmp_path):
    with open_slide(damaged_slide(tmp_path / "jpeg.svs")) as slide:
        overview, unreadable = slide.overview(256)
    assert unreadable[:63, :63].all()
    assert not unreadable[66:].any()
    assert not unreadable[:, 66:].any()
    assert (overview[:60, :60] == 255).all()
    assert overview[80:180, 80:180].mean() < 200


@pytest.mark.parametrize("max_px", [1000, 333, 100, 37])
def test_the_overview_has_the_slides_frame(tmp_path, max_px):
    y, x = np.mgrid[0:700, 0:1000]
    pixels = np.stack([x // 4, y // 4, np.full_like(x, 100)], -1).astype(np.uint8)
    with open_slide(write_pyramid(tmp_path / "odd.svs", pixels)) as slide:
        overview, unreadable = slide.overview(max_px)
    height, width = unreadable.shape
    assert (width, height) == (max_px, round(700 * max_px / 1000))
    assert not unreadable.any()
    centre_x, centre_y = (np.arange(width) + 0.5) * 1000 / width, (np.arange(height) + 0.5) * 700 / height
    inside = np.s_[2:-2]
    assert np.abs(overview[..., 0].mean(0) - (centre_x / 4 - 0.5))[inside].max() < 1
    assert np.abs(overview[..., 1].mean(1) - (centre_y / 4 - 0.5))[inside].max() < 1


def test_a_forked_process_opens_the_file_again(gradient):
    with open_slide(gradient) as slide:
        expected = slide.read(10, 10, 16, 0.5)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, bytes([int(np.array_equal(slide.read(10, 10, 16, 0.5), expected))]))
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reader, 1) == b"\x01"


def test_a_plain_picture_is_a_slide_once_its_scale_is_given(tmp_path):
    Image.fromarray(tissue_picture()).save(tmp_path / "field.png")
    with open_slide(tmp_path / "field.png", mpp=0.5) as slide:
        assert slide.read(0, 0, 64, 1.0).shape == (64, 64, 3)
        assert slide.vendor == "plain image"


def test_real_files(shared_data):
    folder = shared_data / "pathology"
    with open_slide(folder / "slides" / "tcga_no_mpp.svs") as slide:
        assert slide.mpp_um is None
        assert len(slide.level_sizes_px) == 2
    with open_slide(folder / "edge" / "boxes.tiff") as slide:
        assert slide.mpp_um is None
        assert "352.778" in slide.scale.source
    with open_slide(folder / "edge" / "boxes_0.dcm") as slide:
        assert slide.vendor == "dicom"
    for name in ("edge/broken.svs", "slides/small_dicom.dcm"):
        with pytest.raises(SlideError):
            open_slide(folder / name)
    with open_slide(folder / "edge" / "unreadable.svs") as slide, pytest.raises(TileError):
        slide.read(0, 0, 8, 0.5)
