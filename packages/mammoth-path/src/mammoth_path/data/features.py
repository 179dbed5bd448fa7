"""Bags of patch features in the HDF5 layouts that the field's tools share.

Written: TRIDENT's (`features` (N, D), `coords` (N, 2), attributes), with microns per pixel added. Read: TRIDENT's, CLAM's,
files that call them `feats`, files with a leading batch axis, and plain `.pt` tensors.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mammoth_path.data.tiles import TileGrid, magnification
from shared_moe.errors import InputError, UnreadableError
from shared_moe.files import atomic_path

FEATURE_NAMES = ("features", "feats", "embeddings")
COORD_NAMES = ("coords", "coordinates")


@dataclass(frozen=True)
class Bag:
    """features_ND float32; coords_N2 int64 level-0 pixels, top left, or None when the file has none.

    attributes: patch_size_level0, mpp_um, encoder, name ... as far as the file says.
    """

    features_ND: np.ndarray
    coords_N2: np.ndarray | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        features, coords = self.features_ND, self.coords_N2
        if features.ndim != 2 or len(features) == 0 or features.shape[1] == 0:
            raise InputError(f"features must be (N, D) with N, D >= 1, got {features.shape}")
        if coords is not None and coords.shape != (len(features), 2):
            raise InputError(
                f"{len(features)} features but coords of shape {coords.shape}; expected ({len(features)}, 2)"
            )
        bad = ~np.isfinite(features).all(1)
        if bad.any():
            raise InputError(
                f"{int(bad.sum())} of {len(features)} feature rows hold NaN or Inf (first: row {int(bad.argmax())}); "
                "encode the slide again or drop those rows"
            )


def grid_attributes(grid: TileGrid) -> dict[str, Any]:
    """TRIDENT's attributes of a set of tiles, and the scales behind them."""
    return {
        "patch_size": grid.size_px,
        "patch_size_level0": grid.size_level0_px,
        "level0_magnification": magnification(grid.slide_mpp_um),
        "target_magnification": magnification(grid.mpp_um),
        "overlap": grid.overlap_px,
        "name": grid.slide_name,
        "savetodir": "",
        "level0_width": grid.slide_size_px[0],
        "level0_height": grid.slide_size_px[1],
        "mpp_um": grid.mpp_um,
        "level0_mpp_um": grid.slide_mpp_um,
    }


def write_features(path: Path | str, bag: Bag) -> None:
    """Write `bag` whole or not at all. Raises `DiskFullError`, leaving an earlier file as it was."""
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as f:
        features = f.create_dataset("features", data=bag.features_ND)
        features.attrs["encoder"] = bag.attributes.get("encoder", "")
        if bag.coords_N2 is not None:
            coords = f.create_dataset("coords", data=bag.coords_N2.astype(np.int64))
            for key, value in bag.attributes.items():
                coords.attrs[key] = value


def write_coords(path: Path | str, grid: TileGrid) -> None:
    """Write the tiles alone, as TRIDENT's coordinate files."""
    with atomic_path(path) as temporary, h5py.File(temporary, "w") as f:
        coords = f.create_dataset("coords", data=grid.coords_N2)
        for key, value in grid_attributes(grid).items():
            coords.attrs[key] = value


def read_features(path: Path | str) -> Bag:
    """Read a `.h5`, `.hdf5` or `.pt` bag of any of the layouts above.

    Raises `UnreadableError` when the file is absent, cut short or has no features, `InputError` for NaN or for lengths
    that disagree.
    """
    path = Path(path)
    if not path.is_file():
        raise UnreadableError(f"{path}: no such file")
    try:
        return _read_pt(path) if path.suffix == ".pt" else _read_h5(path)
    except InputError as e:
        raise type(e)(f"{path}: {e}") from e


def _read_pt(path: Path) -> Bag:
    import torch

    from mammoth_path.data.weights import load_tensors

    saved = load_tensors(path)
    if isinstance(saved, dict):
        saved = next((saved[name] for name in FEATURE_NAMES if name in saved), saved)
    if not isinstance(saved, torch.Tensor):
        raise UnreadableError(f"{path}: holds {type(saved).__name__}; expected one tensor (N, D)")
    return Bag(_without_batch_axis(saved.detach().to_dense().float().numpy()))


def _read_h5(path: Path) -> Bag:
    try:
        with h5py.File(path) as f:
            found = {name: f[name] for name in f if isinstance(f[name], h5py.Dataset)}
            key = next((n for n in FEATURE_NAMES if n in found), None)
            if key is None:
                raise UnreadableError(
                    f"{path}: no dataset of features ({', '.join(FEATURE_NAMES)}); it holds {', '.join(f) or 'nothing'}"
                )
            features = _without_batch_axis(_numbers(found[key]).astype(np.float32))
            attributes = dict(found[key].attrs)
            coord_key = next((n for n in COORD_NAMES if n in found), None)
            coords = None
            if coord_key is not None:
                coords = _without_batch_axis(_numbers(found[coord_key]))
                if not np.isfinite(coords).all():
                    raise InputError(f"{coord_key} holds NaN or Inf; tile the slide again")
                coords = coords.round().astype(np.int64)
                attributes |= dict(found[coord_key].attrs)
    except (UnreadableError, InputError):
        raise
    except (
        OSError,
        RuntimeError,
        KeyError,
        ValueError,
        TypeError,
        MemoryError,
    ) as e:  # h5py's, by where it is damaged
        raise UnreadableError(f"{path}: not an HDF5 file, cut short or damaged ({e})") from e
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in attributes.items()}
    return Bag(features, coords, _with_level0_size(plain))


def _numbers(dataset: h5py.Dataset) -> np.ndarray:
    if dataset.dtype.kind not in "iuf":
        raise InputError(f"{dataset.name} holds {dataset.dtype}, expected numbers")
    return dataset[()]


def _with_level0_size(attributes: dict[str, Any]) -> dict[str, Any]:
    """CLAM gives a patch's size at its level; what the painter needs is its size at level 0."""
    if "patch_size_level0" not in attributes and {"patch_size", "downsample"} <= attributes.keys():
        down = float(np.atleast_1d(attributes["downsample"])[0])
        attributes["patch_size_level0"] = round(float(np.atleast_1d(attributes["patch_size"])[0]) * down)
    return attributes


def _without_batch_axis(array: np.ndarray) -> np.ndarray:
    return array[0] if array.ndim == 3 and len(array) == 1 else array
