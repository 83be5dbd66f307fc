"""Mends the chosen transcript by small edits that decoder and CTC together find likelier.

A canvas is written side by side, and neighbours may be one place apart: then a piece of a word is there twice, or not
at all. The adapter's CTC reads the audio from its start to its end and makes no such mistakes, but it spells by ear.
So edits are made of what the decoder had in mind for a place and its neighbours, and one is made where it gains more
with both than a threshold. Then words that the decoder was not sure of are compared with those of the language. In
both, what the language has weighs in: its words, and how its tokens follow each other. All of it is for one utterance,
on the host.

Letters: T frames, V classes of CTC, L places, M choices.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from whisfusion.lexicon import WORD, WordList
from whisfusion.pdd import Candidate, Thoughts
from whisfusion.spelling import Edit, Text
from whisfusion.tokenizer import ENDOFTEXT, get_tokenizer
from whisfusion.trigrams import Trigrams

CHOICES = 8
"""How many tokens of each place are kept of what the decoder had in mind."""

# All of these were chosen on dev sets.
_SPELLING = 0.8
"""What a nat of CTC's weighs against one of the decoder's."""
_GRAMMAR = 0.4
"""What one of the trigrams' does."""
_UNKNOWN = 4.0
"""Nats that a word is worth that the language has, and another that it has not."""
_LIKELY = -9.0
"""Edits that cost more with all but CTC are not looked at."""
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
_WORST = -8.0
"""Edits that cost the decoder more are not looked at."""
_APART = 3
"""Tokens between edits that are made at once."""
_LONGEST = 3
"""Tokens that a character may have beside one of its own."""
_ROUNDS = 4
_SURE = -0.5
"""Words that the decoder finds likelier are not looked up."""
_UNTHOUGHT_WORD = -4.0
"""Log-probability of a word of the lexicon that sounds like what was heard."""
_SURPRISE = -5.0
"""The least log-probability of a word that another may replace."""
_BROKEN = 2.0
"""Nats that a character is worth of which a part is missing, if it is made whole."""


def repair(
    chosen: Candidate,
    candidates: Sequence[Candidate],
    thoughts: Thoughts,
    bytes_TV: Tensor,
    *,
    words: WordList | None = None,
    trigrams: Trigrams | None = None,
) -> tuple[int, ...]:
    """The tokens of the chosen candidate after all edits that are worth it.

    thoughts: of the empty canvas, without its prompt. bytes_TV: CTC logits of the utterance. words: those of the
    language, of which CTC may have heard one that the decoder did not think of. trigrams: how tokens follow each other
    in it.
    """
    minds = _Minds(chosen, candidates, thoughts)
    draft = _Draft(list(chosen.tokens), list(range(len(chosen.tokens))))
    logp_TV = bytes_TV.detach().cpu().double().log_softmax(-1)
    text = Text.of(logp_TV, draft.tokens)
    for propose in (_propose, lambda *known: _reword(*known, words) if words else ()):
        anew: Sequence[int] = range(len(draft.tokens) + 1)
        for _ in range(_ROUNDS):
            if text is None:
                break
            edits = _preferring_whole(draft.tokens, propose(draft, anew, minds, text))
            if words:
                edits = _preferring_known(draft.tokens, edits, words)
            if trigrams is not None:
                edits = _preferring_likely(draft.tokens, edits, trigrams)
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


def _propose(draft: _Draft, where: Iterable[int], minds: _Minds, _: Text) -> Iterator[Edit]:
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


def _preferring_known(tokens: Sequence[int], edits: Iterable[Edit], words: WordList) -> list[Edit]:
    """The edits, of which those gain that make words of what is none, and those lose that do the opposite."""
    spelled = get_tokenizer().token_bytes()
    pieces = [spelled[token] for token in tokens]
    # A word has a space before it. What is edited may be a part of the word before, or of the one after.
    starts = [0, *(j for j, piece in enumerate(pieces) if j and piece.startswith(b" ")), len(pieces)]
    found = []
    for edit in edits:
        first = starts[max(bisect.bisect_left(starts, edit.first) - 1, 0)]
        end = starts[bisect.bisect_left(starts, edit.end)]
        new = [*pieces[first : edit.first], *(spelled[token] for token in edit.tokens), *pieces[edit.end : end]]
        were, are = (words.unknown(b"".join(parts).decode(errors="replace")) for parts in (pieces[first:end], new))
        found.append(edit if were == are else edit._replace(gain=edit.gain + _UNKNOWN * (were - are)))
    return found


def _preferring_likely(tokens: Sequence[int], edits: Sequence[Edit], trigrams: Trigrams) -> list[Edit]:
    """The edits, of which those gain that are more usual in the language than what they replace."""
    more = trigrams.gains(tokens, [(edit.first, edit.end, edit.tokens) for edit in edits]).tolist()
    likely = [edit._replace(gain=edit.gain + _GRAMMAR * nats) for edit, nats in zip(edits, more, strict=True)]
    return [edit for edit in likely if edit.gain > _LIKELY]


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


def _reword(draft: _Draft, where: Iterable[int], minds: _Minds, text: Text, known: WordList) -> Iterator[Edit]:
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
        others = {other for sound in sounds for other in known.similar(sound)}
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
