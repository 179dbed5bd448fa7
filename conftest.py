"""Settings that hold for the tests of every member."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a worker: pytest-xdist runs one worker a core
os.environ.setdefault("MPLBACKEND", "Agg")

DATA = Path(os.environ.get("MOE_SUITE_DATA", Path(__file__).parent.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real development data, which is not part of the project; the test skips where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no development data at {DATA} (set MOE_SUITE_DATA)")
    return DATA
