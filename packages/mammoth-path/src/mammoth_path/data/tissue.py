"""Where the tissue is: saturation and Otsu on an overview, without pen, dust and glass."""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter
from scipy import ndimage
from skimage import filters, morphology

from mammoth_path.data.slides import Slide
from mammoth_path.errors import NoTissueError

OVERVIEW_PX = 1024
SATURATION_RANGE = (0.04, 0.1)
DARK, MEDIAN_PX, CLOSING_PX = 0.2, 7, 4
SMALLEST_SHARE, LARGEST_HOLE_SHARE, SMALLEST_MARK_SHARE = 2e-4, 1e-3, 5e-3


@dataclass(frozen=True)
class TissueMask:
    """mask (h, w) of the overview; `downsample` level-0 pixels to one mask pixel, in x and y; overview (h, w, 3)."""

    mask_HW: np.ndarray
    downsample_xy: tuple[float, float]
    overview_HWC: np.ndarray

    @property
    def share(self) -> float:
        """Share of the slide that is tissue."""
        return float(self.mask_HW.mean())


def pen_mask(rgb_HWC: np.ndarray) -> np.ndarray:
    """Marker ink: strong colour outside the range of haematoxylin and eosin (green, blue, red, maroon), or black.

    Around a large red mark its pale blurred edge, red too, belongs to it; a few red cells take nothing with them.
    """
    hsv = np.asarray(Image.fromarray(rgb_HWC).convert("HSV"), np.float32) / 255
    hue, saturation, value = hsv[..., 0] * 360, hsv[..., 1], hsv[..., 2]
    green = (hue > 70) & (hue < 175) & (saturation > 0.15)
    blue = (hue >= 175) & (hue < 238) & (saturation > 0.35)
    red = ((hue < 15) | (hue > 345)) & (saturation > 0.08)
    maroon = ((hue < 20) | (hue > 320)) & (value < 0.4) & (saturation > 0.2)
    mark = ((hue < 12) | (hue > 352)) & (saturation > 0.55) & (value > 0.4) | maroon
    large = morphology.remove_small_objects(mark, max_size=max(16, int(SMALLEST_MARK_SHARE * mark.size)))
    edge = ndimage.binary_propagation(large, mask=red | maroon | large) if large.any() else large
    black = (value < DARK) & (saturation < 0.5)
    ink = green | blue | mark | edge | black
    return ndimage.binary_dilation(ink, iterations=2) if ink.any() else ink


def tissue_mask(rgb_HWC: np.ndarray) -> np.ndarray:
    """Tissue in an overview picture: uint8 RGB (h, w, 3) -> bool (h, w).

    Saturation, median blur, Otsu's threshold held between 0.04 and 0.1 (so that a slide full of tissue is not split in
    two), closing, then specks removed and small holes filled.
    """
    saturation = Image.fromarray(rgb_HWC).convert("HSV").getchannel("S")
    smooth = np.asarray(saturation.filter(ImageFilter.MedianFilter(MEDIAN_PX)), np.float32) / 255
    low, high = SATURATION_RANGE
    threshold = low if np.ptp(smooth) < 1e-6 else float(np.clip(filters.threshold_otsu(smooth), low, high))
    found = (smooth > threshold) & ~pen_mask(rgb_HWC)
    found = ndimage.binary_closing(np.pad(found, CLOSING_PX), iterations=CLOSING_PX)
    found = found[CLOSING_PX:-CLOSING_PX, CLOSING_PX:-CLOSING_PX]
    area = found.size
    found = morphology.remove_small_objects(found, max_size=max(16, int(SMALLEST_SHARE * area)))
    return morphology.remove_small_holes(found, max_size=max(16, int(LARGEST_HOLE_SHARE * area)))


def find_tissue(slide: Slide, max_px: int = OVERVIEW_PX) -> TissueMask:
    """The tissue of a slide. Raises `NoTissueError` when there is none.

    What the overview cannot show counts as tissue: its tiles are tried one by one, and those that fail are counted.
    """
    overview, unreadable = slide.overview(max_px)
    mask = tissue_mask(overview) | unreadable
    if not mask.any():
        raise NoTissueError(
            f"{slide.path}: no tissue found in the overview ({overview.shape[1]} x {overview.shape[0]} px); look at it "
            "with `mammoth-path inspect --thumbnail`, or tile the whole slide with --min-tissue 0"
        )
    height, width = mask.shape
    return TissueMask(mask, (slide.width_px / width, slide.height_px / height), overview)
