"""Pictures of a `RoutingTrace` (extra `viz`). Each returns a matplotlib Figure: `figure.savefig(...)` writes it.

No window system is touched: figures are made without pyplot.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from shared_moe.errors import InputError, MissingExtra
from shared_moe.trace import RoutingTrace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLUMNS = 2000


def load_bars(trace: RoutingTrace, layers: list[str] | None = None) -> "Figure":
    """Share of the assignments of each expert, a panel a layer; the dashed line is an even load."""
    layers = _layers(trace, layers)
    figure, panels = _panels(len(layers), height=1.9)
    for axes, layer in zip(panels, layers, strict=True):
        load = 100 * trace.load(layer)
        axes.bar(np.arange(len(load)), load, color="tab:blue")
        axes.axhline(100 / len(load), color="black", linestyle="--", linewidth=0.8)
        axes.set_ylabel("load (%)")
        axes.set_title(layer, fontsize="small", loc="left")
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel("expert")
    return figure


def kind_heatmap(trace: RoutingTrace, layer: str) -> "Figure":
    """How the tokens of each kind spread over the experts, rows summing to 100 %."""
    kinds, share = trace.by_kind(layer)
    if not kinds:
        raise InputError(f"no token of layer {layer!r} has a kind; pass kinds=... to RoutingTrace.watch")
    figure, (axes,) = _panels(1, height=max(1.8, 0.35 * len(kinds) + 1.2))
    image = axes.imshow(100 * share, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xlabel("expert")
    axes.set_ylabel("kind")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(
        f"{layer}: mutual information {trace.specialisation(layer):.3f} nats", fontsize="small", loc="left"
    )
    figure.colorbar(image, ax=axes, label="share of kind (%)")
    return figure


def over_time(trace: RoutingTrace, layers: list[str] | None = None) -> "Figure":
    """Entropy of the gates and share of experts without a token, by step, a line a layer."""
    layers = _layers(trace, layers)
    figure, (top, bottom) = _panels(2, height=2.4, sharex=True)
    for layer in layers:
        steps = trace.steps(layer)
        E = trace.num_experts[layer]
        dead = [100 * len(trace.dead_experts(layer, step)) / E for step in steps]
        top.plot(steps, [trace.entropy(layer, step) for step in steps], marker=".", label=layer)
        bottom.plot(steps, dead, marker=".", label=layer)
    top.set_ylabel("gate entropy (nats)")
    top.set_ylim(bottom=0)
    bottom.set_ylabel("idle experts (%)")
    bottom.set_ylim(-2, 102)
    bottom.set_xlabel("step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    top.legend(fontsize="x-small", ncols=max(1, len(layers) // 8 + 1))
    return figure


def depth_and_time(trace: RoutingTrace, steps: list[int] | None = None) -> "Figure":
    """The expert of greatest weight for each token, layers upwards, tokens in the order in which they came.

    Tokens without an expert, and places where a layer saw fewer tokens, stay white. Beyond 2,000 tokens every n-th
    is shown.
    """
    layers = _layers(trace, None)
    rows = [_first_choice(trace, layer, steps) for layer in layers]
    width = max(len(row) for row in rows)
    if not width:
        raise InputError(f"no token was recorded in steps {steps}")
    stride = -(-width // MAX_COLUMNS)
    grid = np.full((len(layers), width), np.nan)
    for i, row in enumerate(rows):
        grid[i, : len(row)] = np.where(row < 0, np.nan, row)
    grid = grid[:, ::stride]
    experts = max(trace.num_experts.values())
    figure, (axes,) = _panels(1, height=max(1.8, 0.3 * len(layers) + 1.2))
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    colours = colormaps["turbo"].resampled(experts).with_extremes(bad="white")
    image = axes.imshow(
        grid,
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap=colours,
        vmin=-0.5,
        vmax=experts - 0.5,
        extent=(-0.5, grid.shape[1] * stride - 0.5, -0.5, len(layers) - 0.5),
    )
    axes.set_yticks(range(len(layers)), layers, fontsize="x-small")
    axes.set_xlabel("token" if stride == 1 else f"token (1 in {stride} shown)")
    axes.set_ylabel("layer")
    figure.colorbar(
        image,
        ax=axes,
        label="expert of greatest weight",
        ticks=MaxNLocator(integer=True).tick_values(0, experts - 1),
    )
    return figure


def _first_choice(trace: RoutingTrace, layer: str, steps: list[int] | None) -> np.ndarray:
    chosen = []
    for step in trace.steps(layer):
        if steps is None or step in steps:
            record = trace.records[layer, step]
            if record.ids_TK.shape[1]:
                weights = np.where(record.ids_TK >= 0, record.weights_TK, -np.inf)
                chosen.append(np.take_along_axis(record.ids_TK, weights.argmax(1)[:, None], 1)[:, 0])
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int16)


def _layers(trace: RoutingTrace, layers: list[str] | None) -> list[str]:
    chosen = trace.layers if layers is None else layers
    if not chosen:
        raise InputError("there is nothing to draw: no layer was recorded or named")
    return chosen


def _panels(count: int, height: float, sharex: bool = False) -> tuple["Figure", list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise MissingExtra("matplotlib", "viz", "drawing a routing trace") from e
    figure = Figure(figsize=(7.2, max(2.2, height * count)), layout="constrained")
    return figure, list(figure.subplots(count, 1, sharex=sharex, squeeze=False)[:, 0])
