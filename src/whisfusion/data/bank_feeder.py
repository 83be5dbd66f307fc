"""Training steps as indices into a bank of spectrograms on the device.

What a step needs is laid out once per epoch, in arrays, by a background thread; a step itself is a dozen operations
on the device, whatever the number of its utterances. Shapes are few and fixed, and so compile once.

Letters: C clips, V speeds, M mel bins, R rows of an epoch in step order, S spans that a row is joined of,
B rows of a batch, F mel frames, L canvas positions, T tokens of all texts, X places in a row.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whisfusion.data.bank import DTYPE, Bank
from whisfusion.data.batch import Batch, Failure, Step, Targets, TextStyle, label_ids
from whisfusion.data.epoch import EpochPlan, SamplerOptions
from whisfusion.data.sampler import START, Place, Sampler
from whisfusion.decoder import Canvas
from whisfusion.errors import OptionError
from whisfusion.tokenizer import ENDOFTEXT, PROMPT_LENGTH, get_tokenizer

# A clip's frames are rounded up to a pair.
_PAIR = 2


class BankFeeder:
    """Steps of training from a `Bank`: a `Feeder` that decodes nothing and waits for nobody.

    Clips that a draw joins follow each other without their tails of silence, which only the last one keeps, and
    Whisper's floor is that of their common maximum. That is what `log_mel` makes of the joined audio, but for the
    frames at a seam that hear both sides of it, and up to 20 ms of silence there. Texts are joined by a space.

    Windows are clip-length; canvases are padded to that of the step's window.
    """

    def __init__(
        self,
        bank: Bank,
        options: SamplerOptions,
        *,
        canvas: Canvas,
        text_style: TextStyle,
        micro_batches: int = 1,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Plan steps over the bank's clips, each step in `micro_batches` parts.

        Clips whose text does not fit their canvas are left out, and named by `failures`. `options.margin` is
        overruled: the feeder knows what windows add to clips. Raises OptionError where the options do not fit the
        bank or each other.
        """
        _check(bank, options, micro_batches, world)
        self._canvas, self._micro_batches = canvas, micro_batches
        self._spans = options.join_most if options.join else 1
        labels = [label_ids(u.text, u.language, text_style) for u in bank.utterances]
        fits, misfits = _fitting(bank, labels, canvas)
        self._failures = [*bank.failures, *misfits]
        self._bank = bank.only(fits)
        self._texts = _Texts([labels[clip] for clip in fits], [u.language for u in self._bank.utterances])
        # The window holds the tail, and what rounding to pairs of frames adds to each clip.
        margin = (bank.tail + _PAIR * self._spans) / bank.per_second
        self.sampler = Sampler(
            self._bank.utterances,
            replace(options, margin=margin),
            rank=rank,
            world=world,
            tokens_N=self._texts.counts_C,
            positions=canvas.positions,
        )
        """Which clips are heard when."""
        self._place = START
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bank")
        self._ahead: tuple[int, Future[_Epoch]] | None = None

    def __iter__(self) -> Iterator[Step]:
        """This rank's steps from the current place on, without end."""
        while True:
            number, first = self._place
            epoch = self._epoch(number)
            steps = len(epoch.windows_S)
            for step in range(first, steps):
                self._place = Place(number, step + 1) if step + 1 < steps else Place(number + 1, 0)
                yield tuple(self._batch(epoch, step, part) for part in range(self._micro_batches))

    def state_dict(self) -> dict[str, Any]:
        """The place after the last step that was handed out, as JSON."""
        return self.sampler.state_dict(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to that place: the next iteration starts there. Raises OptionError where the data are not the same."""
        self._place = self.sampler.load_state_dict(state)

    def failures(self) -> list[Failure]:
        """Clips that were left out, since this was last asked."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Stop the background thread."""
        self._thread.shutdown(cancel_futures=True)

    def _epoch(self, number: int) -> "_Epoch":
        """Epoch `number`; the next is being laid out when this returns."""
        if self._ahead is None or self._ahead[0] != number:
            self._ahead = number, self._thread.submit(self._lay_out, number)
        epoch = self._ahead[1].result()
        self._ahead = number + 1, self._thread.submit(self._lay_out, number + 1)
        device = self._bank.frames_NM.device
        return replace(epoch, mel=epoch.mel.to(device), floors_R=_to(epoch.floors_R, device))

    def _lay_out(self, number: int) -> "_Epoch":
        """What the steps of an epoch are made of; on the CPU, and in the background."""
        plan, bank = self.sampler.plan(number), self._bank
        clips_RS, own_RS = _rows(plan, self._spans)
        speed_R1 = (np.array(bank.speeds)[:, None] == plan.speed_D[plan.order_R]).argmax(0)[:, None]

        last_RS = own_RS & ~np.pad(own_RS[:, 1:], ((0, 0), (0, 1)))
        counts_RS = bank.counts_VC[speed_R1, clips_RS] - np.where(last_RS, 0, bank.tail)
        mel = _Joined.of(bank.firsts_VC[speed_R1, clips_RS], np.where(own_RS, counts_RS, 0))
        # At the longest window some of the tail is cut, and of joined clips perhaps the last 10 ms.
        frames_S = np.array([self._frames_in(window) for window in plan.windows_S.tolist()])
        most_R1 = torch.from_numpy(np.repeat(frames_S, np.diff(plan.starts)))[:, None]
        peaks_RS = np.where(own_RS, bank.peaks_VC[speed_R1, clips_RS], -np.inf)

        seconds_R = plan.seconds_D[plan.order_R]
        canvas_R = np.fromiter(map(self._canvas.positions, seconds_R.tolist()), np.int64, len(seconds_R))
        names = [utterance.id for utterance in bank.utterances]
        return _Epoch(
            mel=replace(mel, ends_RS=torch.minimum(mel.ends_RS, most_R1)),
            # Whisper cuts at 8 below the loudest before it divides by 4.
            floors_R=torch.from_numpy(peaks_RS.max(1) - 2.0).to(DTYPE),
            text=self._texts.canvases(clips_RS, own_RS),
            canvas_R=torch.from_numpy(canvas_R),
            seconds_R=seconds_R,
            names_R=[
                "+".join([names[clip] for clip in clips[:count]])
                for clips, count in zip(clips_RS.tolist(), own_RS.sum(1).tolist(), strict=True)
            ],
            starts=plan.starts.tolist(),
            windows_S=plan.windows_S.tolist(),
        )

    def _batch(self, epoch: "_Epoch", step: int, part: int) -> Batch:
        start, end = epoch.starts[step : step + 2]
        first = self.sampler.rank + self.sampler.world * part
        stride = self.sampler.world * self._micro_batches
        rows = slice(start + first, end, stride)
        window = epoch.windows_S[step]
        mel = epoch.mel[rows]
        return Batch(
            mel_BMF=self._mel(mel, epoch.floors_R[rows], self._frames_in(window)).transpose(1, 2),
            frames_B=mel.ends_RS[:, -1],
            targets=self._texts.targets(epoch.text[rows], epoch.canvas_R[rows], self._canvas.positions(window)),
            rows_B=torch.arange(first, end - start, stride),
            total_rows=end - start,
            seconds=float(epoch.seconds_R[rows].sum()),
            ids=tuple(epoch.names_R[rows]),
        )

    def _frames_in(self, seconds: float) -> int:
        """Frames of a window, whole pairs of them."""
        return _PAIR * -(-round(seconds * self._bank.per_second) // _PAIR)

    def _mel(self, rows: "_Joined", floors_B: Tensor, frames: int) -> Tensor:
        mel_BFM = self._bank.frames_NM[rows.places(frames)].maximum(floors_B[:, None, None])
        beyond_BF = torch.arange(frames, device=mel_BFM.device) >= rows.ends_RS[:, -1:]
        return mel_BFM.masked_fill(beyond_BF[..., None], 0.0)


@dataclass(frozen=True)
class _Joined:
    """Rows that are made of spans of a table, one after the other."""

    ends_RS: Tensor
    """Where each span ends in its row; the last where the row does."""
    shifts_RS: Tensor
    """What to add to a place in the row to get its place in the table."""

    @classmethod
    def of(cls, firsts_RS: np.ndarray, counts_RS: np.ndarray) -> "_Joined":
        """Spans of `counts_RS` (or no) places that begin at `firsts_RS` of the table."""
        ends_RS = np.cumsum(counts_RS, axis=1)
        return cls(torch.from_numpy(ends_RS), torch.from_numpy(firsts_RS - (ends_RS - counts_RS)))

    def __getitem__(self, rows: slice) -> "_Joined":
        return _Joined(self.ends_RS[rows], self.shifts_RS[rows])

    def to(self, device: torch.device) -> "_Joined":
        return _Joined(_to(self.ends_RS, device), _to(self.shifts_RS, device))

    def places(self, width: int) -> Tensor:
        """Place in the table of each row's first `width` places, (R, X); 0 beyond the row."""
        place_X = torch.arange(width, device=self.ends_RS.device)
        span_RX = (place_X >= self.ends_RS[:, :-1, None]).sum(1)
        return (place_X + self.shifts_RS.gather(1, span_RX)) * (place_X < self.ends_RS[:, -1:])


@dataclass(frozen=True)
class _Epoch:
    """The R rows of an epoch in step order; `mel` and `floors_R` are needed on the device."""

    mel: _Joined
    floors_R: Tensor
    text: _Joined
    canvas_R: Tensor
    seconds_R: np.ndarray
    names_R: list[str]
    starts: list[int]
    windows_S: list[float]


class _Texts:
    """All prompts and transcripts as one line of tokens. Its first is endoftext: what lies beyond a transcript."""

    def __init__(self, labels: list[list[int]], languages: list[str]) -> None:
        prompts = {language: get_tokenizer().prompt(language) for language in dict.fromkeys(languages)}
        pieces = [[ENDOFTEXT], *prompts.values(), *labels]
        counts = np.array([len(piece) for piece in pieces], dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        clips = slice(1 + len(prompts), None)
        first_of = dict(zip(prompts, firsts[1:].tolist(), strict=False))
        self.tokens_T = torch.tensor([token for piece in pieces for token in piece])
        self.counts_C = counts[clips]
        self._firsts_C = firsts[clips]
        self._prompts_C = np.array([first_of[language] for language in languages], dtype=np.int64)

    def canvases(self, clips_RS: np.ndarray, own_RS: np.ndarray) -> _Joined:
        """The prompt of the first clip's language, then the texts of the clips where `own_RS`."""
        firsts = np.concatenate((self._prompts_C[clips_RS[:, :1]], self._firsts_C[clips_RS]), axis=1)
        counts = np.where(own_RS, self.counts_C[clips_RS], 0)
        return _Joined.of(firsts, np.pad(counts, ((0, 0), (1, 0)), constant_values=PROMPT_LENGTH))

    def targets(self, rows: _Joined, canvas_B: Tensor, positions: int) -> Targets:
        position_L = torch.arange(positions)
        # The place after the last word holds the endoftext that is learned; padding follows.
        ends_B = rows.ends_RS[:, -1] + 1
        return Targets(
            tokens_BL=self.tokens_T[rows.places(positions)],
            canvas_BL=position_L < canvas_B[:, None],
            scored_BL=(position_L >= PROMPT_LENGTH) & (position_L < ends_B[:, None]),
            counts_B=(ends_B - PROMPT_LENGTH).float(),
        )


def _check(bank: Bank, options: SamplerOptions, micro_batches: int, world: int) -> None:
    problems = []
    if missing := sorted({*options.speeds} - {*bank.speeds}):
        problems.append(f"the bank lacks the speeds {missing}: build it with them")
    name = "utterances" if options.utterances else "rows_multiple"
    rows = getattr(options, name)
    if micro_batches < 1 or rows % (micro_batches * world):
        problems.append(f"`{name}` of {rows} does not divide into {micro_batches} micro-batches on {world} ranks")
    OptionError.collect(problems)


def _fitting(bank: Bank, labels: list[list[int]], canvas: Canvas) -> tuple[list[int], list[Failure]]:
    """Clips whose text has room on the canvas of their duration, and what is wrong with the others."""
    fits, misfits = [], []
    for clip, (utterance, ids) in enumerate(zip(bank.utterances, labels, strict=True)):
        positions = canvas.positions(utterance.duration)
        if PROMPT_LENGTH + len(ids) + 1 <= positions:
            fits.append(clip)
        else:
            reason = f"{len(ids)} tokens in {utterance.duration:.2f} s, whose canvas has {positions} positions"
            misfits.append(Failure(utterance.id, reason))
    return fits, misfits


def _rows(plan: EpochPlan, spans: int) -> tuple[np.ndarray, np.ndarray]:
    """The clips of each row in step order, and which of the `spans` places hold one; others repeat the first."""
    firsts_R1 = plan.firsts[plan.order_R][:, None]
    counts_R1 = plan.firsts[plan.order_R + 1][:, None] - firsts_R1
    own_RS = np.arange(spans) < counts_R1
    return plan.clips_C[firsts_R1 + np.where(own_RS, np.arange(spans), 0)], own_RS


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` that neither the host nor the work under way waits for."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
