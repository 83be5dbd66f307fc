"""Parallel Diffusion Decoding with a scripted predictor: no model, known answers."""

import math

import pytest
import torch

from whisfusion import pdd, sampling
from whisfusion.errors import OptionError
from whisfusion.pdd import PAPER_TRAJECTORY, PDDOptions, draw_uniforms, parallel_decode
from whisfusion.sampling import sample
from whisfusion.tokenizer import ENDOFTEXT, MASK, SAMPLEABLE

PROMPT = [50258, 50259, 50360, 50364]


class Script:
    """Predicts target token i at position i with a fixed margin, and remembers what it was shown."""

    def __init__(self, targets: list[list[int]], canvas: int, margin: float = 40.0, vocabulary: int = SAMPLEABLE):
        self.canvas_BL = torch.full((len(targets), canvas), ENDOFTEXT)
        for row, target in enumerate(targets):
            target = target[: canvas - len(PROMPT)]
            self.canvas_BL[row, len(PROMPT) : len(PROMPT) + len(target)] = torch.tensor(target)
        self.margin, self.vocabulary = margin, vocabulary
        self.seen: list[torch.Tensor] = []

    def states(self, tokens_BKL, draft):
        self.seen.append(tokens_BKL.clone())
        length = tokens_BKL.shape[2]
        return self.canvas_BL[:, None, :length, None].expand(*tokens_BKL.shape, 1).float()

    def logits(self, states_RD):
        logits_RV = torch.zeros(len(states_RD), self.vocabulary)
        return logits_RV.scatter_(1, states_RD.long(), self.margin)


class Dice(Script):
    """The same distribution over three tokens everywhere."""

    def logits(self, states_RD):
        logits_RV = torch.full((len(states_RD), SAMPLEABLE), -1e9)
        logits_RV[:, [10, 11, 12]] = torch.tensor([0.5, 0.3, 0.2]).log()
        return logits_RV


def decode(predictor, canvas, options, seeds=None, trace=False):
    rows = len(predictor.canvas_BL)
    prompts = torch.tensor([PROMPT] * rows)
    return parallel_decode(predictor, prompts, canvas, seeds or list(range(rows)), options, trace=trace)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("remask", ["random", "confidence"])
def test_recovers_the_target_for_every_number_of_steps(steps, remask):
    targets = [[5, 6, 7, 8, 9, 10, 11], [42], []]
    predictor = Script(targets, canvas=24)
    options = PDDOptions(candidates=3, steps=steps, remask=remask)
    decoded = decode(predictor, [24, 24, 24], options, trace=True)
    for pool, target in zip(decoded.candidates, targets, strict=True):
        assert len(pool) == 3
        assert all(list(candidate.tokens) == target for candidate in pool)
        assert all(candidate.confidence > -1e-3 for candidate in pool)
        assert all(len(candidate.logprobs) == len(target) + 1 for candidate in pool)
    assert len(decoded.trace) == steps
    assert not (decoded.trace[-1].tokens_BKL == MASK).any()


def test_the_prompt_is_kept_and_never_masked():
    predictor = Script([[5, 6, 7]] * 2, canvas=32)
    decode(predictor, [32, 16], PDDOptions(candidates=4))
    assert len(predictor.seen) == 3
    for tokens_BKL in predictor.seen:
        assert (tokens_BKL[..., : len(PROMPT)] == torch.tensor(PROMPT)).all()


def test_a_canvas_of_its_own_length_is_not_written_past():
    predictor = Script([[5] * 20, [5] * 20], canvas=32)
    decoded = decode(predictor, [32, 16], PDDOptions(candidates=2))
    assert [len(pool[0].tokens) for pool in decoded.candidates] == [20, 12]
    for tokens_BKL in predictor.seen:
        assert (tokens_BKL[1, :, 16:] == ENDOFTEXT).all()


def test_the_mask_rate_of_each_step_is_the_trajectorys():
    canvas, rows, candidates = 204, 40, 5
    trajectory = (1.0, 0.75, 0.4, 0.1)
    predictor = Script([[7] * 200] * rows, canvas=canvas)
    decode(predictor, [canvas] * rows, PDDOptions(candidates=candidates, steps=4, trajectory=trajectory))
    assert predictor.seen[0].shape[1] == 1
    for tokens_BKL, ratio in zip(predictor.seen, trajectory, strict=True):
        masked = (tokens_BKL[..., len(PROMPT) :] == MASK).float()
        error = math.sqrt(ratio * (1 - ratio) / masked.numel())
        assert abs(masked.mean().item() - ratio) <= 4 * error


def test_what_is_not_masked_keeps_its_token():
    predictor = Dice([[0]] * 4, canvas=64)
    decoded = decode(predictor, [64] * 4, PDDOptions(candidates=5, temperature=1.0), trace=True)
    for before, after in zip(decoded.trace, decoded.trace[1:], strict=False):
        kept = ~after.masked_BKL
        assert kept.any()
        assert (before.tokens_BKL[kept] == after.tokens_BKL[kept]).all()


def test_what_follows_endoftext_is_padding_before_the_next_step():
    class Early(Script):
        """Says endoftext at its third position and text after it."""

        def states(self, tokens_BKL, draft):
            states = super().states(tokens_BKL, draft).clone()
            states[:, :, len(PROMPT) + 2] = ENDOFTEXT
            return states

    predictor = Early([[9] * 20], canvas=24)
    decoded = decode(predictor, [24], PDDOptions(candidates=3), trace=True)
    assert all(candidate.tokens == (9, 9) for candidate in decoded.candidates[0])
    for step in decoded.trace:
        assert (step.tokens_BKL[..., len(PROMPT) + 2 :] == ENDOFTEXT).all()
        assert (step.logprobs_BKL[..., len(PROMPT) + 3 :] < -30).all()  # endoftext was not likely there


def test_an_end_that_was_never_written_is_no_certainty():
    class Fickle(Script):
        """Ends after four tokens in the first step, and in all later ones would rather write on."""

        def states(self, tokens_BKL, draft):
            self.seen.append(tokens_BKL.clone())
            return torch.arange(tokens_BKL.shape[2]).float()[:, None].expand(*tokens_BKL.shape, 1)

        def logits(self, states_RD):
            logits_RV = torch.zeros(len(states_RD), SAMPLEABLE)
            logits_RV[:, 7] = 12.0
            if len(self.seen) == 1:
                logits_RV[states_RD[:, 0] == len(PROMPT) + 4, ENDOFTEXT] = 40.0
            return logits_RV

    pool = decode(Fickle([[7] * 4], canvas=40), [40], PDDOptions(candidates=8)).candidates[0]
    # Padding that was kept now ends the text. The model never wrote that end, and was far from it.
    longer = [candidate for candidate in pool if candidate.complete and len(candidate.tokens) > 4]
    assert longer
    assert all(candidate.logprobs[-1] < -10 for candidate in longer)


def test_nothing_is_asked_about_what_follows_a_kept_end(monkeypatch):
    class Counted(Script):
        """Ends at chance, and counts the positions that it is asked about."""

        asked = 0

        def logits(self, states_RD):
            self.asked += len(states_RD)
            logits_RV = torch.full((len(states_RD), SAMPLEABLE), -1e9)
            logits_RV[:, [10, 11, ENDOFTEXT]] = torch.tensor([0.5, 0.4, 0.1]).log()
            return logits_RV

    options = PDDOptions(candidates=5, temperature=1.0)
    sparing = Counted([[0]] * 3, canvas=64)
    decoded = decode(sparing, [64, 64, 32], options)
    ended, calls = pdd.ended, iter(range(2 * options.steps))
    # The first of the two calls in a step says what need not be asked.
    monkeypatch.setattr(pdd, "ended", lambda *a: ended(*a) if next(calls) % 2 else torch.zeros_like(ended(*a)))
    thorough = Counted([[0]] * 3, canvas=64)
    assert decode(thorough, [64, 64, 32], options).candidates == decoded.candidates
    assert sparing.asked < 0.6 * thorough.asked


def test_each_step_is_shown_what_the_one_before_wrote():
    drafts = []

    class Listener(Dice):
        def states(self, tokens_BKL, draft):
            drafts.append(draft)
            return super().states(tokens_BKL, draft)

    predictor = Listener([[0]] * 2, canvas=16)
    trace = decode(predictor, [16, 16], PDDOptions(candidates=3, temperature=1.0), trace=True).trace
    assert drafts[0] is None
    for draft, step in zip(drafts[1:], trace[:-1], strict=True):
        assert (draft.tokens_GL == step.tokens_BKL).all()
        assert torch.equal(draft.probabilities_GL, step.logprobs_BKL.exp())


def test_a_full_canvas_is_told():
    predictor = Script([[5] * 20, [5] * 3], canvas=16)
    pools = decode(predictor, [16, 16], PDDOptions(candidates=1)).candidates
    assert [pool[0].complete for pool in pools] == [False, True]


def test_sharing_the_first_step_does_not_change_the_distribution():
    counts = {}
    for shared in (True, False):
        predictor = Dice([[0]] * 50, canvas=64)
        options = PDDOptions(candidates=5, steps=1, temperature=1.0, share_first_step=shared)
        decoded = decode(predictor, [64] * 50, options)
        tokens = torch.tensor([c.tokens for pool in decoded.candidates for c in pool])
        assert tokens.shape == (250, 60)
        counts[shared] = torch.stack([(tokens == token).float().mean() for token in (10, 11, 12)])
        expected = torch.tensor([0.5, 0.3, 0.2])
        assert (counts[shared] - expected).abs().max() < 4 * math.sqrt(0.25 / tokens.numel())
        # Candidates are drawn independently: two agree at a position with probability 0.25 + 0.09 + 0.04.
        first, second = tokens[0::5], tokens[1::5]
        assert abs((first == second).float().mean().item() - 0.38) < 4 * math.sqrt(0.38 * 0.62 / first.numel())
    # With the same uniforms the tokens themselves are the same.
    assert torch.equal(counts[True], counts[False])


def test_one_candidate_one_step_greedy_is_argmax():
    class Noise(Script):
        def logits(self, states_RD):
            self.asked = torch.randn(len(states_RD), SAMPLEABLE, generator=torch.Generator().manual_seed(3))
            self.asked[:, ENDOFTEXT] = -9
            return self.asked

    predictor = Noise([[0]], canvas=40)
    decoded = decode(predictor, [40], PDDOptions(candidates=1, steps=1, temperature=0))
    assert list(decoded.candidates[0][0].tokens) == predictor.asked.argmax(1).tolist()


def test_a_clips_draws_depend_on_its_seed_alone():
    lengths = [16, 64, 32, 48, 24, 64, 16, 40]
    options = PDDOptions(candidates=3, temperature=1.0)
    alone = [decode(Dice([[0]], n), [n], options, seeds=[seed]).candidates[0] for seed, n in enumerate(lengths)]
    together = decode(Dice([[0]] * 8, 64), lengths, options, seeds=list(range(8))).candidates
    assert together == alone
    assert alone[1] != alone[5]


def test_more_candidates_are_the_same_ones_and_some_more():
    few = decode(Dice([[0]], 40), [40], PDDOptions(candidates=2, temperature=1.0)).candidates[0]
    many = decode(Dice([[0]], 40), [40], PDDOptions(candidates=7, temperature=1.0)).candidates[0]
    assert many[:2] == few


def test_confidence_remasking_keeps_the_most_confident():
    class Slope(Script):
        """Is surer of later positions."""

        def states(self, tokens_BKL, draft):
            self.seen.append(tokens_BKL.clone())
            position = torch.arange(tokens_BKL.shape[2]).float()
            return position[:, None].expand(*tokens_BKL.shape, 1)

        def logits(self, states_RD):
            logits_RV = torch.zeros(len(states_RD), SAMPLEABLE)
            logits_RV[:, 7] = 9 + 0.2 * states_RD[:, 0]
            return logits_RV

    predictor = Slope([[7] * 20], canvas=24)
    decode(predictor, [24], PDDOptions(candidates=2, remask="confidence", temperature=0))
    second, third = ((seen[0, 0] != MASK).nonzero()[len(PROMPT) :, 0].tolist() for seen in predictor.seen[1:])
    assert second == [22, 23]  # floor((1 - 0.9) * 20)
    assert third == [20, 21, 22, 23]  # floor((1 - 0.8) * 20)


def test_sampling_inverts_the_cumulative_distribution():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    uniforms = torch.tensor([[0.0, 0.099, 0.101, 0.299, 0.301, 0.599, 0.601, 0.999999]])
    ids, total = sample(logits, uniforms, temperature=1.0)
    assert ids.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]]
    assert total.item() == pytest.approx(0.0, abs=1e-6)
    # At a lower temperature the total, of which log-probabilities are made, is still that of temperature 1.
    ids, total = sample(logits, torch.tensor([[0.5]]), temperature=0.1)
    assert ids.tolist() == [[3]]
    assert total.item() == pytest.approx(0.0, abs=1e-6)
    # A uniform of 0 does not draw what is impossible.
    assert sample(torch.tensor([[-100.0, 0.0]]), torch.zeros(1, 1), temperature=0.1)[0].item() == 1


@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("columns", [900, 5000, 50_258])
def test_sampling_among_the_likely_is_sampling_among_all(temperature, columns, monkeypatch):
    generator = torch.Generator().manual_seed(columns)
    logits_RV = torch.randn(200, columns, generator=generator)
    # A few likely tokens in each row, the last column often among them, and some that are not allowed.
    for _ in range(5):
        where_R1 = torch.randint(columns, (200, 1), generator=generator)
        logits_RV.scatter_(1, where_R1, 9 + torch.randn(200, 1, generator=generator))
    logits_RV[::2, -1] = 10
    logits_RV[:, 5::7] = -math.inf
    uniforms_RC = torch.rand(200, 6, generator=generator)
    uniforms_RC[:, 0], uniforms_RC[:, 1] = 2**-18, 1 - 2**-18
    drawn_RC, total_R1 = sample(logits_RV, uniforms_RC, temperature)
    likely, found = sampling._likely, []
    monkeypatch.setattr(sampling, "_likely", lambda *arguments: found.append(likely(*arguments)))
    assert torch.equal(sample(logits_RV, uniforms_RC, temperature)[0], drawn_RC)
    assert (found[0] is None) == (columns == 900 or temperature == 1)
    assert torch.allclose(total_R1, logits_RV.logsumexp(1, keepdim=True), atol=1e-5)
    assert torch.isfinite(logits_RV.gather(1, drawn_RC)).all()


def test_default_trajectories_are_the_papers():
    assert PDDOptions().ratios == (1.0, 0.9, 0.8)
    assert [len(PDDOptions(steps=n).ratios) for n in range(1, 6)] == [1, 2, 3, 4, 5]
    assert PDDOptions(steps=5).ratios == PAPER_TRAJECTORY


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"candidates": 0}, ["candidates (K) must be at least 1"]),
        ({"steps": 0}, ["steps (N) must be at least 1"]),
        ({"steps": 6}, ["6 steps need a trajectory"]),
        ({"trajectory": (1.0, 0.5)}, ["3 steps has 3 ratios, not 2"]),
        ({"trajectory": (0.9, 0.8, 0.7)}, ["starts at 1"]),
        ({"trajectory": (1.0, 1.8, 0.7)}, ["between 0 and 1"]),
        ({"temperature": -1}, ["temperature"]),
        ({"temperature": 1e-46}, ["temperature"]),
        ({"candidates": 2.5, "trajectory": ("1", "0.9")}, ["candidates must be a whole number", "must be numbers"]),
        ({"candidates": 0, "steps": 0, "remask": "best", "temperature": math.nan}, ["(K)", "(N)", "remask", "temper"]),
    ],
)
def test_bad_options_are_named_all_at_once(options, words):
    with pytest.raises(OptionError) as caught:
        PDDOptions(**options)
    assert all(word in str(caught.value) for word in words)


def test_uniforms_are_a_function_of_the_seed():
    options = PDDOptions()
    first, again, other = (draw_uniforms(seed, options, 32) for seed in (1, 1, 2))
    assert first.shape == (5, 3, 2, 32)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
