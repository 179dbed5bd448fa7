"""`moe-suite`: run every domain's demo and gather the results on one page; say what this machine can do."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from shared_moe.console import run
from shared_moe.errors import InputError, MoeError

DEMOS = {"slides": "mammoth-path"}
"""Domain -> the command line whose `demo` shows it."""

app = typer.Typer(
    help="Mixture-of-Experts for six domains. Each domain's own command line does the work; this one shows them all.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.command(epilog="Example: `moe-suite demo slides --output pages`")
def demo(
    domains: Annotated[
        list[str] | None, typer.Argument(help=f"Which: {', '.join(DEMOS)}. Default: all.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the pages and pictures.")] = Path("moe-suite-demo"),
) -> None:
    """Run the demos on their embedded real input, offline, and write OUTPUT/index.html."""
    from moe_suite.index import DemoRun, write_index

    chosen = domains or list(DEMOS)
    unknown = [d for d in chosen if d not in DEMOS]
    if unknown:
        raise InputError(f"unknown domain {', '.join(unknown)}; there are: {', '.join(DEMOS)}")
    runs = []
    for domain in chosen:
        command = DEMOS[domain]
        typer.echo(f"{domain}: {command} demo ...", err=True)
        started = time.monotonic()
        script = Path(sys.executable).with_name(command)
        done = subprocess.run(
            [script, "demo", "--output", output / domain], stdout=subprocess.PIPE, text=True
        )
        runs.append(DemoRun(domain, command, output / domain, time.monotonic() - started, done.returncode))
    page = write_index(output, runs)
    typer.echo(page)
    failed = [r.domain for r in runs if r.exit_code]
    if failed:
        raise MoeError(f"demo failed: {', '.join(failed)} (the messages stand above)")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a script.")] = False,
) -> None:
    """Say which packages are installed and what `shared-moe doctor` finds on this machine."""
    from importlib.metadata import version

    versions = {name: version(name) for name in ("moe-suite", "shared-moe", *DEMOS.values())}
    script = Path(sys.executable).with_name("shared-moe")
    if as_json:
        found = subprocess.run(
            [script, "doctor", "--json"], capture_output=True, text=True, check=True
        ).stdout
        typer.echo(json.dumps({"packages": versions, "machine": json.loads(found)}, indent=2))
        return
    for name, found in versions.items():
        typer.echo(f"{name:14} {found}")
    subprocess.run([script, "doctor"], check=True)


def main() -> None:
    run(app)


if __name__ == "__main__":
    main()
