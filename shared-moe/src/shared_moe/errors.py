"""Errors that every package of the suite raises: what was wrong, where, and what to do about it.

Each class carries the exit code that a command line ends with (0 fine, 1 failed, 2 usage, 3 unreadable input,
4 refused).
"""


class MoeError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 1


class InputError(MoeError, ValueError):
    """A value the caller gave cannot be used."""

    exit_code = 2


class ShapeError(InputError):
    """A tensor has the wrong shape or dtype."""


class UnreadableError(MoeError, OSError):
    """A file is absent, truncated or not of the expected kind."""

    exit_code = 3


class RefusedError(MoeError):
    """The input is readable, but the result would mislead (quality too low, scale unknown)."""

    exit_code = 4


class BusyError(MoeError):
    """Another process holds the folder."""


class DiskFullError(MoeError, OSError):
    """A write failed for want of space; what was there before is untouched."""


class ParallelError(MoeError, RuntimeError):
    """Processes that work together stopped doing so: one died, is late, or disagrees with the others."""


class MissingExtra(MoeError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str, distribution: str = "shared-moe"):
        super().__init__(
            f"{purpose} needs {package}, which is not installed: pip install '{distribution}[{extra}]'"
        )
