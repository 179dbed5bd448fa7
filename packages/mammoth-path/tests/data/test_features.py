import errno
import pickle

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mammoth_path.data.features import Bag, read_features, write_features
from shared_moe.errors import DiskFullError, InputError, UnreadableError


def a_bag(n=5, d=4):
    rng = np.random.default_rng(0)
    return Bag(
        rng.normal(size=(n, d)).astype(np.float32),
        rng.integers(0, 9999, (n, 2)),
        {"patch_size_level0": 512, "mpp_um": 0.5, "encoder": "uni", "name": "a"},
    )


@given(
    features=hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
        elements=st.floats(-1e6, 1e6, width=32),
    ),
    encoder=st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tmp_path, features, encoder):
    coords = np.arange(2 * len(features)).reshape(-1, 2)
    bag = Bag(features, coords, {"encoder": encoder, "patch_size_level0": 256, "mpp_um": 0.5})
    write_features(tmp_path / "a.h5", bag)
    found = read_features(tmp_path / "a.h5")
    assert np.array_equal(found.features_ND, features)
    assert np.array_equal(found.coords_N2, coords)
    assert found.attributes["encoder"] == encoder
    assert found.attributes["patch_size_level0"] == 256


def test_the_layout_is_tridents(tmp_path):
    write_features(tmp_path / "a.h5", a_bag())
    with h5py.File(tmp_path / "a.h5") as f:
        assert f["features"].shape == (5, 4)
        assert f["coords"].dtype == np.int64
        assert f["features"].attrs["encoder"] == "uni"
        assert f["coords"].attrs["patch_size_level0"] == 512


def test_clams_files_and_other_names(tmp_path):
    bag = a_bag()
    with h5py.File(tmp_path / "clam.h5", "w") as f:
        f["features"] = bag.features_ND
        coords = f.create_dataset("coords", data=bag.coords_N2)
        coords.attrs["patch_size"], coords.attrs["patch_level"] = 256, 1
        coords.attrs["downsample"] = np.array([4.0, 4.0])
    assert read_features(tmp_path / "clam.h5").attributes["patch_size_level0"] == 1024
    with h5py.File(tmp_path / "old.h5", "w") as f:
        f["feats"] = bag.features_ND[None]
    old = read_features(tmp_path / "old.h5")
    assert old.features_ND.shape == (5, 4)
    assert old.coords_N2 is None
    torch.save(torch.from_numpy(bag.features_ND), tmp_path / "a.pt")
    assert np.array_equal(read_features(tmp_path / "a.pt").features_ND, bag.features_ND)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(UnreadableError, match="no such file"):
        read_features(tmp_path / "absent.h5")
    write_features(tmp_path / "a.h5", a_bag())
    cut = tmp_path / "cut.h5"
    cut.write_bytes((tmp_path / "a.h5").read_bytes()[:700])
    with pytest.raises(UnreadableError, match=r"cut\.h5"):
        read_features(cut)
    with h5py.File(tmp_path / "none.h5", "w") as f:
        f["coords"] = np.zeros((3, 2))
    with pytest.raises(UnreadableError, match="it holds coords"):
        read_features(tmp_path / "none.h5")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(print))
    with pytest.raises(UnreadableError, match=r"evil\.pt"):
        read_features(tmp_path / "evil.pt")


def test_nan_and_disagreeing_lengths_are_refused(tmp_path):
    with h5py.File(tmp_path / "nan.h5", "w") as f:
        f["features"] = np.array([[1.0, 2.0], [np.nan, 1.0]])
    with pytest.raises(InputError, match=r"nan\.h5: 1 of 2 feature rows hold NaN or Inf \(first: row 1\)"):
        read_features(tmp_path / "nan.h5")
    with pytest.raises(InputError, match="5 features but coords of shape"):
        Bag(a_bag().features_ND, np.zeros((4, 2), int))
    with pytest.raises(InputError, match="N, D >= 1"):
        Bag(np.zeros((0, 4), np.float32))


def test_a_full_disk_keeps_the_earlier_file(tmp_path, monkeypatch):
    write_features(tmp_path / "a.h5", a_bag())
    before = (tmp_path / "a.h5").read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(h5py.Group, "create_dataset", full)
    with pytest.raises(DiskFullError, match=r"a\.h5: no space left"):
        write_features(tmp_path / "a.h5", a_bag(7))
    assert (tmp_path / "a.h5").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.h5"]
