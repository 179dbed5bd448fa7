"""What every command line of the suite shares: errors to exit codes, and progress bars."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import typer

from shared_moe.errors import MoeError

T = TypeVar("T")


def run(app: typer.Typer) -> None:
    """Run a command line; an error of ours becomes one line on stderr and its exit code."""
    try:
        app()
    except MoeError as e:
        typer.secho(f"error: {e}", fg="red", err=True)
        sys.exit(e.exit_code)


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """Iterate with a progress bar on stderr, which is drawn only on a terminal."""
    from rich.console import Console
    from rich.progress import track as rich_track

    console = Console(stderr=True)
    yield from rich_track(
        items, description, total=total, console=console, disable=not console.is_terminal, transient=True
    )
