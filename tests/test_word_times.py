"""benchmarks/word_times.py: what it counts."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import word_times

from whisfusion.words import Word


def test_lateness_is_of_the_words_that_were_recognised():
    words = [("One", 0.25, 0.5), ("two", 0.7, 1.0), ("three", 1.2, 1.6)]
    heard = (Word(" One,", 0.3, 0.45, 0.9), Word(" too", 0.7, 0.9, 0.2), Word(" three.", 1.1, 1.7, 0.9))
    model = SimpleNamespace(transcribe=lambda *_, **__: SimpleNamespace(segments=[SimpleNamespace(words=heard)]))
    late = list(word_times.lateness(model, np.zeros(1), words, "en"))
    assert np.ravel(late).tolist() == pytest.approx([0.05, -0.05, -0.1, 0.1])


def test_a_word_is_cut_where_its_sound_is():
    sound = np.concatenate((np.zeros(400), 0.5 * np.ones(2000), 0.001 * np.ones(900))).astype(np.float32)
    part = word_times.trimmed(sound)
    assert len(part) == 2000
    assert part[0] == part[-1] == 0
    assert part[1000] == 0.5
