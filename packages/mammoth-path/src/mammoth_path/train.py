"""Training a multiple-instance model: a loop to read, with early stopping, checkpoints and resumption."""

import csv
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from mammoth_path.data.bags import BagSet, batches, folds_by_case, pad
from mammoth_path.model.mil import MILModel
from shared_moe.console import track
from shared_moe.errors import InputError, RefusedError, UnreadableError
from shared_moe.files import atomic_path, folder_lock
from shared_moe.hub import load_pretrained, load_weights, save_pretrained

PACKAGE = "mammoth_path"
STATE = "training_state.pt"


@dataclass(frozen=True)
class TrainOptions:
    """What to train and how. layer_options go to `Mammoth`.

    patience: stop after this many epochs without a better validation loss (0: train all epochs, no validation set).
    """

    layer: str = "mammoth"
    aggregator: str = "abmil"
    dim: int = 512
    layer_options: dict[str, Any] = field(default_factory=dict)
    dropout: float = 0.25
    epochs: int = 40
    batch_size: int = 8
    learning_rate: float = 1e-4
    weight_decay: float = 1e-5
    patience: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.epochs < 1 or self.batch_size < 1 or not self.learning_rate > 0 or self.patience < 0:
            raise InputError(
                f"epochs={self.epochs}, batch_size={self.batch_size}, learning_rate={self.learning_rate}, "
                f"patience={self.patience}; expected positive numbers (patience may be 0)"
            )

    def with_seed(self, seed: int) -> "TrainOptions":
        return replace(self, seed=seed)


@dataclass(frozen=True)
class Trained:
    """The model in eval mode, and one row an epoch: epoch, learning_rate, train_loss, val_loss."""

    model: MILModel
    history: list[dict[str, float]]


def fit(bags: BagSet, options: TrainOptions, folder: Path | None = None, *, resume: bool = False) -> Trained:
    """Train on `bags`. With a folder, progress is logged and kept there: an interrupted run resumes to the same result.

    Raises `RefusedError` when the folder holds an interrupted run and `resume` is not set.
    AdamW with a cosine schedule on padded mini-batches. With patience, a fifth of the cases is the validation set and
    the model of the lowest validation loss is returned. Standardisation comes from the training bags alone.
    """
    if folder is None:
        return _fit(bags, options, None, resume=False)
    with folder_lock(folder):
        if (folder / STATE).is_file() and not resume:
            raise RefusedError(
                f"{folder} holds a run already: go on with it (--resume), or start anew with --overwrite"
            )
        return _fit(bags, options, folder, resume=resume)


def _fit(bags: BagSet, options: TrainOptions, folder: Path | None, *, resume: bool) -> Trained:
    train, val = _split(bags, options)
    generator = torch.Generator().manual_seed(options.seed)
    history: list[dict[str, float]] = []
    best: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):  # dropout knows only the global generator
        torch.manual_seed(options.seed)
        model = build(bags.dim, len(bags.classes), options, generator)
        rows = np.concatenate(train.features)
        model.standardise(torch.from_numpy(rows.mean(0)), torch.from_numpy(rows.std(0)))
        optimiser = torch.optim.AdamW(
            model.parameters(), options.learning_rate, weight_decay=options.weight_decay
        )
        state = folder / STATE if folder else None
        if resume and state is not None and state.is_file():
            history, best = _restore(state, options, model, optimiser, generator)
        for epoch in track(range(len(history), options.epochs), "training"):
            if _stalled(history, options.patience):
                break
            history.append(_epoch(model, optimiser, train, val, options, epoch, generator))
            if val is not None and history[-1]["val_loss"] <= min(h["val_loss"] for h in history):
                best = {k: v.clone() for k, v in model.state_dict().items()}
            if folder is not None and state is not None:
                _keep(state, options, model, optimiser, generator, history, best)
                _write_log(folder / "log.csv", history)
    if best:
        model.load_state_dict(best)
    return Trained(model.eval(), history)


def build(
    dim: int, classes: int, options: TrainOptions, generator: torch.Generator | None = None
) -> MILModel:
    return MILModel(
        dim,
        classes,
        layer=options.layer,
        aggregator=options.aggregator,
        dim=options.dim,
        layer_options=options.layer_options,
        dropout=options.dropout,
        generator=generator,
    )


def _split(bags: BagSet, options: TrainOptions) -> tuple[BagSet, BagSet | None]:
    if not options.patience:
        return bags, None
    train, val = folds_by_case(bags, 5, options.seed)[0]
    return bags.subset(train), bags.subset(val)


def _epoch(
    model: MILModel,
    optimiser: torch.optim.Optimizer,
    train: BagSet,
    val: BagSet | None,
    options: TrainOptions,
    epoch: int,
    generator: torch.Generator,
) -> dict[str, float]:
    rate = options.learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / options.epochs))
    for group in optimiser.param_groups:
        group["lr"] = rate
    model.train()
    total = 0.0
    for x, mask, labels in batches(train, options.batch_size, generator):
        loss = model.loss(x, mask, labels, generator=generator)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        total += loss.item() * len(labels)
    val_loss = float("nan") if val is None else evaluate_loss(model, val, options.batch_size)
    return {"epoch": epoch, "learning_rate": rate, "train_loss": total / len(train), "val_loss": val_loss}


@torch.no_grad()
def evaluate_loss(model: MILModel, bags: BagSet, batch_size: int = 8) -> float:
    """Mean cross-entropy."""
    model.eval()
    total = 0.0
    for x, mask, labels in batches(bags, batch_size):
        total += nnf.cross_entropy(model(x, mask).logits_BC, labels, reduction="sum").item()
    return total / len(bags)


@torch.no_grad()
def predict_probabilities(model: MILModel, bags: BagSet, batch_size: int = 16) -> np.ndarray:
    """Class probabilities (B, C), bag by bag in the order given."""
    model.eval()
    found = []
    for start in range(0, len(bags), batch_size):
        x, mask = pad(bags.features[start : start + batch_size])
        found.append(model(x, mask).logits_BC.softmax(1).numpy())
    return np.concatenate(found)


def _stalled(history: list[dict[str, float]], patience: int) -> bool:
    if not patience or len(history) <= patience:
        return False
    losses = [h["val_loss"] for h in history]
    return len(losses) - 1 - int(np.argmin(losses)) >= patience


def _keep(state: Path, options, model, optimiser, generator, history, best) -> None:
    saved = {
        "options": asdict(options),
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "generator": generator.get_state(),
        "global_generator": torch.get_rng_state(),
        "history": history,
        "best": best,
    }
    with atomic_path(state) as p:
        torch.save(saved, p)


def _restore(
    state: Path, options, model, optimiser, generator
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    try:
        saved = torch.load(state, weights_only=True)
    except Exception as e:  # torch.load raises whatever the broken bytes lead it to
        raise UnreadableError(f"{state}: cannot resume, the file is damaged; delete it to start again") from e
    if saved["options"] != asdict(options):
        differ = [k for k, v in asdict(options).items() if saved["options"].get(k) != v]
        raise InputError(
            f"{state}: the interrupted run had other options ({', '.join(differ)}); use those, or start anew"
        )
    model.load_state_dict(saved["model"])
    optimiser.load_state_dict(saved["optimiser"])
    generator.set_state(saved["generator"])
    torch.set_rng_state(saved["global_generator"])
    return saved["history"], saved["best"]


def _write_log(path: Path, history: list[dict[str, float]]) -> None:
    with atomic_path(path) as p, p.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(history[0]))
        writer.writeheader()
        writer.writerows(history)


def save_model(
    folder: Path | str,
    model: MILModel,
    classes: list[str],
    card: str,
    *,
    encoder: str = "",
    about: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write weights, config and card. encoder: whose features the model expects; about: anything else to keep."""
    config = {"model": model.config, "classes": classes, "encoder": encoder, **(about or {})}
    return save_pretrained(folder, model, config, card, overwrite=overwrite)


def load_model(name_or_folder: Path | str, *, download: bool = False) -> tuple[MILModel, dict[str, Any]]:
    """(model in eval mode, config) of a shipped model, a folder, or (download=True) a hub id."""
    tensors, config = load_pretrained(name_or_folder, PACKAGE, download)
    model = MILModel(**config["model"])
    load_weights(model, tensors, name_or_folder)
    return model.eval(), config
