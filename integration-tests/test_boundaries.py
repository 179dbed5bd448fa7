"""Dependencies point one way: apps -> packages -> shared-moe -> torch."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = [ROOT / "shared-moe" / "src" / "shared_moe", *sorted((ROOT / "packages").glob("*/src/*"))]
DOMAINS = {p.name for p in SOURCES[1:]}


def imported_packages(source: Path) -> set[str]:
    names = set()
    for file in source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_no_package_imports_another_domain(source):
    assert not imported_packages(source) & (DOMAINS - {source.name})
    assert "moe_suite" not in imported_packages(source)
