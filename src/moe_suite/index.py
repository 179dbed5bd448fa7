"""The page that gathers what the domains' demos wrote: each leaves `summary.json` beside its report."""

import json
from dataclasses import dataclass
from pathlib import Path

from shared_moe.report import Report


@dataclass(frozen=True)
class DemoRun:
    """One domain's demo: where it wrote, how long it took, how it ended."""

    domain: str
    command: str
    folder: Path
    seconds: float
    exit_code: int


def write_index(output: Path, runs: list[DemoRun]) -> Path:
    """Write `output`/index.html; a demo that failed is shown as failed. Returns the page's path."""
    report = Report("moe-suite demo")
    for run in runs:
        summary_file = run.folder / "summary.json"
        if run.exit_code or not summary_file.is_file():
            report.heading(run.domain)
            report.notice(
                f"`{run.command} demo` failed with exit code {run.exit_code} after {run.seconds:.0f} s."
            )
            continue
        summary = json.loads(summary_file.read_text(encoding="utf-8"))
        report.heading(f"{run.domain}: {summary['title']}")
        report.paragraph(f"`{run.command} demo`, {run.seconds:.0f} s")
        for notice in summary["notices"]:
            report.notice(notice)
        if summary["facts"]:
            report.table(("what", "value"), summary["facts"])
        for picture in summary["pictures"]:
            report.picture(run.folder / picture["file"], picture["caption"], embed=False)
        report.link(run.folder / "index.html", "the whole report")
    return report.write(output)
