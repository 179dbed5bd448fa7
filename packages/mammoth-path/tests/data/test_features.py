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


F = np.ones((3, 4), np.float32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"features": np.array([b"a", b"b"])}, "expected numbers"),
        ({"features": F.astype(complex)}, "expected numbers"),
        ({"features": np.float32(1)}, "got ()"),
        ({"features": np.ones((2, 3, 4))}, "got (2, 3, 4)"),
        ({"features": F, "coords": np.array([b"a", b"b", b"c"])}, "expected numbers"),
        ({"features": F, "coords": np.full((3, 2), np.nan)}, "NaN or Inf"),
        ({"features": F, "coords": np.ones((3, 3))}, "(3, 2)"),
    ],
)
def test_contents_of_another_kind_are_named(tmp_path, content, message):
    with h5py.File(tmp_path / "a.h5", "w") as f:
        for key, value in content.items():
            f[key] = value
    with pytest.raises(InputError) as caught:
        read_features(tmp_path / "a.h5")
    assert str(tmp_path / "a.h5") in str(caught.value)
    assert message in str(caught.value)


def test_tensors_of_every_kind(tmp_path):
    for name, saved in (
        ("bf16", torch.ones(3, 4, dtype=torch.bfloat16)),
        ("grad", torch.ones(3, 4, requires_grad=True)),
        ("axis", torch.ones(1, 3, 4)),
        ("dict", {"features": torch.ones(3, 4), "coords": torch.zeros(3, 2)}),
    ):
        torch.save(saved, tmp_path / f"{name}.pt")
        assert np.array_equal(read_features(tmp_path / f"{name}.pt").features_ND, F)
    torch.save([torch.ones(3)], tmp_path / "list.pt")
    with pytest.raises(UnreadableError, match="holds list"):
        read_features(tmp_path / "list.pt")


@pytest.mark.parametrize("suffix", [".h5", ".pt"])
def test_damaged_bytes_give_a_typed_error_or_a_sound_bag(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".h5":
        write_features(path, a_bag(50, 40))
    else:
        torch.save(torch.from_numpy(a_bag(50, 40).features_ND), path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for trial in range(120):
        data = bytearray(whole[: rng.integers(len(whole))] if trial % 2 else whole)
        for position in rng.integers(0, min(len(data), 3000) or 1, 3):
            if data:
                data[position] = rng.integers(256)
        path.write_bytes(data)
        try:
            assert np.isfinite(read_features(path).features_ND).all()
        except (UnreadableError, InputError):
            refused += 1
    assert refused >= 60


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
