"""Weight files from outside: read without executing anything in them, brought to a network's names, and checked against it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_moe.errors import UnreadableError

PREFIXES = (
    *("", "module.", "backbone.", "model.", "trunk.", "visual.", "visual.trunk.", "vit."),
    *("module.backbone.", "module.visual.", "module.visual.trunk."),
)
WRAPPERS = ("state_dict", "model", "teacher")
LAYERS = ("blocks.", "layers.", "stages.")
TRANSFORMERS_NAMES = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
    ("encoder.layer.", "blocks."),
    (".attention.output.dense.", ".attn.proj."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
)


def load_tensors(path: Path) -> Any:
    """What a .pt, .pth or .bin file holds. Raises `UnreadableError` when it is cut short or holds more than tensors."""
    import pickle

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        raise UnreadableError(
            f"{path}: holds Python objects, not only tensors, or is no tensor file; convert it to .safetensors"
        ) from e
    except Exception as e:  # torch raises almost anything on a damaged file
        reason = (str(e).splitlines() or [type(e).__name__])[0][:120]
        raise UnreadableError(f"{path}: not a tensor file, or cut short ({reason})") from e


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .bin, .pt or .pth file; nothing in it is executed.

    Raises `UnreadableError` when it is absent, cut short, or holds more than tensors.
    """
    if not path.is_file():
        raise UnreadableError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except (SafetensorError, OSError, ValueError) as e:
            raise UnreadableError(f"{path}: not a safetensors file, or cut short ({e})") from e
    saved = load_tensors(path)
    for key in WRAPPERS:
        if isinstance(saved, dict) and isinstance(saved.get(key), dict):
            saved = saved[key]
    if not isinstance(saved, dict) or not all(isinstance(v, Tensor) for v in saved.values()):
        raise UnreadableError(f"{path}: expected a dictionary of tensors")
    return saved


def fill(network: nn.Module, saved: dict[str, Tensor], path: Path) -> None:
    """Load `saved` into `network`, whatever prefix its names carry. Heads that the network lacks are left out.

    Raises `UnreadableError` when a tensor is missing or has another shape, or when the file holds further layers.
    """
    own = network.state_dict()
    prefix = max(PREFIXES, key=lambda p: sum(p + key in saved for key in own))
    found = {k.removeprefix(prefix): v for k, v in saved.items() if k.startswith(prefix)}
    advice = "is it the weight file of this encoder?"
    missing = [k for k in own if k not in found]
    if missing:
        raise UnreadableError(
            f"{path}: {len(missing)} of {len(own)} tensors of the network are not in it (first: {missing[0]}); {advice}"
        )
    for key, value in own.items():
        if found[key].shape != value.shape:
            raise UnreadableError(
                f"{path}: {key} is {tuple(found[key].shape)}, the network expects {tuple(value.shape)}; {advice}"
            )
    deeper = [k for k in found if k not in own and k.startswith(LAYERS)]
    if deeper:
        raise UnreadableError(f"{path}: holds layers that the network lacks (first: {deeper[0]}); {advice}")
    network.load_state_dict({k: found[k] for k in own})


def from_transformers(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """A ViT under transformers' names -> timm's names (query, key and value joined); any other file as it is."""
    prefix = next((p for p in PREFIXES if f"{p}embeddings.cls_token" in saved), None)
    if prefix is None:
        return saved
    named: dict[str, Tensor] = {}
    for key, value in saved.items():
        key = key.removeprefix(prefix)
        if ".attention.attention." in key:
            continue
        for old, new in TRANSFORMERS_NAMES:
            key = key.replace(old, new)
        named["norm." + key.removeprefix("layernorm.") if key.startswith("layernorm.") else key] = value
    for key in saved:
        if not key.endswith("attention.attention.query.weight"):
            continue
        block = key.removeprefix(prefix).split(".")[2]
        for kind in ("weight", "bias"):
            parts = [key.replace("query.weight", f"{name}.{kind}") for name in ("query", "key", "value")]
            if all(part in saved for part in parts):
                named[f"blocks.{block}.attn.qkv.{kind}"] = torch.cat([saved[part] for part in parts])
    return named
