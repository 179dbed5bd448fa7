"""Look into a Mixture-of-Experts checkpoint without building the model or holding it in memory.

Reads safetensors folders of Hugging Face models (single file or shards, experts stored one by one or stacked) and the
folders that `shared_moe.hub` writes. One expert's matrix is in memory at a time, beside a sketch of the others.

Shapes: E experts, D width, F hidden width.
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared_moe import hub
from shared_moe.console import track
from shared_moe.erc import noise_bound
from shared_moe.errors import UnreadableError

NUMBERED = re.compile(r"^(?P<block>.*?)(?:^|\.)experts\.(?P<expert>\d+)\.(?P<tensor>.+)$")
ROUTER = re.compile(
    r"^(?P<block>(?:.*\.)?)(?P<router>(?!gate_proj|gate_up)[^.]*(?:gate|router)[^.]*)(?:\.(?:layer|classifier|proj|wg))?\.weight$"
)
FIRST = ("gate_proj.weight", "w1.weight", "wi_0.weight", "up_proj.weight", "wi.weight")
STACKED_FIRST = ("gate_up_proj", "gate_up_proj.weight", "input_linear.weight", "up_proj")
STACKED_LAST = ("down_proj", "down_proj.weight", "output_linear.weight")
SKETCH_ROWS = 64
NEAR_DUPLICATE = 0.99
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass
class Layer:
    """One MoE layer of a checkpoint.

    shapes, dtypes       the tensors of one expert (of the stack, where experts are stacked), by name
    bytes                of all experts of the layer
    router               name of the router's matrix, None where none was found
    router_norms         (smallest, mean, largest) row norm
    router_cosine        mean cosine between two different rows; 1 means that the router cannot tell experts apart
    near_duplicates      (i, j, cosine) of experts whose first matrices point the same way
    diagonal_dominant    share of router rows that excite their own expert most (expert-router coupling)
    coupling_loss        the ERC loss at alpha 1 without noise, over the mean of the own-expert norms; 0 is full coupling
    epsilon              mean noise bound of the router's rows, the gauge of specialisation
    notes                what could not be computed, and why
    """

    name: str
    num_experts: int
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    bytes: int
    stacked: bool
    router: str | None = None
    router_shape: list[int] | None = None
    router_norms: tuple[float, float, float] | None = None
    router_cosine: float | None = None
    near_duplicates: list[tuple[int, int, float]] | None = None
    diagonal_dominant: float | None = None
    coupling_loss: float | None = None
    epsilon: float | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Inspection:
    folder: str
    model_type: str | None
    tensors: int
    bytes: int
    layers: list[Layer]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def inspect_checkpoint(folder: Path | str, *, quick: bool = False) -> Inspection:
    """What each MoE layer of a checkpoint holds and how its router and experts stand to each other.

    quick  shapes, sizes and routers only; experts' weights are not read

    Shows a progress bar on a terminal. Raises `UnreadableError` for a folder that is no checkpoint, holds no experts,
    or is damaged.
    """
    folder = Path(folder)
    config = _config(folder)
    with ExitStack() as stack:
        files = _Tensors(folder, stack)
        layers = _find_layers(files)
        if not layers:
            raise UnreadableError(
                f"{folder}: no experts among its {len(files.where)} tensors ({', '.join(sorted(files.where)[:3])}, ...); "
                "is it a dense model?"
            )
        try:
            for layer in track(layers, f"reading {folder.name}"):
                _measure(layer, files, config.get("model_type"), quick)
        except SafetensorError as e:
            raise UnreadableError(f"{folder}: damaged weights: {e}") from e
        return Inspection(
            str(folder),
            config.get("model_type"),
            len(files.where),
            sum(map(files.bytes, files.where)),
            layers,
        )


def describe(found: Inspection) -> str:
    """The inspection for a reader."""
    lines = [
        f"{found.folder}: {found.model_type or 'no model type'}, {found.tensors} tensors, {_size(found.bytes)}, "
        f"{len(found.layers)} MoE layers"
    ]
    for layer in found.layers:
        lines += ["", f"{layer.name or 'model'}: {layer.num_experts} experts, {_size(layer.bytes)}"]
        kind = "all experts" if layer.stacked else "each expert"
        lines += [
            f"  {name:<28} {kind} {tuple(shape)} {layer.dtypes[name]}" for name, shape in layer.shapes.items()
        ]
        if layer.router_norms and layer.router_shape:
            low, mean, high = layer.router_norms
            lines.append(
                f"  router {layer.router} {tuple(layer.router_shape)}: row norms {low:.3g} to {high:.3g} (mean {mean:.3g})"
                + ("" if layer.router_cosine is None else f", mean cosine {layer.router_cosine:.3f}")
            )
        if layer.near_duplicates is not None:
            pairs = [f"{i} and {j} ({cosine:.3f})" for i, j, cosine in layer.near_duplicates[:5]]
            more = (
                f" and {len(layer.near_duplicates) - 5} pairs more" if len(layer.near_duplicates) > 5 else ""
            )
            lines.append(f"  near-duplicate experts: {', '.join(pairs) or 'none'}{more}")
        if layer.diagonal_dominant is not None:
            lines.append(
                f"  expert-router coupling: {100 * layer.diagonal_dominant:.0f} % of router rows excite their own expert "
                f"most (chance {100 / layer.num_experts:.1f} %), relative loss {layer.coupling_loss:.3f}, mean noise bound {layer.epsilon:.3f}"
            )
        lines += [f"  note: {note}" for note in layer.notes]
    return "\n".join(lines)


class _Tensors:
    """The tensors of a checkpoint by name, opened lazily."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.where: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as e:
                raise UnreadableError(f"{path}: not a safetensors file, or truncated: {e}") from e
            self.where |= dict.fromkeys(opened.keys(), opened)

    def shape(self, name: str) -> list[int]:
        return self.where[name].get_slice(name).get_shape()

    def dtype(self, name: str) -> str:
        return self.where[name].get_slice(name).get_dtype()

    def bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * WIDTHS.get(self.dtype(name), 1)

    def read(self, name: str) -> Tensor:
        return self.where[name].get_tensor(name)

    def read_row(self, name: str, index: int) -> Tensor:
        """One entry along the first axis, without the others."""
        return self.where[name].get_slice(name)[index : index + 1][0]


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UnreadableError(f"{folder}: not a folder; expected one with config.json and *.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        raise UnreadableError(f"{path}: missing; a checkpoint folder holds config.json and *.safetensors")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise UnreadableError(f"{path}: not JSON: {e}") from e
    if not isinstance(config, dict):
        raise UnreadableError(f"{path}: expected a JSON object, found {type(config).__name__}")
    if "format_version" in config and "weights" in config:
        hub.check_weights(folder)
    return config


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if files:
            return files
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        hint = f"; {', '.join(others[:3])} would have to be unpickled, which is not done" if others else ""
        raise UnreadableError(f"{folder}: no *.safetensors files{hint}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UnreadableError(f"{index}: not an index of shards: {e!r}") from e
    files = [folder / Path(name).name for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UnreadableError(
            f"{folder}: {len(missing)} of {len(files)} shards are missing, such as {missing[0]}; download them"
        )
    return files


def _find_layers(files: _Tensors) -> list[Layer]:
    routers: dict[str, list[str]] = {}
    for name in files.where:
        if (found := ROUTER.match(name)) and len(files.shape(name)) == 2:
            routers.setdefault(found["block"], []).append(name)
    one_by_one: dict[str, dict[int, list[str]]] = {}
    stacked: dict[str, list[str]] = {}
    for name in files.where:
        if found := NUMBERED.match(name):
            experts = one_by_one.setdefault(found["block"], {})
            experts.setdefault(int(found["expert"]), []).append(name)
        elif _is_stack(name, files) and (block := _stack_block(name, routers, files)) is not None:
            stacked.setdefault(block, []).append(name)
    layers = [_numbered_layer(block, experts, files) for block, experts in one_by_one.items()]
    layers += [_stacked_layer(block, names, files) for block, names in stacked.items()]
    for layer in layers:
        block = f"{layer.name}." if layer.name else ""
        fitting = [r for r in routers.get(block, []) if files.shape(r)[0] == layer.num_experts]
        layer.router = min(fitting, key=len, default=None)
    return sorted(
        layers, key=lambda layer: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", layer.name)]
    )


def _is_stack(name: str, files: _Tensors) -> bool:
    return len(files.shape(name)) >= 3 or ("experts." in name and name.endswith("bias"))


def _stack_block(name: str, routers: dict[str, list[str]], files: _Tensors) -> str | None:
    """The block to which a tensor of three axes belongs as a stack of experts; None when it is something else."""
    before, experts, _ = name.rpartition("experts.")
    if experts and before[-1:] in ("", "."):
        return before.rstrip(".")
    parents = [
        b for b in routers if name.startswith(b) and files.shape(routers[b][0])[0] == files.shape(name)[0]
    ]
    return max(parents, key=len).rstrip(".") if parents else None


def _numbered_layer(block: str, experts: dict[int, list[str]], files: _Tensors) -> Layer:
    first = experts[min(experts)]
    tensors = {NUMBERED.match(n)["tensor"]: n for n in first}  # pyright: ignore[reportOptionalSubscript]
    return Layer(
        name=block,
        num_experts=len(experts),
        shapes={t: files.shape(n) for t, n in tensors.items()},
        dtypes={t: files.dtype(n) for t, n in tensors.items()},
        bytes=sum(files.bytes(n) for names in experts.values() for n in names),
        stacked=False,
        notes=[]
        if sorted(experts) == list(range(len(experts)))
        else [f"experts are numbered {sorted(experts)}"],
    )


def _stacked_layer(block: str, names: list[str], files: _Tensors) -> Layer:
    short = {n: n.removeprefix(f"{block}." if block else "").removeprefix("experts.") for n in names}
    return Layer(
        name=block,
        num_experts=files.shape(names[0])[0],
        shapes={short[n]: files.shape(n) for n in names},
        dtypes={short[n]: files.dtype(n) for n in names},
        bytes=sum(files.bytes(n) for n in names),
        stacked=True,
    )


def _measure(layer: Layer, files: _Tensors, model_type: str | None, quick: bool) -> None:
    router = None
    if layer.router is None:
        layer.notes.append("no router found beside the experts")
    else:
        router = files.read(layer.router).float()
        norms = router.norm(dim=1)
        layer.router_shape = list(router.shape)
        layer.router_norms = (norms.min().item(), norms.mean().item(), norms.max().item())
        layer.epsilon = noise_bound(router).mean().item()
        layer.router_cosine = _mean_cosine(router)
    if quick:
        return
    gates = _gate_matrices(layer, files, model_type, None if router is None else router.shape[1])
    if gates is None:
        layer.notes.append(
            "gate matrices are packed or of an unknown layout; duplicates and coupling not computed"
        )
        return
    sketches, answers = [], []
    for gate_FD in gates:
        rows = torch.linspace(0, len(gate_FD) - 1, min(SKETCH_ROWS, len(gate_FD))).long()
        sketches.append(torch.nn.functional.normalize(gate_FD[rows].flatten(), dim=0))
        if router is not None:
            answers.append((router @ gate_FD.t()).norm(dim=1))
    layer.near_duplicates = _near_duplicates(torch.stack(sketches))
    if answers:
        layer.diagonal_dominant, layer.coupling_loss = _coupling(torch.stack(answers, 1))


def _coupling(M_EE: Tensor) -> tuple[float, float]:
    """(share of rows whose diagonal leads, ERC loss over the mean diagonal): `shared_moe.erc` from M alone."""
    own = M_EE.diagonal()
    leads = M_EE.argmax(1) == torch.arange(len(own))
    excess = (M_EE - own[:, None]).clamp_min(0) + (M_EE.t() - own[:, None]).clamp_min(0)
    return leads.float().mean().item(), (excess.mean() / own.mean().clamp_min(1e-30)).item()


def _gate_matrices(
    layer: Layer, files: _Tensors, model_type: str | None, D: int | None
) -> Iterator[Tensor] | None:
    """Each expert's gate matrix (F, D) in float32, one at a time; None for a layout that is not known."""
    block = f"{layer.name}." if layer.name else ""
    if not layer.stacked:
        gate = next((t for t in FIRST if t in layer.shapes), None)
        if (
            gate is None
            or (D is not None and layer.shapes[gate][-1] != D)
            or not _floating(layer.dtypes[gate])
        ):
            return None
        ids = sorted(
            {int(m["expert"]) for n in files.where if (m := NUMBERED.match(n)) and m["block"] == layer.name}
        )
        return (files.read(f"{block}experts.{e}.{gate}").float() for e in ids)
    first, last = (
        next((t for t in names if t in layer.shapes), None) for names in (STACKED_FIRST, STACKED_LAST)
    )
    if first is None or last is None or len(layer.shapes[first]) != 3 or not _floating(layer.dtypes[first]):
        return None
    _, A, B = layer.shapes[first]
    transposed = model_type == "gpt_oss" or (D is not None and D != B)
    if D is not None and (A if transposed else B) != D:
        return None
    name = f"{block}experts.{first}" if f"{block}experts.{first}" in files.where else f"{block}{first}"
    gated = math.prod(layer.shapes[first]) == 2 * math.prod(layer.shapes[last])
    return (
        _gate_rows(files.read_row(name, e).float(), transposed, gated, model_type == "gpt_oss")
        for e in range(layer.num_experts)
    )


def _gate_rows(first: Tensor, transposed: bool, gated: bool, interleaved: bool) -> Tensor:
    """The rows of an expert's first matrix that make the gate (all of them when there is no gate)."""
    rows = first.t() if transposed else first
    if not gated:
        return rows
    return rows[::2] if interleaved else rows[: len(rows) // 2]


def _floating(dtype: str) -> bool:
    return dtype in ("F64", "F32", "F16", "BF16")


def _mean_cosine(rows_ED: Tensor) -> float | None:
    E = len(rows_ED)
    if E < 2:
        return None
    unit = torch.nn.functional.normalize(rows_ED, dim=1)
    return ((unit @ unit.t()).sum().item() - unit.square().sum().item()) / (E * (E - 1))


def _near_duplicates(unit_ES: Tensor) -> list[tuple[int, int, float]]:
    cosine = unit_ES @ unit_ES.t()
    pairs = torch.nonzero(torch.triu(cosine, diagonal=1) >= NEAR_DUPLICATE).tolist()
    return sorted(((i, j, cosine[i, j].item()) for i, j in pairs), key=lambda pair: -pair[2])


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"
