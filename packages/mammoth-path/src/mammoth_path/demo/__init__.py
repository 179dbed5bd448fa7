"""The whole way on the embedded slide: inspect, find tissue, tile, encode, predict, explain; then real biopsies."""

from pathlib import Path

SLIDE = Path(__file__).with_name("cmu_small_region.svs")
HEAD_NOTE = "Demo tissue head, trained on 28 px colorectal tiles: not a diagnosis."
WEAK_NOTE = "Model trained on composed bags with weak labels from the tissue head: no claim about accuracy."
DOMAIN_NOTE = (
    "The slide region shows squamous epithelium with hair follicles, tissue that neither the colorectal tissue head nor the model "
    "has seen: their class names do not apply here. What the pictures show is how a decision is traced to patches and experts."
)


def run_demo(output: Path) -> Path:
    """Write OUTPUT/index.html with pictures and tables; returns its path. Offline; about a minute on 2 cores."""
    from mammoth_path.data.encoders import load_encoder
    from mammoth_path.data.features import Bag, grid_attributes, write_features
    from mammoth_path.data.slides import open_slide
    from mammoth_path.data.tiles import tile_grid
    from mammoth_path.data.tissue import find_tissue
    from mammoth_path.encode import encode_grid
    from mammoth_path.heatmap import (
        expert_figure,
        grid_figure,
        heatmap_figure,
        save_figure,
        tissue_figure,
        top_patches_figure,
    )
    from mammoth_path.predict import predict_bag
    from mammoth_path.presets import WEAK_TUMOUR
    from mammoth_path.train import load_model
    from shared_moe.files import folder_lock
    from shared_moe.report import Report

    with folder_lock(output), open_slide(SLIDE) as slide:
        tissue = find_tissue(slide)
        grid = tile_grid(slide, tissue, mpp=0.5, size_px=256, overlap_px=32)
        encoder = load_encoder("densenet121-capricorn")
        features, kept = encode_grid(slide, grid, encoder)
        bag = Bag(features, grid.coords_N2[kept], {**grid_attributes(grid), "encoder": encoder.name})
        write_features(output / "features" / f"{slide.name}.h5", bag)
        model, config = load_model(WEAK_TUMOUR)
        prediction = predict_bag(model, config, bag)
        assert prediction.experts_NE is not None
        pictures = {
            "tiles.png": grid_figure(slide, grid, tissue.mask_HW),
            "tissue.png": tissue_figure(
                slide, encoder.tissue_probs(features), encoder.tissue_classes, bag, note=HEAD_NOTE
            ),
            "attention.png": heatmap_figure(
                slide, prediction.scores_N, bag,
                title="share of each patch in the decision", label="share (sums to 1)", note=WEAK_NOTE,
            ),
            "experts.png": expert_figure(slide, prediction.experts_NE, bag, note=WEAK_NOTE),
            "top_patches.png": top_patches_figure(slide, prediction.scores_N, bag, note=WEAK_NOTE),
        }  # fmt: skip
        for name, figure in pictures.items():
            save_figure(figure, output / name)
        report = Report("mammoth-path: a slide region, from pixels to a prediction")
        report.paragraph(
            "The real Aperio scan that OpenSlide publishes as its CMU-1 small region (CC0) is cut at 0.5 µm/px, encoded by a "
            "DenseNet121 and given to a MAMMOTH multiple-instance model. Everything ran on this machine, offline."
        )
        report.notice(f"{HEAD_NOTE} {WEAK_NOTE} Research use; not a medical device.")
        report.notice(DOMAIN_NOTE)
        report.table(
            ("what", "value"),
            (
                ("slide", f"{slide.path.name}, {slide.width_px} x {slide.height_px} px"),
                ("scale", f"{slide.mpp_um:g} µm/px, from {slide.scale.source}"),
                ("tissue", f"{tissue.share:.0%} of the slide"),
                ("tiles", f"{len(grid)} of {grid.size_px} px at {grid.mpp_um:g} µm/px"),
                ("encoder", f"{encoder.name}, {encoder.dim} features a tile"),
                ("model", f"{WEAK_TUMOUR}: for maps only, see below"),
            ),
        )
        report.heading("Tissue and tiles")
        report.picture(
            output / "tiles.png", "What is encoded: tiles (blue) on tissue (outlined green).", embed=False
        )
        report.picture(output / "tissue.png", f"Most probable tissue class. {HEAD_NOTE}", embed=False)
        report.heading("The decision, traced to patches")
        report.paragraph(
            f"The model {WEAK_TUMOUR} asks whether a bag holds tumour epithelium. On pictures other than its own it says yes to "
            "nearly every bag (balanced accuracy 0.5, see its card), so its answer for this slide is not shown: it would mean "
            "nothing. Shown is how its decision is made up: which patches it rests on, and through which experts."
        )
        report.picture(
            output / "attention.png",
            "Attention over slots, carried to the patches exactly through the dispatch weights.",
            embed=False,
        )
        report.picture(output / "experts.png", "Which patches each mini expert draws on.", embed=False)
        report.picture(output / "top_patches.png", "The patches with the largest share.", embed=False)
        _biopsies(report, output)
        report.heading("Your own slide")
        report.code(
            "mammoth-path inspect slide.svs\nmammoth-path encode slides/ --job-dir job\n"
            "mammoth-path train job/20x_256px_0px_overlap/features_densenet121-capricorn --labels labels.csv --output model\n"
            "mammoth-path predict slide.svs --model model/model\nmammoth-path heatmap slide.svs --model model/model --output maps"
        )
        return report.write(output)


def _biopsies(report, output: Path) -> None:
    """Real labelled bags that the shipped model was not trained on."""
    from matplotlib.figure import Figure

    from mammoth_path.heatmap import save_figure
    from mammoth_path.presets import HELD_OUT, UCSB, read_bags
    from mammoth_path.train import PACKAGE, load_model, predict_probabilities
    from shared_moe.hub import find_pretrained

    bags = read_bags(find_pretrained(UCSB, PACKAGE) / HELD_OUT)
    model, _ = load_model(UCSB)
    probs = predict_probabilities(model, bags)[:, 1]
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.add_subplot()
    colours = ["#c0182b" if label else "#3b6fb5" for label in bags.labels]
    axis.bar(range(len(bags)), probs, color=colours)
    axis.axhline(0.5, color="#666666", linewidth=0.8, linestyle="--")
    axis.set(ylim=(0, 1), ylabel="probability of malignancy", xlabel="held-out biopsy")
    axis.set_xticks(range(len(bags)), [n.removeprefix("ucsb-") for n in bags.names])
    axis.set_title("red: malignant, blue: benign (the data set's labels)", fontsize=10)
    save_figure(figure, output / "biopsies.png")
    right = int(((probs > 0.5) == bags.labels).sum())
    report.heading("Real breast biopsies")
    report.paragraph(
        f"{len(bags)} of the 58 UCSB breast biopsies (708 hand-made features a patch), which the shipped model {UCSB} was not "
        f"trained on. {right} of {len(bags)} fall on the right side of 0.5; so few say little: the model card has the "
        "cross-validated measures with their intervals."
    )
    report.picture(
        output / "biopsies.png", "A MAMMOTH model on biopsies that it was not trained on.", embed=False
    )
