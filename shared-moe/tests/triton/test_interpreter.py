"""The Triton kernels run by Triton's interpreter, which must be switched on before they are imported: own processes.

On a machine with a GPU the same checks run again, compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).parent / "checks"


def run_checks(name: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "--durations=3"]
    done = subprocess.run(
        [*command, "-o", "python_files=check_*.py", CHECKS / f"check_{name}.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


NAMES = sorted(path.stem.removeprefix("check_") for path in CHECKS.glob("check_*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_interpreted(name):
    assert "every kernel was launched" in run_checks(name, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: Triton kernels were only interpreted")
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name):
    run_checks(name, TRITON_INTERPRET="0")
