"""The processes that share experts, and how they notice that one of them is gone, late or of another opinion.

Every exchange of rows is announced: all ranks first tell each other, in one small message of fixed size, what they are
about to do and with which numbers. So a rank that computes something else is named before any row moves.
"""

import itertools
import json
import time
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from shared_moe.errors import InputError, ParallelError

ANNOUNCEMENT_BYTES = 512
GRACE_S = 4.0
"""How long a rank that noticed a failure waits for word from the others before it names those who are missing."""

_serial = itertools.count()


class ExpertGroup:
    """All ranks of `torch.distributed`, joined for expert parallelism. Every rank must make it, at the same point.

    timeout_s  a rank that lets the others wait longer than this (seconds) is taken for dead

    Announcements go over gloo on the CPU, where a dead or late rank can be told; rows go over the default backend
    (NCCL on GPUs). A failure raises `ParallelError` and closes the group for good: start the processes again, from a
    checkpoint. Raises `ParallelError` when `torch.distributed` isn't initialised.
    """

    def __init__(self, timeout_s: float = 600.0):
        if not (dist.is_available() and dist.is_initialized()):
            raise ParallelError(
                "torch.distributed is not initialised: start with torchrun, then call init_process_group"
            )
        if not timeout_s > 0:
            raise InputError(f"timeout_s is {timeout_s}; expected seconds above 0")
        self.rank, self.size, self.timeout_s = dist.get_rank(), dist.get_world_size(), timeout_s
        self.failure: str | None = None
        self.layers = itertools.count()
        self._store, self._key = _get_default_store(), f"shared_moe/expert_group/{next(_serial)}"
        self._control = self._join("gloo")
        self._rows = self._control if dist.get_backend() == "gloo" else self._join(None)

    def _join(self, backend: str | None) -> dist.ProcessGroup:
        joined = dist.new_group(backend=backend, timeout=timedelta(seconds=self.timeout_s))
        assert isinstance(joined, dist.ProcessGroup)  # a group of all ranks has no outsiders
        return joined

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertGroup":
        """A copied model (a moving average of the weights, say) works with the same ranks."""
        return self

    def agree(self, facts: dict[str, Any], numbers: Sequence[int] = ()) -> Tensor:
        """Tell the others `facts` and hear theirs, which must be the same; `numbers`, at most W + 1, may differ.

        Returns everyone's numbers (W, W + 1), int64, zeros where a rank gave fewer.
        Raises `ParallelError` that names the fact and the ranks that differ.
        """
        mine = torch.zeros(ANNOUNCEMENT_BYTES + 8 * (self.size + 1), dtype=torch.uint8)
        text = json.dumps(facts).encode()[:ANNOUNCEMENT_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        mine[ANNOUNCEMENT_BYTES:].view(torch.int64)[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        told, rows = mine.repeat(self.size, 1), mine.new_empty(self.size, mine.numel())
        # all-to-all, not all-gather: everyone hears from everyone directly, so everyone notices who doesn't speak
        self._attempt(facts["operation"], lambda: dist.all_to_all_single(rows, told, group=self._control))
        texts = [row.numpy().tobytes().rstrip(b"\0") for row in rows[:, :ANNOUNCEMENT_BYTES]]
        if any(text != texts[self.rank] for text in texts):
            self._close(_disagreement([json.loads(text) for text in texts]))
        return rows[:, ANNOUNCEMENT_BYTES:].contiguous().view(torch.int64)

    def give_up(self, error: Exception) -> None:
        """Tell the others that this rank can't go on, so that they stop at once; then raise your own error."""
        words = f"{type(error).__name__}: {error}".encode("ascii", "replace").decode().split()
        reason = " ".join(words)[:200]
        try:
            self.agree({"operation": "give up", "error": reason})
        except ParallelError:
            return
        self.failure = reason

    def exchange(self, rows: Tensor, sends: list[int], receives: list[int], operation: str) -> Tensor:
        """Send the first sends[0] rows to rank 0, the next sends[1] to rank 1 and so on; returns what came, by rank."""
        received = rows.new_empty(sum(receives), *rows.shape[1:])
        self._attempt(
            operation,
            lambda: dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=self._rows),
        )
        return received

    def sum(self, values: Tensor, operation: str) -> Tensor:
        """The sum of everyone's values, which have the same shape, on every rank."""
        self.agree({"operation": operation, "shape": list(values.shape), "dtype": str(values.dtype)})
        total = values.detach().clone()
        self._attempt(operation, lambda: dist.all_reduce(total, group=self._rows))
        return total

    def _attempt(self, operation: str, collective: Callable[[], Any]) -> None:
        if self.failure is not None:
            raise ParallelError(f"the expert group is closed since an earlier failure: {self.failure}")
        try:
            collective()
        except RuntimeError as e:
            self._close(self._diagnose(operation), e)

    def _close(self, failure: str, cause: Exception | None = None) -> None:
        self.failure = failure
        raise ParallelError(failure) from cause

    def _diagnose(self, operation: str) -> str:
        """Who else noticed? Those who don't report within the grace period are the ones that are missing."""
        where = f"rank {self.rank} of {self.size} failed in {operation!r}"
        missing = [r for r in range(self.size) if r != self.rank]
        until = time.monotonic() + GRACE_S
        try:
            self._store.set(f"{self._key}/{self.rank}", operation)
            while missing and time.monotonic() < until:
                missing = [r for r in missing if not self._store.check([f"{self._key}/{r}"])]
                time.sleep(0.05)
        except RuntimeError:
            return f"{where}: the process that keeps torch.distributed's store (rank 0, or torchrun) is gone"
        if not missing:
            return f"{where}, and so did every other rank: they run different steps, or the network broke"
        return (
            f"{where}: no word from {_ranks(missing)}, dead or more than {self.timeout_s:g} s late; "
            "look at its log, then start again from a checkpoint"
        )


def summary(values: object) -> str:
    """Values as text short enough for an announcement, different for different values."""
    text = str(values)
    return text if len(text) <= 160 else f"{text[:140]}... #{zlib.crc32(text.encode()):08x}"


def _disagreement(told: list[dict[str, Any]]) -> str:
    for rank, facts in enumerate(told):
        if facts["operation"] == "give up":
            return f"rank {rank} gave up: {facts['error']}"
    names = dict.fromkeys(name for facts in told for name in facts)
    differing = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(told):
            holders.setdefault(str(facts.get(name)), []).append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in holders.items())
            differing.append(f"{name} ({values})")
    return f"ranks disagree about {'; '.join(differing)}; every rank must run the same model and steps"


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
