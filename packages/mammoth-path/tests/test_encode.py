import csv
import errno
import subprocess
import sys
import time
from dataclasses import replace

import h5py
import numpy as np
import pytest
from pyramids import damaged_slide, tissue_picture, write_pyramid

from mammoth_path import encode
from mammoth_path.data.encoders import Encoder
from mammoth_path.data.features import read_features
from mammoth_path.encode import TileOptions, encode_slides, find_slides, tile_slides
from shared_moe.errors import BusyError, DiskFullError, InputError
from shared_moe.files import folder_lock

OPTIONS = TileOptions(mpp=0.5, size_px=64)


def mean_colour(x):
    return x.mean((2, 3))


@pytest.fixture
def encoder():
    """A fast stand-in: three features, the mean colour of the tile."""
    return Encoder("mean-colour", 3, 64, mean_colour)


@pytest.fixture
def slides(tmp_path):
    folder = tmp_path / "slides"
    folder.mkdir()
    return [write_pyramid(folder / f"{name}.svs", tissue_picture(seed=i)) for i, name in enumerate("ab")]


def rows(table):
    with table.open() as f:
        return {row["slide"]: row for row in csv.DictReader(f)}


def test_features_lie_where_the_tiles_do(slides, tmp_path, encoder):
    job = tmp_path / "job"
    results = encode_slides(slides, job, encoder, OPTIONS)
    assert [r.status for r in results] == ["done", "done"]
    bag = read_features(job / "20x_64px_0px_overlap" / "features_mean-colour" / "a.h5")
    assert len(bag.features_ND) == 64
    assert bag.attributes["mpp_um"] == 0.5
    assert bag.attributes["patch_size_level0"] == 64
    assert bag.attributes["encoder"] == "mean-colour"
    pixels = tissue_picture(seed=0)
    for (x, y), feature in zip(bag.coords_N2, bag.features_ND, strict=True):
        assert feature * 255 == pytest.approx(pixels[y : y + 64, x : x + 64].mean((0, 1)), abs=0.01)
    assert rows(job / "encode_table.csv")["a"]["tiles"] == "64"


def test_an_interrupted_run_resumes_to_the_same_file(slides, tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK", 16)
    encode_slides(slides, tmp_path / "whole", encoder, OPTIONS)
    calls = []

    def interrupted(x):
        calls.append(len(x))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return x.mean((2, 3))

    job = tmp_path / "job"
    with pytest.raises(KeyboardInterrupt):
        encode_slides(slides, job, Encoder("mean-colour", 3, 64, interrupted), OPTIONS)
    folder = job / "20x_64px_0px_overlap" / "features_mean-colour"
    assert not (folder / "a.h5").exists()
    done = len(list((folder / "a.partial").glob("*.npz")))
    assert done == 2
    calls.clear()

    def counting(x):
        calls.append(len(x))
        return x.mean((2, 3))

    encode_slides(slides, job, Encoder("mean-colour", 3, 64, counting), OPTIONS)
    assert sum(calls) == 2 * 64 - done * 16
    assert not (folder / "a.partial").exists()
    with (
        h5py.File(folder / "a.h5") as f,
        h5py.File(tmp_path / "whole" / folder.relative_to(job) / "a.h5") as g,
    ):
        assert np.array_equal(f["features"][()], g["features"][()])
        assert np.array_equal(f["coords"][()], g["coords"][()])
    again = encode_slides(slides, job, encoder, OPTIONS)
    assert [r.status for r in again] == ["resumed", "resumed"]


def test_one_bad_slide_costs_only_itself(slides, tmp_path, encoder):
    (slides[0].parent / "aa.svs").write_text("no slide")
    write_pyramid(slides[0].parent / "white.svs", np.full((512, 512, 3), 250, np.uint8))
    results = {
        r.slide: r for r in encode_slides(find_slides(slides[0].parent), tmp_path / "job", encoder, OPTIONS)
    }
    assert [results[n].status for n in ("a", "aa", "b", "white")] == ["done", "failed", "done", "failed"]
    assert "not a slide" in results["aa"].message
    assert "no tissue" in rows(tmp_path / "job" / "encode_table.csv")["white"]["message"]


def test_a_tile_that_cannot_be_decoded_is_left_out_and_counted(tmp_path, encoder):
    """Also where there is no other level: the overview cannot show it, so it is tried."""
    path = damaged_slide(tmp_path / "damaged.svs")
    (result,) = encode_slides([path], tmp_path / "job", encoder, TileOptions(0.5, 256, 0, 0.0))
    assert (result.status, result.tiles, result.unreadable_tiles) == ("done", 15, 1)
    (result,) = encode_slides([path], tmp_path / "tissue", encoder, TileOptions(0.5, 256))
    assert (result.status, result.tiles, result.unreadable_tiles) == ("done", 4, 1)


def test_a_fault_of_the_file_system_costs_one_slide(slides, tmp_path, encoder, monkeypatch):
    real = encode.open_slide

    def stalling(path, mpp):
        if path.stem == "a":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, mpp)

    monkeypatch.setattr(encode, "open_slide", stalling)
    results = encode_slides(slides, tmp_path / "job", encoder, OPTIONS)
    assert [r.status for r in results] == ["failed", "done"]
    assert "Input/output error" in results[0].message


def test_the_table_is_on_disk_after_every_slide(slides, tmp_path):
    seen = []

    def network(x):
        table = tmp_path / "job" / "encode_table.csv"
        seen.append(set(rows(table)) if table.is_file() else set())
        return x.mean((2, 3))

    encode_slides(slides, tmp_path / "job", Encoder("mean-colour", 3, 64, network), OPTIONS)
    assert seen[0] == set()
    assert seen[-1] == {"a"}


def test_a_damaged_chunk_is_encoded_again(slides, tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK", 16)
    real = encode.write_features

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(encode, "write_features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode_slides(slides[:1], tmp_path / "job", encoder, OPTIONS)
    (first, *_) = sorted((tmp_path / "job").rglob("*.npz"))
    first.write_bytes(first.read_bytes()[:50])
    monkeypatch.setattr(encode, "write_features", real)
    encode_slides(slides[:1], tmp_path / "job", encoder, OPTIONS)
    encode_slides(slides[:1], tmp_path / "whole", encoder, OPTIONS)
    (found,), (expected,) = ((tmp_path / name).rglob("a.h5") for name in ("job", "whole"))
    assert found.read_bytes() == expected.read_bytes()


def test_other_weights_under_the_same_name_are_refused(slides, tmp_path, encoder):
    encode_slides(slides[:1], tmp_path / "job", replace(encoder, weights_sha256="aa"), OPTIONS)
    (result,) = encode_slides(slides[:1], tmp_path / "job", replace(encoder, weights_sha256="bb"), OPTIONS)
    assert result.status == "failed"
    assert "the encoder's weights differ" in result.message


def test_a_doubtful_scale_is_in_the_table(tmp_path, encoder):
    path = write_pyramid(tmp_path / "odd.svs", tissue_picture(), mpp=0.5, power=40)
    (result,) = encode_slides([path], tmp_path / "job", encoder, OPTIONS)
    assert result.status == "done"
    assert (
        "does not go with an objective of 40x"
        in rows(tmp_path / "job" / "encode_table.csv")["odd"]["message"]
    )


SLOW_RUN = """
import sys, time
from pathlib import Path
from mammoth_path import encode
from mammoth_path.data.encoders import Encoder

calls = []

def slow(x):
    calls.append(1)
    if len(calls) > 2:
        time.sleep(600)
    return x.mean((2, 3))

encode.CHUNK = 16
slides = encode.find_slides(Path(sys.argv[1]))
options = encode.TileOptions(mpp=0.5, size_px=64)
encode.encode_slides(slides, Path(sys.argv[2]), Encoder("mean-colour", 3, 64, slow), options)
"""


def test_a_killed_run_resumes_to_the_same_bytes(slides, tmp_path, encoder, monkeypatch):
    job = tmp_path / "job"
    running = subprocess.Popen([sys.executable, "-c", SLOW_RUN, slides[0].parent, job])
    deadline = time.monotonic() + 120
    while len(list(job.rglob("*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    running.kill()
    running.wait()
    chunks = {p.name: p.read_bytes() for p in job.rglob("*.npz")}
    assert len(chunks) == 2
    assert not list(job.rglob("a.h5"))
    (left_over := next(job.rglob("a.partial")).parent / ".a.h5.123.tmp").write_bytes(b"half a file")

    monkeypatch.setattr(encode, "CHUNK", 16)
    tiles = []

    def counting(x):
        tiles.append(len(x))
        return mean_colour(x)

    encode_slides(slides, job, replace(encoder, network=counting), OPTIONS)
    assert sum(tiles) == 2 * 64 - 16 * len(chunks)
    encode_slides(slides, tmp_path / "whole", encoder, OPTIONS)
    for name in ("a", "b"):
        (found,), (expected,) = (f.rglob(f"{name}.h5") for f in (job, tmp_path / "whole"))
        assert found.read_bytes() == expected.read_bytes()
    assert not left_over.exists()


def test_a_busy_folder_and_a_full_disk_end_the_run(slides, tmp_path, encoder, monkeypatch):
    with folder_lock(tmp_path / "job"), pytest.raises(BusyError, match="another process"):
        encode_slides(slides, tmp_path / "job", encoder, OPTIONS)

    def full(*_):
        raise DiskFullError("disk: no space left on the disk")

    monkeypatch.setattr(encode, "write_features", full)
    with pytest.raises(DiskFullError):
        encode_slides(slides, tmp_path / "job", encoder, OPTIONS)


def test_finished_files_of_other_tiles_are_not_taken_for_done(slides, tmp_path, encoder):
    """0.5 and 0.55 um/px are both called 20x: the folder's name does not tell them apart."""
    encode_slides(slides[:1], tmp_path / "job", encoder, OPTIONS)
    (result,) = encode_slides(slides[:1], tmp_path / "job", encoder, TileOptions(mpp=0.55, size_px=64))
    assert result.status == "failed"
    assert "made with other options" in result.message
    (result,) = encode_slides(slides[:1], tmp_path / "job", encoder, TileOptions(0.5, 64, 0, 0.9))
    assert result.status == "resumed"


def test_slides_that_share_a_name_are_refused(slides):
    write_pyramid(slides[0].with_suffix(".tif"), tissue_picture())
    with pytest.raises(InputError, match=r"share a name: a\.svs, a\.tif"):
        find_slides(slides[0].parent)


def test_half_precision(slides, tmp_path, encoder):
    encode_slides(slides[:1], tmp_path / "job", encoder, OPTIONS, half=True)
    (path,) = (tmp_path / "job").rglob("a.h5")
    with h5py.File(path) as f:
        assert f["features"].dtype == np.float16


def test_tiling_writes_tridents_files_and_a_picture(slides, tmp_path):
    tile_slides(slides, tmp_path / "job", OPTIONS)
    folder = tmp_path / "job" / "20x_64px_0px_overlap"
    with h5py.File(folder / "patches" / "a_patches.h5") as f:
        assert f["coords"].shape == (64, 2)
        assert f["coords"].attrs["level0_width"] == 1024
    assert (folder / "visualization" / "a.png").stat().st_size > 1000


def test_folders_without_slides(tmp_path):
    with pytest.raises(InputError, match="no slide in this folder"):
        find_slides(tmp_path)
    with pytest.raises(InputError, match="no such file or folder"):
        find_slides(tmp_path / "absent")
