"""Counts the kernels that the interpreter launched, and fails a file that leaves one of its `KERNELS` out."""

import os
from collections import Counter

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LAUNCHES: Counter[str] = Counter()


@pytest.fixture(scope="session")
def device():
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(params=[torch.float32, torch.float16], ids=["fp32", "fp16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _count_launches():
    if INTERPRETED:
        from triton.runtime import interpreter

        launch = interpreter.GridExecutor.__call__

        def counted(self, *arguments, **options):
            LAUNCHES[self.fn.__name__] += 1
            return launch(self, *arguments, **options)

        interpreter.GridExecutor.__call__ = counted


def pytest_sessionfinish(session, exitstatus):
    if not INTERPRETED:
        return
    expected = {name for item in session.items for name in getattr(item.module, "KERNELS", ())}
    missing = expected - LAUNCHES.keys()
    print("\n" + "\n".join(f"{name}: {count} launches" for name, count in sorted(LAUNCHES.items())))
    if missing:
        print(f"never launched: {', '.join(sorted(missing))}")
        session.exitstatus = 1
    else:
        print("every kernel was launched")
