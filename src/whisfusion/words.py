"""When each word of a transcript was said: the likeliest path of CTC through its bytes.

Letters: T frames, V classes, S bytes of the text, P states of the path (blank, byte, blank ... blank).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from whisfusion.ctc import BLANK
from whisfusion.mel import FRAMES_PER_SECOND
from whisfusion.tokenizer import get_tokenizer

SECONDS = 2 / FRAMES_PER_SECOND
"""Seconds of a frame of CTC: it spells once for each position of the encoder."""
_BEFORE = 0.03
"""Seconds by which CTC hears the beginning of a word too late."""
_NEW_WORD = r"(?=\s[^\w\s]*\w)"
# Latin words and numbers stay whole.
_NEW_CHARACTER = r"(?<![A-Za-z0-9])(?=\w)|(?<=[A-Za-z0-9])(?=[^\WA-Za-z0-9_])"
UNSPACED = frozenset({"zh", "ja", "yue", "th", "lo", "my", "km"})
"""Languages that write no spaces: of these each character is timed."""


@dataclass(frozen=True)
class Word:
    """A word as it is written, with the space before it and the marks around it, and when it was said, in seconds."""

    word: str
    start: float
    end: float
    probability: float
    """How likely CTC finds its letters where it hears them: the geometric mean over them."""


def time_words(tokens: Sequence[int], bytes_TV: Tensor, language: str) -> tuple[Word, ...]:
    """Each word of a text, from CTC's logits; where it has no path through them spread evenly, and not likely."""
    spelled = get_tokenizer().token_bytes()
    pieces = list(_pieces(b"".join(spelled[token] for token in tokens), language))
    logp_TV = bytes_TV.detach().cpu().double().log_softmax(-1).numpy()
    target = [1 + byte for piece in pieces for byte in piece]
    path = best_path(logp_TV, target)
    heard = path is not None
    if path is None:
        each = len(logp_TV) / max(1, len(target))
        path = [(int(each * place), int(each * (place + 1))) for place in range(len(target))]
    words, ends = [], np.cumsum([len(piece) for piece in pieces])
    for piece, end in zip(pieces, ends.tolist(), strict=True):
        letters = [place for place in range(end - len(piece), end) if piece[place - end] not in b" "]
        text = piece.decode(errors="replace").replace("\ufffd", "")
        if text.strip() and letters:
            first, last = path[letters[0]][0], path[letters[-1]][1]
            sure = [logp_TV[slice(*path[place]), target[place]].max() for place in letters] if heard else [-np.inf]
            words.append((text, first * SECONDS, last * SECONDS, float(np.exp(np.mean(sure)))))
    return tuple(_begun_earlier(words))


def best_path(logp_TV: np.ndarray, target: Sequence[int]) -> list[tuple[int, int]] | None:
    """For each class of `target` the first frame in which CTC hears it, and the one after the last; None: no path."""
    frames, states = len(logp_TV), 2 * len(target) + 1
    classes_P = np.full(states, BLANK)
    classes_P[1::2] = target
    # A blank between two bytes may be passed over unless they are the same.
    skips_P = np.zeros(states, dtype=bool)
    skips_P[3::2] = classes_P[3::2] != classes_P[1:-2:2]
    heard_TP = logp_TV[:, classes_P]
    came_TP = np.zeros((frames, states), dtype=np.int8)
    best_P = np.full(states, -np.inf)
    best_P[:2] = 0.0
    ways_3P = np.full((3, states), -np.inf)
    for frame in range(frames):
        ways_3P[0] = best_P
        if frame:
            ways_3P[1, 1:] = best_P[:-1]
            ways_3P[2, 2:] = np.where(skips_P[2:], best_P[:-2], -np.inf)
        came_TP[frame] = ways_3P.argmax(0)
        best_P = ways_3P.max(0) + heard_TP[frame]
    state = states - 1 if states == 1 or best_P[-1] >= best_P[-2] else states - 2
    if not np.isfinite(best_P[state]):
        return None
    path: list[tuple[int, int]] = [(0, 0)] * len(target)
    for frame in range(frames - 1, -1, -1):
        if state % 2:
            _, last = path[state // 2]
            path[state // 2] = (frame, last or frame + 1)
        state -= int(came_TP[frame, state])
    return path


def _pieces(text: bytes, language: str) -> Iterator[bytes]:
    """Bytes of the words, one after another, or of characters where words are not told apart; marks go with a word."""
    whole = text.decode(errors="surrogateescape")
    # A word goes as far as the next one begins, so that marks between them are the first one's.
    begins = _NEW_CHARACTER if language in UNSPACED else _NEW_WORD
    parts = [part for part in re.split(begins, whole) if part]
    # What comes before the first word is its own.
    first = next((number for number, part in enumerate(parts) if re.search(r"\w", part)), 0)
    for part in ["".join(parts[: first + 1]), *parts[first + 1 :]]:
        if part:
            yield part.encode(errors="surrogateescape")


def _begun_earlier(words: Sequence[tuple[str, float, float, float]]) -> Iterator[Word]:
    """Words from where they begin, but not before the end of the last one."""
    before = 0.0
    for text, start, end, probability in words:
        first = max(min(before, start), start - _BEFORE)
        yield Word(text, round(first, 3), round(end, 3), round(probability, 3))
        before = end
