"""Labelled bags: collections, splits by patient, padded mini-batches. Shapes: B bags, N patches, D features."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor

from mammoth_path.data.features import read_features
from shared_moe.errors import InputError, UnreadableError


@dataclass(frozen=True)
class BagSet:
    """features: one (N, D) float32 array a bag; labels: class index of each; cases: the patient that each comes from;
    encoder: what made the features, where known.

    Bags of one case never land on both sides of a split.
    """

    features: list[np.ndarray]
    labels: np.ndarray
    names: list[str]
    cases: list[str]
    classes: list[str]
    encoder: str = ""

    def __post_init__(self):
        lengths = {len(self.features), len(self.labels), len(self.names), len(self.cases)}
        if len(lengths) != 1 or 0 in lengths:
            raise InputError(
                f"features, labels, names and cases must be as many and at least one, got {sorted(lengths)}"
            )
        widths = sorted({f.shape[1] for f in self.features})
        if len(widths) != 1:
            raise InputError(f"bags have features of different widths: {widths}; use one encoder for all")

    def __len__(self) -> int:
        return len(self.features)

    @property
    def dim(self) -> int:
        return self.features[0].shape[1]

    def subset(self, indices: Sequence[int] | np.ndarray) -> "BagSet":
        chosen = [int(i) for i in indices]
        return replace(
            self,
            features=[self.features[i] for i in chosen],
            labels=self.labels[chosen],
            names=[self.names[i] for i in chosen],
            cases=[self.cases[i] for i in chosen],
        )


def read_bag_folder(folder: Path | str, table: Path | str) -> BagSet:
    """Feature files named by slide and a CSV `case_id,slide_id,label`.

    Raises `UnreadableError` for a missing column or feature file (all of them are named).
    """
    folder, table = Path(folder), Path(table)
    if not table.is_file():
        raise UnreadableError(f"{table}: no such file; expected a CSV with case_id, slide_id, label")
    with table.open(newline="", encoding="utf-8-sig") as f:
        rows = list(csv.DictReader(f))
    needed = ("case_id", "slide_id", "label")
    missing = [c for c in needed if not rows or c not in rows[0]]
    if missing:
        found = ", ".join(rows[0]) if rows else "nothing"
        raise UnreadableError(f"{table}: no column {', '.join(missing)}; it has {found}")
    paths = [_feature_file(folder, row["slide_id"]) for row in rows]
    absent = [row["slide_id"] for row, path in zip(rows, paths, strict=True) if path is None]
    if absent:
        raise UnreadableError(f"{folder}: no feature file for {len(absent)} slides: {', '.join(absent[:10])}")
    classes = sorted({row["label"] for row in rows})
    bags = [read_features(path) for path in paths if path is not None]
    encoders = sorted({str(bag.attributes.get("encoder", "")) for bag in bags})
    if len(encoders) > 1:
        raise InputError(f"{folder}: features of different encoders: {', '.join(encoders)}; use one for all")
    return BagSet(
        [bag.features_ND for bag in bags],
        np.array([classes.index(row["label"]) for row in rows]),
        [row["slide_id"] for row in rows],
        [row["case_id"] for row in rows],
        classes,
        encoders[0],
    )


def _feature_file(folder: Path, slide_id: str) -> Path | None:
    candidates = (folder / f"{slide_id}{suffix}" for suffix in (".h5", ".hdf5", ".pt"))
    return next((p for p in candidates if p.is_file()), None)


def folds_by_case(bags: BagSet, folds: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Stratified folds (train indices, test indices) that keep a patient's bags together.

    Raises `InputError` when a class has fewer cases than folds.
    """
    for c, name in enumerate(bags.classes):
        cases = {case for case, label in zip(bags.cases, bags.labels, strict=True) if label == c}
        if len(cases) < folds:
            raise InputError(f"class {name!r} has {len(cases)} cases; {folds} folds need at least that many")
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(len(bags)), bags.labels, bags.cases))


def pad(features: Sequence[np.ndarray], max_patches: int | None = None) -> tuple[Tensor, Tensor]:
    """(x (B, N, D), mask (B, N), True = real): bags padded with zeros to the longest.

    max_patches: longer bags are cut to that many, evenly spaced (a bag never fails for its size).
    """
    if max_patches is not None:
        features = [f if len(f) <= max_patches else f[_spread(len(f), max_patches)] for f in features]
    longest = max(len(f) for f in features)
    x = torch.zeros(len(features), longest, features[0].shape[1])
    mask = torch.zeros(len(features), longest, dtype=torch.bool)
    for b, f in enumerate(features):
        x[b, : len(f)] = torch.from_numpy(np.ascontiguousarray(f, np.float32))
        mask[b, : len(f)] = True
    return x, mask


def _spread(count: int, wanted: int) -> np.ndarray:
    return np.linspace(0, count - 1, wanted).astype(int)


def batches(
    bags: BagSet, size: int, generator: torch.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(x, mask, labels) of each mini-batch; in random order when a generator is given."""
    order = torch.arange(len(bags)) if generator is None else torch.randperm(len(bags), generator=generator)
    for indices in order.split(size):
        part = bags.subset(indices.tolist())
        yield (*pad(part.features), torch.as_tensor(part.labels, dtype=torch.long))
