"""Writing on canvases in shapes that are known beforehand: what the fast engine does between encoder and candidates.

Letters: B windows, K candidates, G = B * K sequences, L canvas positions, T audio positions, D width, R = B * K * L
rows, V vocabulary, X lists of tokens, P prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from whisfusion import kernels
from whisfusion.attention import Attend
from whisfusion.blocks import Rotation
from whisfusion.checkpoint import Model
from whisfusion.decoder import DiffusionDecoder, Draft
from whisfusion.fused import Audio, FusedStack, attention_bias, padded_rows
from whisfusion.kernels import Lists
from whisfusion.tokenizer import ENDOFTEXT, LANGUAGES, PROMPT_LENGTH, SAMPLEABLE, embedding_rows, get_tokenizer
from whisfusion.whisper import WhisperDecoder

LANGUAGE_POSITION = 1
"""Where a prompt has its language token."""
ROWS_AT_ONCE = 8192
"""Logits over the vocabulary exist for this many positions at a time: 0.8 GB in bf16."""


@dataclass(frozen=True)
class Head:
    """The output head, its rows filled up for speed, and what each language may write."""

    weight_VD: Tensor
    allowed_XV: Tensor | None = None
    """uint8: the tokens of each list; None where all may be written."""
    list_of_id: Tensor | None = None
    """By language id the number of its list."""

    @classmethod
    def of(cls, model: Model) -> "Head":
        """That of a model."""
        weight_VD = padded_rows(model.decoder.output_weight[:SAMPLEABLE])
        if not model.vocabulary:
            return cls(weight_VD)
        tokenizer, device = get_tokenizer(), weight_VD.device
        allowed_XV = torch.zeros(1 + len(model.vocabulary), SAMPLEABLE, dtype=torch.uint8)
        allowed_XV[0] = 1
        list_of_id = torch.zeros(1 + max(tokenizer.language_id(code) for code in LANGUAGES), dtype=torch.int32)
        for number, (language, ids) in enumerate(model.vocabulary.items(), 1):
            allowed_XV[number, ids] = 1
            list_of_id[tokenizer.language_id(language)] = number
        return cls(weight_VD, allowed_XV.to(device), list_of_id.to(device))

    def __call__(self, states_RD: Tensor) -> Tensor:
        """Logits, those of the rows that are filled up included."""
        return F.linear(states_RD, self.weight_VD)

    def lists_of(self, prompts_BP: Tensor, times: int) -> Tensor | None:
        """The list of each row, where a window has `times` of them."""
        if self.list_of_id is None:
            return None
        return self.list_of_id[prompts_BP[:, LANGUAGE_POSITION], None].expand(-1, times).reshape(-1)

    def lists(self, list_R: Tensor | None, rows: slice) -> Lists | None:
        """What the drawing kernel wants to know of it."""
        return None if self.allowed_XV is None or list_R is None else Lists(self.allowed_XV, list_R[rows])


class States:
    """The decoder listening to a batch: hidden states of canvases."""

    def __init__(
        self,
        decoder: DiffusionDecoder,
        stack: FusedStack,
        audio: Audio,
        anchors_BLD: Tensor | None,
        canvas_BL: Tensor | None,
    ) -> None:
        """`stack`: the decoder's blocks, laid out for speed. `audio`: what they listen to."""
        self._decoder, self._stack, self._audio = decoder, stack, audio
        self._anchors_BLD, self._canvas_BL = anchors_BLD, canvas_BL

    def __call__(self, tokens_BKL: Tensor, draft: Draft | None = None) -> Tensor:
        """States (B * K, L, D)."""
        if draft is not None:
            draft = draft.of_sequences()
        x_GLD = self._decoder.inputs(tokens_BKL.flatten(0, 1), self._anchors_BLD, draft)
        canvas_GL = self._canvas_BL
        if canvas_GL is not None:
            canvas_GL = canvas_GL[:, None].expand(tokens_BKL.shape).flatten(0, 1)
        states_GLD = self._stack(
            x_GLD,
            self._audio,
            self_bias_GL=attention_bias(canvas_GL, x_GLD.dtype),
            rotation=self._rotation(tokens_BKL.shape[2]),
        )
        return states_GLD.roll(1, dims=1) if self._decoder.reads_ahead else states_GLD

    def _rotation(self, positions: int) -> Rotation | None:
        """Rotary angles of so many positions, if the blocks want them."""
        config = self._decoder.config
        if config.block != "paper":
            return None
        head_width = config.width // config.heads
        return Rotation.of(positions, head_width, config.rope_base, self._decoder.embed.weight.device)


class Writer:
    """Writes wanted positions (`pdd.Write`): logits for all, draws for those that are wanted."""

    def __init__(
        self,
        states: States,
        head: Head,
        prompts_BP: Tensor,
        temperature: float,
        *,
        mark: Callable[[str], None],
    ) -> None:
        """`mark`: told of each stage that ends."""
        self._states, self._head, self._prompts_BP = states, head, prompts_BP
        self._temperature, self._mark = temperature, mark
        self._end_1 = torch.full((1,), ENDOFTEXT, device=prompts_BP.device)
        self._step = 0

    def __call__(
        self,
        tokens_BKL: Tensor,
        draft: Draft | None,
        wanted_BKL: Tensor,
        logprobs_BKL: Tensor,
        ends_BKL: Tensor,
        uniforms_BKL: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probabilities and endoftext's, for as many candidates as there are uniforms."""
        draws = uniforms_BKL.shape[1] // tokens_BKL.shape[1]
        self._step += 1
        states_RD = self._states(tokens_BKL, draft).flatten(0, 1)
        self._mark(f"step {self._step}")
        uniforms_RC = uniforms_BKL.unflatten(1, (-1, draws)).movedim(2, -1).reshape(-1, draws)
        wanted_R = wanted_BKL.reshape(-1)
        list_R = self._head.lists_of(self._prompts_BP, tokens_BKL[0].numel())
        parts = []
        for first in range(0, len(states_RD), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            logits_RV = self._head(states_RD[rows])
            parts.append(
                kernels.draw(
                    logits_RV,
                    uniforms_RC[rows],
                    self._temperature,
                    self._end_1.expand(len(logits_RV)),
                    vocabulary=SAMPLEABLE,
                    wanted_R=wanted_R[rows],
                    lists=self._head.lists(list_R, rows),
                )
            )
        drawn = [torch.cat(values) if len(values) > 1 else values[0] for values in zip(*parts, strict=True)]
        ids_RC, new_RC, end_R = drawn
        self._mark(f"head {self._step}")

        def candidates(values_RC: Tensor) -> Tensor:
            """(R, draws) of canvases that stand for several candidates, or (R, 1), as (B, K, L)."""
            values = values_RC.unflatten(0, tokens_BKL.shape).movedim(-1, 2)
            return values.expand(-1, -1, draws, -1).flatten(1, 2)

        wanted_BKL = candidates(wanted_R[:, None])
        return (
            torch.where(wanted_BKL, candidates(ids_RC), candidates(tokens_BKL.reshape(-1, 1))),
            torch.where(wanted_BKL, candidates(new_RC), logprobs_BKL),
            torch.where(wanted_BKL, candidates(end_R[:, None]), ends_BKL),
        )


class Scorer:
    """Whisper's decoder reading finished candidates: `whisper.log_likelihood` in shapes known beforehand."""

    def __init__(self, decoder: WhisperDecoder, attend: Attend) -> None:
        self.decoder = decoder
        self._stack = FusedStack(decoder.blocks, decoder.norm, attend)
        self._head_VD = padded_rows(decoder.embed.weight)
        rows = [-1 if row is None else row for row in embedding_rows(decoder.config.vocab_size)]
        self._rows = torch.tensor(rows, device=decoder.embed.weight.device)

    def __call__(self, audio_BTD: Tensor, heard_BT: Tensor | None, prompts_BP: Tensor, tokens_BKL: Tensor) -> Tensor:
        """Mean log-probability (B, K) of each candidate's tokens and endoftext."""
        # What was written has the same ids in every Whisper; prompts have not.
        text_GL = tokens_BKL[..., PROMPT_LENGTH:].flatten(0, 1)
        prompts_GP = self._rows[prompts_BP][:, None].expand(-1, tokens_BKL.shape[1], -1).flatten(0, 1)
        tokens_GL = torch.cat((prompts_GP, text_GL), 1)
        targets_GL = F.pad(text_GL, (0, 1), value=ENDOFTEXT)
        x_GLD = self.decoder.embed(tokens_GL) + self.decoder.positions[: tokens_GL.shape[1]]
        states_GLD = self._stack(x_GLD, self._stack.listen(audio_BTD, heard_BT), causal=True)
        states_RD = states_GLD[:, PROMPT_LENGTH - 1 :].reshape(-1, x_GLD.shape[2])
        # Padding after the first endoftext does not count.
        ends_GL = targets_GL == ENDOFTEXT
        scored_GL = ends_GL.cumsum(1) <= ends_GL
        targets_R, scored_R = targets_GL.reshape(-1), scored_GL.reshape(-1)
        nothing_R1 = torch.zeros(len(targets_R), 1, device=targets_R.device)
        parts = []
        for first in range(0, len(states_RD), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            drawn = kernels.draw(
                F.linear(states_RD[rows], self._head_VD),
                nothing_R1[rows],
                0.0,
                targets_R[rows],
                vocabulary=self.decoder.config.vocab_size,
                wanted_R=scored_R[rows],
            )
            parts.append(drawn.target_logprobs_R)
        logprobs_GL = torch.cat(parts).view_as(scored_GL).masked_fill(~scored_GL, 0.0)
        return (logprobs_GL.sum(1) / scored_GL.sum(1)).view(tokens_BKL.shape[:2])
