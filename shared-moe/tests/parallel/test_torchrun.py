"""A training script under torchrun, stopped and continued with fewer ranks."""

import os
import subprocess
import sys
from pathlib import Path

import jobs
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent / "train_under_torchrun.py"


def torchrun(ranks: int, *arguments: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_torchrun_trains_and_continues_with_fewer_ranks(tmp_path):
    checkpoint = tmp_path / "checkpoint.safetensors"
    torchrun(2, checkpoint, 0, 2)
    torchrun(1, checkpoint, 2, 2)
    found = load_file(checkpoint)
    for name, tensor in jobs.train_one_process(4)[0].state_dict().items():
        torch.testing.assert_close(found[name], tensor)
