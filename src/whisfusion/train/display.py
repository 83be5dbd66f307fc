"""What a person sees of a run: a live bar on a terminal, plain lines anywhere else."""

import sys
from typing import Any, Protocol

from whisfusion.train.meter import Speed
from whisfusion.train.trainer import Readings


class Display(Protocol):
    """Where progress goes."""

    def say(self, text: str) -> None:
        """Print a sentence."""
        ...

    def expect(self, steps: int) -> None:
        """The run is now expected to have so many steps."""
        ...

    def advance(self, step: int) -> None:
        """A step was handed to the device."""
        ...

    def show(self, step: int, readings: Readings, speed: Speed, hours: float) -> None:
        """New readings are there."""
        ...

    def __enter__(self) -> "Display": ...

    def __exit__(self, *error: object) -> None: ...


def make_display(steps: int, *, main: bool) -> Display:
    """A live bar where standard error is a terminal and rich is installed; lines otherwise."""
    if not main:
        return Silent()
    if sys.stderr.isatty():
        try:
            return LiveBar(steps)
        except ImportError:
            pass
    return Lines(steps)


class Silent:
    """For ranks that do not talk."""

    def say(self, text: str) -> None:
        """Nothing."""

    def expect(self, steps: int) -> None:
        """Nothing."""

    def advance(self, step: int) -> None:
        """Nothing."""

    def show(self, step: int, readings: Readings, speed: Speed, hours: float) -> None:
        """Nothing."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *error: object) -> None:
        return None


class Lines(Silent):
    """One line for every reading: for log files."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def say(self, text: str) -> None:
        """Print a sentence."""
        print(text, file=sys.stderr, flush=True)

    def expect(self, steps: int) -> None:
        """Say so in the lines that follow."""
        self._steps = steps

    def show(self, step: int, readings: Readings, speed: Speed, hours: float) -> None:
        """Print a line."""
        left = (self._steps - step) * speed.ms_per_step / 1000
        self.say(f"step {step}/{self._steps}  {describe(readings, speed, hours)}  {duration(left)} left")


class LiveBar(Silent):
    """A bar that moves with every step."""

    def __init__(self, steps: int) -> None:
        """Raises ImportError where rich is not installed."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        # On a narrow terminal the numbers wrap, and nothing else.
        self._progress: Any = Progress(
            BarColumn(bar_width=12),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=Column(no_wrap=False)),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("starting", total=steps)

    def say(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)

    def expect(self, steps: int) -> None:
        """Stretch or shorten the bar."""
        self._progress.update(self._task, total=steps)

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def show(self, step: int, readings: Readings, speed: Speed, hours: float) -> None:
        """Write the numbers beside the bar."""
        self._progress.update(self._task, completed=step, description=describe(readings, speed, hours))

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def describe(readings: Readings, speed: Speed, hours: float) -> str:
    """The numbers that a person watches, in one line."""
    parts = [
        f"loss {readings.loss:.3f}",
        *([f"ctc {readings.ctc:.3f}"] if readings.ctc else []),
        f"{speed.ms_per_step:.0f} ms/step",
        f"{speed.utterances_per_second:.0f} utt/s",
        f"{hours:.1f} h heard",
        f"{speed.memory_gb:.1f} GB",
    ]
    if speed.peak_share is not None:
        parts.append(f"{100 * speed.peak_share:.0f} % of peak")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
