"""The page that a run ends with: what was trained, on what, how fast and how well."""

from pathlib import Path

from whisfusion.train.display import duration
from whisfusion.train.log import read_csv
from whisfusion.train.state import TrainState


def write_report(folder: Path, state: TrainState, name: str, *, finished: bool) -> Path:
    """Write report.md from the run's own files and counts."""
    progress, trainer = state.progress, state.trainer
    rows, evaluated = read_csv(folder / "log.csv"), read_csv(folder / "dev.csv")
    lines = [
        f"# Run {folder.name}: recipe {name}",
        "",
        f"{'Finished' if finished else 'Stopped'} at step {trainer.step_number:,} of {trainer.steps:,}, after "
        f"{duration(progress.train_seconds)} of training: {progress.utterances:,} utterances, "
        f"{progress.seconds / 3600:,.1f} h of speech heard.",
    ]
    if progress.clips_failed:
        lines += ["", f"{progress.clips_failed} clips could not be read and were left out: see skipped.jsonl."]
    if rows:
        last = rows[-1]
        lines += [
            "",
            f"Loss {last['loss']:.3f} at the end; {last['ms_per_step']:.0f} ms a step, "
            f"{last['utterances_per_second']:.0f} utterances/s, {last['memory_gb']:.1f} GB.",
        ]
    if evaluated and progress.best_wer is not None:
        lines += [
            "",
            f"Dev WER {100 * evaluated[-1]['wer']:.2f} % at the end, {100 * progress.best_wer:.2f} % at its best "
            f"(step {progress.best_step:,}, in `best/`), over {evaluated[-1]['clips']:.0f} clips.",
        ]
    lines += [f"\n![{plot.stem}]({plot.name})" for plot in sorted(folder.glob("*.png"))]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
