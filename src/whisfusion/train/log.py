"""What a run writes down: log.csv, dev.csv, dev_sets.csv, dev transcripts, skipped clips, TensorBoard events."""

import csv
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from whisfusion.data.batch import Failure
from whisfusion.train.dev import DevResult, spread
from whisfusion.train.masking import BINS
from whisfusion.train.meter import Speed
from whisfusion.train.state import Progress
from whisfusion.train.trainer import Readings

BIN_COLUMNS = tuple(f"loss_{low / BINS:.1f}" for low in range(BINS))
"""Loss by mask ratio: loss_0.3 is that of ratios in [0.3, 0.4)."""
LOG_COLUMNS = (
    "step",
    "epoch",
    "loss",
    "quantity",
    "language",
    "ctc",
    "placing",
    "consistency",
    "learning_rate",
    "gradient_norm",
    "utterances",
    "hours",
    "utterances_per_second",
    "ms_per_step",
    "memory_gb",
    "peak_share",
    *BIN_COLUMNS,
)
DEV_COLUMNS = ("step", "wer", "clips", "words")
"""wer is the mean over languages, where there are several; dev_sets.csv has each dataset's own."""
DEV_SET_COLUMNS = ("step", "set", "wer")
_SHOWN = 20
"""Dev transcripts that an evaluation writes out."""


class RunLog:
    """Writes the files of a run folder; on ranks other than 0 nothing."""

    def __init__(self, folder: Path, *, main: bool, resume_at: int = 0) -> None:
        """With `resume_at`, lines of later steps are dropped: they will be written again."""
        self.folder = folder
        self._main = main
        self._events: Any = None
        if not main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        _start_csv(folder / "log.csv", LOG_COLUMNS, resume_at)
        _start_csv(folder / "dev.csv", DEV_COLUMNS, resume_at)
        _start_csv(folder / "dev_sets.csv", DEV_SET_COLUMNS, resume_at)
        self._events = _tensorboard(folder / "tensorboard", resume_at)

    @property
    def has_events(self) -> bool:
        """Whether TensorBoard events are written: not where tensorboard is not installed."""
        return self._events is not None

    def step(self, step: int, epoch: int, rate: float, readings: Readings, speed: Speed, progress: Progress) -> None:
        """Write a line of log.csv; `rate` is the learning rate of the step."""
        values: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "loss": readings.loss,
            "quantity": readings.quantity,
            "language": readings.language,
            "ctc": readings.ctc,
            "placing": readings.placing,
            "consistency": readings.consistency,
            "learning_rate": rate,
            "gradient_norm": readings.gradient_norm,
            "utterances": progress.utterances,
            "hours": progress.seconds / 3600,
            "utterances_per_second": speed.utterances_per_second,
            "ms_per_step": speed.ms_per_step,
            "memory_gb": speed.memory_gb,
            "peak_share": speed.peak_share,
            **dict(zip(BIN_COLUMNS, readings.by_bin, strict=True)),
        }
        self._write("log.csv", LOG_COLUMNS, values)
        self._scalars("train", step, values)

    def dev(self, step: int, result: DevResult) -> None:
        """Write a line of dev.csv, one for each dataset, and some of the transcripts."""
        words = sum(clip.length for clip in result.clips)
        values = {"step": step, "wer": result.rate, "clips": len(result.clips), "words": words}
        self._write("dev.csv", DEV_COLUMNS, values)
        for name, rate in result.by_dataset.items():
            self._write("dev_sets.csv", DEV_SET_COLUMNS, {"step": step, "set": name, "wer": rate})
        self._scalars("dev", step, values | result.by_dataset)
        if self._main:
            samples = self.folder / "samples"
            samples.mkdir(exist_ok=True)
            shown = spread(result.clips, _SHOWN)
            lines = [f"{clip.id}\n  said:  {clip.said}\n  heard: {clip.heard}\n" for clip in shown]
            (samples / f"step-{step:08}.txt").write_text("\n".join(lines), encoding="utf-8")

    def skipped(self, step: int, failures: Iterable[Failure]) -> None:
        """Name clips that could not be read; every rank calls it with all ranks' failures."""
        if not self._main:
            return
        with (self.folder / "skipped.jsonl").open("a", encoding="utf-8") as file:
            for failure in failures:
                record = {"step": step, "id": failure.id, "reason": failure.reason}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Flush what is buffered."""
        if self._events is not None:
            self._events.close()

    def _write(self, name: str, columns: tuple[str, ...], values: Mapping[str, Any]) -> None:
        if not self._main:
            return
        with (self.folder / name).open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([_cell(values[column]) for column in columns])

    def _scalars(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        if self._events is None:
            return
        for name, value in values.items():
            if name != "step" and value is not None and math.isfinite(value):
                self._events.add_scalar(f"{group}/{name}", value, step)


def read_csv(path: Path) -> list[dict[str, float]]:
    """The lines of log.csv or dev.csv as numbers; nan where a cell is empty."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: float(cell) if cell else math.nan for name, cell in row.items()} for row in rows]


def _start_csv(path: Path, columns: tuple[str, ...], resume_at: int) -> None:
    """Write the header, and keep the lines of steps that a resumed run has behind it."""
    kept: list[list[str]] = []
    if resume_at and path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.reader(file) if row and row[0].isdigit() and int(row[0]) <= resume_at]
    temporary = path.with_suffix(".part")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *kept])
    temporary.replace(path)


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _tensorboard(folder: Path, resume_at: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=resume_at + 1 if resume_at else None)
