"""`mammoth-path`: from a slide to a prediction, one command a step."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shared_moe.console import run
from shared_moe.errors import InputError, MoeError

app = typer.Typer(
    help="Gigapixel pathology with MAMMOTH. Start with `mammoth-path demo`, then `mammoth-path inspect SLIDE`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Source = Annotated[Path | None, typer.Argument(help="A slide, or a folder of slides.", show_default=False)]
WsiDir = Annotated[
    Path | None, typer.Option("--wsi-dir", "--wsi_dir", help="The same, as an option.", show_default=False)
]
Mpp = Annotated[
    float | None, typer.Option(help="Microns per pixel of the finest level, where the file does not say.")
]
TileMpp = Annotated[float, typer.Option("--tile-mpp", help="Microns per pixel of the tiles (0.5 is 20x).")]
Mag = Annotated[float | None, typer.Option("--mag", help="The same as a power: --mag 20 is --tile-mpp 0.5.")]
Size = Annotated[int, typer.Option("--patch-size", "--patch_size", help="Side of a tile in pixels.")]
Overlap = Annotated[int, typer.Option(help="Overlap of neighbouring tiles in pixels.")]
MinTissue = Annotated[float, typer.Option(help="Least share of a tile that is tissue; 0 takes every tile.")]
JobDir = Annotated[Path, typer.Option("--job-dir", "--job_dir", help="Folder for the results.")]
EncoderName = Annotated[
    str, typer.Option("--encoder", "--patch-encoder", "--patch_encoder", help="See `mammoth-path encoders`.")
]
EncoderWeights = Annotated[Path | None, typer.Option(help="Weight file of an encoder that you have.")]
Model = Annotated[str, typer.Option(help="Name of a shipped model, or a model's folder.")]
AGGREGATOR_HELP = (
    "mean, max, abmil, clam-sb, clam-mb, dsmil, dtfd, transmil, ilra, rrt or wikg; transmil and rrt read patches in their "
    "order, which MAMMOTH's slots do not have: use --layer linear."
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


@app.command(epilog="Example: `mammoth-path inspect slide.svs`")
def inspect(
    slide: Annotated[Path, typer.Argument(help="A slide or picture.", show_default=False)],
    mpp: Mpp = None,
    thumbnail: Annotated[
        Path | None, typer.Option(help="Write an overview with the tissue outlined here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Size, levels, scale and where it came from, and how much of the slide is tissue."""
    from mammoth_path.data.slides import open_slide
    from mammoth_path.data.tissue import tissue_mask

    with open_slide(slide, mpp) as opened:
        mask = tissue_mask(opened.thumbnail(1024))
        facts = {
            "file": str(slide),
            "vendor": opened.vendor,
            "size_px": [opened.width_px, opened.height_px],
            "bounds_px": opened.bounds_px,
            "levels_px": [list(size) for size in opened.level_sizes_px],
            "mpp_um": opened.mpp_um,
            "mpp_source": opened.scale.source,
            "warning": opened.scale.warning,
            "power": opened.power,
            "associated": opened.associated,
            "tissue_share": round(float(mask.mean()), 4),
        }
        if thumbnail is not None:
            from mammoth_path.heatmap import outline_figure, save_figure

            save_figure(outline_figure(opened, mask), thumbnail)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        typer.echo(f"{key:14} {value}")


@app.command(epilog="Example: `mammoth-path tile slides/ --job-dir job --tile-mpp 0.5`")
def tile(
    source: Source = None,
    wsi_dir: WsiDir = None,
    job_dir: JobDir = Path("mammoth-job"),
    mpp: Mpp = None,
    tile_mpp: TileMpp = 0.5,
    mag: Mag = None,
    patch_size: Size = 256,
    overlap: Overlap = 0,
    min_tissue: MinTissue = 0.25,
) -> None:
    """Find tissue and write the tiles' coordinates (TRIDENT's layout) and a picture of them for every slide."""
    from mammoth_path.encode import find_slides, tile_slides

    options = _tile_options(tile_mpp, mag, patch_size, overlap, min_tissue)
    slides = find_slides(_source(source, wsi_dir))
    _finish(tile_slides(slides, job_dir, options, mpp), job_dir / "tile_table.csv")


@app.command(epilog="Example: `mammoth-path encode slides/ --job-dir job --encoder efficientnet-lite0`")
def encode(
    source: Source = None,
    wsi_dir: WsiDir = None,
    job_dir: JobDir = Path("mammoth-job"),
    encoder: EncoderName = "densenet121-capricorn",
    encoder_weights: EncoderWeights = None,
    download: Annotated[bool, typer.Option(help="Fetch the encoder's weights from the hub.")] = False,
    mpp: Mpp = None,
    tile_mpp: TileMpp = 0.5,
    mag: Mag = None,
    patch_size: Size = 256,
    overlap: Overlap = 0,
    min_tissue: MinTissue = 0.25,
    half: Annotated[bool, typer.Option(help="Store features in float16.")] = False,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes a GPU if there is one.")
    ] = "auto",
) -> None:
    """Tile and encode every slide to features (.h5). Run it again to go on where it stopped."""
    from mammoth_path.data.encoders import load_encoder
    from mammoth_path.encode import encode_slides, find_slides

    slides = find_slides(_source(source, wsi_dir))
    options = _tile_options(tile_mpp, mag, patch_size, overlap, min_tissue)
    loaded = load_encoder(encoder, encoder_weights, download=download).to(_device(device))
    results = encode_slides(slides, job_dir, loaded, options, mpp=mpp, half=half)
    _finish(results, job_dir / "encode_table.csv")


@app.command()
def encoders() -> None:
    """List the encoders: which are ready, and which need a weight file of yours."""
    from mammoth_path.data.encoders import KNOWN, OFFLINE

    for name in OFFLINE:
        typer.echo(f"{name:24} ready, offline")
    for name, architecture in KNOWN.items():
        typer.echo(
            f"{name:24} {architecture.dim} wide; give --encoder-weights FILE, or --download ({architecture.hub})"
        )
    typer.echo(f"{'timm:NAME':24} any timm architecture; give --encoder-weights FILE, or --download")


@app.command(
    epilog="Examples: `mammoth-path train job/20x_256px_0px_overlap/features_uni --labels labels.csv --output model`; "
    "`mammoth-path train --preset ucsb-breast --output model`"
)
def train(
    features: Annotated[
        Path | None, typer.Argument(help="Folder of feature files.", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the model.")] = Path("mammoth-model"),
    labels: Annotated[Path | None, typer.Option(help="CSV with case_id, slide_id, label.")] = None,
    preset: Annotated[str | None, typer.Option(help="Rebuild a shipped model instead.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data that the preset asks for.")] = None,
    layer: Annotated[str, typer.Option(help="linear, mlp or mammoth.")] = "mammoth",
    aggregator: Annotated[str, typer.Option(help=AGGREGATOR_HELP)] = "abmil",
    rank: Annotated[str, typer.Option(help="MAMMOTH's rank: match, auto or a number.")] = "match",
    epochs: int = 40,
    batch_size: int = 8,
    learning_rate: float = 1e-4,
    patience: Annotated[
        int, typer.Option(help="Epochs without a better validation loss; 0: no early stop.")
    ] = 10,
    folds: Annotated[int, typer.Option(help="Cross-validate with this many folds first; 0: do not.")] = 0,
    seed: int = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that lies there.")] = False,
) -> None:
    """Train a multiple-instance model on bags of features."""
    from mammoth_path.data.bags import read_bag_folder
    from mammoth_path.presets import build_preset
    from mammoth_path.train import TrainOptions

    if preset is not None:
        typer.echo(build_preset(preset, output, data=data, seed=seed, overwrite=overwrite))
        return
    if features is None or labels is None:
        raise InputError("give a folder of features and --labels CSV, or --preset NAME")
    bags = read_bag_folder(features, labels)
    options = TrainOptions(
        layer=layer,
        aggregator=aggregator,
        layer_options={} if layer == "linear" else {"rank": int(rank) if rank.isdigit() else rank},
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        patience=patience,
        seed=seed,
    )
    from mammoth_path.fit_cohort import fit_cohort

    typer.echo(fit_cohort(bags, options, output, folds=folds, resume=resume, overwrite=overwrite))


@app.command(epilog="Example: `mammoth-path predict slide.svs --model weak-tumour-densenet121`")
def predict(
    source: Annotated[Path, typer.Argument(help="A slide or a feature file.", show_default=False)],
    model: Model,
    encoder: Annotated[str, typer.Option(help="Encoder for a slide; default: the model's.")] = "",
    mpp: Mpp = None,
    tile_mpp: TileMpp = 0.5,
    patch_size: Size = 256,
    overlap: Overlap = 0,
    min_tissue: MinTissue = 0.25,
    as_json: Json = False,
) -> None:
    """Class probabilities of one slide, and the patches that weigh most."""
    from mammoth_path.predict import bag_of, predict_bag
    from mammoth_path.train import load_model

    loaded, config = load_model(model)
    options = _tile_options(tile_mpp, None, patch_size, overlap, min_tissue)
    found = predict_bag(loaded, config, bag_of(source, encoder or config["encoder"], options, mpp))
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
        return
    for name, p in found.probabilities.items():
        typer.echo(f"{p:7.1%}  {name}")
    for name, p in sorted(found.tissue.items(), key=lambda item: -item[1]):
        typer.echo(f"{p:7.1%}  of the tissue looks like {name}")
    typer.echo("research use; not a medical device", err=True)


@app.command(epilog="Example: `mammoth-path heatmap slide.svs --model weak-tumour-densenet121 --output maps`")
def heatmap(
    slide: Annotated[Path, typer.Argument(help="The slide.", show_default=False)],
    model: Model,
    output: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("mammoth-heatmaps"),
    features: Annotated[
        Path | None, typer.Option(help="The slide's feature file, if it is encoded already.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="Encoder for the slide; default: the model's.")] = "",
    mpp: Mpp = None,
    tile_mpp: TileMpp = 0.5,
    patch_size: Size = 256,
    overlap: Overlap = 0,
    min_tissue: MinTissue = 0.25,
) -> None:
    """Attention, expert and top-patch pictures of one slide."""
    from mammoth_path.data.slides import open_slide
    from mammoth_path.heatmap import write_maps
    from mammoth_path.predict import bag_of, predict_bag
    from mammoth_path.train import load_model

    loaded, config = load_model(model)
    options = _tile_options(tile_mpp, None, patch_size, overlap, min_tissue)
    bag = bag_of(features or slide, encoder or config["encoder"], options, mpp)
    found = predict_bag(loaded, config, bag)
    with open_slide(slide, mpp) as opened:
        for path in write_maps(opened, bag, found.scores_N, found.experts_NE, output, note=f"model {model}"):
            typer.echo(path)


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("mammoth-path-demo"),
) -> None:
    """The whole way on an embedded real slide, offline: report, heat-maps, prediction. About a minute."""
    from mammoth_path.demo import run_demo

    typer.echo(run_demo(output))


def _source(source: Path | None, wsi_dir: Path | None) -> Path:
    found = source or wsi_dir
    if found is None or (source and wsi_dir):
        raise InputError("give one slide or folder of slides, as argument or as --wsi-dir")
    return found


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _tile_options(tile_mpp: float, mag: float | None, patch_size: int, overlap: int, min_tissue: float):
    from mammoth_path.data.tiles import mpp_of_power
    from mammoth_path.encode import TileOptions

    return TileOptions(tile_mpp if mag is None else mpp_of_power(mag), patch_size, overlap, min_tissue)


def _finish(results, table: Path) -> None:
    """Print a line a slide; a failed slide makes the exit code 1."""
    for result in results:
        tiles = f"{result.tiles} tiles" if result.status != "failed" else ""
        lost = f"{result.unreadable_tiles} more cannot be read" if result.unreadable_tiles else ""
        facts = "; ".join(part for part in (tiles, lost, result.message) if part)
        typer.echo(f"{result.status:8} {result.slide}: {facts}")
    typer.echo(table)
    failed = [r for r in results if r.status == "failed"]
    if failed:
        raise MoeError(f"{len(failed)} of {len(results)} slides failed; {table} says why")


def main() -> None:
    run(app)


if __name__ == "__main__":
    main()
