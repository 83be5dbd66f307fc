"""Curves of a run as PNG, from its log.csv and dev.csv."""

from pathlib import Path
from typing import Any

from whisfusion.train.log import BIN_COLUMNS, read_csv


def draw_plots(folder: Path) -> list[Path]:
    """Write loss.png and, with a dev set, wer.png. Raises ImportError where matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def start(title: str, unit: str) -> tuple[Any, Any]:
        figure = Figure(figsize=(8, 5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.grid(alpha=0.3)
        return figure, axes

    rows = read_csv(folder / "log.csv")
    steps = [row["step"] for row in rows]
    figure, axes = start("Training loss by mask ratio", "cross-entropy (nats per token)")

    def curve(column: str, label: str, color: tuple[float, float, float], width: float) -> None:
        values = [row[column] for row in rows]
        # What a run does not learn from is 0 throughout, or never there.
        if any(value > 0 for value in values):
            axes.plot(steps, values, color=color, linewidth=width, label=label)

    for place, column in enumerate(BIN_COLUMNS):
        curve(column, f"t from {column[5:]}", (0.2, 0.4, 0.25 + 0.7 * place / len(BIN_COLUMNS)), 0.8)
    curve("loss", "all", (0.0, 0.0, 0.0), 1.8)
    curve("ctc", "the adapter's CTC (nats per letter)", (0.8, 0.3, 0.1), 1.2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(fontsize="small", ncols=2)
    drawn = [folder / "loss.png"]
    figure.savefig(drawn[0], dpi=120)

    evaluated = read_csv(folder / "dev.csv")
    if evaluated:
        figure, axes = start("Dev set", "WER (%)")
        axes.plot([row["step"] for row in evaluated], [100 * row["wer"] for row in evaluated], marker="o")
        axes.set_ylim(bottom=0)
        drawn.append(folder / "wer.png")
        figure.savefig(drawn[-1], dpi=120)
    return drawn
