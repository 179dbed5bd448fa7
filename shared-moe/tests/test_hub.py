import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared_moe import hub
from shared_moe.errors import DiskFullError, InputError, MissingExtra, RefusedError, UnreadableError

CARD = "# A model\nTrained on nothing; for tests."


@pytest.fixture
def saved(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1, 2], dtype=torch.int64)}
    return hub.save_pretrained(tmp_path / "model", tensors, {"dim": 3, "name": "tiny"}, CARD), tensors


def test_round_trip(saved):
    folder, tensors = saved
    loaded, config = hub.load_pretrained(folder)
    assert config == {"dim": 3, "name": "tiny"}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert (folder / "README.md").read_text().startswith("# A model")
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8, torch.bool]


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    config=st.dictionaries(
        st.text(max_size=5),
        st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4),
    ),
)
def test_any_shape_dtype_and_config_round_trips(tmp_path_factory, shapes, dtype, config):
    tensors = {f"t{i}": torch.randint(0, 2, shape).to(dtype) for i, shape in enumerate(shapes)}
    config = {k: v for k, v in config.items() if k not in hub.RESERVED}
    folder = hub.save_pretrained(tmp_path_factory.mktemp("m") / "x", tensors, config, CARD)
    loaded, read = hub.load_pretrained(folder)
    assert read == config
    assert all(torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in tensors.items())


def test_module_with_tied_and_transposed_weights_round_trips(tmp_path):
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    module["a"].weight.data = module["a"].weight.data.t()
    folder = hub.save_pretrained(tmp_path / "m", module, {}, CARD)
    tensors, _ = hub.load_pretrained(folder)
    other = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    hub.load_weights(other, tensors)
    assert torch.equal(other["a"].weight, module["a"].weight)
    assert torch.equal(other["b"].weight, module["a"].weight)


def test_truncated_weights_are_named_with_both_hashes(saved):
    folder, _ = saved
    weights = folder / "model.safetensors"
    expected = hub.sha256(weights)
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(
        UnreadableError, match=rf"model\.safetensors.*expected sha256 {expected}.*found {hub.sha256(weights)}"
    ):
        hub.load_pretrained(folder)


@pytest.mark.parametrize("where", [0, 20, -1])
def test_one_flipped_byte_is_noticed(saved, where):
    folder, _ = saved
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[where] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(UnreadableError, match="damaged or replaced"):
        hub.load_pretrained(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json: missing"),
        ("{", "not JSON"),
        ("[1]", "no 'format_version'"),
        ('{"dim": 3}', "no 'format_version'"),
        ('{"format_version": 99}', "format version 99"),
        ('{"format_version": 1, "weights": 3}', "record sha256 and bytes"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_bad_config_is_one_clear_error(saved, content, message):
    folder, _ = saved
    path = folder / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UnreadableError, match=message):
        hub.load_pretrained(folder)


def test_weights_that_are_no_safetensors_are_refused_even_with_a_matching_hash(saved):
    folder, _ = saved
    weights = folder / "model.safetensors"
    torch.save({"a": torch.zeros(2)}, weights)
    config = json.loads((folder / "config.json").read_text())
    config["weights"] = {"sha256": hub.sha256(weights), "bytes": weights.stat().st_size}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnreadableError, match="not a safetensors file"):
        hub.load_pretrained(folder)
    weights.unlink()
    with pytest.raises(UnreadableError, match="only safetensors"):
        hub.load_pretrained(folder)


def test_an_existing_model_is_replaced_only_on_request(saved):
    folder, tensors = saved
    hub.save_pretrained(folder, tensors, {"dim": 3, "name": "tiny"}, CARD)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RefusedError, match="different model"):
        hub.save_pretrained(folder, {"a": torch.ones(1)}, {}, CARD)
    assert torch.equal(hub.load_pretrained(folder)[0]["a"], tensors["a"])
    hub.save_pretrained(folder, {"a": torch.ones(1)}, {}, CARD, overwrite=True)
    assert hub.load_pretrained(folder)[0]["a"].item() == 1
    assert (folder / "notes.txt").read_text() == "mine"
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_a_folder_of_something_else_is_never_touched(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(RefusedError, match="not a model folder"):
        hub.save_pretrained(tmp_path / "thesis", {"a": torch.ones(1)}, {}, CARD, overwrite=True)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter.txt"]


def test_full_disk_leaves_the_earlier_model(saved, monkeypatch):
    folder, tensors = saved

    def fail(*args, **kwargs):
        raise hub.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(hub, "save_file", fail)
    with pytest.raises(DiskFullError, match="no space left"):
        hub.save_pretrained(folder, {"a": torch.ones(1)}, {}, CARD, overwrite=True)
    assert torch.equal(hub.load_pretrained(folder)[0]["a"], tensors["a"])
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("tensors", "config", "card", "message"),
    [
        ({}, {}, CARD, "there are none"),
        ({"a": 3}, {}, CARD, r"'a' \(int\)"),
        ({"a": torch.ones(1)}, {"weights": 1}, CARD, "reserved"),
        ({"a": torch.ones(1)}, {"x": object()}, CARD, "JSON values"),
        ({"a": torch.ones(1)}, {"x": float("nan")}, CARD, "JSON values"),
        ({"a": torch.ones(1)}, {}, " \n", "card is empty"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, tensors, config, card, message):
    with pytest.raises(InputError, match=message):
        hub.save_pretrained(tmp_path / "m", tensors, config, card)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_do_not_fit_are_listed_and_change_nothing():
    module = nn.Linear(2, 3)
    before = module.weight.detach().clone()
    with pytest.raises(
        UnreadableError, match=r"missing bias; unknown extra; wrong shape weight \(expected \(3, 2\)"
    ):
        hub.load_weights(module, {"weight": torch.zeros(2, 3), "extra": torch.zeros(1)})
    assert torch.equal(module.weight, before)


@pytest.fixture
def package(tmp_path, monkeypatch):
    root = tmp_path / "site" / "a_package_with_models"
    root.mkdir(parents=True)
    (root / "__init__.py").touch()
    for name in ("small", "large"):
        hub.save_pretrained(root / "pretrained" / name, {"w": torch.full((1,), float(len(name)))}, {}, CARD)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    yield root.name
    sys.modules.pop(root.name, None)


def test_shipped_models_come_before_folders(package, tmp_path):
    hub.save_pretrained(tmp_path / "small", {"w": torch.zeros(1)}, {}, CARD)
    assert hub.pretrained_names(package) == ["large", "small"]
    assert hub.load_pretrained("small", package)[0]["w"].item() == 5
    assert hub.load_pretrained("./small", package)[0]["w"].item() == 0
    assert hub.load_pretrained("small")[0]["w"].item() == 0


def test_unknown_names_are_answered_with_the_names_there_are(package):
    with pytest.raises(InputError, match=r"'medium'.*ships: large, small"):
        hub.load_pretrained("medium", package)
    with pytest.raises(InputError, match=r"'medium'.*ships: large, small"):
        hub.load_pretrained("medium", package, download=True)
    with pytest.raises(InputError, match="not installed"):
        hub.load_pretrained("small", "no_such_package_here")


def test_the_hub_is_asked_only_on_request(package, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(repo, revision, allow_patterns):
        asked.append((repo, revision))
        return str(hub.save_pretrained(tmp_path / "cache", {"w": torch.full((1,), 7.0)}, {}, CARD))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(InputError, match="ask for the download"):
        hub.load_pretrained("owner/model", package)
    assert asked == []
    assert hub.load_pretrained("owner/model", package, download=True, revision="v1")[0]["w"].item() == 7
    assert asked == [("owner/model", "v1")]


def test_hub_failures_are_one_typed_error(package, monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UnreadableError, match=r"owner/model: cannot be fetched.*offline"):
        hub.load_pretrained("owner/model", package, download=True)


def test_a_missing_extra_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra, match=r"shared-moe\[hub\]"):
        hub.load_pretrained("owner/model", package, download=True)


def test_a_kill_in_the_middle_of_saving_leaves_the_earlier_model(saved):
    folder, tensors = saved
    script = (
        "import os, sys, torch\nfrom shared_moe import hub\n"
        "hub._move_into_place = lambda *a: os.kill(os.getpid(), 9)\n"
        f"hub.save_pretrained({str(folder)!r}, {{'a': torch.ones(1)}}, {{}}, 'card', overwrite=True)\n"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert torch.equal(hub.load_pretrained(folder)[0]["a"], tensors["a"])
