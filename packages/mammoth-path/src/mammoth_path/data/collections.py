"""Real labelled bags: the classical MIL collections (package `mil`, extra `collections`) and the texture features of
5,000 colorectal tiles (Kather et al. 2016), composed into bags.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from mammoth_path.data.bags import BagSet
from shared_moe.errors import InputError, MissingExtra, UnreadableError

COLLECTIONS = {
    "ucsb": ("ucsb_breast_cancer", ("benign", "malignant")),
    "musk1": ("musk1", ("no musk", "musk")),
    "musk2": ("musk2", ("no musk", "musk")),
    "elephant": ("elephant", ("no elephant", "elephant")),
}
TEXTURE_FILE = "best3_numFeatures49_last_output_rand_67445.mat"
TISSUES = ("tumour", "stroma", "complex", "lymphocytes", "debris", "mucosa", "adipose", "empty")
TUMOUR = 0


def load_collection(name: str) -> BagSet:
    """ucsb (58 breast biopsies, 708 features), musk1 (92 molecules), musk2 (102), elephant (200 photographs).

    Raises `InputError` for another name, `MissingExtra` where the package `mil` is not installed.
    """
    if name not in COLLECTIONS:
        raise InputError(f"no collection {name!r}; there are: {', '.join(COLLECTIONS)}")
    stem, classes = COLLECTIONS[name]
    try:
        text = files("mil").joinpath(f"data/datasets/csv/{stem}.csv").read_text()
    except ModuleNotFoundError as e:
        raise MissingExtra("mil", "collections", f"the {name} collection", "mammoth-path") from e
    table = np.array([[float(v) for v in line.split(",")] for line in text.splitlines()])
    labels, bag_ids, rows = table[:, 0].astype(int), table[:, 1].astype(int), table[:, 2:].astype(np.float32)
    order = np.unique(bag_ids)
    names = [f"{name}-{b}" for b in order]
    bag_labels = np.array([labels[bag_ids == b].max() for b in order])
    return BagSet([rows[bag_ids == b] for b in order], bag_labels, names, names, list(classes))


@dataclass(frozen=True)
class Tiles:
    """Features (N, 49) and tissue class (N,) of real tiles; see `TISSUES`."""

    features_ND: np.ndarray
    tissue_N: np.ndarray

    def subset(self, indices: np.ndarray) -> "Tiles":
        return Tiles(self.features_ND[indices], self.tissue_N[indices])


def load_texture_tiles(folder: Path | str) -> Tiles:
    """The 49 texture features of 5,000 real colorectal tiles, 625 in each of 8 tissue classes.

    `folder` holds the authors' .mat file. There is no patient in it, so splits can only be by tile.
    Raises `UnreadableError` when the file is absent or damaged.
    """
    import scipy.io

    path = Path(folder) / TEXTURE_FILE
    if not path.is_file():
        raise UnreadableError(f"{path}: no such file; it is part of the histology-multiclass-texture data")
    try:
        saved = scipy.io.loadmat(path)
        features, tissue = saved["source_array"].T, saved["target_array"].argmax(0)
    except (ValueError, KeyError, OSError) as e:
        raise UnreadableError(f"{path}: not the expected MATLAB file, or cut short ({e})") from e
    return Tiles(features.astype(np.float32), tissue.astype(int))


def split_tiles(tiles: Tiles, rng: np.random.Generator, share: float = 0.5) -> tuple[Tiles, Tiles]:
    """Two disjoint sets of tiles with the same mix of tissues."""
    first: list[int] = []
    second: list[int] = []
    for tissue in np.unique(tiles.tissue_N):
        indices = rng.permutation(np.flatnonzero(tiles.tissue_N == tissue))
        cut = round(share * len(indices))
        first += indices[:cut].tolist()
        second += indices[cut:].tolist()
    return tiles.subset(np.array(first)), tiles.subset(np.array(second))


def compose_bags(
    tiles: Tiles, count: int, rng: np.random.Generator, *, task: str = "needle", size: int = 100
) -> tuple[BagSet, list[np.ndarray]]:
    """Bags COMPOSED of real tiles, half of them positive, and the tissue class of every tile.

    needle       2 tumour tiles of 100 in a positive bag, none in a negative one
    burden       30 tumour tiles of 100 against 10
    interaction  15 tumour and 15 lymphocyte tiles together, against 30 of one of them alone
    """
    plans = {
        "needle": lambda positive: {0: 2} if positive else {},
        "burden": lambda positive: {0: 30} if positive else {0: 10},
        "interaction": lambda positive: {0: 15, 3: 15} if positive else {int(rng.choice([0, 3])): 30},
    }
    if task not in plans:
        raise InputError(f"no task {task!r}; there are: {', '.join(plans)}")
    reserved = {"needle": (0,), "burden": (0,), "interaction": (0, 3)}[task]
    background = np.flatnonzero(~np.isin(tiles.tissue_N, reserved))
    features, kinds = [], []
    labels = np.arange(count) % 2
    for positive in labels:
        plan = plans[task](bool(positive))
        chosen = [rng.choice(np.flatnonzero(tiles.tissue_N == t), n, replace=False) for t, n in plan.items()]
        chosen.append(rng.choice(background, size - sum(plan.values()), replace=False))
        indices = rng.permutation(np.concatenate(chosen))
        features.append(tiles.features_ND[indices])
        kinds.append(tiles.tissue_N[indices])
    names = [f"composed-{i:04d}" for i in range(count)]
    return BagSet(features, labels, names, names, ["negative", "positive"]), kinds
