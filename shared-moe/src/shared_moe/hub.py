"""Saving and loading trained models: `model.safetensors`, `config.json` and a model card `README.md` in one folder.

`config.json` records the format version and the SHA-256 of the weights, which every load checks. Nothing is ever
unpickled, and nothing is fetched from a network unless the caller passes `download=True`.
"""

import errno
import hashlib
import importlib.resources
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared_moe.errors import DiskFullError, InputError, MissingExtra, RefusedError, UnreadableError

FORMAT_VERSION = 1
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
RESERVED = ("format_version", "weights")


def save_pretrained(
    folder: Path | str,
    tensors: Mapping[str, Tensor] | nn.Module,
    config: Mapping[str, Any],
    card: str,
    *,
    overwrite: bool = False,
) -> Path:
    """Write a model folder; all three files appear together or not at all.

    tensors  a module (its `state_dict` is saved) or names to tensors of any dtype and device
    config   JSON values only; the keys `format_version` and `weights` are ours
    card     the model card: data, licence, command, seeds, metrics with intervals, intended use, limits

    Saving the same model twice is fine. A different model at `folder` is replaced only with `overwrite=True`, and
    other files that lie there are kept. Returns the folder. Raises `InputError` for values that cannot be saved,
    `RefusedError` where something else is in the way, `DiskFullError` when the disk fills up.
    """
    folder = Path(folder)
    state = _plain_tensors(tensors)
    _check_config(config)
    if not card.strip():
        raise InputError(
            "the model card is empty: say what data, licence, seeds, metrics, use and limits it has"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        save_file(state, temporary / WEIGHTS, metadata={"format": "pt"})
        weights = {"sha256": sha256(temporary / WEIGHTS), "bytes": (temporary / WEIGHTS).stat().st_size}
        recorded = {"format_version": FORMAT_VERSION, "weights": weights} | dict(config)
        (temporary / CONFIG).write_text(
            json.dumps(recorded, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        (temporary / CARD).write_text(card.rstrip() + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG, CARD):
            with (temporary / name).open("rb+") as f:
                os.fsync(f.fileno())
        if not _same_model(temporary, folder):
            _move_into_place(temporary, folder, overwrite)
    except (OSError, SafetensorError) as e:
        # safetensors reports a failed write without an errno, only in its message
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(e):
            raise DiskFullError(f"{folder}: no space left on the disk; free some and save again") from e
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load_pretrained(
    name_or_folder: Path | str,
    package: str | None = None,
    download: bool = False,
    revision: str | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load (tensors on the CPU, config) of a model by name, folder or hub id, in this order:

    1. a model shipped in the `pretrained/` folder of `package`, by its name
    2. a folder written by `save_pretrained`
    3. only with `download=True`: the Hugging Face hub, by id `owner/name` (extra `hub`), at `revision`

    Raises `InputError` for a name that is none of these (it lists the names there are) and `UnreadableError` for a
    model that is incomplete, damaged or of another format.
    """
    return read_model(find_pretrained(name_or_folder, package, download, revision))


def find_pretrained(
    name_or_folder: Path | str,
    package: str | None = None,
    download: bool = False,
    revision: str | None = None,
) -> Path:
    """The folder that `load_pretrained` would read."""
    name = str(name_or_folder)
    shipped = pretrained_names(package) if package else []
    if package and name in shipped:
        return _shipped_folder(package) / name
    if Path(name).is_dir():
        return Path(name)
    is_hub_id = len(parts := name.split("/")) == 2 and all(parts)
    if download and is_hub_id:
        return _download(name, revision)
    known = (
        f"{package} ships: {', '.join(shipped) or 'no models'}"
        if package
        else "no package was named to look in"
    )
    hint = "; to fetch it from the hub, ask for the download" if is_hub_id and not download else ""
    raise InputError(f"no model called {name!r}: {known}; and there is no such folder{hint}")


def pretrained_names(package: str) -> list[str]:
    """Names of the models that an installed package ships, sorted."""
    root = _shipped_folder(package)
    return sorted(path.parent.name for path in root.glob(f"*/{CONFIG}"))


def read_model(folder: Path | str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read (tensors, config) from one folder, checking format version and hash. Raises `UnreadableError`."""
    config = check_weights(folder)
    weights = Path(folder) / WEIGHTS
    try:
        tensors = load_file(weights)
    except SafetensorError as e:
        raise UnreadableError(f"{weights}: not a safetensors file: {e}") from e
    return tensors, {key: value for key, value in config.items() if key not in RESERVED}


def check_weights(folder: Path | str) -> dict[str, Any]:
    """Check that the weights are those that `config.json` records, and return it. Raises `UnreadableError`."""
    folder = Path(folder)
    config = read_config(folder)
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise UnreadableError(f"{weights}: missing; only safetensors weights are read")
    expected, size = config["weights"]["sha256"], config["weights"]["bytes"]
    found = sha256(weights)
    if found != expected:
        raise UnreadableError(
            f"{weights}: damaged or replaced: expected sha256 {expected} ({size} bytes), found {found} "
            f"({weights.stat().st_size} bytes); fetch or save the model again"
        )
    return config


def read_config(folder: Path | str) -> dict[str, Any]:
    """`config.json` as it stands, with the recorded format version and weights. Raises `UnreadableError`."""
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UnreadableError(f"{path}: missing; a model folder holds {WEIGHTS}, {CONFIG} and {CARD}") from e
    except ValueError as e:
        raise UnreadableError(f"{path}: not JSON: {e}") from e
    version = config.get("format_version") if isinstance(config, dict) else None
    if version is None:
        raise UnreadableError(f"{path}: no 'format_version': not written by shared_moe.hub.save_pretrained")
    if version != FORMAT_VERSION:
        raise UnreadableError(
            f"{path}: format version {version!r}, this release reads {FORMAT_VERSION}; update shared-moe"
        )
    weights = config.get("weights")
    if not isinstance(weights, dict) or not isinstance(weights.get("sha256"), str) or "bytes" not in weights:
        raise UnreadableError(f"{path}: expected 'weights' to record sha256 and bytes, found {weights!r}")
    return config


def load_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], source: Path | str = "the weights"
) -> None:
    """Copy `tensors` into `module`, all or nothing.

    Raises `UnreadableError` naming every kind of disagreement: names missing, names unknown, shapes that differ.
    """
    check_fit(module.state_dict(), tensors, type(module).__name__, source)
    module.load_state_dict(dict(tensors))


def check_fit(
    own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], what: str, source: Path | str
) -> None:
    """Raises `UnreadableError` unless `tensors` have the names and shapes of `own`, those of a `what`."""
    wrong = [f"missing {_some(own.keys() - tensors.keys())}"] if own.keys() - tensors.keys() else []
    if tensors.keys() - own.keys():
        wrong.append(f"unknown {_some(tensors.keys() - own.keys())}")
    shapes = {
        f"{k} (expected {tuple(own[k].shape)}, found {tuple(tensors[k].shape)})"
        for k in own.keys() & tensors.keys()
        if own[k].shape != tensors[k].shape
    }
    if shapes:
        wrong.append(f"wrong shape {_some(shapes)}")
    if wrong:
        raise UnreadableError(f"{source} does not fit {what}: {'; '.join(wrong)}")


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _plain_tensors(tensors: Mapping[str, Tensor] | nn.Module) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two share memory, as safetensors wants them."""
    source = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    wrong = [f"{k!r} ({type(v).__name__})" for k, v in source.items() if not isinstance(v, Tensor)]
    if wrong or not source:
        raise InputError(f"weights must be names to tensors; not so: {', '.join(wrong) or 'there are none'}")
    state, seen = {}, set()
    for name, tensor in source.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        state[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return state


def _check_config(config: Mapping[str, Any]) -> None:
    taken = [key for key in RESERVED if key in config]
    if taken:
        raise InputError(f"config keys {taken} are reserved for what save_pretrained records")
    try:
        json.dumps(dict(config), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise InputError(f"config must hold JSON values only: {e}") from e


def _same_model(a: Path, b: Path) -> bool:
    return all((b / f).is_file() and sha256(a / f) == sha256(b / f) for f in (WEIGHTS, CONFIG, CARD))


def _move_into_place(new: Path, folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        new.replace(folder)
        return
    if not (folder / CONFIG).is_file():
        raise RefusedError(f"{folder}: exists and is not a model folder; choose another one")
    if not overwrite:
        raise RefusedError(f"{folder}: holds a different model; choose another folder or pass overwrite=True")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.replace(old)
    try:
        new.replace(folder)
    except OSError:
        old.replace(folder)
        raise
    for path in old.iterdir():
        if path.name not in (WEIGHTS, CONFIG, CARD):
            path.replace(folder / path.name)
    shutil.rmtree(old)


def _shipped_folder(package: str) -> Path:
    try:
        return Path(str(importlib.resources.files(package))) / "pretrained"
    except ModuleNotFoundError as e:
        raise InputError(f"package {package!r} is not installed") from e


def _download(repo: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as e:
        raise MissingExtra("huggingface_hub", "hub", f"downloading {repo}") from e
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[WEIGHTS, CONFIG, CARD]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        raise UnreadableError(f"{repo}: cannot be fetched from the hub: {e}") from e


def _some(names: set[str], shown: int = 3) -> str:
    first = sorted(names)
    more = f" and {len(first) - shown} more" if len(first) > shown else ""
    return ", ".join(first[:shown]) + more
