"""A grid of tiles over the tissue, at one physical scale. Shapes: N tiles."""

from dataclasses import dataclass

import numpy as np

from mammoth_path.data.slides import Slide
from mammoth_path.data.tissue import TissueMask
from mammoth_path.errors import NoTissueError, ScaleError
from shared_moe.errors import InputError

BANDS_UM = ((0.16, 80), (0.2, 60), (0.3, 40), (0.6, 20), (1.2, 10), (2.4, 5))


@dataclass(frozen=True)
class TileGrid:
    """coords_N2: int64 level-0 pixels (x, y) of each tile's top left corner, row by row.

    size_px is a tile's side at `mpp_um` microns per pixel, size_level0_px its side in level-0 pixels.
    """

    coords_N2: np.ndarray
    size_px: int
    mpp_um: float
    overlap_px: int
    size_level0_px: int
    slide_mpp_um: float
    slide_size_px: tuple[int, int]
    slide_name: str

    def __len__(self) -> int:
        return len(self.coords_N2)

    @property
    def folder_name(self) -> str:
        """TRIDENT's name for a set of tiles: 20x_256px_0px_overlap."""
        return f"{magnification(self.mpp_um)}x_{self.size_px}px_{self.overlap_px}px_overlap"

    def read(self, slide: Slide, index: int) -> np.ndarray:
        """Tile `index` of the slide: uint8 (size_px, size_px, 3)."""
        x, y = self.coords_N2[index]
        return slide.read(x * self.slide_mpp_um, y * self.slide_mpp_um, self.size_px, self.mpp_um)


def magnification(mpp_um: float) -> int:
    """The power that the field calls this scale (80, 60, 40, 20, 10, 5; else the nearest whole number)."""
    for limit, power in BANDS_UM:
        if mpp_um < limit:
            return power
    return max(1, round(10 / mpp_um))


def mpp_of_power(power: float) -> float:
    """20x -> 0.5 um/px."""
    if not power > 0:
        raise InputError(f"--mag {power:g}; expected a positive magnification")
    return 10 / power


def tile_grid(
    slide: Slide,
    tissue: TissueMask | None,
    *,
    mpp: float = 0.5,
    size_px: int = 256,
    overlap_px: int = 0,
    min_tissue: float = 0.25,
) -> TileGrid:
    """Whole tiles with at least `min_tissue` of their area on tissue (None: every whole tile).

    Raises `ScaleError` when the slide's scale is unknown or coarser than `mpp`, `NoTissueError` when no tile is left.
    """
    base = slide.require_mpp()
    if size_px < 1 or not 0 <= overlap_px < size_px or not 0 <= min_tissue <= 1:
        raise InputError(
            f"size_px={size_px}, overlap_px={overlap_px}, min_tissue={min_tissue}; expected a positive size, "
            "0 <= overlap < size and 0 <= min_tissue <= 1"
        )
    if mpp < 0.95 * base:
        raise ScaleError(
            f"{slide.path}: tiles at {mpp:g} um/px were asked for, but the scan has {base:g} um/px; "
            f"ask for at least {base:g}"
        )
    side = round(size_px * mpp / base)
    step = (size_px - overlap_px) * mpp / base
    xs = np.round(np.arange(0, max(0, slide.width_px - side) + 1e-9, step)).astype(np.int64)
    ys = np.round(np.arange(0, max(0, slide.height_px - side) + 1e-9, step)).astype(np.int64)
    if side > slide.width_px or side > slide.height_px:
        raise NoTissueError(
            f"{slide.path}: {slide.width_px} x {slide.height_px} px is smaller than one tile of {side} px at level 0"
        )
    coords = np.stack(np.meshgrid(xs, ys), -1).reshape(-1, 2)
    if tissue is not None:
        coords = coords[tissue_fraction(tissue, coords, side) >= max(min_tissue, 1e-9)]
    if len(coords) == 0:
        raise NoTissueError(
            f"{slide.path}: 0 tiles of {size_px} px at {mpp:g} um/px hold {min_tissue:.0%} tissue "
            f"({0 if tissue is None else tissue.share:.1%} of the slide is tissue); use smaller tiles or a lower "
            "--min-tissue"
        )
    size = (slide.width_px, slide.height_px)
    return TileGrid(coords, size_px, mpp, overlap_px, side, base, size, slide.name)


def tissue_fraction(tissue: TissueMask, coords_N2: np.ndarray, side_px: int) -> np.ndarray:
    """Share of each tile's area that lies on tissue (N,)."""
    height, width = tissue.mask_HW.shape
    total = np.zeros((height + 1, width + 1))
    total[1:, 1:] = tissue.mask_HW.cumsum(0).cumsum(1)
    down_x, down_y = tissue.downsample_xy
    left, top = coords_N2[:, 0] / down_x, coords_N2[:, 1] / down_y
    x0, x1 = (np.clip(np.round(v), 0, width).astype(int) for v in (left, left + side_px / down_x))
    y0, y1 = (np.clip(np.round(v), 0, height).astype(int) for v in (top, top + side_px / down_y))
    area = np.maximum(1, (x1 - x0) * (y1 - y0))
    return (total[y1, x1] - total[y0, x1] - total[y1, x0] + total[y0, x0]) / area
