"""The model that comes with the package: it is whole, small enough, and hears what is said."""

import json
from pathlib import Path

import numpy as np
import pytest

import whisfusion
from whisfusion import checkpoint, hub
from whisfusion.data.manifest import read_manifest
from whisfusion.normalise import edit_distance, units

FOLDER = hub.resolve("base")
CLIPS = Path(__file__).parent.parent / "examples" / "examples.jsonl"
MOST_MEGABYTES, MOST_MIB_A_FILE = 90, 48
ENGLISH_WER = 0.10
"""Over the English example clips."""


@pytest.fixture(scope="module")
def transcriber() -> whisfusion.Transcriber:
    return whisfusion.load()


def test_it_is_small_and_needs_nothing_else():
    files = list(FOLDER.iterdir())
    assert sum(file.stat().st_size for file in files) < MOST_MEGABYTES * 1e6
    assert max(file.stat().st_size for file in files) < MOST_MIB_A_FILE * 2**20
    config, listed = checkpoint.read_config(FOLDER)
    assert any(name.startswith("encoder") for name in listed)
    assert config.text_style == "written"
    assert config.detects_language
    assert set(config.experimental) < set(config.languages)
    assert "/" not in json.dumps(config.training) + config.encoder_name


def test_it_hears_english(transcriber: whisfusion.Transcriber):
    clips = [clip for clip in read_manifest(CLIPS) if clip.language == "en"]
    heard = transcriber.transcribe([clip.file for clip in clips], language="en")
    edits = [edit_distance(units(h.text, "en"), units(c.text, "en")) for h, c in zip(heard, clips, strict=True)]
    assert sum(edits) / sum(len(units(clip.text, "en")) for clip in clips) < ENGLISH_WER


def test_it_tells_english_from_mandarin(transcriber: whisfusion.Transcriber):
    clips = {clip.id: clip for clip in read_manifest(CLIPS)}
    heard = transcriber.transcribe([clips[name].file for name in ("jfk", "en-library", "zh-gongyuan")])
    assert [transcript.language for transcript in heard] == ["en", "en", "zh"]


@pytest.mark.parametrize("level", [0.001, 0.05])
def test_it_writes_nothing_where_nobody_speaks(transcriber: whisfusion.Transcriber, level: float):
    noise = level * np.random.default_rng(0).standard_normal(5 * 16_000).astype(np.float32)
    assert transcriber.transcribe(noise, language="en").text == ""
