"""The sampler: the paper's shares, steps that do not hang on ranks or stops, windows that fit."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from whisfusion.data.manifest import Utterance
from whisfusion.data.sampler import START, Place, Sampler, SamplerOptions, apportion
from whisfusion.data.shares import render_shares, share_rows, target_shares
from whisfusion.errors import OptionError

# The paper's table of training data: hours, target share in per cent, boost.
PAPER_TABLE = {
    "en": (51_099, 23.2, 0.31),
    "ja": (5_318, 11.8, 1.51),
    "de": (3_557, 10.4, 2.00),
    "fr": (2_310, 9.2, 2.71),
    "nl": (1_700, 8.4, 3.35),
    "es": (1_631, 8.3, 3.45),
    "ko": (970, 7.1, 4.97),
    "it": (636, 6.2, 6.69),
    "zh": (381, 5.3, 9.52),
    "pl": (354, 5.2, 10.0),
    "pt": (326, 5.1, 10.6),
}
SHARE_TOLERANCE_POINTS = 0.06
BOOST_TOLERANCE = 0.01


def utterance(number, language="en", dataset="a", seconds=5.0):
    return Utterance(str(number), f"{number}.wav", seconds, "text", language, dataset=dataset)


def corpus(sizes, seed=0, low=1.0, high=16.0):
    """Utterances of random durations: sizes maps (language, dataset) to a count."""
    rng = np.random.default_rng(seed)
    buckets = [bucket for bucket, count in sizes.items() for _ in range(count)]
    return [utterance(i, *bucket, float(rng.uniform(low, high))) for i, bucket in enumerate(buckets)]


MIXED = {("en", "a"): 700, ("en", "b"): 150, ("de", "a"): 90, ("zh", "c"): 60}
OPTIONS = {
    "utterances": SamplerOptions(utterances=16, pool=4),
    "seconds": SamplerOptions(
        seconds=480, shapes=(4.0, 8.0, 16.0, 30.0), join=0.25, speeds=(0.9, 1.0, 1.1), margin=0.16
    ),
}


def epoch_of(sampler, epoch=0):
    return [sampler.step(Place(epoch, step)) for step in range(sampler.steps_per_epoch(epoch))]


@pytest.mark.parametrize("language", PAPER_TABLE)
def test_paper_table(language):
    hours = {(name, "all"): row[0] for name, row in PAPER_TABLE.items()}
    _, printed_percent, printed_boost = PAPER_TABLE[language]
    share = target_shares(hours)[language, "all"]
    natural = hours[language, "all"] / sum(hours.values())
    assert abs(100 * share - printed_percent) <= SHARE_TOLERANCE_POINTS
    assert abs(share / natural - printed_boost) <= BOOST_TOLERANCE * printed_boost


def test_datasets_share_a_language_by_the_root_of_their_hours():
    shares = target_shares({("en", "large"): 900.0, ("en", "small"): 100.0, ("de", "only"): 1000.0})
    assert shares["en", "large"] == pytest.approx(0.5 * 30 / 40)
    assert shares["en", "small"] == pytest.approx(0.5 * 10 / 40)
    assert shares["de", "only"] == pytest.approx(0.5)


def test_a_bucket_without_hours_is_refused():
    with pytest.raises(OptionError, match=r"holds 0\.0 hours"):
        target_shares({("en", "a"): 0.0})


def test_share_table_shows_targets_and_boosts():
    rows = share_rows([*(utterance(i, "en", seconds=36.0) for i in range(100)), utterance(100, "de", "b", 3.6)])
    assert [(r.language, r.utterances) for r in rows] == [("de", 1), ("en", 100)]
    assert rows[0].natural == pytest.approx(1 / 1001)
    assert rows[0].boost == pytest.approx(rows[0].target * 1001)
    assert f"{rows[0].boost:.2f}x" in render_shares(rows)


def test_drawn_shares_count_utterances_whatever_their_duration():
    """Ten times longer clips in one bucket: drawn by hours' share, but counted in utterances."""
    utterances = [*(utterance(i, "en", seconds=20.0) for i in range(500)),
                  *(utterance(i, "de", seconds=2.0) for i in range(500, 1000))]  # fmt: skip
    steps = epoch_of(Sampler(utterances, SamplerOptions(utterances=100)))
    drawn = Counter(utterances[draw.clips[0]].language for step in steps for draw in step.draws)
    share = target_shares({("en", "a"): 10_000.0, ("de", "a"): 1_000.0})["en", "a"]
    assert abs(drawn["en"] - 1000 * share) < 1


@pytest.mark.parametrize("kind", OPTIONS)
def test_epochs_draw_each_bucket_its_share(kind):
    utterances = corpus(MIXED)
    sampler = Sampler(utterances, OPTIONS[kind])
    clips = [[i for draw in step.draws for i in draw.clips] for step in epoch_of(sampler)]
    drawn = Counter((utterances[i].language, utterances[i].dataset) for step in clips for i in step)
    fill = drawn.total() - len(utterances)
    assert 0 <= fill < max(map(len, clips))
    assert sum(sampler.draws_per_epoch.values()) == len(utterances)
    hours = {}
    for u in utterances:
        hours[u.language, u.dataset] = hours.get((u.language, u.dataset), 0.0) + u.duration
    for bucket, share in target_shares(hours).items():
        assert abs(sampler.draws_per_epoch[bucket] - share * len(utterances)) <= 1
        assert 0 <= drawn[bucket] - sampler.draws_per_epoch[bucket] <= fill


def test_no_clip_comes_again_before_its_bucket_is_used_up():
    utterances = corpus(MIXED)
    # 1,000 draws in whole steps of 20: nothing is filled up.
    sampler = Sampler(utterances, SamplerOptions(utterances=20))
    heard = Counter(i for e in range(4) for step in epoch_of(sampler, e) for d in step.draws for i in d.clips)
    for bucket in MIXED:
        members = [i for i, u in enumerate(utterances) if (u.language, u.dataset) == bucket]
        counts = [heard[i] for i in members]
        assert max(counts) - min(counts) <= 1


def test_epochs_and_seeds_differ():
    sampler = Sampler(corpus(MIXED), SamplerOptions(utterances=20))
    other = Sampler(corpus(MIXED), SamplerOptions(utterances=20, seed=43))
    assert sampler.step(Place(0, 0)).draws != sampler.step(Place(1, 0)).draws
    assert sampler.step(Place(0, 0)).draws != other.step(Place(0, 0)).draws


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_divide_each_step(kind, world):
    utterances = corpus(MIXED)
    alone = Sampler(utterances, OPTIONS[kind])
    ranks = [Sampler(utterances, OPTIONS[kind], rank=rank, world=world) for rank in range(world)]
    assert {sampler.steps_per_epoch() for sampler in ranks} == {alone.steps_per_epoch()}
    for whole, *parts in zip(epoch_of(alone), *map(epoch_of, ranks), strict=True):
        assert len({len(part.draws) for part in parts}) == 1
        assert {part.window for part in parts} == {whole.window}
        assert {part.total_rows for part in parts} == {len(whole.draws)}
        by_row = {row: draw for part in parts for row, draw in zip(part.rows, part.draws, strict=True)}
        assert [by_row[row] for row in range(len(whole.draws))] == list(whole.draws)


def test_ranks_hear_different_clips():
    """1,000 draws without fill: what one rank hears, the other does not, but for a bucket's second lap."""
    sizes = {("en", "a"): 1000}
    ranks = [Sampler(corpus(sizes), SamplerOptions(utterances=20), rank=r, world=2) for r in range(2)]
    first, second = ({i for s in epoch_of(rank) for d in s.draws for i in d.clips} for rank in ranks)
    assert len(first) == len(second) == 500
    assert not first & second


@pytest.mark.parametrize("kind", OPTIONS)
def test_resume_equals_going_on(kind):
    utterances = corpus(MIXED)
    straight = list(islice(Sampler(utterances, OPTIONS[kind]).steps_from(), 150))
    assert straight[-1].place.epoch >= 1  # the stop below is in the first epoch, the end in a later one
    stopped = Sampler(utterances, OPTIONS[kind])
    done = list(islice(stopped.steps_from(START), 23))
    state = stopped.state_dict(done[-1].next)
    resumed = Sampler(utterances, OPTIONS[kind])
    assert done + list(islice(resumed.steps_from(resumed.load_state_dict(state)), 127)) == straight


def test_resume_may_change_the_number_of_ranks_but_not_the_data():
    utterances = corpus(MIXED)
    options = SamplerOptions(utterances=16)
    state = Sampler(utterances, options).state_dict(Place(1, 2))
    assert Sampler(utterances, options, rank=1, world=2).load_state_dict(state) == Place(1, 2)
    changed = [*utterances[:-1], utterance(999, "zh", "c", 7.77)]
    with pytest.raises(OptionError, match="not those of the checkpoint"):
        Sampler(changed, options).load_state_dict(state)
    with pytest.raises(OptionError, match="not those of the checkpoint"):
        Sampler(utterances, SamplerOptions(utterances=16, seed=1)).load_state_dict(state)


def test_steps_of_utterances_pad_little():
    options = SamplerOptions(utterances=16, pool=16)
    mixed = Sampler(corpus(MIXED), SamplerOptions(utterances=16, pool=1))
    grouped = Sampler(corpus(MIXED), options)
    assert mixed.padding() > 0.4
    assert grouped.padding() < 0.1
    for step in epoch_of(grouped):
        assert len(step.draws) == 16
        assert step.window == max(draw.seconds for draw in step.draws)


def test_steps_of_seconds_have_few_shapes_and_fill_them():
    options = OPTIONS["seconds"]
    sampler = Sampler(corpus({bucket: 4 * count for bucket, count in MIXED.items()}, high=20.0), options)
    steps = epoch_of(sampler)
    rows = {step.window: len(step.draws) for step in steps}
    assert set(rows) == set(options.shapes)
    assert len({(step.window, len(step.draws)) for step in steps}) == len(rows)
    for window, count in rows.items():
        assert count % options.rows_multiple == 0
        assert options.seconds - options.rows_multiple * window < count * window <= options.seconds
    for step in steps:
        assert max(draw.seconds for draw in step.draws) + options.margin <= step.window
    assert sampler.padding() < 0.4


def test_the_trial_shapes():
    """2,000 s of speech like that of the trial: mostly Common Voice, some LibriSpeech."""
    utterances = corpus({("en", "cv"): 6000}, high=10.0) + corpus({("en", "ls"): 900}, high=20.0)
    options = SamplerOptions(seconds=2000, join=0.25, speeds=(0.9, 1.0, 1.1), margin=0.16)
    rows = {step.window: len(step.draws) for step in epoch_of(Sampler(utterances, options))}
    assert rows == {4.0: 496, 6.0: 328, 8.0: 248, 11.0: 176, 16.0: 120, 30.0: 64}


def test_a_corpus_smaller_than_a_step_fills_it():
    sampler = Sampler(corpus({("en", "a"): 10}, high=3.0), SamplerOptions(seconds=480, shapes=(4.0, 30.0)))
    (step,) = epoch_of(sampler)
    assert step.window == 4.0
    assert Counter(draw.clips for draw in step.draws) == {(i,): 12 for i in range(10)}


def test_joined_draws():
    utterances = corpus(MIXED, high=12.0)
    options = SamplerOptions(utterances=10, join=0.25, join_most=4, join_seconds=29.0)
    draws = [draw for step in epoch_of(Sampler(utterances, options)) for draw in step.draws]
    sizes = Counter(len(draw.clips) for draw in draws)
    assert set(sizes) == {1, 2, 3, 4}
    # Clips average 6.5 s: the tries for four often end at three. A quarter of the draws tried.
    assert 0.2 < 1 - sizes[1] / len(draws) < 0.3
    for draw in draws:
        assert len({(utterances[i].language, utterances[i].dataset) for i in draw.clips}) == 1
        assert draw.seconds == pytest.approx(sum(utterances[i].duration for i in draw.clips))
        assert len(draw.clips) == 1 or draw.seconds <= 29.0


def test_joining_and_speed_leave_room_for_the_text():
    utterances = corpus({("en", "a"): 400}, high=8.0)
    tokens = np.array([int(4 * u.duration) for u in utterances])
    options = SamplerOptions(utterances=10, join=1.0, speeds=(0.9, 1.0, 1.1))

    def longest(positions):
        sampler = Sampler(utterances, options, tokens_N=tokens, positions=positions)
        return [
            (int(tokens[list(draw.clips)].sum()), draw.seconds, len(draw.clips), draw.speed)
            for step in epoch_of(sampler)
            for draw in step.draws
        ]

    assert max(text for text, *_ in longest(lambda _: 192)) > 60
    fixed = longest(lambda _: 65)
    assert max(text for text, *_ in fixed) <= 60
    assert max(clips for *_, clips, _ in fixed) > 1

    def tight(seconds):
        return 5 + int(4.2 * seconds)

    following = longest(tight)
    assert all(5 + text <= tight(seconds) for text, seconds, *_ in following)
    speeds = Counter(speed for *_, speed in following)
    assert speeds[1.1] < speeds[0.9] / 2  # sped up, most texts no longer fit


def test_speeds_are_even_and_never_exceed_the_longest_window():
    utterances = [*(utterance(i, seconds=6.0) for i in range(3000)), *(utterance(i, seconds=29.0) for i in range(50))]
    options = SamplerOptions(utterances=50, speeds=(0.9, 1.0, 1.1))
    draws = [draw for step in epoch_of(Sampler(utterances, options)) for draw in step.draws]
    assert all(d.seconds == pytest.approx(utterances[d.clips[0]].duration / d.speed) for d in draws)
    assert max(draw.seconds for draw in draws) <= 30.0
    counts = Counter(draw.speed for draw in draws if utterances[draw.clips[0]].duration == 6.0)
    five_deviations = 5 * (3000 * (1 / 3) * (2 / 3)) ** 0.5
    assert all(abs(counts[speed] - 1000) < five_deviations for speed in options.speeds)


def test_split_into_micro_batches():
    step = Sampler(corpus(MIXED), SamplerOptions(utterances=16), rank=1, world=2).step(START)
    parts = step.split(4)
    assert [len(part.draws) for part in parts] == [2, 2, 2, 2]
    assert sorted(row for part in parts for row in part.rows) == sorted(step.rows)
    assert dict(zip(step.rows, step.draws, strict=True)) == {
        row: draw for part in parts for row, draw in zip(part.rows, part.draws, strict=True)
    }
    with pytest.raises(OptionError, match="3 equal micro-batches"):
        step.split(3)


def test_a_step_past_the_end_of_its_epoch():
    sampler = Sampler(corpus(MIXED), SamplerOptions(utterances=20))
    assert sampler.step(Place(0, 49)).next == Place(1, 0)
    with pytest.raises(IndexError, match="has 50 steps"):
        sampler.step(Place(0, 50))


def test_apportion_is_exact_and_leaves_no_bucket_out():
    shares = {("en", "a"): 0.99989, ("en", "b"): 0.0001, ("de", "c"): 0.00001}
    assert apportion(shares, 1000) == {("en", "a"): 998, ("en", "b"): 1, ("de", "c"): 1}
    assert apportion({("en", "a"): 1 / 3, ("de", "a"): 2 / 3}, 10) == {("en", "a"): 3, ("de", "a"): 7}


def test_options_report_every_problem():
    with pytest.raises(OptionError) as caught:
        SamplerOptions(utterances=8, seconds=2000.0, shapes=(6.0, 4.0), join=1.5, speeds=(0.0,), seed=-1)
    for word in ("one of `utterances` and `seconds`", "`shapes`", "`join`", "`speeds`", "`seed`"):
        assert word in str(caught.value)
    with pytest.raises(OptionError, match="must hold 8 rows"):
        SamplerOptions(seconds=200.0)


def test_what_does_not_fit_together_is_reported_at_once():
    with pytest.raises(OptionError) as caught:
        Sampler([utterance(0, seconds=31.0)], SamplerOptions(utterances=10), rank=3, world=3)
    for words in ("longer than 30 s", "rank 3 is not", "cannot be divided among 3 ranks"):
        assert words in str(caught.value)
    with pytest.raises(OptionError, match="no utterances"):
        Sampler([], SamplerOptions(utterances=10))
    with pytest.raises(OptionError, match="come together"):
        Sampler([utterance(0)], SamplerOptions(utterances=1), tokens_N=np.array([1]))
