"""Whole-slide images, read by physical scale: micrometres and microns per pixel, never pyramid levels.

Coordinates: level-0 pixels from the image's top left corner, or micrometres along the same axes.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openslide
from PIL import Image, UnidentifiedImageError

from mammoth_path.errors import ScaleError, SlideError
from shared_moe.errors import InputError

MPP_KEYS = ("openslide.mpp-x", "aperio.MPP", "mirax.LAYER_0_LEVEL_0_SECTION.MICROMETER_PER_PIXEL_X")
PLAUSIBLE_MPP_UM = (0.05, 20.0)
FINER_TOLERANCE = 0.95
SQUARE_TOLERANCE = 0.05
BLOCK_PX, SMALLEST_BLOCK_PX = 1024, 256
WHITE = (255, 255, 255)


class TileError(SlideError):
    """One region of a slide cannot be decoded; the rest of the slide can still be read."""


@dataclass(frozen=True)
class Scale:
    """Microns per pixel at level 0 (None when unknown), where the number came from, and what is odd about it."""

    mpp_um: float | None
    source: str
    warning: str | None = None


class Slide:
    """A slide or a plain image. Use as a context manager; safe to use after a fork (the file is opened again).

    `mpp_um` is None when the file does not say and the caller did not: then only `read_level` and `thumbnail` work.
    `bounds_px` (x, y, width, height) is the scanned part of the frame where the format says so, else None. All coordinates
    here are of the whole frame, as OpenSlide's are; a viewer that shows only the scanned part has (x, y) to subtract.
    """

    def __init__(self, path: Path | str, mpp: float | None = None):
        self.path = Path(path)
        self.name = self.path.stem
        self._handle, self._pid = _open(self.path), os.getpid()
        self.properties: dict[str, str] = dict(self._handle.properties)
        self.width_px, self.height_px = self._handle.dimensions
        self.level_sizes_px: tuple[tuple[int, int], ...] = self._handle.level_dimensions
        self.downsamples: tuple[float, ...] = self._handle.level_downsamples
        self.associated: list[str] = list(self._handle.associated_images)
        self.vendor = self.properties.get("openslide.vendor", "plain image")
        self.bounds_px = find_bounds(self.properties)
        self.power = _number(self.properties.get("openslide.objective-power"))
        self.scale = find_scale(self.properties, self.power, mpp)

    @property
    def mpp_um(self) -> float | None:
        return self.scale.mpp_um

    def require_mpp(self) -> float:
        """Microns per pixel at level 0. Raises `ScaleError` when unknown or absurd: the scale is never guessed."""
        if self.mpp_um is None:
            raise ScaleError(
                f"{self.path}: {self.scale.source}; give the microns per pixel of its finest level with --mpp "
                "(about 0.25 for a 40x scan, 0.5 for 20x)"
            )
        return self.mpp_um

    def read(self, x_um: float, y_um: float, size_px: int, mpp: float) -> np.ndarray:
        """The square region whose top left corner lies at (x_um, y_um), at `mpp` microns per pixel.

        Returns uint8 (size_px, size_px, 3); beyond the slide it is white. Resampled from the next finer level.
        Raises `ScaleError` when `mpp` is finer than the scan, `TileError` when the region cannot be decoded.
        """
        base = self.require_mpp()
        if size_px < 1 or not mpp > 0:
            raise InputError(f"size_px={size_px}, mpp={mpp}; expected a positive size and scale")
        if mpp < FINER_TOLERANCE * base:
            raise ScaleError(
                f"{self.path}: {mpp:g} um/px was asked for, but the scan has {base:g} um/px; ask for at least {base:g}"
            )
        target = mpp / base
        level = self._finer_level(target)
        down = self.downsamples[level]
        left, top, side = x_um / base / down, y_um / base / down, size_px * target / down
        if abs(side - size_px) < 1e-6 and abs(left - round(left)) < 1e-6 and abs(top - round(top)) < 1e-6:
            return self._region(level, round(left), round(top), size_px, size_px)
        width, height = self.level_sizes_px[level]
        x0, x1 = _with_margin(left, side, width)
        y0, y1 = _with_margin(top, side, height)
        pixels = Image.fromarray(self._region(level, x0, y0, x1 - x0, y1 - y0))
        box = (left - x0, top - y0, left - x0 + side, top - y0 + side)
        return np.asarray(pixels.resize((size_px, size_px), Image.Resampling.BILINEAR, box=box))

    def read_level(self, level: int, x_px: int, y_px: int, width_px: int, height_px: int) -> np.ndarray:
        """A region of one pyramid level, its corner in that level's pixels: uint8 (height, width, 3).

        Raises `InputError` for a level that does not exist.
        """
        if not 0 <= level < len(self.level_sizes_px):
            sizes = ", ".join(f"{i}: {w} x {h}" for i, (w, h) in enumerate(self.level_sizes_px))
            raise InputError(f"{self.path} has no level {level}; its levels are {sizes}")
        return self._region(level, x_px, y_px, width_px, height_px)

    def thumbnail(self, max_px: int = 1024) -> np.ndarray:
        """The whole slide, its longer side at most `max_px`: uint8 (h, w, 3), white where it cannot be decoded."""
        return self.overview(max_px)[0]

    def overview(self, max_px: int = 1024) -> tuple[np.ndarray, np.ndarray]:
        """(`thumbnail`, bool (h, w) true where it cannot be decoded).

        Read block by block, so that one bad tile does not spoil it and a level of any size fits the memory.
        Raises `TileError` when no part can be decoded.
        """
        scale = max(1.0, max(self.width_px, self.height_px) / max_px)
        level = self._finer_level(scale)
        width, height = self.level_sizes_px[level]
        step = max(1, max(width, height) // max_px)
        canvas = Image.new("RGB", (-(-width // step), -(-height // step)), WHITE)
        bad = Image.new("L", canvas.size, 0)
        block = step * max(1, BLOCK_PX // step)
        for y in range(0, height, block):
            for x in range(0, width, block):
                size = (min(block, width - x), min(block, height - y))
                self._paste_block(level, (x, y), size, step, canvas, bad)
        if bad.getextrema() == (255, 255):
            raise TileError(f"{self.path}: the overview cannot be decoded")
        final = (max(1, round(self.width_px / scale)), max(1, round(self.height_px / scale)))
        box = (0, 0, width / step, height / step)
        rgb = canvas.resize(final, Image.Resampling.BILINEAR, box=box)
        return np.asarray(rgb), np.asarray(bad.resize(final, Image.Resampling.BILINEAR, box=box)) > 0

    def _paste_block(
        self,
        level: int,
        corner: tuple[int, int],
        size: tuple[int, int],
        step: int,
        canvas: Image.Image,
        bad: Image.Image,
    ) -> None:
        """One block of a level, `step` times smaller, onto the canvas; one that fails is tried again in quarters."""
        (x, y), (width, height) = corner, size
        try:
            pixels = Image.fromarray(self._region(level, x, y, width, height))
        except TileError:
            half = step * max(1, -(-max(size) // (2 * step)))
            if max(size) <= max(SMALLEST_BLOCK_PX, step):
                bad.paste(255, (x // step, y // step, -(-(x + width) // step), -(-(y + height) // step)))
                return
            for top in range(0, height, half):
                for left in range(0, width, half):
                    part = (min(half, width - left), min(half, height - top))
                    self._paste_block(level, (x + left, y + top), part, step, canvas, bad)
            return
        canvas.paste(pixels.reduce(step), (x // step, y // step))

    def _finer_level(self, downsample: float) -> int:
        """The coarsest level that still has the detail of `downsample`."""
        return max((i for i, d in enumerate(self.downsamples) if d <= downsample * 1.001), default=0)

    def _region(self, level: int, x: int, y: int, width: int, height: int) -> np.ndarray:
        self._reopen_after_fork()
        down = self.downsamples[level]
        corner = (round(x * down), round(y * down))
        try:
            image = self._handle.read_region(corner, level, (width, height))
        except (openslide.OpenSlideError, OSError) as e:
            self._reopen()  # after an error OpenSlide refuses every later read of the same handle
            raise TileError(
                f"{self.path}: region at level {level}, ({x}, {y}) cannot be decoded ({e})"
            ) from e
        return np.asarray(_on_white(image))

    def _reopen_after_fork(self) -> None:
        if os.getpid() != self._pid:
            self._handle, self._pid = _open(self.path), os.getpid()

    def _reopen(self) -> None:
        self._handle.close()
        self._handle = _open(self.path)

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> "Slide":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_slide(path: Path | str, mpp: float | None = None) -> Slide:
    """Open whatever OpenSlide reads (SVS, NDPI, MRXS, SCN, DICOM, pyramidal TIFF ...) or a plain PNG, JPEG or TIFF.

    mpp: microns per pixel at level 0, for files that do not say or say wrongly.
    Raises `SlideError` when the file is absent, truncated or no image; `ScaleError` for an absurd `mpp`.
    """
    return Slide(path, mpp)


def find_scale(properties: dict[str, str], power: float | None, given_mpp: float | None) -> Scale:
    """The scale by the caller's word, else by the file's; an implausible number in the file counts as unknown."""
    low, high = PLAUSIBLE_MPP_UM
    if given_mpp is not None:
        if not low <= given_mpp <= high:
            raise ScaleError(
                f"--mpp {given_mpp:g} is outside {low:g} to {high:g} um/px; give microns per pixel"
            )
        return Scale(given_mpp, "given")
    for key in MPP_KEYS:
        mpp = _number(properties.get(key))
        if mpp is None:
            continue
        if not low <= mpp <= high:
            return Scale(None, f"{key} says {mpp:g} um/px, which no microscope has")
        mpp_y = _number(properties.get("openslide.mpp-y")) or mpp
        if abs(mpp / mpp_y - 1) > SQUARE_TOLERANCE:
            return Scale(None, f"its pixels are not square ({mpp:g} um wide, {mpp_y:g} um high)")
        return Scale(mpp, key, _disagreement(mpp, power))
    return Scale(None, "the file does not say its scale")


def _with_margin(start: float, length: float, limit: int) -> tuple[int, int]:
    """The whole pixels around [start, start + length] and one more on each side for the resampling filter, but not across
    the slide's edge, where white would bleed in."""
    first, last = int(np.floor(start)) - 1, int(np.ceil(start + length)) + 1
    if start >= 0:
        first = max(first, 0)
    if start + length <= limit:
        last = min(last, limit)
    return first, last


def find_bounds(properties: dict[str, str]) -> tuple[int, int, int, int] | None:
    found = [properties.get(f"openslide.bounds-{side}", "") for side in ("x", "y", "width", "height")]
    if not all(text.isdigit() for text in found):
        return None
    x, y, width, height = map(int, found)
    return x, y, width, height


def _disagreement(mpp_um: float, power: float | None) -> str | None:
    if power is None or 0.6 < power * mpp_um / 10 < 1.7:
        return None
    return f"{mpp_um:g} um/px does not go with an objective of {power:g}x (about {10 / power:g} um/px): check the scale"


def _number(text: str | None) -> float | None:
    try:
        value = float(text.replace(",", ".")) if text else None
    except ValueError:
        return None
    return value if value is not None and np.isfinite(value) and value > 0 else None


def _open(path: Path) -> openslide.AbstractSlide:
    if not path.is_file():
        raise SlideError(f"{path}: no such file")
    try:
        return openslide.open_slide(path)
    except (openslide.OpenSlideError, UnidentifiedImageError, OSError, Image.DecompressionBombError) as e:
        raise SlideError(
            f"{path}: not a slide or image that can be read, or cut short ({e}); check that the whole file was copied "
            "and that its format is one of OpenSlide's (https://openslide.org/formats/)"
        ) from e


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode != "RGBA":
        return image.convert("RGB")
    flat = Image.new("RGB", image.size, WHITE)
    flat.paste(image, mask=image.getchannel("A"))
    return flat
