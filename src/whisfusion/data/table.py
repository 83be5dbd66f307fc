"""Tables in plain text: what the data commands print, readable in a log file too."""

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return `rows` under `header`, columns aligned: numbers to the right, words to the left."""
    columns = [[name, *cells] for name, *cells in zip(header, *rows, strict=True)]
    padded = [_pad(cells) for cells in columns]
    lines = ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _pad(cells: list[str]) -> list[str]:
    width = max(map(len, cells))
    numeric = all(not cell or cell[0].isdigit() for cell in cells[1:])
    return [cell.rjust(width) if numeric else cell.ljust(width) for cell in cells]
