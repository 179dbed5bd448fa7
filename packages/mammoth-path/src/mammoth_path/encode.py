"""From slides to features: tile, encode, write; resume where a run stopped; one bad slide costs only itself."""

import csv
import errno
import glob
import hashlib
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mammoth_path.data.encoders import Encoder
from mammoth_path.data.features import Bag, grid_attributes, read_features, write_coords, write_features
from mammoth_path.data.slides import Slide, TileError, open_slide
from mammoth_path.data.tiles import TileGrid, tile_grid
from mammoth_path.data.tissue import find_tissue
from mammoth_path.heatmap import grid_figure, save_figure
from shared_moe.console import track
from shared_moe.errors import BusyError, DiskFullError, InputError, MoeError
from shared_moe.files import atomic_path, folder_lock

SUFFIXES = {
    *(".svs", ".tif", ".tiff", ".ndpi", ".vms", ".vmu", ".scn", ".mrxs", ".bif", ".svslide", ".dcm"),
    *(".png", ".jpg", ".jpeg"),
}
BATCH = 16
CHUNK = 64
WEIGHTS = "encoder_weights_sha256"


@dataclass(frozen=True)
class SlideResult:
    """One row of a run's table. status: done, resumed (was there already), failed. message: the fault, or a warning."""

    slide: str
    status: str
    tiles: int = 0
    unreadable_tiles: int = 0
    mpp_um: float | None = None
    mpp_source: str = ""
    message: str = ""


@dataclass(frozen=True)
class TileOptions:
    """How slides are cut: microns per pixel, tile side and overlap in pixels, least share of tissue."""

    mpp: float = 0.5
    size_px: int = 256
    overlap_px: int = 0
    min_tissue: float = 0.25


Work = Callable[[Path], SlideResult]


def find_slides(source: Path) -> list[Path]:
    """The slide itself, or every slide of a folder by name. Raises `InputError` when there is none."""
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise InputError(f"{source}: no such file or folder")
    found = sorted(p for p in source.iterdir() if p.suffix.lower() in SUFFIXES)
    if not found:
        raise InputError(f"{source}: no slide in this folder (looked for {', '.join(sorted(SUFFIXES))})")
    stems = Counter(p.stem for p in found)
    twice = [p.name for p in found if stems[p.stem] > 1]
    if twice:
        raise InputError(
            f"{source}: results are named by slide, and these share a name: {', '.join(twice)}; rename them"
        )
    return found


def grid_of(slide: Slide, options: TileOptions) -> TileGrid:
    """The tiles of a slide's tissue; with min_tissue=0 every whole tile."""
    tissue = find_tissue(slide) if options.min_tissue > 0 else None
    return tile_grid(
        slide,
        tissue,
        mpp=options.mpp,
        size_px=options.size_px,
        overlap_px=options.overlap_px,
        min_tissue=options.min_tissue,
    )


def tile_slides(
    slides: list[Path], job: Path, options: TileOptions, mpp: float | None = None
) -> list[SlideResult]:
    """Write JOB/<tiles>/patches/<slide>_patches.h5 and a picture of the tiles for every slide, and the run's table."""

    def one(path: Path) -> SlideResult:
        with open_slide(path, mpp) as slide:
            grid = grid_of(slide, options)
            folder = job / grid.folder_name
            write_coords(folder / "patches" / f"{slide.name}_patches.h5", grid)
            save_figure(grid_figure(slide, grid, None), folder / "visualization" / f"{slide.name}.png")
            return SlideResult(slide.name, "done", len(grid), 0, *_scale_columns(slide))

    return _each(slides, one, job, "tile_table.csv", "tiling")


def encode_slides(
    slides: list[Path],
    job: Path,
    encoder: Encoder,
    options: TileOptions,
    *,
    mpp: float | None = None,
    half: bool = False,
) -> list[SlideResult]:
    """Write JOB/<tiles>/features_<encoder>/<slide>.h5 for every slide, and the run's table.

    A finished slide is not encoded again; an interrupted one goes on at the chunk of tiles where it stopped, to the same
    file bit for bit. A tile that cannot be decoded is left out and counted. A failed slide is a row of the table.
    Raises `BusyError` when another process writes to `job`, `DiskFullError` when the disk is full.
    """

    def one(path: Path) -> SlideResult:
        with open_slide(path, mpp) as slide:
            grid = grid_of(slide, options)
            folder = job / grid.folder_name / f"features_{encoder.name.replace(':', '-').replace('/', '-')}"
            target = folder / f"{slide.name}.h5"
            about = _scale_columns(slide)
            if target.is_file():
                done = _check_same(target, grid, encoder)
                return SlideResult(slide.name, "resumed", done, len(grid) - done, *about)
            for left_by_a_killed_run in folder.glob(f".{glob.escape(target.name)}.*.tmp"):
                left_by_a_killed_run.unlink()
            features, kept = _encode(slide, grid, encoder, folder / f"{slide.name}.partial")
            attributes = {**grid_attributes(grid), "encoder": encoder.name, WEIGHTS: encoder.weights_sha256}
            stored = features.astype(np.float16) if half else features
            write_features(target, Bag(stored, grid.coords_N2[kept], attributes))
            _remove(folder / f"{slide.name}.partial")
            return SlideResult(slide.name, "done", len(kept), len(grid) - len(kept), *about)

    return _each(slides, one, job, "encode_table.csv", "encoding slides")


def _each(slides: list[Path], one: Work, job: Path, table: str, description: str) -> list[SlideResult]:
    """`one` for every slide under the folder's lock; the table is on disk after each."""
    results: list[SlideResult] = []
    with folder_lock(job):
        for path in track(slides, description):
            results.append(_guard(one, path))
            _write_table(job / table, results)
    return results


def _scale_columns(slide: Slide) -> tuple[float | None, str, str]:
    return slide.mpp_um, slide.scale.source, slide.scale.warning or ""


def encode_grid(slide: Slide, grid: TileGrid, encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """(features (M, D), indices (M,) of the tiles that could be read). The encoder and the reader work side by side."""
    features, kept = [], []
    starts = range(0, len(grid), BATCH)
    for indices, tiles in track(_batches(slide, grid, starts), f"encoding {slide.name}", total=len(starts)):
        if len(indices):
            features.append(encoder(tiles))
            kept.append(indices)
    if not kept:
        raise TileError(f"{slide.path}: none of its {len(grid)} tiles can be decoded")
    return np.concatenate(features), np.concatenate(kept)


def _encode(slide: Slide, grid: TileGrid, encoder: Encoder, partial: Path) -> tuple[np.ndarray, np.ndarray]:
    """`encode_grid` in chunks that are kept on disk until the slide is whole."""
    signature = _signature(slide, grid, encoder)
    note = partial / "signature.json"
    if not note.is_file() or note.read_text() != signature:
        _remove(partial)
        with atomic_path(note) as p:
            p.write_text(signature)
    parts = []
    starts = list(range(0, len(grid), CHUNK))
    for start in track(starts, f"encoding {slide.name}"):
        chunk = partial / f"{start:08d}.npz"
        part = _read_chunk(chunk)
        if part is None:
            part = _encode_range(slide, grid, encoder, start, min(start + CHUNK, len(grid)))
            with atomic_path(chunk) as p, p.open("wb") as f:
                np.savez(f, features=part[0], kept=part[1])
        parts.append(part)
    kept = np.concatenate([k for _, k in parts])
    if len(kept) == 0:
        raise TileError(f"{slide.path}: none of its {len(grid)} tiles can be decoded")
    return np.concatenate([f for f, _ in parts]), kept


def _signature(slide: Slide, grid: TileGrid, encoder: Encoder) -> str:
    """Everything that the chunks of a slide depend on."""
    tiles = hashlib.sha256(np.ascontiguousarray(grid.coords_N2, np.int64).tobytes()).hexdigest()
    about = {"encoder": encoder.name, WEIGHTS: encoder.weights_sha256, "dim": encoder.dim, "chunk": CHUNK}
    bytes_ = slide.path.stat().st_size
    return json.dumps({**about, **grid_attributes(grid), "tiles_sha256": tiles, "slide_bytes": bytes_})


def _read_chunk(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """A finished chunk; None when there is none or it was damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as saved:
            return saved["features"], saved["kept"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _encode_range(
    slide: Slide, grid: TileGrid, encoder: Encoder, start: int, stop: int
) -> tuple[np.ndarray, np.ndarray]:
    features, kept = [np.empty((0, encoder.dim), np.float32)], [np.empty(0, np.int64)]
    for indices, tiles in _batches(slide, grid, range(start, stop, BATCH), stop):
        if len(indices):
            features.append(encoder(tiles))
            kept.append(indices)
    return np.concatenate(features), np.concatenate(kept)


def _batches(
    slide: Slide, grid: TileGrid, starts: Iterable[int], stop: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(indices, tiles) of each batch; the next one is read while the caller works on this one."""
    end = len(grid) if stop is None else stop

    def read(start: int) -> tuple[np.ndarray, np.ndarray]:
        indices, tiles = [], []
        for i in range(start, min(start + BATCH, end)):
            try:
                tiles.append(grid.read(slide, i))
                indices.append(i)
            except TileError:
                continue
        return np.array(indices, np.int64), np.array(tiles, np.uint8)

    with ThreadPoolExecutor(1) as pool:
        ahead = None
        for start in starts:
            following = pool.submit(read, start)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()


def _check_same(target: Path, grid: TileGrid, encoder: Encoder) -> int:
    """How many tiles a finished file holds. Raises `InputError` when they are not of this grid and encoder."""
    bag = read_features(target)
    expected = {k: v for k, v in grid_attributes(grid).items() if k != "savetodir"}
    differ = [k for k, v in expected.items() if bag.attributes.get(k) != v]
    tiles = set(map(tuple, grid.coords_N2.tolist()))
    if bag.coords_N2 is None or not tiles.issuperset(map(tuple, bag.coords_N2.tolist())):
        differ.append("coords")
    if bag.attributes.get(WEIGHTS, encoder.weights_sha256) != encoder.weights_sha256:
        differ.append("the encoder's weights")
    if differ:
        raise InputError(
            f"{target} was made with other options ({', '.join(differ)} differ): choose another --job-dir, or move it away"
        )
    return len(bag.features_ND)


def _guard(one: Work, path: Path) -> SlideResult:
    """A slide's own fault becomes a row; a fault of the run (full disk, busy folder) ends it."""
    try:
        return one(path)
    except (DiskFullError, BusyError):
        raise
    except (MoeError, OSError, MemoryError) as e:  # a network disk that stalls, a file without permission
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{path}: no space left on the disk; free some and run again") from e
        return SlideResult(path.stem, "failed", message=str(e) or type(e).__name__)


def _write_table(path: Path, results: list[SlideResult]) -> None:
    with atomic_path(path) as p, p.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(asdict(results[0])))
        writer.writeheader()
        writer.writerows(asdict(r) for r in results)


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
