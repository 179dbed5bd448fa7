import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mammoth_path.data.bags import BagSet, batches, folds_by_case, pad, read_bag_folder
from mammoth_path.data.collections import (
    TISSUES,
    compose_bags,
    load_collection,
    load_texture_tiles,
    split_tiles,
)
from mammoth_path.data.features import Bag, write_features
from shared_moe.errors import InputError, UnreadableError


def some_bags(count=12, per_case=2, dim=3):
    rng = np.random.default_rng(0)
    features = [rng.normal(size=(int(rng.integers(1, 6)), dim)).astype(np.float32) for _ in range(count)]
    cases = [f"case{i // per_case}" for i in range(count)]
    labels = np.array([(i // per_case) % 2 for i in range(count)])
    return BagSet(features, labels, [str(i) for i in range(count)], cases, ["no", "yes"])


@pytest.mark.parametrize(
    ("name", "bags", "dim", "positive"),
    [("ucsb", 58, 708, 26), ("musk1", 92, 166, 47), ("elephant", 200, 230, 100)],
)
def test_collections_are_as_published(name, bags, dim, positive):
    found = load_collection(name)
    assert (len(found), found.dim, int(found.labels.sum())) == (bags, dim, positive)
    assert all(np.isfinite(f).all() for f in found.features)


def test_unknown_collection():
    with pytest.raises(InputError, match="ucsb, musk1, musk2, elephant"):
        load_collection("fox")


@given(folds=st.integers(2, 3), seed=st.integers(0, 50))
@settings(max_examples=20, deadline=None)
def test_a_patients_bags_never_cross_folds(folds, seed):
    bags = some_bags()
    seen = []
    for train, test in folds_by_case(bags, folds, seed):
        assert not {bags.cases[i] for i in train} & {bags.cases[i] for i in test}
        seen += test.tolist()
    assert sorted(seen) == list(range(len(bags)))


def test_too_few_cases_for_the_folds():
    with pytest.raises(InputError, match=r"'no' has 3 cases; 4 folds"):
        folds_by_case(some_bags(), 4, 0)


def test_padding_and_batches():
    bags = some_bags()
    x, mask = pad(bags.features[:3])
    for b in range(3):
        n = len(bags.features[b])
        assert torch.equal(x[b, :n], torch.from_numpy(bags.features[b]))
        assert mask[b].sum() == n
    assert pad([np.arange(20.0, dtype=np.float32)[:, None]], max_patches=5)[0].flatten().tolist() == [
        0,
        4,
        9,
        14,
        19,
    ]
    labels = torch.cat([y for _, _, y in batches(bags, 5)])
    assert labels.tolist() == bags.labels.tolist()
    shuffled = [
        torch.cat([y for _, _, y in batches(bags, 5, torch.Generator().manual_seed(s))]) for s in (1, 1, 2)
    ]
    assert torch.equal(shuffled[0], shuffled[1])


def test_a_folder_of_features_and_its_table(tmp_path):
    bags = some_bags(4)
    for name, f in zip(bags.names, bags.features, strict=True):
        write_features(tmp_path / f"{name}.h5", Bag(f))
    table = tmp_path / "labels.csv"
    table.write_text("case_id,slide_id,label\nc0,0,luad\nc0,1,luad\nc1,2,lusc\nc1,3,lusc\n")
    found = read_bag_folder(tmp_path, table)
    assert found.classes == ["luad", "lusc"]
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.cases == ["c0", "c0", "c1", "c1"]
    table.write_text("case_id,slide,label\nc0,0,luad\n")
    with pytest.raises(UnreadableError, match="no column slide_id; it has case_id, slide, label"):
        read_bag_folder(tmp_path, table)
    table.write_text("case_id,slide_id,label\nc0,0,a\nc0,77,b\nc0,78,b\n")
    with pytest.raises(UnreadableError, match="no feature file for 2 slides: 77, 78"):
        read_bag_folder(tmp_path, table)
    with pytest.raises(UnreadableError, match="no such file"):
        read_bag_folder(tmp_path, tmp_path / "absent.csv")


def test_bags_of_different_encoders_are_refused():
    with pytest.raises(InputError, match=r"different widths: \[3, 4\]"):
        BagSet([np.zeros((1, 3)), np.zeros((1, 4))], np.array([0, 1]), ["a", "b"], ["a", "b"], ["x", "y"])


@pytest.fixture(scope="module")
def tiles(shared_data):
    return load_texture_tiles(shared_data / "pathology" / "texture-features")


def test_the_real_tiles(tiles):
    assert tiles.features_ND.shape == (5000, 49)
    assert np.bincount(tiles.tissue_N).tolist() == [625] * 8
    assert TISSUES[0] == "tumour"


@pytest.mark.parametrize(("task", "positive", "negative"), [("needle", 2, 0), ("burden", 30, 10)])
def test_composed_bags_hold_what_they_say(tiles, task, positive, negative):
    rng = np.random.default_rng(0)
    train, test = split_tiles(tiles, rng)
    assert not {f.tobytes() for f in train.features_ND} & {f.tobytes() for f in test.features_ND}
    bags, kinds = compose_bags(train, 10, rng, task=task)
    for label, tissue in zip(bags.labels, kinds, strict=True):
        assert (tissue == 0).sum() == (positive if label else negative)
        assert len(tissue) == 100
    interaction, kinds = compose_bags(train, 10, rng, task="interaction")
    for label, tissue in zip(interaction.labels, kinds, strict=True):
        assert {(tissue == 0).sum(), (tissue == 3).sum()} == ({15} if label else {0, 30})


def test_bad_texture_files_and_tasks(tmp_path, tiles):
    with pytest.raises(UnreadableError, match="no such file"):
        load_texture_tiles(tmp_path)
    with pytest.raises(InputError, match="needle, burden, interaction"):
        compose_bags(tiles, 2, np.random.default_rng(0), task="haystack")
