"""Train on a cohort of labelled slides and write the model with a card that says what was measured."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mammoth_path.data.bags import BagSet
from mammoth_path.evaluate import Estimate, cross_validate, estimate
from mammoth_path.train import STATE, TrainOptions, fit, save_model
from shared_moe.errors import RefusedError

CARD = """# {title}

A multiple-instance model trained with `mammoth-path train` on {bags} slides of {cases} cases.

**Research use; not a medical device.**

{measured}

- Classes: {classes}
- Options: `{options}`
- Features: {dim} wide
"""


def fit_cohort(
    bags: BagSet,
    options: TrainOptions,
    output: Path,
    *,
    folds: int = 0,
    resume: bool = False,
    overwrite: bool = False,
) -> Path:
    """Cross-validate when asked, fit on all bags, write OUTPUT/model. The run's state lies in OUTPUT/run.

    Raises `RefusedError`, before any work, when a model lies there and `overwrite` is not set.
    """
    if overwrite:
        (output / "run" / STATE).unlink(missing_ok=True)
    elif (output / "model").exists():
        raise RefusedError(f"{output / 'model'} exists: choose another --output, or --overwrite it")
    measures: dict[str, Estimate] = {}
    if folds:
        probs = cross_validate(bags, options, folds=folds)
        measures = {
            name: estimate(name, bags.labels, probs, bags.cases)
            for name in ("auroc", "balanced_accuracy", "calibration_error")
        }
    trained = fit(bags, options, output / "run", resume=resume)
    rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in measures.items()]
    header = [
        f"| measure | {folds}-fold cross-validation, 95 % bootstrap interval over cases |",
        "| --- | --- |",
    ]
    card = CARD.format(
        title=output.name,
        bags=len(bags),
        cases=len(set(bags.cases)),
        measured="\n".join(header + rows)
        if rows
        else "Nothing was measured on slides it was not trained on (`--folds` does).",
        classes=", ".join(f"{c} ({int(np.sum(bags.labels == i))})" for i, c in enumerate(bags.classes)),
        options=json.dumps(asdict(options)),
        dim=bags.dim,
    )
    about = {"metrics": {name: asdict(value) for name, value in measures.items()}}
    return save_model(
        output / "model",
        trained.model,
        bags.classes,
        card,
        encoder=bags.encoder,
        about=about,
        overwrite=overwrite,
    )
