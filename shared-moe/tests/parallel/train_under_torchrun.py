"""torchrun train_under_torchrun.py CHECKPOINT FIRST_STEP STEPS: train on, from the checkpoint if there is one.

At the start the experts lie evenly; after each step they move to where the load asks for them.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

import jobs

from shared_moe.files import atomic_path
from shared_moe.parallel import Placement, expert_load, full_state, load_full_state, move_experts
from shared_moe.parallel.dense import parallel_layers


def main(checkpoint: Path, first: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer, group = jobs.prepare("fsdp", None)
    (experts,) = parallel_layers(model).values()
    if checkpoint.exists():
        loaded = load_file(checkpoint)
        load_full_state(model, {name: t for name, t in loaded.items() if "/" not in name})
        load_full_state(model, {name: t for name, t in loaded.items() if "/" in name}, optimizer)
    for step in range(first, first + steps):
        routings = []
        hook = experts.register_forward_hook(lambda _, inputs, __, kept=routings: kept.append(inputs[1]))
        jobs.step_(model, optimizer, group, step)
        hook.remove()
        load_E = expert_load(routings[0], group)
        move_experts(experts, Placement.balanced(load_E, group.size, 6 // group.size + 1), optimizer)
    state = full_state(model) | full_state(model, optimizer)
    if group.rank == 0:
        with atomic_path(checkpoint) as path:
            save_file(state, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
