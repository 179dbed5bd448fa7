"""Teams of processes for the tests, and the folder of their jobs on the path, where spawned processes find it too."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from team import Team


@pytest.fixture(scope="session")
def pair():
    with Team(2) as team:
        yield team


@pytest.fixture(scope="session")
def four():
    with Team(4) as team:
        yield team
