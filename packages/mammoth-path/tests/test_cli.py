"""The command line from end to end, and the demo."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pyramids import tissue_picture, write_pyramid
from typer.testing import CliRunner

from mammoth_path.cli import app
from mammoth_path.data.features import Bag, read_features, write_features
from mammoth_path.demo import SLIDE, run_demo
from mammoth_path.train import load_model
from shared_moe.errors import MoeError

ENCODER = ("--encoder", "efficientnet-lite0", "--patch-size", "128", "--min-tissue", "0.9")


def call(*arguments) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments) -> tuple[int, str]:
    """(exit code, message) of an error of ours; the last test shows that the real script prints just that."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert isinstance(result.exception, MoeError), result.output
    return result.exception.exit_code, str(result.exception)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Four slides encoded, with a table of labels."""
    folder = tmp_path_factory.mktemp("cohort")
    (folder / "slides").mkdir()
    for i in range(4):
        spot = (400, 400) if i % 2 else None
        write_pyramid(folder / "slides" / f"s{i}.svs", tissue_picture(seed=i, spot=spot))
    call("encode", folder / "slides", "--job-dir", folder / "job", *ENCODER)
    rows = "".join(f"case{i},s{i},{'spot' if i % 2 else 'plain'}\n" for i in range(4))
    (folder / "labels.csv").write_text("case_id,slide_id,label\n" + rows)
    return folder


def test_inspect(tmp_path):
    facts = json.loads(call("inspect", SLIDE, "--json", "--thumbnail", tmp_path / "t.png"))
    assert (facts["mpp_um"], facts["size_px"], facts["power"]) == (0.499, [2220, 2967], 20)
    assert 0.2 < facts["tissue_share"] < 0.6
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert "openslide.mpp-x" in call("inspect", SLIDE)


def test_the_fields_words_are_understood(tmp_path):
    call("tile", "--wsi_dir", SLIDE.parent, "--job_dir", tmp_path, "--mag", "10", "--patch_size", "128")
    assert (tmp_path / "10x_128px_0px_overlap" / "patches" / "cmu_small_region_patches.h5").is_file()
    code, message = fails("tile", SLIDE, "--wsi-dir", SLIDE.parent, "--job-dir", tmp_path)
    assert (code, "--wsi-dir" in message) == (2, True)


def test_encode_train_predict_heatmap(job, tmp_path):
    features = job / "job" / "20x_128px_0px_overlap" / "features_efficientnet-lite0"
    assert read_features(features / "s0.h5").features_ND.shape == (16, 1280)
    model = call(
        "train",
        features,
        "--labels",
        job / "labels.csv",
        "--output",
        tmp_path / "model",
        "--epochs",
        2,
        "--patience",
        0,
    ).strip()
    _, config = load_model(model)
    assert (config["classes"], config["encoder"]) == (["plain", "spot"], "efficientnet-lite0")
    from_file = json.loads(call("predict", features / "s1.h5", "--model", model, "--json"))
    from_slide = json.loads(
        call(
            "predict", job / "slides" / "s1.svs", "--model", model, "--patch-size", 128, "--min-tissue", 0.9, "--json",
        )
    )  # fmt: skip
    assert sum(from_file["probabilities"].values()) == pytest.approx(1)
    assert from_file["probabilities"] == pytest.approx(from_slide["probabilities"], abs=1e-4)
    written = call(
        "heatmap",
        job / "slides" / "s1.svs",
        "--features",
        features / "s1.h5",
        "--model",
        model,
        "--output",
        tmp_path / "maps",
    )
    assert len(written.split()) == 3


def test_features_of_another_encoder_name_the_one_that_fits(tmp_path):
    write_features(tmp_path / "a.h5", Bag(np.zeros((3, 1280), np.float32)))
    code, message = fails("predict", tmp_path / "a.h5", "--model", "weak-tumour-densenet121")
    assert code == 2
    assert "densenet121-capricorn" in message
    assert "EfficientNet-Lite0" in message


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("inspect", "absent.svs"), 3, "no such file"),
        (("inspect", __file__), 3, "not a slide"),
        (("predict", "absent.h5", "--model", "ucsb-breast"), 3, "no such file"),
        (("predict", "a.h5", "--model", "none"), 2, "ucsb-breast"),
        (("encode", SLIDE, "--encoder", "nothing"), 2, "densenet121-capricorn"),
        (("encode", SLIDE, "--encoder", "efficientnet-lite0", "--device", "nothing"), 2, "--device cpu"),
        (("encode",), 2, "--wsi-dir"),
        (("train",), 2, "--preset NAME"),
        (("train", "--preset", "nothing"), 2, "ucsb-breast"),
    ],
)
def test_errors_name_the_fix_and_have_their_exit_code(tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    found, text = fails(*arguments)
    assert found == code
    assert message in text


def test_a_failed_slide_makes_exit_code_1_and_asks_for_the_scale(tmp_path):
    path = write_pyramid(tmp_path / "bare.svs", tissue_picture(), mpp=None, power=None)
    code, message = fails("tile", path, "--job-dir", tmp_path / "job")
    assert (code, message.split(";")[0]) == (1, "1 of 1 slides failed")
    assert "give the microns per pixel" in (tmp_path / "job" / "tile_table.csv").read_text()
    call("tile", path, "--job-dir", tmp_path / "job", "--mpp", "0.5")


def test_the_script_prints_one_line_and_no_traceback(tmp_path):
    program = Path(sys.executable).with_name("mammoth-path")
    done = subprocess.run([program, "inspect", tmp_path / "absent.svs"], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_help_has_examples():
    for command in ("inspect", "tile", "encode", "train", "predict", "heatmap"):
        assert "Example" in call(command, "--help")


def test_the_demo_page_is_whole_and_says_what_it_is(tmp_path, monkeypatch):
    """With a coarse grid, so that it is quick; the full demo runs in CI."""
    from mammoth_path.data import tiles

    real = tiles.tile_grid
    monkeypatch.setattr(
        tiles,
        "tile_grid",
        lambda slide, tissue, **kw: real(slide, tissue, **{**kw, "mpp": 1.0, "overlap_px": 0}),
    )
    page = run_demo(tmp_path / "demo")
    text = page.read_text()
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    for picture in summary["pictures"]:
        assert (tmp_path / "demo" / picture["file"]).stat().st_size > 5000
    assert "composed bags" in text
    assert "not a medical device" in text
    assert "is not shown" in text
    assert "prediction" not in dict(summary["facts"])
    bag = read_features(tmp_path / "demo" / "features" / "cmu_small_region.h5")
    assert bag.features_ND.shape[1] == 1024
