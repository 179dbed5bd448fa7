"""Processes joined by gloo (or NCCL) that run functions together, over and over: starting them takes longer than most tests."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT_S = 60


class Team:
    """`with Team(4) as team: team.run(function, *args)`; functions must be importable, arguments picklable."""

    def __init__(self, size: int, backend: str = "gloo"):
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["shared_moe.parallel", "shared_moe.layer"])
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        pipes = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, size, backend, self.store.port), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def answers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned or raised; None for a rank that died. A rank without an answer fails the test."""
        for pipe in self.pipes:
            pipe.send((function, args))
        return [self._answer(rank) for rank in range(len(self.pipes))]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each rank returned; an exception on any rank fails the test."""
        answers = self.answers(function, *args)
        for rank, answer in enumerate(answers):
            assert not isinstance(answer, Exception), f"rank {rank}: {''.join(answer.__notes__)}"
        return answers

    def _answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(LIMIT_S), f"rank {rank} hung"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return None


def _serve(pipe: Any, rank: int, size: int, backend: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore("localhost", port, timeout=limit)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    while True:
        function, args = pipe.recv()
        try:
            answer = function(*args)
        except Exception as e:
            e.add_note(traceback.format_exc())
            answer = e
        pipe.send(answer)
