"""How likely CTC finds a text, and how much likelier it would find it after each of many small edits.

It follows from CTC's forward and backward sums over the text as it is, and a short walk through the bytes that are new.

Letters: T frames, V classes, N edits, Z bytes of an edit, W frames of a walk, S states of a text (blank, byte, blank
... blank).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whisfusion.ctc import BLANK, bytes_to_text
from whisfusion.tokenizer import get_tokenizer

_EARLIER = 2
"""Frames before a word's first letter that may belong to it."""
_MARGIN = 20
"""Frames, before and after where the text that is edited was heard, in which what is new may be heard."""
_EDITS_AT_ONCE = 1024


class Edit(NamedTuple):
    """Tokens `first` to `end` of a text become `tokens`, which stand at the places `places`."""

    first: int
    end: int
    tokens: tuple[int, ...]
    places: tuple[int, ...]
    gain: float
    """What is gained by it beside what CTC gains, less what the edit costs."""


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
        new_NZ = np.array([[*piece, *[0] * (longest - len(piece))] for piece in new], dtype=np.int64)
        new_NZ = new_NZ.reshape(len(new), longest)
        before_N = np.where(firsts > 0, self.target[firsts - 1], -2)
        # What comes before each new byte, and before the byte after the edit.
        line_NZ = np.concatenate((before_N[:, None], new_NZ), axis=1)
        differs_NZ = np.diff(line_NZ, axis=1) != 0
        differs_N = line_NZ[np.arange(len(new)), counts] != self.target[ends]
        begin_N = np.where(firsts > 0, np.maximum(self.arrivals[firsts - 1] - _MARGIN, 1), 1)
        walk = int((self.arrivals[ends] + _MARGIN - begin_N).max(initial=0)) + 1
        time_WN = np.minimum(begin_N + np.arange(walk)[:, None], len(self.heard_TV) - 1)
        # The state before the first new byte is the text's own.
        blank_WN, byte_WN = self.blank_TS[time_WN - 1, firsts], self.byte_TS[time_WN - 1, firsts]
        onward_WN, silent_WN = self.onward_TS[time_WN, ends], self.heard_TV[time_WN, BLANK]
        heard_WNZ = self.heard_TV[time_WN[..., None], new_NZ]
        last_N, total_N = np.arange(len(new)) * (longest + 1) + counts, np.zeros(len(new))
        blank_NZ, byte_NZ = np.zeros((2, len(new), longest + 1))
        for step in range(walk):
            blank_NZ[:, 0], byte_NZ[:, 0] = blank_WN[step], byte_WN[step]
            total_N += (blank_NZ.take(last_N) + differs_N * byte_NZ.take(last_N)) * onward_WN[step]
            came_NZ = blank_NZ[:, :-1] + differs_NZ * byte_NZ[:, :-1] + byte_NZ[:, 1:]
            stayed_NZ = blank_NZ[:, 1:] + byte_NZ[:, 1:]
            np.multiply(came_NZ, heard_WNZ[step], out=byte_NZ[:, 1:])
            np.multiply(stayed_NZ, silent_WN[step][:, None], out=blank_NZ[:, 1:])
        with np.errstate(divide="ignore"):
            return np.log(total_N)
