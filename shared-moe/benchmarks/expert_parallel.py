"""Experts over 1, 2 and 4 processes: time of a training step, and how much of it is communication.

    python shared-moe/benchmarks/expert_parallel.py [--rounds 10] [--cells A,B] [--ranks 1,2,4]

The same tokens are dealt to ever more processes on this machine, joined by gloo, one thread each; "plain" is the same
layer in one process without `ParallelExperts`. A step is forward and backward of the expert layer (routing fixed); its time
is wall time on the slowest rank, in the fastest round after two that warm up. Communication is the share of that time inside
collectives on the average rank, waiting for slower ranks included. CPU is the processor time of the busiest rank. Rows are what leaves a rank, forward, of the rows that
one row an assignment would be. Load is the rows that the busiest rank computes against the mean. "skewed" routes most tokens
to few experts; "replicated" has the same tokens and room for a quarter more experts a rank, placed by load.

With more processes than cores the table shows overhead, not speed. Cells: A is d=1024 ff=2048 T=2048, B is d=256 ff=512
T=2048; 32 experts, 4 a token, float32.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from shared_moe.experts import FFNExperts
from shared_moe.parallel import ExpertGroup, ParallelExperts, Placement
from shared_moe.parallel.itinerary import Tables, plan
from shared_moe.routing import Routing

EXPERTS, TOP_K, WARM_UP = 32, 4, 2
CELLS = {"A": (1024, 2048, 2048), "B": (256, 512, 2048)}


class TimedGroup(ExpertGroup):
    """Counts the seconds inside collectives."""

    seconds = 0.0

    def _attempt(self, operation: str, collective: Callable[[], Any]) -> None:
        started = time.perf_counter()
        super()._attempt(operation, collective)
        self.seconds += time.perf_counter() - started


def routing_of(T: int, skewed: bool) -> Routing:
    g = torch.Generator().manual_seed(0)
    pull = -torch.arange(EXPERTS).float() / 6 if skewed else torch.zeros(EXPERTS)
    logits_TE = torch.rand(T, EXPERTS, generator=g).log().neg().log().neg() + pull
    weights_TK, ids_TK = logits_TE.topk(TOP_K, dim=1)
    return Routing(ids_TK, weights_TK.softmax(1), logits_TE.softmax(1), logits_TE)


def part(routing: Routing, rank: int, size: int) -> Routing:
    def cut(x: Tensor) -> Tensor:
        return x.chunk(size)[rank].clone()

    return Routing(
        cut(routing.expert_ids_TK), cut(routing.weights_TK), cut(routing.probs_TE), cut(routing.logits_TE)
    )


def step(experts: nn.Module, x_TD: Tensor, routing: Routing) -> None:
    experts.zero_grad()
    y_TD = experts(x_TD, routing)
    y_TD.backward(torch.ones_like(y_TD))


def measure(
    group: TimedGroup, cell: str, load: str, rounds: int
) -> tuple[float, float, float, float | None, float]:
    """(seconds of a step, share of communication, CPU seconds of the busiest rank, share of rows sent away, load of the busiest rank)."""
    rank, size = group.rank, group.size
    D, F, T = CELLS[cell]
    whole = routing_of(T, load != "uniform")
    counts_E = torch.bincount(whole.expert_ids_TK.flatten(), minlength=EXPERTS)
    placement = Placement.even(EXPERTS, size)
    if load == "replicated":
        placement = Placement.balanced(counts_E, size, EXPERTS // size * 5 // 4)
    whole_experts = FFNExperts(D, F, EXPERTS, generator=torch.Generator().manual_seed(0))
    experts = ParallelExperts(whole_experts, group, placement)
    routing = part(whole, rank, size)
    x_TD = torch.randn(len(routing.weights_TK), D).requires_grad_()
    sends = plan(routing.expert_ids_TK, Tables(placement, x_TD.device), rank).sends_W
    sends_WW = group.agree({"operation": "count rows"}, sends)[:, :size]
    rounds_taken = []
    for _ in range(rounds + WARM_UP):
        dist.barrier()
        group.seconds = 0.0
        started, started_cpu = time.perf_counter(), time.process_time()
        step(experts, x_TD, routing)
        mine, cpu = time.perf_counter() - started, time.process_time() - started_cpu
        told = torch.tensor([[mine, group.seconds / mine, cpu]], dtype=torch.float64)
        everyone = told.new_empty(size, 3)
        dist.all_gather_into_tensor(everyone, told)
        slowest, _, busiest = everyone.amax(0).tolist()
        rounds_taken.append((slowest, everyone[:, 1].mean().item(), busiest))
    load_W = [
        sum(counts_E[e].item() / len(placement.ranks[e]) for e in placement.experts_of(r))
        for r in range(size)
    ]
    away = (sends_WW.sum() - sends_WW.diagonal().sum()).item()
    one_by_one = TOP_K * T * (1 - 1 / size)
    return (
        *min(rounds_taken[WARM_UP:])[:2],
        min(cpu for _, _, cpu in rounds_taken[WARM_UP:]),
        away / one_by_one if size > 1 else None,
        max(load_W) * size / sum(load_W),
    )


def worker(rank: int, size: int, port: int, cases: list[tuple[str, str]], rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = TimedGroup(timeout_s=120)
    found = [measure(group, cell, load, rounds) for cell, load in cases]
    if rank == 0:
        results.put(found)
    dist.barrier()


def plain(cell: str, skewed: bool, rounds: int) -> tuple[float, float]:
    """(seconds, CPU seconds) of a step in one process, without any parallelism."""
    D, F, T = CELLS[cell]
    experts = FFNExperts(D, F, EXPERTS, generator=torch.Generator().manual_seed(0))
    routing, x_TD = routing_of(T, skewed), torch.randn(T, D).requires_grad_()
    seconds, cpu = [], []
    for _ in range(rounds + WARM_UP):
        started, started_cpu = time.perf_counter(), time.process_time()
        step(experts, x_TD, routing)
        seconds.append(time.perf_counter() - started)
        cpu.append(time.process_time() - started_cpu)
    return min(seconds[WARM_UP:]), min(cpu[WARM_UP:])


def spread_out(size: int, cases: list[tuple[str, str]], rounds: int) -> list[Any]:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, (size, store.port, cases, rounds, results), nprocs=size)
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--ranks", default="1,2,4")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, gloo, {os.cpu_count()} cores, 1 thread a process\n")
    titles = [
        "cell",
        "routing",
        "ranks",
        "step",
        "plain/step",
        "communication",
        "CPU",
        "plain/CPU",
        "rows",
        "load",
    ]
    print("| " + " | ".join(titles) + " |")
    print("| --- |" + " --- |" * (len(titles) - 1))
    cells = args.cells.split(",")
    cases = [(cell, load) for cell in cells for load in ("uniform", "skewed", "replicated")]
    alone = {(cell, skewed): plain(cell, skewed, args.rounds) for cell in cells for skewed in (False, True)}
    for (cell, skewed), (seconds, cpu) in alone.items():
        row = [cell, "skewed" if skewed else "uniform", "plain", f"{seconds * 1e3:.0f} ms", "1", "-"]
        print("| " + " | ".join([*row, f"{cpu * 1e3:.0f} ms", "1", "-", "-"]) + " |", flush=True)
    for size in map(int, args.ranks.split(",")):
        found = spread_out(size, cases, args.rounds)
        for (cell, load), (seconds, share, cpu, away, busiest) in zip(cases, found, strict=True):
            plain_seconds, plain_cpu = alone[cell, load != "uniform"]
            row = [cell, load, str(size), f"{seconds * 1e3:.0f} ms", f"{plain_seconds / seconds:.2f}"]
            row += [f"{share:.0%}", f"{cpu * 1e3:.0f} ms", f"{plain_cpu / cpu:.2f}"]
            row += ["-" if away is None else f"{away:.0%}", f"{busiest:.2f}"]
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
