"""runs/ablations.py on a few clips, and the table that benchmarks/ablations.py makes of its rows."""

import importlib.util
import json

import pytest
from conftest import ROOT, load_benchmark
from small_run import CLIPS, SMALL

from whisfusion.errors import OptionError
from whisfusion.train import RECIPES, launch

# The recipe `tiny` in the place of `trial`, whose encoder is no part of this package.
WORDS = [word for name, text in SMALL.items() if name != "steps" for word in (f"--{name}", text)]


@pytest.fixture
def made():
    spec = importlib.util.spec_from_file_location("made", ROOT / "runs" / "ablations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def speech(tmp_path):
    for kind in ("train", "dev"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "tiny-en-000.tar").symlink_to(CLIPS / "tiny-en-000.tar")
        for number, name in enumerate(("librispeech-en", "commonvoice-en", "ljspeech-en")):
            lines = []
            for line in (CLIPS / "tiny-en.jsonl").read_text("utf-8").splitlines()[4 * number : 4 * number + 4]:
                lines.append(json.dumps(json.loads(line) | {"dataset": name}))
            (tmp_path / kind / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return tmp_path


def test_every_row_is_a_recipe_that_can_be_prepared(made, tmp_path):
    assert len(made.ALL) == len({*made.ALL}) == len(made.ROWS) + len(made.TWICE)
    args, settings = made.parse_args([str(tmp_path), str(tmp_path / "out"), "--steps", "100"])
    for text in made.ALL:
        asked = made.asked(args, settings, text)
        assert asked.recipe in RECIPES
        assert (asked.settings["seed"], asked.resume) == (text.partition(":")[2] or "42", False)
    with pytest.raises(OptionError, match="there is no row cake"):
        made.asked(args, settings, "cake")


def test_rows_share_a_process_and_come_to_one_table(made, speech, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES, "trial", RECIPES["tiny"])
    banks = []
    build = launch.build_bank
    monkeypatch.setattr(launch, "build_bank", lambda *a, **k: banks.append(1) or build(*a, **k))
    options = ["--steps", "3", "--device", "cpu", "--workers", "1", "--feeder", "bank", *WORDS]
    assert made.main([str(speech), str(tmp_path / "one"), "trial", "no_anchors", *options]) == 0
    assert len(banks) == 1
    said = capsys.readouterr().out
    assert said.index("trial-42 is done") < said.index("no_anchors-42 is done")
    config = json.loads((tmp_path / "one" / "no_anchors-42" / "config.json").read_text())
    assert (config["recipe"]["decoder"]["anchors"], config["recipe"]["steps"]) == (False, 3)
    # What is there is not made again, and what another day brings comes to the same table.
    assert made.main([str(speech), str(tmp_path / "one"), "trial", *options]) == 0
    assert made.main([str(speech), str(tmp_path / "two"), "trial:43", *options]) == 0
    assert len(banks) == 2

    table = load_benchmark("ablations")
    (tmp_path / "two" / "cut-42").mkdir()
    (tmp_path / "two" / "cut-42" / "n1.jsonl").touch()
    out, dev = tmp_path / "table.json", [str(speech / "dev" / f"{name}.jsonl") for name in made.DEV]
    table.main([str(tmp_path / "one"), str(tmp_path / "two"), "--data", *dev, "--out", str(out)])
    assert "cut-42 is not decoded to the end" in capsys.readouterr().err
    rows = json.loads(out.read_text())["rows"]
    assert [(row["row"], row["seed"], row["steps"]) for row in rows] == [
        ("no_anchors", 42, 3),
        ("trial", 42, 3),
        ("trial", 43, 3),
    ]
    assert set(rows[0]["dev"]) == {"librispeech-en", "commonvoice-en"}
    with pytest.raises(SystemExit, match="more than one folder is called"):
        table.main([str(tmp_path / "one"), str(tmp_path / "one"), "--data", *dev])
