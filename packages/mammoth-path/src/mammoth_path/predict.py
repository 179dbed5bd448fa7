"""What a model says about a bag, and which patches it says so by. Shapes: N patches, E experts, C classes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mammoth_path.data.encoders import load_encoder
from mammoth_path.data.features import Bag, grid_attributes, read_features
from mammoth_path.data.slides import open_slide
from mammoth_path.encode import TileOptions, encode_grid, grid_of
from mammoth_path.errors import FeatureWidthError, encoders_of_width
from mammoth_path.model.mil import MILModel
from shared_moe.errors import InputError


@dataclass(frozen=True)
class Prediction:
    """probabilities: class -> probability. scores_N: each patch's share in the decision (sums to 1); experts_NE: each
    patch's experts (rows sum to 1), for MAMMOTH models. tissue: mean probability of each tissue class, where the encoder
    has a tissue head."""

    probabilities: dict[str, float]
    scores_N: np.ndarray
    experts_NE: np.ndarray | None
    tissue: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        top = np.argsort(-self.scores_N)[:10]
        return {
            "probabilities": self.probabilities,
            "tissue": self.tissue,
            "patches": len(self.scores_N),
            "top_patches": [{"index": int(i), "score": float(self.scores_N[i])} for i in top],
        }


@torch.no_grad()
def predict_bag(model: MILModel, config: dict[str, Any], bag: Bag) -> Prediction:
    """Raises `FeatureWidthError` naming the encoder that fits when the bag comes from another one."""
    width = bag.features_ND.shape[1]
    if width != model.input_dim:
        wanted = config.get("encoder") or encoders_of_width(model.input_dim)
        raise FeatureWidthError(
            f"the bag's features are {width} wide, this model expects {model.input_dim} ({wanted}); {encoders_of_width(width)}"
        )
    x = torch.from_numpy(bag.features_ND.astype(np.float32))[None]
    probabilities = model.answer(model(x).logits_BC)[0].tolist()
    scores, experts = model.patch_scores(x)
    tissue: dict[str, float] = {}
    if bag.attributes.get("encoder") == "densenet121-capricorn":
        encoder = load_encoder("densenet121-capricorn")
        means = encoder.tissue_probs(bag.features_ND).mean(0).tolist()
        tissue = dict(zip(encoder.tissue_classes, means, strict=True))
    return Prediction(
        dict(zip(config["classes"], probabilities, strict=True)),
        scores[0].numpy(),
        None if experts is None else experts[0].numpy(),
        tissue,
    )


def bag_of(source: Path, encoder: str, options: TileOptions, mpp: float | None = None) -> Bag:
    """A feature file as it is; a slide cut and encoded first."""
    if source.suffix in (".h5", ".hdf5", ".pt"):
        return read_features(source)
    if not encoder:
        raise InputError(
            f"{source} is not a feature file, and the model does not say which encoder it needs: --encoder"
        )
    loaded = load_encoder(encoder)
    with open_slide(source, mpp) as slide:
        grid = grid_of(slide, options)
        features, kept = encode_grid(slide, grid, loaded)
    return Bag(features, grid.coords_N2[kept], {**grid_attributes(grid), "encoder": loaded.name})
