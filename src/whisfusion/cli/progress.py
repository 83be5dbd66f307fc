"""A progress bar on a terminal: seconds of audio done, speed and time left. Elsewhere nothing at all."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress


class AudioProgress:
    """How much of the audio is done. `total` may grow while one works, where it is not known before."""

    def __init__(self, total: float, *, shown: bool = True) -> None:
        self._bar = _make_bar() if shown and on_terminal() else None
        self._task = self._bar.add_task("", total=total, speed="") if self._bar else None
        self._total, self._done, self._since = total, 0.0, time.perf_counter()

    def __enter__(self) -> "AudioProgress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar:
            self._bar.stop()

    def grow(self, seconds: float) -> None:
        """There is so much more audio than was known."""
        self._total += seconds
        self._show()

    def reach(self, seconds: float) -> None:
        """So much audio is done in all."""
        self._done = seconds
        self._show()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Take the bar away while something is printed."""
        if self._bar:
            self._bar.stop()
        try:
            yield
        finally:
            if self._bar:
                self._bar.start()

    def _show(self) -> None:
        if self._bar and self._task is not None:
            speed = self._done / max(1e-9, time.perf_counter() - self._since)
            text = f"{self._done:,.0f} of {self._total:,.0f} s, {speed:,.1f}x real time"
            self._bar.update(self._task, completed=self._done, total=self._total, speed=text)


def count(done: int, total: int, what: str = "") -> None:
    """Say on a terminal how far long work has come, on one line."""
    if on_terminal():
        of = f" of {total:,}" if total else ""
        label = f"{what} " if what else ""
        print(f"\r{label}{done:,}{of}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether someone watches stderr."""
    return sys.stderr is not None and sys.stderr.isatty()


def _make_bar() -> "Progress | None":
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
    except ImportError:  # a machine with little more than torch
        return None
    return Progress(
        SpinnerColumn(),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        # Our own text goes to stdout, which may be a pipe: rich must not catch it.
        redirect_stdout=False,
        redirect_stderr=False,
    )
