"""Mends the chosen transcript by small edits that decoder and CTC together find likelier.

A canvas is written side by side, and neighbours may be one place apart: then a piece of a word is there twice, or not
at all. The adapter's CTC reads the audio from its start to its end and makes no such mistakes, but it spells by ear.
So edits are made of what the decoder had in mind for a place and its neighbours, and one is made where it gains more
with both than a threshold. How likely CTC finds an edited text follows from its forward and backward sums over the text
as it is, and a short walk through the bytes that are new. Then words that the decoder was not sure of are compared with
those of a lexicon. All of it is for one utterance, on the host.

Letters: T frames, V classes, N edits, Z bytes of an edit, S states of a text (blank, byte, blank ... blank), M choices.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whisfusion.ctc import BLANK, bytes_to_text
from whisfusion.lexicon import WORD
from whisfusion.pdd import Candidate, Thoughts
from whisfusion.tokenizer import ENDOFTEXT, get_tokenizer

CHOICES = 8
"""How many tokens of each place are kept of what the decoder had in mind."""

# All of these were chosen on dev sets.
_SPELLING = 0.5
"""What a nat of CTC's weighs against one of the decoder's."""
_LEAST_GAIN = 1.0
"""Nats that an edit must gain."""
_COST = 1.0
"""Nats that it takes to change the number of tokens."""
_NEIGHBOUR = 2.0
"""Nats that a token loses which the decoder had in mind for the next place, or the one before."""
_UNTHOUGHT = -10.0
"""Log-probability of a token that the decoder did not think of."""
_WRITTEN_LEAST = -6.0
"""The least log-probability of what other candidates wrote."""
_FIRST_SHARE = 0.3
"""Share of what the decoder thought before anything was written."""
_WORST = -5.0
"""Edits that cost the decoder more are not looked at."""
_APART = 3
"""Tokens between edits that are made at once."""
_LONGEST = 3
"""Tokens that a character may have beside one of its own."""
_ROUNDS = 4
_SURE = -1.0
"""Words that the decoder finds likelier are not looked up."""
_UNTHOUGHT_WORD = -4.0
"""Log-probability of a word of the lexicon that sounds like what was heard."""
_SURPRISE = -6.0
"""The least log-probability of a word that another may replace."""
_EARLIER = 2
"""Frames before a word's first letter that may belong to it."""
_MARGIN = 20
"""Frames, before and after where the text that is edited was heard, in which what is new may be heard."""
_BROKEN = 2.0
"""Nats that a character is worth of which a part is missing, if it is made whole."""
_EDITS_AT_ONCE = 1024


class Edit(NamedTuple):
    """Tokens `first` to `end` of a text become `tokens`, which stand at the places `places`."""

    first: int
    end: int
    tokens: tuple[int, ...]
    places: tuple[int, ...]
    gain: float
    """What the decoder gains, less what the edit costs."""


def repair(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    thoughts: Thoughts,
    bytes_TV: Tensor,
    similar: Callable[[str], Iterable[str]] | None = None,
) -> tuple[int, ...]:
    """The tokens of the chosen candidate after all edits that are worth it.

    thoughts: of the empty canvas, without its prompt. bytes_TV: CTC logits of the utterance. similar: words of the
    language that are spelled like another, of which CTC may have heard one that the decoder did not think of.
    """
    minds = _Minds(chosen, candidates, thoughts)
    draft = _Draft(list(chosen.tokens), list(range(len(chosen.tokens))))
    logp_TV = bytes_TV.detach().cpu().double().log_softmax(-1)
    text = Text.of(logp_TV, draft.tokens)
    for propose in (_propose, lambda *known: _reword(*known, similar) if similar else ()):
        anew: Sequence[int] = range(len(draft.tokens) + 1)
        for _ in range(_ROUNDS):
            if text is None:
                break
            edits = _preferring_whole(draft.tokens, propose(draft, anew, minds, text))
            gains = [edit.gain + _SPELLING * gain for edit, gain in zip(edits, text.gains(edits), strict=True)]
            made = _apart([(gain, edit) for gain, edit in zip(gains, edits, strict=True) if gain > _LEAST_GAIN])
            if not made:
                break
            # Elsewhere nothing changes, and what was not worth it still is not.
            anew = draft.make(made)
            text = Text.of(logp_TV, draft.tokens)
    return tuple(draft.tokens)


@dataclass(frozen=True)
class _Draft:
    """A text that is being edited."""

    tokens: list[int]
    places: list[int]
    """The place of each token on the canvas."""

    def make(self, edits: Sequence[Edit]) -> list[int]:
        """Make edits that are in the order of the text; returns the tokens that are not far from one now."""
        near, shift = set[int](), 0
        for edit in edits:
            first = edit.first + shift
            old = slice(first, edit.end + shift)
            self.tokens[old], self.places[old] = edit.tokens, edit.places
            shift += len(edit.tokens) - (edit.end - edit.first)
            near.update(range(first - _APART - 1, first + len(edit.tokens) + _APART + 1))
        return sorted(near & {*range(len(self.tokens) + 1)})


class _Minds:
    """How likely the decoder finds a token at a place."""

    def __init__(self, chosen: Candidate, candidates: Sequence[Candidate], thoughts: Thoughts) -> None:
        self._first = _tables(thoughts, len(chosen.tokens) + 1)
        for candidate in candidates:
            for table, token, logprob in zip(self._first, candidate.tokens, candidate.logprobs, strict=False):
                table.setdefault(token, max(logprob, _WRITTEN_LEAST))
        self._last = [dict(table) for table in self._first]
        for table, token, logprob in zip(self._last, chosen.tokens, chosen.logprobs, strict=False):
            table[token] = logprob
        self._known: dict[tuple[int, int], float] = {}
        self._choices: dict[int, list[tuple[float, int]]] = {}

    def __call__(self, token: int, place: int) -> float:
        """Log-probability of a token."""
        if (token, place) not in self._known:
            first, last = (_at(tables, token, place) for tables in (self._first, self._last))
            share = _FIRST_SHARE * math.exp(first) + (1 - _FIRST_SHARE) * math.exp(last)
            self._known[token, place] = math.log(share)
        return self._known[token, place]

    def choices(self, place: int) -> list[tuple[float, int]]:
        """What may stand at a place, the likeliest first."""
        if place not in self._choices:
            tokens = {token for table in self._last[max(0, place - 1) : place + 2] for token in table}
            self._choices[place] = sorted(((self(token, place), token) for token in tokens), reverse=True)
        return self._choices[place]


def _tables(thoughts: Thoughts, places: int) -> list[dict[int, float]]:
    rows = zip(thoughts.tokens[:places].tolist(), thoughts.logprobs[:places].tolist(), strict=True)
    tables = [
        {token: logprob for token, logprob in zip(*row, strict=True) if token < ENDOFTEXT and logprob > -np.inf}
        for row in rows
    ]
    return tables + [{} for _ in range(places - len(tables))]


def _at(tables: Sequence[Mapping[int, float]], token: int, place: int) -> float:
    best = tables[place].get(token, _UNTHOUGHT) if 0 <= place < len(tables) else _UNTHOUGHT
    for near in (place - 1, place + 1):
        if 0 <= near < len(tables):
            best = max(best, tables[near].get(token, -np.inf) - _NEIGHBOUR)
    return max(best, _UNTHOUGHT)


def _propose(draft: _Draft, where: Iterable[int], minds: _Minds, _: "Text") -> Iterator[Edit]:
    """At each of the tokens `where`: one less, another, one more before it, and one instead of it and the next.

    The number of tokens is the place after the last. What costs the decoder too much is left out.
    """
    tokens, places = draft.tokens, draft.places
    for j in where:
        place = places[j] if j < len(tokens) else places[-1] + 1
        choices = minds.choices(place)
        for logprob, other in choices:
            gain = max(logprob, minds(other, place - 1)) - _COST
            if gain >= _WORST:
                yield Edit(j, j, (other,), (place,), gain)
        if j == len(tokens):
            continue
        own = minds(tokens[j], place)
        yield Edit(j, j + 1, (), (), -own - _COST)
        for logprob, other in choices:
            if logprob - own < _WORST:
                break
            if other != tokens[j]:
                yield Edit(j, j + 1, (other,), (place,), logprob - own)
        yield from _whole_characters(draft, j, minds)
        if j + 1 == len(tokens):
            continue
        after = places[j + 1]
        both = own + minds(tokens[j + 1], after)
        for other in {other for _, other in (*choices, *minds.choices(after))} - {tokens[j], tokens[j + 1]}:
            gain = max(minds(other, place), minds(other, after)) - both - _COST
            if gain >= _WORST:
                yield Edit(j, j + 2, (other,), (place,), gain)


def _whole_characters(draft: _Draft, j: int, minds: _Minds) -> Iterator[Edit]:
    """Where a token is a part of a character, and perhaps the next one too: two parts that make a whole one."""
    tokens, places, parts = draft.tokens, draft.places, _parts()
    if tokens[j] not in parts:
        return
    spelled = get_tokenizer().token_bytes()
    place, after = places[j], places[j + 1] if j + 1 < len(tokens) else places[j] + 1
    seconds = [other for _, other in {*minds.choices(place), *minds.choices(after)} if other in parts]
    for _, first in minds.choices(place):
        if first not in parts:
            continue
        for second in seconds:
            if not _is_whole(spelled[first] + spelled[second]):
                continue
            both = minds(first, place) + minds(second, after)
            gain = both - minds(tokens[j], place) - _COST
            if gain >= _WORST:
                yield Edit(j, j + 1, (first, second), (place, after), gain)
            if j + 1 < len(tokens) and (first, second) != (tokens[j], tokens[j + 1]):
                gain = both - minds(tokens[j], place) - minds(tokens[j + 1], after)
                if gain >= _WORST:
                    yield Edit(j, j + 2, (first, second), (place, after), gain)


def _preferring_whole(tokens: Sequence[int], edits: Iterable[Edit]) -> list[Edit]:
    """The edits, of which those gain that make characters whole, and those lose that break them."""
    parts = _parts()
    if parts.isdisjoint(tokens):
        return [edit if parts.isdisjoint(edit.tokens) else edit._replace(gain=edit.gain - _BROKEN) for edit in edits]
    found = []
    for edit in edits:
        start, stop = max(0, edit.first - _LONGEST), edit.end + _LONGEST
        before, after = tokens[start : edit.first], tokens[edit.end : stop]
        old, new = (*before, *tokens[edit.first : edit.end], *after), (*before, *edit.tokens, *after)
        if not (parts.isdisjoint(old) and parts.isdisjoint(new)):
            edit = edit._replace(gain=edit.gain + _BROKEN * (_broken(old) - _broken(new)))
        found.append(edit)
    return found


@functools.cache
def _parts() -> frozenset[int]:
    """Tokens that are not whole characters by themselves."""
    return frozenset(token for token, spelled in enumerate(get_tokenizer().token_bytes()) if not _is_whole(spelled))


def _is_whole(spelled: bytes) -> bool:
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True


def _broken(tokens: Iterable[int]) -> int:
    """How many characters of these tokens are not whole."""
    spelled = get_tokenizer().token_bytes()
    return b"".join(spelled[token] for token in tokens).decode(errors="replace").count("\ufffd")


def _reword(
    draft: _Draft, where: Iterable[int], minds: _Minds, text: "Text", similar: Callable[[str], Iterable[str]]
) -> Iterator[Edit]:
    """Instead of each word, or two, that the decoder was not sure of: one that sounds like it."""
    tokenizer, near = get_tokenizer(), set(where)
    words = _words(draft.tokens)
    pairs = [(first, end) for (first, middle), (start, end) in itertools.pairwise(words) if middle == start]
    for first, end in words + pairs:
        places = draft.places[first:end]
        own = sum(map(minds, draft.tokens[first:end], places))
        if own > _SURE or near.isdisjoint(range(first, end)):
            continue
        written = tokenizer.decode(draft.tokens[first:end]).replace(" ", "")
        heard = "".join(WORD.findall(text.heard(first, end)))
        sounds = {sound for sound in (heard.lower(), written.lower()) if len(sound) > 1}
        others = {other for sound in sounds for other in similar(sound)}
        for other in sorted(others - ({written.lower()} if (first, end) in words else set())):
            new = tuple(tokenizer.encode(other.capitalize() if written[0].isupper() else other))
            yield Edit(first, end, new, (places[0],) * len(new), _UNTHOUGHT_WORD - max(own, _SURPRISE))


def _words(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Where words of letters begin and end; each begins with a token that has a space before it."""
    spelled = get_tokenizer().token_bytes()
    pieces = [spelled[token].decode(errors="replace") for token in tokens]
    starts = [i for i, piece in enumerate(pieces) if not (piece.isalpha() or piece == "'")]
    spans = zip(starts, [*starts[1:], len(tokens)], strict=True)
    texts = (("".join(pieces[first:end]), first, end) for first, end in spans)
    return [(first, end) for text, first, end in texts if text[0] == " " and WORD.fullmatch(text[1:])]


def _apart(edits: Sequence[tuple[float, Edit]]) -> list[Edit]:
    """The best of the edits that do not touch each other's surroundings, in the order of the text."""
    made: list[Edit] = []
    for _, edit in sorted(edits, reverse=True):
        if all(edit.first >= other.end + _APART or other.first >= edit.end + _APART for other in made):
            made.append(edit)
    return sorted(made)


@dataclass(frozen=True)
class Text:
    """A text, and CTC's forward and backward sums over it, scaled frame by frame to the likeliest state.

    Times are one later than frames: time 0 is before the first. After the last frame comes the end, and then a time at
    which nothing can be heard.
    """

    starts: np.ndarray
    """Where the bytes of each token begin, and where the last ones end."""
    target: np.ndarray
    """Its bytes as classes, and an end that is unlike any of them."""
    best_T: np.ndarray
    """The likeliest class of each frame."""
    heard_TV: np.ndarray
    """Probability of each class at a time, by how the scale changes with it."""
    blank_TS: np.ndarray
    """Paths that stand, at a time, on the blank after so many bytes."""
    byte_TS: np.ndarray
    """Those that stand on the last of so many bytes."""
    onward_TS: np.ndarray
    """What becomes of a path that comes to a byte at a time, by the text's likelihood."""
    arrivals: np.ndarray
    """When each byte, and the end, was most likely heard."""

    @classmethod
    def of(cls, logp_TV: Tensor, tokens: Sequence[int]) -> "Text | None":
        """From CTC's log-probabilities; None where the text is empty or has no path through the frames."""
        spelled = get_tokenizer().token_bytes()
        target = [1 + byte for token in tokens for byte in spelled[token]]
        frames, count = len(logp_TV), len(target)
        if not count or not frames:
            return None
        starts = np.cumsum([0, *(len(spelled[token]) for token in tokens)])
        bytes_S = torch.tensor(target)
        # The second of the two is the text backwards, whose forward sums are the text's backward sums.
        total, sums = torch._ctc_loss(
            torch.stack((logp_TV, logp_TV.flip(0)), 1),
            torch.stack((bytes_S, bytes_S.flip(0))),
            [frames, frames],
            [count, count],
            BLANK,
            False,
        )
        likelihood = -float(total[0])
        if not np.isfinite(likelihood):
            return None
        there_TS, back_TS = sums[0].numpy(), sums[1].flip(0, 1).numpy()
        level_T = np.concatenate(([0.0], there_TS.max(1)))
        at_TS = np.exp(there_TS - level_T[1:, None])
        blank_TS, byte_TS, onward_TS = np.zeros((3, frames + 3, count + 1))
        blank_TS[0, 0] = 1.0
        blank_TS[1 : frames + 1] = at_TS[:, ::2]
        byte_TS[1 : frames + 1, 1:] = at_TS[:, 1::2]
        onward_TS[1 : frames + 1, :-1] = np.exp(back_TS[:, 1::2] + level_T[:-1, None] - likelihood)
        # The end is heard after the last frame, by paths on the last byte or the blank after it.
        onward_TS[frames + 1, -1] = np.exp(level_T[-1] - likelihood)
        heard_TV = np.zeros((frames + 3, logp_TV.shape[1]))
        heard_TV[1 : frames + 1] = np.exp(logp_TV.numpy() + (level_T[:-1] - level_T[1:])[:, None])
        # Both sums count the frame itself.
        likely_TS = there_TS[:, 1::2] + back_TS[:, 1::2] - logp_TV.numpy()[:, target]
        arrivals = np.append(likely_TS.argmax(0) + 1, frames + 1)
        best_T = logp_TV.argmax(1).numpy()
        return cls(starts, np.array([*target, -1]), best_T, heard_TV, blank_TS, byte_TS, onward_TS, arrivals)

    def heard(self, first: int, end: int) -> str:
        """What CTC spells by itself where it hears the tokens `first` to `end`."""
        start, stop = self.arrivals[self.starts[[first, end]]]
        frames = self.best_T[max(0, start - 1 - _EARLIER) : stop - 1]
        runs = frames[np.diff(frames, prepend=-1) != 0]
        return bytes_to_text(runs[runs != BLANK]).replace("\ufffd", "")

    def gains(self, edits: Sequence[Edit]) -> list[float]:
        """By how much each edit changes CTC's log-likelihood of the text.

        What is heard outside the edit's surroundings is taken to stay where it is: exact but for what is negligible.
        """
        spelled = get_tokenizer().token_bytes()
        new = [[1 + byte for token in edit.tokens for byte in spelled[token]] for edit in edits]
        gains = np.empty(len(edits))
        # Of one length after another: none waits for a longer one.
        order = sorted(range(len(edits)), key=lambda i: len(new[i]))
        for at in range(0, len(order), _EDITS_AT_ONCE):
            some = order[at : at + _EDITS_AT_ONCE]
            firsts, ends = self.starts[[[edits[i].first for i in some], [edits[i].end for i in some]]]
            gains[some] = self._walk(firsts, ends, [new[i] for i in some])
        return gains.tolist()

    def _walk(self, firsts: np.ndarray, ends: np.ndarray, new: Sequence[Sequence[int]]) -> np.ndarray:
        """Log of how much likelier the text is with bytes `firsts` to `ends` replaced by `new`."""
        counts = np.array([len(piece) for piece in new])
        longest = int(counts.max(initial=0))
        new_NZ = np.array([[*piece, *[0] * (longest - len(piece))] for piece in new], dtype=np.int64).reshape(
            -1, longest
        )
        before_N = np.where(firsts > 0, self.target[firsts - 1], -2)
        # What comes before each new byte, and before the byte after the edit.
        line_NZ = np.concatenate((before_N[:, None], new_NZ), axis=1)
        differs_NZ = np.diff(line_NZ, axis=1) != 0
        differs_N = line_NZ[np.arange(len(new)), counts] != self.target[ends]
        begin_N = np.where(firsts > 0, np.maximum(self.arrivals[firsts - 1] - _MARGIN, 1), 1)
        walk = int((self.arrivals[ends] + _MARGIN - begin_N).max(initial=0)) + 1
        rows, total_N = np.arange(len(new)), np.zeros(len(new))
        blank_NZ, byte_NZ = np.zeros((2, len(new), longest + 1))
        for step in range(walk):
            time_N = np.minimum(begin_N + step, len(self.heard_TV) - 1)
            # The state before the first new byte is the text's own.
            blank_NZ[:, 0], byte_NZ[:, 0] = self.blank_TS[time_N - 1, firsts], self.byte_TS[time_N - 1, firsts]
            leaving_N = blank_NZ[rows, counts] + differs_N * byte_NZ[rows, counts]
            total_N += leaving_N * self.onward_TS[time_N, ends]
            came_NZ = blank_NZ[:, :-1] + differs_NZ * byte_NZ[:, :-1] + byte_NZ[:, 1:]
            stayed_NZ = blank_NZ[:, 1:] + byte_NZ[:, 1:]
            byte_NZ[:, 1:] = came_NZ * self.heard_TV[time_N[:, None], new_NZ]
            blank_NZ[:, 1:] = stayed_NZ * self.heard_TV[time_N, BLANK][:, None]
        with np.errstate(divide="ignore"):
            return np.log(total_N)
