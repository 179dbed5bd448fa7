"""`moe-suite demo` and `doctor`."""

import json
import stat
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_suite import cli
from shared_moe.errors import InputError, MoeError
from shared_moe.report import Report


@pytest.fixture
def demos(tmp_path, monkeypatch):
    """Two stand-in domains: one whose demo works, one whose demo fails."""
    picture = Path(cli.__file__).parent.parent.parent / "packages" / "mammoth-path" / "docs" / "attention.jpg"

    def works(output: Path) -> None:
        report = (
            Report("It works")
            .notice("Composed of <b>real</b> parts")
            .table(("what", "value"), (("tiles", 7),))
        )
        output.mkdir(parents=True)
        (output / "map.jpg").write_bytes(picture.read_bytes())
        report.picture(output / "map.jpg", "a map", embed=False).write(output)

    works(tmp_path / "made")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    scripts = {"good": f'cp -r {tmp_path / "made"}/. "$3"', "bad": "echo broken >&2; exit 3"}
    for name, body in scripts.items():
        (bin_ / name).write_text(f'#!/bin/sh\nmkdir -p "$3"\n{body}\n')
        (bin_ / name).chmod((bin_ / name).stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(cli, "DEMOS", {"one": "good", "two": "bad"})
    monkeypatch.setattr(sys, "executable", str(bin_ / "python"))


def test_the_index_shows_what_worked_and_what_failed(demos, tmp_path):
    result = CliRunner().invoke(cli.app, ["demo", "--output", str(tmp_path / "pages")])
    assert isinstance(result.exception, MoeError)
    assert result.exception.exit_code == 1
    assert "two" in str(result.exception)
    page = (tmp_path / "pages" / "index.html").read_text()
    assert "It works" in page
    assert "Composed of &lt;b&gt;real&lt;/b&gt; parts" in page
    assert "one/map.jpg" in page
    assert "one/index.html" in page
    assert "failed with exit code 3" in page


def test_some_domains_alone(demos, tmp_path):
    result = CliRunner().invoke(cli.app, ["demo", "one", "--output", str(tmp_path / "pages")])
    assert result.exit_code == 0
    assert "failed" not in (tmp_path / "pages" / "index.html").read_text()


def test_unknown_domains_are_named(tmp_path):
    result = CliRunner().invoke(cli.app, ["demo", "nothing", "--output", str(tmp_path)])
    assert isinstance(result.exception, InputError)
    assert "slides" in str(result.exception)


def test_doctor():
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert set(found["packages"]) == {"moe-suite", "shared-moe", "mammoth-path"}
    assert found["machine"]["torch"]
