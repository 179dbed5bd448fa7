"""Patch values painted over the slide's overview, in level-0 coordinates. Shapes: N patches, E experts."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from scipy.stats import rankdata

from mammoth_path.data.features import Bag
from mammoth_path.data.slides import Slide
from mammoth_path.data.tiles import TileGrid
from shared_moe.errors import InputError
from shared_moe.files import atomic_path

TISSUE_COLOURS = (
    *("#f2d94e", "#e8e8e8", "#8c6d46", "#3b4cc0", "#56b4e9"),
    *("#e377c2", "#2ca02c", "#ff9d3c", "#c0182b"),
)


def percentiles(values_N: np.ndarray) -> np.ndarray:
    """Rank of each value among all, 0..1; ties share their mean rank. One value alone is 0.5."""
    n = len(values_N)
    return (rankdata(values_N) - 1) / (n - 1) if n > 1 else np.full(n, 0.5)


def paint(
    values_N: np.ndarray, coords_N2: np.ndarray, side_px: int, size_px: tuple[int, int], max_px: int = 1024
):
    """Mean value of the patches over each pixel of an overview (h, w), NaN where there is none.

    coords: level-0 pixels, top left; side: a patch's side at level 0; size: (width, height) of level 0.
    """
    down = max(size_px) / max_px if max(size_px) > max_px else 1.0
    width, height = (max(1, round(v / down)) for v in size_px)
    total, count = np.zeros((height, width)), np.zeros((height, width))
    for value, (x, y) in zip(values_N, coords_N2, strict=True):
        left, right = round(x / down), max(round(x / down) + 1, round((x + side_px) / down))
        top, bottom = round(y / down), max(round(y / down) + 1, round((y + side_px) / down))
        total[top:bottom, left:right] += value
        count[top:bottom, left:right] += 1
    with np.errstate(invalid="ignore"):
        return total / np.where(count > 0, count, np.nan)


def patch_frame(bag: Bag) -> tuple[np.ndarray, int]:
    """(coords, side at level 0) of a bag. Raises `InputError` when its file does not say where the patches lie."""
    side = bag.attributes.get("patch_size_level0")
    if bag.coords_N2 is None or side is None:
        raise InputError(
            "the bag has no coordinates or no patch_size_level0: it cannot be painted over a slide"
        )
    return bag.coords_N2, int(side)


def heatmap_figure(
    slide: Slide, values_N: np.ndarray, bag: Bag, *, title: str, label: str, note: str = ""
) -> Figure:
    """One map over the overview, beside the overview itself, with colour bar and scale bar."""
    coords, side = patch_frame(bag)
    overview = slide.thumbnail(1024)
    size = (slide.width_px, slide.height_px)
    figure, (left, right) = _two_panels(size)
    _show_overview(left, overview, size)
    left.set_title("H&E", fontsize=10)
    _show_overview(right, overview, size)
    image = right.imshow(
        paint(values_N, coords, side, size),
        cmap="magma",
        alpha=0.65,
        extent=_extent(size),
        vmin=0,
        interpolation="none",
    )
    right.set_title(title, fontsize=10)
    figure.colorbar(image, ax=right, fraction=0.046, label=label)
    _scale_bar(left, slide)
    _caption(figure, slide, note)
    return figure


def expert_figure(slide: Slide, experts_NE: np.ndarray, bag: Bag, *, most: int = 6, note: str = "") -> Figure:
    """For the experts that differ most between patches: each patch's rank (percentile) in that expert's dispatch."""
    coords, side = patch_frame(bag)
    chosen = np.argsort(-experts_NE.std(0))[:most]
    size = (slide.width_px, slide.height_px)
    overview = slide.thumbnail(768)
    columns = min(3, len(chosen))
    rows = -(-len(chosen) // columns)
    aspect = size[1] / size[0]
    figure = Figure(figsize=(3.2 * columns + 0.8, 3.1 * aspect * rows + 0.7), layout="constrained")
    axes = np.atleast_1d(np.array(figure.subplots(rows, columns))).ravel()
    image = None
    for axis, e in zip(axes, chosen, strict=False):
        _show_overview(axis, overview, size)
        values = paint(percentiles(experts_NE[:, e]), coords, side, size)
        image = axis.imshow(
            values, cmap="viridis", alpha=0.65, extent=_extent(size), vmin=0, vmax=1, interpolation="none"
        )
        axis.set_title(f"expert {e}", fontsize=10)
    for axis in axes[len(chosen) :]:
        axis.axis("off")
    if image is not None:
        figure.colorbar(
            image, ax=list(axes), fraction=0.025, label="percentile of the patch in the expert's dispatch"
        )
    _caption(figure, slide, note)
    return figure


def tissue_figure(
    slide: Slide, probs_NC: np.ndarray, classes: tuple[str, ...], bag: Bag, *, note: str = ""
) -> Figure:
    """Most probable tissue class of each patch."""
    coords, side = patch_frame(bag)
    size = (slide.width_px, slide.height_px)
    overview = slide.thumbnail(1024)
    figure, (left, right) = _two_panels(size)
    _show_overview(left, overview, size)
    left.set_title("H&E", fontsize=10)
    _show_overview(right, overview, size)
    best = probs_NC.argmax(1)
    maps = np.stack([paint(probs_NC[:, c], coords, side, size) for c in range(len(classes))])
    covered = ~np.isnan(maps[0])
    right.imshow(
        np.where(covered, np.nan_to_num(maps).argmax(0), np.nan),
        cmap=ListedColormap(TISSUE_COLOURS[: len(classes)]),
        alpha=0.6,
        extent=_extent(size),
        vmin=-0.5,
        vmax=len(classes) - 0.5,
        interpolation="none",
    )
    right.set_title("most probable tissue class of each patch", fontsize=10)
    shown = [
        Patch(color=TISSUE_COLOURS[c], label=f"{classes[c]} ({(best == c).mean():.0%})")
        for c in np.unique(best)
    ]
    right.legend(handles=shown, fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    _scale_bar(left, slide)
    _caption(figure, slide, note)
    return figure


def grid_figure(slide: Slide, grid: TileGrid, mask_HW: np.ndarray | None, *, note: str = "") -> Figure:
    """The tiles and the outline of the tissue over the overview: what will be encoded."""
    size = (slide.width_px, slide.height_px)
    figure = Figure(figsize=(6, 6 * size[1] / size[0] + 0.6), layout="constrained")
    axis = figure.add_subplot()
    _show_overview(axis, slide.thumbnail(1024), size)
    if mask_HW is not None:
        _outline(axis, mask_HW, size)
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    boxes = [
        Rectangle((float(x), float(y)), grid.size_level0_px, grid.size_level0_px) for x, y in grid.coords_N2
    ]
    axis.add_collection(PatchCollection(boxes, facecolor="none", edgecolor="#1f3fbf", linewidth=0.6))
    axis.set_title(f"{len(grid)} tiles of {grid.size_px} px at {grid.mpp_um:g} µm/px", fontsize=10)
    _scale_bar(axis, slide)
    _caption(figure, slide, note)
    return figure


def top_patches_figure(
    slide: Slide, scores_N: np.ndarray, bag: Bag, *, most: int = 8, note: str = ""
) -> Figure:
    """The patches with the largest share in the decision, as they look on the slide."""
    coords, _ = patch_frame(bag)
    chosen = np.argsort(-scores_N)[:most]
    size_px, mpp, base = (
        int(bag.attributes["patch_size"]),
        float(bag.attributes["mpp_um"]),
        slide.require_mpp(),
    )
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = Figure(figsize=(2.1 * columns, 2.4 * rows + 0.4), layout="constrained")
    axes = np.atleast_1d(np.array(figure.subplots(rows, columns))).ravel()
    for axis, i in zip(axes, chosen, strict=False):
        x, y = coords[i]
        axis.imshow(slide.read(x * base, y * base, size_px, mpp))
        axis.set_title(f"share {scores_N[i]:.1%}\n({x}, {y})", fontsize=8)
    for axis in axes:
        axis.axis("off")
    _caption(figure, slide, f"Each {size_px * mpp:.0f} µm wide. {note}".rstrip())
    return figure


def save_figure(figure: Figure, path: Path | str) -> Path:
    path = Path(path)
    with atomic_path(path) as p:
        figure.savefig(p, dpi=130, format="png")
    return path


def _two_panels(size: tuple[int, int]) -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=(10.5, 4.6 * size[1] / size[0] + 0.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def _extent(size: tuple[int, int]) -> tuple[float, float, float, float]:
    return (0, size[0], size[1], 0)


def _show_overview(axis: Axes, overview: np.ndarray, size: tuple[int, int]) -> None:
    axis.imshow(overview, extent=_extent(size))
    axis.set_xticks([])
    axis.set_yticks([])


def _scale_bar(axis: Axes, slide: Slide) -> None:
    if slide.mpp_um is None:
        return
    wanted = slide.width_px * slide.mpp_um / 5
    power = 10 ** np.floor(np.log10(wanted))
    length = float(power * max(s for s in (1, 2, 5) if s * power <= wanted))
    x, y = 0.05 * slide.width_px, 0.95 * slide.height_px
    axis.plot([x, x + length / slide.mpp_um], [y, y], color="black", linewidth=3, solid_capstyle="butt")
    text = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
    box = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1}
    axis.text(x, y - 0.015 * slide.height_px, text, fontsize=8, va="bottom", bbox=box)


def _caption(figure: Figure, slide: Slide, note: str) -> None:
    figure.supxlabel(f"{slide.path.name}. {note}" if note else slide.path.name, fontsize=8, color="#444444")


def outline_figure(slide: Slide, mask_HW: np.ndarray) -> Figure:
    """The overview with the tissue outlined."""
    size = (slide.width_px, slide.height_px)
    figure = Figure(figsize=(6, 6 * size[1] / size[0] + 0.6), layout="constrained")
    axis = figure.add_subplot()
    _show_overview(axis, slide.thumbnail(1024), size)
    _outline(axis, mask_HW, size)
    axis.set_title(f"tissue: {mask_HW.mean():.0%} of the slide", fontsize=10)
    _scale_bar(axis, slide)
    _caption(figure, slide, "")
    return figure


def write_maps(
    slide: Slide,
    bag: Bag,
    scores_N: np.ndarray,
    experts_NE: np.ndarray | None,
    output: Path,
    *,
    note: str = "",
) -> list[Path]:
    """attention.png, top_patches.png and, for MAMMOTH models, experts.png in `output`."""
    title, label = "share of each patch in the decision", "share (sums to 1)"
    written = [
        save_figure(
            heatmap_figure(slide, scores_N, bag, title=title, label=label, note=note),
            output / "attention.png",
        ),
        save_figure(top_patches_figure(slide, scores_N, bag, note=note), output / "top_patches.png"),
    ]
    if experts_NE is not None:
        written.append(save_figure(expert_figure(slide, experts_NE, bag, note=note), output / "experts.png"))
    return written


def _outline(axis: Axes, mask_HW: np.ndarray, size: tuple[int, int]) -> None:
    if mask_HW.any() and not mask_HW.all():
        axis.contour(
            mask_HW, levels=[0.5], colors="#0a7d2c", linewidths=1, extent=_extent(size), origin="upper"
        )
