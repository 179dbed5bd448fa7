"""Each package, built as a wheel and installed alone, brings only its own dependencies and works."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.isolation

ROOT = Path(__file__).parent.parent
MEMBERS = {
    tomllib.loads((p / "pyproject.toml").read_text())["project"]["name"]: p
    for p in [ROOT / "shared-moe", *sorted((ROOT / "packages").iterdir())]
}


def run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for name in MEMBERS:
        run("uv", "build", "--wheel", "--quiet", "--package", name, "--out-dir", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="session")
def installed(wheels, tmp_path_factory):
    """name -> the bin folder of a fresh environment that holds that package alone, at the locked versions."""
    environments: dict[str, Path] = {}

    def install(name: str) -> Path:
        if name not in environments:
            folder = tmp_path_factory.mktemp(name)
            export = ("uv", "export", "--quiet", "--frozen", "--no-hashes", "--no-emit-workspace", "--no-dev")
            (folder / "locked.txt").write_text(run(*export, "--package", name, cwd=ROOT))
            run("uv", "venv", "--quiet", "--python", sys.executable, folder / "env", cwd=folder)
            install = ("uv", "pip", "install", "--quiet", "--python", folder / "env" / "bin" / "python")
            run(*install, "--find-links", wheels, "--constraints", folder / "locked.txt", name, cwd=folder)
            environments[name] = folder / "env" / "bin"
        return environments[name]

    return install


@pytest.mark.parametrize("name", MEMBERS)
def test_brings_only_its_own_dependencies(installed, name, tmp_path):
    bin_ = installed(name)
    listed = json.loads(
        run("uv", "pip", "list", "--python", bin_ / "python", "--format", "json", cwd=tmp_path)
    )
    found = {normalised(p["name"]) for p in listed}
    locked = (bin_.parent.parent / "locked.txt").read_text()
    expected = {normalised(m) for m in re.findall(r"^([A-Za-z0-9][\w.-]*)==", locked, re.MULTILINE)}
    assert found - expected <= {name, "shared-moe"}
    assert not found & (set(MEMBERS) - {name, "shared-moe"})


@pytest.mark.parametrize("name", MEMBERS)
def test_import_is_light(installed, name, tmp_path):
    module = name.replace("-", "_")
    code = f"import sys, {module}; print(sorted({{'torch', 'matplotlib', 'transformers', 'timm', 'openslide'}} & set(sys.modules)))"
    assert run(installed(name) / "python", "-c", code, cwd=tmp_path).strip() == "[]"


def test_shared_moe_alone(installed, tmp_path):
    report = json.loads(run(installed("shared-moe") / "shared-moe", "doctor", "--json", cwd=tmp_path))
    assert report["torch"]


def test_mammoth_path_alone(installed, tmp_path):
    bin_ = installed("mammoth-path")
    slide = run(
        bin_ / "python",
        "-c",
        "import mammoth_path.demo, pathlib; print(pathlib.Path(mammoth_path.demo.__file__).parent / 'cmu_small_region.svs')",
        cwd=tmp_path,
    ).strip()
    facts = json.loads(run(bin_ / "mammoth-path", "inspect", slide, "--json", cwd=tmp_path))
    assert facts["mpp_um"] == pytest.approx(0.499)
