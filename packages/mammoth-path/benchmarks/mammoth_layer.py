"""MAMMOTH beside the linear layer it replaces and, where installed, the published module, in one run.

    python packages/mammoth-path/benchmarks/mammoth_layer.py [--rounds 5] [--large]

1024 -> 512 at the published sizes (30 experts, 10 slots, 16 heads), float32, one thread. Times are CPU seconds
(`time.process_time`), the minimum of interleaved rounds after a warm-up. Memory is the growth of the peak resident set
over one call, each case in a fresh process. The published module (mammoth-moe, CC BY-NC-ND) is compared where a user has
installed it; it is no dependency.
"""

import argparse
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from mammoth_path.model import Mammoth

WIDTH, OUT = 1024, 512


def linear() -> Callable[[Tensor], Tensor]:
    return nn.Sequential(nn.Linear(WIDTH, OUT), nn.ReLU(), nn.Dropout(0.1))


def ours(form: str, keep_slots: bool) -> Callable[[Tensor], Tensor]:
    layer = Mammoth(WIDTH, OUT, keep_slots=keep_slots)
    return lambda x: layer(x, form=form)


def published(keep_slots: bool) -> Callable[[Tensor], Tensor]:
    from mammoth import Mammoth as Published

    return Published(input_dim=WIDTH, dim=OUT, keep_slots=keep_slots)


METHODS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear + ReLU + dropout": linear,
    "ours, slots, fused": lambda: ours("fused", True),
    "ours, slots, streamed": lambda: ours("streamed", True),
    "ours, patches, fused": lambda: ours("fused", False),
}
if importlib.util.find_spec("mammoth"):
    METHODS["published, slots"] = lambda: published(True)
    METHODS["published, patches"] = lambda: published(False)


def call(layer: Callable[[Tensor], Tensor], x: Tensor, train: bool) -> None:
    if train:
        layer(x).sum().backward()
    else:
        with torch.no_grad():
            layer(x)


def measure(patches: int, train: bool, rounds: int) -> dict[str, float]:
    layers = {name: make() for name, make in METHODS.items()}
    x = torch.randn(1, patches, WIDTH)
    best = dict.fromkeys(layers, float("inf"))
    for round_ in range(rounds + 1):
        for name, layer in layers.items():
            started = time.process_time()
            call(layer, x, train)
            if round_:
                best[name] = min(best[name], time.process_time() - started)
    return best


def peak_mb(name: str, patches: int, train: bool) -> float:
    command = [sys.executable, __file__, "--peak", json.dumps([name, patches, train])]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def resident_mb(field: str) -> float:
    """VmRSS (resident now) or VmHWM (its peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def print_peak(name: str, patches: int, train: bool) -> None:
    layer, x = METHODS[name](), torch.randn(1, patches, WIDTH)
    call(layer, x[:, :64], train)
    gc.collect()
    before = resident_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    call(layer, x, train)
    print(resident_mb("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="also 100,000 patches, forward")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print_peak(*json.loads(args.peak))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, 1024 -> 512, float32")
    cases = [(10_000, False), (10_000, True)] + ([(100_000, False)] if args.large else [])
    for patches, train in cases:
        times = measure(patches, train, args.rounds if patches <= 10_000 else 1)
        print(f"\nN = {patches:,}, {'forward and backward' if train else 'forward'}\n")
        print(
            "| layer | CPU s | against linear | published / this | extra MB |\n| --- | --- | --- | --- | --- |"
        )
        for name, seconds in times.items():
            peer = times.get("published, patches" if "patches" in name else "published, slots")
            against = "-" if peer is None or name.startswith("linear") else f"{peer / seconds:.1f}"
            ratio = seconds / times["linear + ReLU + dropout"]
            print(
                f"| {name} | {seconds:.2f} | {ratio:.1f} | {against} | {peak_mb(name, patches, train):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
