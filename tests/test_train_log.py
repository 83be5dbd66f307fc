import io
import math

import pytest
import torch
from small_run import small_recipe
from test_train_step import batch_of, trainer_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from whisfusion.data.batch import Failure
from whisfusion.train.dev import DevClip, DevResult
from whisfusion.train.display import Lines, LiveBar, Silent, describe, duration, make_display
from whisfusion.train.flops import decoder_flops, encoder_flops, matrix_peak, measured_peak
from whisfusion.train.log import LOG_COLUMNS, RunLog, read_csv
from whisfusion.train.masking import BINS
from whisfusion.train.meter import Meter, Speed
from whisfusion.train.plots import draw_plots
from whisfusion.train.state import Progress
from whisfusion.train.trainer import Readings

READINGS = Readings(
    loss=1.25,
    quantity=0.1,
    language=math.nan,
    ctc=0.0,
    placing=0.0,
    consistency=0.0,
    gradient_norm=2.0,
    by_bin=(math.nan, *[0.5] * (BINS - 1)),
    utterances=64,
)
SPEED = Speed(ms_per_step=50, utterances_per_second=320, memory_gb=1.5, peak_share=0.42)

DEV_CLIPS = (
    DevClip("a", "en", "books", "what was said", "what was heard", edits=1, length=3),
    DevClip("b", "en", "news", "yes", "yes", edits=0, length=1),
    DevClip("c", "zh", "news", "好", "", edits=1, length=1),
)


def write(log: RunLog, *steps: int) -> None:
    for step in steps:
        log.step(step, 0, 3e-4, READINGS, SPEED, Progress(utterances=64 * step, seconds=3600))
        log.dev(step, DevResult(DEV_CLIPS))


def test_a_line_holds_what_its_header_says(tmp_path):
    log = RunLog(tmp_path, main=True)
    write(log, 10)
    log.close()
    [row] = read_csv(tmp_path / "log.csv")
    assert tuple(row) == LOG_COLUMNS
    assert (row["step"], row["loss"], row["hours"], row["peak_share"]) == (10, 1.25, 1, 0.42)
    assert math.isnan(row["language"])
    assert math.isnan(row["loss_0.0"])
    assert row["loss_0.9"] == 0.5
    [dev] = read_csv(tmp_path / "dev.csv")
    # Languages count alike, whatever their numbers of clips: (1 / 4 + 1) / 2.
    assert dev == {"step": 10, "wer": 0.625, "clips": 3, "words": 5}
    lines = (tmp_path / "dev_sets.csv").read_text().split()
    assert lines == ["step,set,wer", "10,en/books,0.333333", "10,en/news,0", "10,zh/news,1"]
    assert "heard: what was heard" in (tmp_path / "samples" / "step-00000010.txt").read_text()


def test_a_resumed_log_forgets_what_will_come_again(tmp_path):
    log = RunLog(tmp_path, main=True)
    write(log, 10, 20, 30)
    log.close()
    log = RunLog(tmp_path, main=True, resume_at=20)
    assert [row["step"] for row in read_csv(tmp_path / "log.csv")] == [10, 20]
    write(log, 30)
    log.close()
    assert [row["step"] for row in read_csv(tmp_path / "dev.csv")] == [10, 20, 30]


def test_only_the_main_rank_writes(tmp_path):
    log = RunLog(tmp_path / "none", main=False)
    write(log, 10)
    log.skipped(10, [Failure("a", "why")])
    assert not (tmp_path / "none").exists()


def test_plots_are_drawn_from_the_csv(tmp_path):
    pytest.importorskip("matplotlib")
    log = RunLog(tmp_path, main=True)
    write(log, 10, 20)
    log.close()
    assert [path.name for path in draw_plots(tmp_path)] == ["loss.png", "wer.png"]
    assert (tmp_path / "loss.png").read_bytes()[1:4] == b"PNG"


def test_a_line_for_people_has_the_numbers_they_watch(capsys):
    with Lines(steps=100) as display:
        display.show(40, READINGS, SPEED, hours=1.0)
    said = capsys.readouterr().err
    for part in ("step 40/100", "loss 1.250", "320 utt/s", "1.0 h heard", "1.5 GB", "42 % of peak", "0:03 left"):
        assert part in said
    assert duration(3723) == "1:02:03"


def test_the_bar_shows_the_same(monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", stream)
    display = make_display(100, main=True)
    assert isinstance(display, LiveBar)
    with display:
        display.say("a sentence [with brackets]")
        display.advance(39)
        display.show(40, READINGS, SPEED, hours=1.0)
    assert "a sentence [with brackets]" in stream.getvalue()
    assert "40/100" in stream.getvalue()
    assert describe(READINGS, SPEED, 1.0).startswith("loss 1.250")


def test_other_ranks_are_silent():
    assert type(make_display(10, main=False)) is Silent


@pytest.mark.parametrize(
    ("block", "adapter", "stride", "reach", "speller"),
    [
        ("paper", "0", "1", "0", "0"),
        ("whisper", "0", "1", "0", "0"),
        ("paper", "2", "1", "0", "0"),
        ("paper", "2", "2", "0", "0"),
        ("paper", "2", "2", "5", "0"),
        ("paper", "1", "2", "0", "2"),
    ],
)
def test_flops_are_those_that_torch_counts(block, adapter, stride, reach, speller):
    """Against torch's own counter, which sees every matrix product of a real step."""
    shape = {"decoder.block": block, "decoder.adapter": adapter, "decoder.stride": stride, "decoder.reach": reach}
    recipe = small_recipe(**shape, decoder__speller=speller, decoder__tied="false", decoder__layers="2")
    trainer, batch = trainer_of(recipe), batch_of([0, 1, 2, 3, 4, 5])
    predicted = []
    trainer.objective.register_forward_pre_hook(lambda _, args: predicted.append(len(args[2].where_R)))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        trainer.step((batch,))
    expected = encoder_flops(trainer.encoder.config, 6, 40) + decoder_flops(
        recipe.decoder, 6, 20, audio_positions=20, predicted=predicted[0]
    )
    # The vocabulary is rounded up, and gradients that nobody needs (of the audio) are not computed.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)


def test_the_peak_is_measured_where_it_is_asked_for():
    cpu = torch.device("cpu")
    assert matrix_peak(cpu) is None
    assert measured_peak(cpu, torch.float32) > 1e8


def test_the_meter_counts_what_was_trained_on():
    trainer, batch = trainer_of(small_recipe()), batch_of([0, 1, 2, 3, 4, 5])
    meter = Meter(trainer)
    for _ in range(2):
        trainer.step((batch,))
        meter.add((batch,))
    counted = meter.read()
    assert (counted.utterances, counted.seconds) == (12, 2.0)
    assert counted.speed.ms_per_step == pytest.approx(500 * counted.train_seconds)
    assert counted.speed.memory_gb > 0.1
    assert meter.read().utterances == 0
