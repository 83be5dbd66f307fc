"""Figures in the docs come from committed measurements."""

import json
from pathlib import Path

import pytest
from conftest import load_benchmark

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))


def load_report():
    return load_benchmark("report")


def test_the_page_of_results_is_what_the_script_writes():
    report = load_report()
    assert report.PAGE.read_text("utf-8") == report.render()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT / "benchmarks" / "results")))
def test_every_result_says_how_it_was_made(path):
    result = json.loads(path.read_text("utf-8"))
    assert {"benchmark", "command", "machine", "versions", "seed"} <= set(result)
