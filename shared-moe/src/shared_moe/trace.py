"""What routers did: recorded while a model runs, kept small, saved as Parquet, summed up in figures.

Shapes: T tokens, K slots a token, E experts, N assignments. Entropies and mutual information are in nats.
"""

import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared_moe.errors import InputError, MissingExtra, ShapeError, UnreadableError
from shared_moe.files import atomic_path
from shared_moe.routing.routing import Routing

COLUMNS = ("layer", "step", "token", "expert_ids", "weights")
OPTIONAL = ("kind", "entropy")
METADATA = b"shared_moe.trace"


@dataclass(frozen=True)
class Record:
    """One layer's routing in one step.

    token_T   int32   number of the token within the step
    ids_TK    int16 or int32; -1 = no expert
    weights_TK  float16 or float32
    entropy_T float32, of the whole gate distribution scaled to sum 1; NaN where unknown
    kind_T    int32 index into the trace's `kinds`; -1 = unlabelled
    """

    token_T: np.ndarray
    ids_TK: np.ndarray
    weights_TK: np.ndarray
    entropy_T: np.ndarray
    kind_T: np.ndarray

    def __add__(self, other: "Record") -> "Record":
        return Record(
            *(np.concatenate([getattr(self, f), getattr(other, f)]) for f in self.__dataclass_fields__)
        )


class RoutingTrace:
    """Routings by layer and step.

    >>> trace = RoutingTrace()
    >>> with trace.watch(model, kinds=["word", "space", "word"]):
    ...     model(x)
    >>> trace.save("routing.parquet")

    weight_dtype   "float32" keeps combine weights exactly, "float16" in half the space
    """

    def __init__(self, weight_dtype: str = "float32"):
        if weight_dtype not in ("float32", "float16"):
            raise InputError(f"weight_dtype is {weight_dtype!r}; expected 'float32' or 'float16'")
        self.weight_dtype = np.dtype(weight_dtype)
        self.step = 0
        self.kinds: list[str] = []
        self.num_experts: dict[str, int] = {}
        self.records: dict[tuple[str, int], Record] = {}

    # -- recording

    def record(self, layer: str, routing: Routing, kinds: Sequence[str] | None = None) -> None:
        """Add the routing of T tokens in the present `step`; further calls for the same layer and step append.

        `kinds` labels each token. Raises `ShapeError` when its length is not T, or when K or E change.
        """
        E = routing.num_experts
        ids = routing.expert_ids_TK.detach()
        ids = torch.where(ids >= E, -1, ids).cpu().numpy()
        T, K = ids.shape
        if kinds is not None and len(kinds) != T:
            raise ShapeError(f"layer {layer!r} routed {T} tokens, but there are {len(kinds)} kinds")
        if self.num_experts.setdefault(layer, E) != E:
            raise ShapeError(f"layer {layer!r} had {self.num_experts[layer]} experts before, now {E}")
        before = self.records.get((layer, self.step))
        if before is not None and before.ids_TK.shape[1] != K:
            raise ShapeError(
                f"layer {layer!r} had {before.ids_TK.shape[1]} slots in this step before, now {K}"
            )
        start = 0 if before is None else len(before.token_T)
        probs = routing.probs_TE.detach().float()
        probs = probs / probs.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        new = Record(
            np.arange(start, start + T, dtype=np.int32),
            ids.astype(_id_dtype(E)),
            routing.weights_TK.detach().float().cpu().numpy().astype(self.weight_dtype),
            torch.special.entr(probs).sum(1).cpu().numpy().astype(np.float32),
            self._kind_numbers(kinds, T),
        )
        self.records[layer, self.step] = new if before is None else before + new

    @contextmanager
    def watch(self, model: nn.Module, kinds: Sequence[str] | None = None) -> Iterator["RoutingTrace"]:
        """Record every module inside `model` that returns a `Routing`, alone or within a tuple, by its name.

        A routing that a layer passes on from its router is recorded once; a forward pass that activation
        checkpointing repeats during the backward pass is not recorded again. `step` goes up by one after each pass
        of `model`. `kinds` labels the tokens of each pass.
        """
        seen: weakref.WeakValueDictionary[int, Routing] = weakref.WeakValueDictionary()

        def after(name: str, output: Any) -> None:
            if _in_backward():
                return
            for routing in output if isinstance(output, tuple) else (output,):
                if isinstance(routing, Routing) and id(routing) not in seen:
                    seen[id(routing)] = routing
                    self.record(name, routing, kinds)

        def step(*_: Any) -> None:
            if not _in_backward():
                self.step += 1

        def hook(name: str):
            return lambda module, inputs, output: after(name, output)

        handles = [m.register_forward_hook(hook(name or "model")) for name, m in model.named_modules()]
        handles.append(model.register_forward_hook(step))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _kind_numbers(self, kinds: Sequence[str] | None, T: int) -> np.ndarray:
        if kinds is None:
            return np.full(T, -1, dtype=np.int32)
        known = {kind: number for number, kind in enumerate(self.kinds)}
        numbers = np.array([known.setdefault(str(kind), len(known)) for kind in kinds], dtype=np.int32)
        self.kinds = list(known)
        return numbers

    # -- figures

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the order in which they were first recorded."""
        return list(self.num_experts)

    def steps(self, layer: str) -> list[int]:
        """Steps in which a layer was recorded, ascending. Raises `InputError` for an unknown layer."""
        self._check_layer(layer)
        return sorted(step for name, step in self.records if name == layer)

    def load(self, layer: str, step: int | None = None) -> np.ndarray:
        """Share of the assignments that each expert got (E,), over all steps or one; zeros where there are none."""
        counts = sum(
            (
                np.bincount(_chosen(r.ids_TK), minlength=self.num_experts[layer])
                for r in self._of(layer, step)
            ),
            np.zeros(self.num_experts[layer], dtype=np.int64),
        )
        return counts / max(1, counts.sum())

    def entropy(self, layer: str, step: int | None = None) -> float:
        """Mean entropy of the gate distribution in nats, ln E at most; NaN where it was not recorded."""
        values = np.concatenate([r.entropy_T for r in self._of(layer, step)] or [np.zeros(0, np.float32)])
        values = values[~np.isnan(values)]
        return float(values.mean(dtype=np.float64)) if values.size else float("nan")

    def dead_experts(self, layer: str, step: int | None = None, share: float = 0.0) -> list[int]:
        """Experts whose load is at most `share` (0: those never chosen)."""
        return np.flatnonzero(self.load(layer, step) <= share).tolist()

    def by_kind(self, layer: str) -> tuple[list[str], np.ndarray]:
        """(kinds, P(expert | kind) (kinds, E)) over the labelled tokens; a kind without assignments has zeros."""
        counts = self._joint(layer)
        return list(self.kinds), counts / np.maximum(1, counts.sum(1, keepdims=True))

    def specialisation(self, layer: str) -> float:
        """Mutual information of kind and expert over the labelled assignments, in nats.

        0 when experts ignore the kind, at most min(ln kinds, ln E). It is the plain estimate from counts, which over
        N assignments of unrelated kinds comes out near (kinds - 1)(E - 1) / 2N rather than at 0.
        """
        joint = self._joint(layer)
        if joint.sum() == 0:
            return float("nan")
        p = joint / joint.sum()
        independent = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
        there = p > 0
        return max(0.0, float((p[there] * np.log(p[there] / independent[there])).sum()))

    def replay(self, layer: str, step: int) -> tuple[Tensor, Tensor]:
        """(expert_ids_TK int64, weights_TK float32) as recorded, to send the same tokens to the same experts again.

        Raises `InputError` when the layer was not recorded in that step.
        """
        record = self._of(layer, step)[0]
        return torch.from_numpy(record.ids_TK.astype(np.int64)), torch.from_numpy(
            record.weights_TK.astype(np.float32)
        )

    def _joint(self, layer: str) -> np.ndarray:
        E = self.num_experts.get(layer, 0)
        counts = np.zeros((len(self.kinds), E), dtype=np.int64)
        for r in self._of(layer, None):
            kind = np.repeat(r.kind_T, r.ids_TK.shape[1])
            ids = r.ids_TK.reshape(-1).astype(np.int64)
            used = (kind >= 0) & (ids >= 0) & (ids < E)
            np.add.at(counts, (kind[used], ids[used]), 1)
        return counts

    def _of(self, layer: str, step: int | None) -> list[Record]:
        self._check_layer(layer)
        if step is not None and (layer, step) not in self.records:
            raise InputError(
                f"layer {layer!r} was not recorded in step {step}; there are {self.steps(layer)}"
            )
        return [r for (name, s), r in self.records.items() if name == layer and step in (None, s)]

    def _check_layer(self, layer: str) -> None:
        if layer not in self.num_experts:
            raise InputError(
                f"no layer {layer!r} in this trace; there are: {', '.join(self.layers) or 'none'}"
            )

    # -- files

    def save(self, path: Path | str) -> Path:
        """Write a Parquet file, one row a token; lists hold the K slots. Needs the extra `trace`.

        Columns: layer, step, token, kind (null = unlabelled), expert_ids (-1 = none), weights, entropy (nats, null =
        unknown). Number of experts and order of the layers stand in the metadata key `shared_moe.trace`.
        """
        pa, pq = _pyarrow()
        about = {
            "format_version": 1,
            "weight_dtype": self.weight_dtype.name,
            "num_experts": self.num_experts,
            "kinds": self.kinds,
            "step": self.step,
        }
        schema = pa.schema(
            [
                ("layer", pa.dictionary(pa.int32(), pa.string())),
                ("step", pa.int32()),
                ("token", pa.int32()),
                ("kind", pa.dictionary(pa.int32(), pa.string())),
                ("expert_ids", pa.list_(pa.int32())),
                ("weights", pa.list_(pa.float16() if self.weight_dtype == np.float16 else pa.float32())),
                ("entropy", pa.float32()),
            ],
            metadata={METADATA: json.dumps(about).encode()},
        )
        path = Path(path)
        with atomic_path(path) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
            for layer in self.layers:
                parts = [self._table(pa, schema, layer, step) for step in self.steps(layer)]
                if parts:
                    writer.write_table(pa.concat_tables(parts))
        return path

    def _table(self, pa: ModuleType, schema: Any, layer: str, step: int) -> Any:
        r = self.records[layer, step]
        T, K = r.ids_TK.shape
        offsets = pa.array(np.arange(T + 1, dtype=np.int32) * K)
        kinds = pa.array(r.kind_T, mask=r.kind_T < 0)
        columns = [
            pa.DictionaryArray.from_arrays(pa.array(np.zeros(T, np.int32)), pa.array([layer], pa.string())),
            pa.array(np.full(T, step, np.int32)),
            pa.array(r.token_T),
            pa.DictionaryArray.from_arrays(kinds, pa.array(self.kinds, pa.string())),
            pa.ListArray.from_arrays(offsets, pa.array(r.ids_TK.reshape(-1).astype(np.int32))),
            pa.ListArray.from_arrays(offsets, pa.array(r.weights_TK.reshape(-1))),
            pa.array(r.entropy_T, mask=np.isnan(r.entropy_T)),
        ]
        return pa.Table.from_arrays(columns, schema=schema)

    @classmethod
    def from_file(cls, path: Path | str) -> "RoutingTrace":
        """Read what `save` wrote, or any Parquet file with the columns layer, step, token, expert_ids and weights.

        Raises `UnreadableError` for another kind of file, missing columns, or values that make no routing.
        """
        pa, pq = _pyarrow()
        path = Path(path)
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException) as e:
            raise UnreadableError(f"{path}: not a readable Parquet file: {e}") from e
        missing = [name for name in COLUMNS if name not in table.column_names]
        if missing:
            raise UnreadableError(
                f"{path}: missing columns {missing}; a routing trace has {list(COLUMNS)} and may have "
                f"{list(OPTIONAL)}; this file has {table.column_names}"
            )
        try:
            return cls._from_table(pa, table)
        except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException) as e:
            raise UnreadableError(f"{path}: not a routing trace: {e}") from e

    @classmethod
    def _from_table(cls, pa: ModuleType, table: Any) -> "RoutingTrace":
        about = json.loads((table.schema.metadata or {}).get(METADATA, b"{}"))
        half = table.schema.field("weights").type in (pa.list_(pa.float16()), pa.large_list(pa.float16()))
        trace = cls(about.get("weight_dtype", "float16" if half else "float32"))
        trace.kinds = list(about.get("kinds", []))
        trace.num_experts = dict(about.get("num_experts", {}))
        for name in COLUMNS:
            if table.column(name).null_count:
                raise ValueError(f"column {name!r} has {table.column(name).null_count} empty cells")
        ids, lengths = _lists(pa, table.column("expert_ids"), pa.int64())
        weights, weight_lengths = _lists(pa, table.column("weights"), pa.float32())
        if not np.array_equal(lengths, weight_lengths):
            raise ValueError("expert_ids and weights must hold as many values in every row")
        if ids.size and ids.min() < -1:
            raise ValueError(f"expert_ids holds {ids.min()}; expected at least -1")
        layers = table.column("layer").cast(pa.string()).to_numpy()
        steps = table.column("step").cast(pa.int32()).to_numpy()
        tokens = table.column("token").cast(pa.int32()).to_numpy()
        kinds = trace._kind_column(pa, table)
        entropy = np.full(len(layers), np.nan, np.float32)
        if "entropy" in table.column_names:
            entropy = table.column("entropy").cast(pa.float32()).to_numpy().astype(np.float32)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        for layer, step, rows in _groups(layers, steps):
            K = int(lengths[rows[0]])
            if (lengths[rows] != K).any():
                raise ValueError(f"layer {layer!r}, step {step}: rows with different numbers of experts")
            cells = starts[rows][:, None] + np.arange(K)
            highest = int(ids[cells].max(initial=-1))
            if "num_experts" not in about:
                trace.num_experts[layer] = max(trace.num_experts.get(layer, 1), highest + 1)
            elif highest > trace.num_experts[layer]:
                raise ValueError(
                    f"layer {layer!r} has {trace.num_experts[layer]} experts, but names {highest}"
                )
            trace.records[layer, step] = Record(
                tokens[rows],
                ids[cells].astype(_id_dtype(trace.num_experts[layer])),
                weights[cells].astype(trace.weight_dtype),
                entropy[rows],
                kinds[rows],
            )
        last = max((step for _, step in trace.records), default=-1)
        trace.step = about.get("step", last + 1)
        return trace

    def _kind_column(self, pa: ModuleType, table: Any) -> np.ndarray:
        if "kind" not in table.column_names:
            return np.full(table.num_rows, -1, np.int32)
        labels = table.column("kind").cast(pa.string()).to_pylist()
        known = {kind: number for number, kind in enumerate(self.kinds)} | {None: -1}
        numbers = [known.setdefault(label, len(known) - 1) for label in labels]
        self.kinds = [kind for kind in known if kind is not None]
        return np.array(numbers, dtype=np.int32)


def _id_dtype(num_experts: int) -> type:
    return np.int16 if num_experts <= np.iinfo(np.int16).max else np.int32


def _chosen(ids_TK: np.ndarray) -> np.ndarray:
    ids = ids_TK.reshape(-1)
    return ids[ids >= 0]


def _in_backward() -> bool:
    """Whether autograd is running: then a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise MissingExtra("pyarrow", "trace", "saving and loading routing traces") from e
    return pyarrow, pyarrow.parquet


def _lists(pa: ModuleType, column: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """(all values, number of values in each row) of a column of lists."""
    array = pa.chunked_array(column).combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise ValueError(f"expected a column of lists, found {array.type}")
    values = array.flatten().cast(dtype)
    if values.null_count:
        raise ValueError(f"a column of lists has {values.null_count} empty values")
    lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return values.to_numpy(zero_copy_only=False), lengths


def _groups(layers: np.ndarray, steps: np.ndarray) -> Iterator[tuple[str, int, np.ndarray]]:
    """(layer, step, row numbers), layers and rows in the order of the file."""
    if not layers.size:
        return
    names, first, number = np.unique(layers.astype(str), return_index=True, return_inverse=True)
    order = np.lexsort((steps, first[number]))
    changes = (np.diff(number[order]) != 0) | (np.diff(steps[order]) != 0)
    for rows in np.split(order, np.flatnonzero(changes) + 1):
        yield str(names[number[rows[0]]]), int(steps[rows[0]]), rows
