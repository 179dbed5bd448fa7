"""Pathology encoders whose weights the user brings: how each is built around its file.

Shapes: B tiles, T tokens (class token first), C trunk width, D feature width.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MeanStd = tuple[tuple[float, ...], tuple[float, ...]]

RAW: MeanStd = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
HALVES: MeanStd = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET: MeanStd = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP: MeanStd = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HOPTIMUS: MeanStd = ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517))


@dataclass(frozen=True)
class Architecture:
    """How to build an encoder around its weight file.

    timm_name, arguments   the trunk in timm
    pool    cls: class token; cls+mean: and the mean patch token; attention: CONCH's pooler; timm: the trunk's own
    hub     where the weights are published: the repository
    """

    timm_name: str
    dim: int
    arguments: dict[str, Any] = field(default_factory=dict)
    mean_std: MeanStd = IMAGENET
    pool: str = "cls"
    hub: str = ""
    input_px: int = 224
    resize: str = "bilinear"


VIT = {"dynamic_img_size": True}
SWIGLU = {"mlp_layer": "SwiGLUPacked", "act_layer": "SiLU", "init_values": 1e-5}
KNOWN = {
    "uni": Architecture("vit_large_patch16_224", 1024, {**VIT, "init_values": 1e-5}, hub="MahmoodLab/UNI"),
    "uni2": Architecture(
        "vit_giant_patch14_224",
        1536,
        {**VIT, **SWIGLU, "depth": 24, "num_heads": 24, "embed_dim": 1536, "mlp_ratio": 2.66667 * 2}
        | {"no_embed_class": True, "reg_tokens": 8},
        hub="MahmoodLab/UNI2-h",
    ),
    "virchow": Architecture(
        "vit_huge_patch14_224",
        2560,
        {**VIT, **SWIGLU, "mlp_ratio": 5.3375},
        pool="cls+mean",
        hub="paige-ai/Virchow",
        resize="bicubic",
    ),
    "virchow2": Architecture(
        "vit_huge_patch14_224",
        2560,
        {**VIT, **SWIGLU, "mlp_ratio": 5.3375, "reg_tokens": 4},
        pool="cls+mean",
        hub="paige-ai/Virchow2",
        resize="bicubic",
    ),
    "conch": Architecture(
        "vit_base_patch16_224",
        512,
        {**VIT, "img_size": 448},
        mean_std=CLIP,
        pool="attention",
        hub="MahmoodLab/CONCH",
        input_px=448,
        resize="bicubic",
    ),
    "phikon": Architecture(
        "vit_base_patch16_224", 768, {**VIT, "norm_layer": "LayerNorm12"}, hub="owkin/phikon"
    ),
    "hoptimus0": Architecture(
        "vit_giant_patch14_reg4_dinov2",
        1536,
        {"img_size": 224, "init_values": 1e-5, "dynamic_img_size": False},
        mean_std=HOPTIMUS,
        hub="bioptimus/H-optimus-0",
    ),
}


class Query(nn.Module):
    """One learned query that attends to all tokens: (B, T, C) -> (B, D)."""

    def __init__(self, dim: int, width: int, heads: int = 8):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, dim))
        self.attn = nn.MultiheadAttention(dim, heads, kdim=width, vdim=width, batch_first=True)
        self.ln_q, self.ln_k = nn.LayerNorm(dim), nn.LayerNorm(width)

    def forward(self, tokens_BTC: Tensor) -> Tensor:
        keys = self.ln_k(tokens_BTC)
        query = self.ln_q(self.query).expand(len(keys), -1, -1)
        return self.attn(query, keys, keys, need_weights=False)[0][:, 0]


class AttentionPool(nn.Module):
    """CONCH's contrastive branch before its projection. The names are those of the published weight file."""

    def __init__(self, trunk: nn.Module, dim: int, width: int):
        super().__init__()
        self.trunk = trunk
        self.attn_pool_contrast = Query(dim, width)
        self.ln_contrast = nn.LayerNorm(dim)

    def forward(self, x_BChw: Tensor) -> Tensor:
        tokens = self.trunk.forward_features(x_BChw)  # pyright: ignore[reportCallIssue]
        return self.ln_contrast(self.attn_pool_contrast(tokens))


class TokenPool(nn.Module):
    """The class token, or the class token beside the mean patch token: (B, C) or (B, 2C)."""

    def __init__(self, trunk: nn.Module, with_mean: bool):
        super().__init__()
        self.trunk, self.with_mean = trunk, with_mean

    def forward(self, x_BChw: Tensor) -> Tensor:
        tokens_BTC = self.trunk.forward_features(x_BChw)  # pyright: ignore[reportCallIssue]
        if not self.with_mean:
            return tokens_BTC[:, 0]
        prefix = int(self.trunk.num_prefix_tokens)  # pyright: ignore[reportArgumentType]
        return torch.cat([tokens_BTC[:, 0], tokens_BTC[:, prefix:].mean(1)], dim=1)


def build(architecture: Architecture) -> tuple[nn.Module, nn.Module]:
    """(network: images -> features, the part of it that the weight file fills), with untrained weights."""
    import timm
    from timm.layers import SwiGLUPacked

    named = {
        "SwiGLUPacked": SwiGLUPacked,
        "SiLU": nn.SiLU,
        "LayerNorm12": partial(nn.LayerNorm, eps=1e-12),  # transformers' ViT
    }
    arguments = {k: named.get(v, v) if isinstance(v, str) else v for k, v in architecture.arguments.items()}
    trunk = timm.create_model(architecture.timm_name, **{"num_classes": 0, **arguments})
    if architecture.pool == "timm":
        return trunk, trunk
    if architecture.pool == "attention":
        network = AttentionPool(trunk, architecture.dim, int(trunk.num_features))  # pyright: ignore[reportArgumentType]
        return network, network
    return TokenPool(trunk, architecture.pool == "cls+mean"), trunk
