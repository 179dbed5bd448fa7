"""Small pyramids that OpenSlide reads, with known colours at known places."""

from pathlib import Path

import numpy as np
import tifffile


def write_pyramid(
    path: Path, pixels: np.ndarray, *, mpp: float | None = 0.5, power: float | None = 20
) -> Path:
    """An Aperio-style TIFF: 256 px tiles, levels at 1 and 1/2, uncompressed, so that colours stay exact."""
    facts = "".join(
        f"|{key} = {value}" for key, value in (("AppMag", power), ("MPP", mpp)) if value is not None
    )
    description = f"Aperio Image Library v12\n{pixels.shape[1]}x{pixels.shape[0]}{facts}"
    small = (
        pixels.reshape(pixels.shape[0] // 2, 2, pixels.shape[1] // 2, 2, 3)
        .mean((1, 3))
        .round()
        .astype(np.uint8)
    )
    with tifffile.TiffWriter(path) as tif:
        for level, image in enumerate((pixels, small)):
            tif.write(
                image,
                tile=(256, 256),
                photometric="rgb",
                description=description if level == 0 else "",
                subfiletype=1 if level else 0,
                metadata=None,
            )
    return path


def tissue_picture(size: int = 1024, *, spot: tuple[int, int] | None = None, seed: int = 0) -> np.ndarray:
    """White glass with a pink block of tissue (the middle half); optionally a dark blue 128 px square at `spot` (x, y)."""
    rng = np.random.default_rng(seed)
    pixels = np.full((size, size, 3), 245, np.uint8)
    a, b = size // 4, 3 * size // 4
    pixels[a:b, a:b] = np.array([200, 110, 160]) + rng.integers(-12, 12, (b - a, b - a, 3))
    if spot is not None:
        x, y = spot
        pixels[y : y + 128, x : x + 128] = (60, 30, 120)
    return pixels


def damaged_slide(path: Path, pixels: np.ndarray | None = None) -> Path:
    """One level of JPEG tiles (256 px, 0.5 um/px) whose first tile holds zeros instead of its bytes."""
    with tifffile.TiffWriter(path) as tif:
        tif.write(
            tissue_picture() if pixels is None else pixels,
            tile=(256, 256), photometric="rgb", compression="jpeg", metadata=None,
            description="Aperio Image Library v12\n1024x1024|AppMag = 20|MPP = 0.5",
        )  # fmt: skip
    with tifffile.TiffFile(path) as tif:
        page = tif.pages[0]
        offset, count = page.dataoffsets[0], page.databytecounts[0]
    data = bytearray(path.read_bytes())
    data[offset : offset + count] = bytes(count)
    path.write_bytes(data)
    return path
