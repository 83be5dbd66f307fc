"""Figures in the docs come from committed measurements."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))


def load_report():
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_results_is_what_the_script_writes():
    report = load_report()
    assert report.PAGE.read_text("utf-8") == report.render()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT / "benchmarks" / "results")))
def test_every_result_says_how_it_was_made(path):
    result = json.loads(path.read_text("utf-8"))
    assert {"benchmark", "command", "machine", "versions", "seed"} <= set(result)
