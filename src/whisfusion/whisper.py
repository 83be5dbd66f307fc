"""Whisper's own autoregressive decoder: likelihoods for reranking, and greedy decoding as the peer.

Token ids are large-v3's everywhere outside this file; sizes before it number some of theirs otherwise, so ids
are translated here, where they enter and leave the model.

Letters: B utterances, M mel bins, G sequences (the candidates of all utterances), L tokens, N scored tokens,
T audio positions, V vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whisfusion.blocks import Cache, KeysValues, Stack, whisper_block
from whisfusion.encoder import WhisperEncoder
from whisfusion.mel import HOP, MAX_SAMPLES, log_mel_of_padded
from whisfusion.tokenizer import (
    ENDOFTEXT,
    LANGUAGES,
    NOSPEECH,
    STARTOFLM,
    STARTOFPREV,
    STARTOFTRANSCRIPT,
    TRANSCRIBE,
    TRANSLATE,
    embedding_rows,
    get_tokenizer,
    id_from_whisper,
    whisper_id,
)

_SPACE = 220  # a lone space: no transcript begins with it
_SCORED_ROWS = 512  # positions whose logits exist at one time: 106 MB in float32


@dataclass(frozen=True)
class WhisperDecoderConfig:
    """Shape of a Whisper decoder; the defaults are large-v3's."""

    vocab_size: int = 51_866
    width: int = 1280
    layers: int = 32
    heads: int = 20
    positions: int = 448


class WhisperDecoder(nn.Module):
    """Causal text decoder over encoder features, with Whisper's own token ids. Frozen."""

    def __init__(self, config: WhisperDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Parameter(torch.empty(config.positions, config.width))
        self.blocks = Stack(
            whisper_block(config.width, config.heads, hidden=4 * config.width, cross=True) for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def listen(self, audio_BTD: Tensor) -> list[KeysValues]:
        """Cross-attention keys and values of every layer, once per utterance."""
        return [block.cross_attn.keys_values(audio_BTD) for block in self.blocks]

    @torch.no_grad()
    def states(
        self,
        tokens_GL: Tensor,
        memory: list[KeysValues],
        *,
        memory_mask_BT: Tensor | None = None,
        cache: Cache | None = None,
        offset: int = 0,
        places_GL: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """States (G, L, D) of which `logits` are made.

        With a `cache`, `tokens_GL` continue what it has seen, from position `offset` on, one token at a time
        after the first call; or, with `places_GL`, at any positions, each token seeing those of `mask`, which is
        true where one may be seen and broadcasts to (G, heads, L, all that the cache will hold).
        """
        length = tokens_GL.shape[1]
        positions = self.positions[offset : offset + length] if places_GL is None else self.positions[places_GL]
        x_GLD = self.embed(tokens_GL) + positions
        memory_mask = None if memory_mask_BT is None else memory_mask_BT[:, None, None, :]
        for i, block in enumerate(self.blocks):
            x_GLD = block(
                x_GLD,
                memory[i],
                self_mask=mask,
                memory_mask=memory_mask,
                causal=length > 1 and mask is None,
                cache=None if cache is None else (cache, i),
            )
        return self.norm(x_GLD)

    @torch.no_grad()
    def logits(self, x_ND: Tensor) -> Tensor:
        """Logits (..., V) in float32 of states (..., D)."""
        return (x_ND @ self.embed.weight.T).float()

    def forward(
        self,
        tokens_GL: Tensor,
        memory: list[KeysValues],
        *,
        memory_mask_BT: Tensor | None = None,
        cache: Cache | None = None,
        offset: int = 0,
    ) -> Tensor:
        """Logits (G, L, V) in float32, of every position; see `states` for the arguments."""
        return self.logits(self.states(tokens_GL, memory, memory_mask_BT=memory_mask_BT, cache=cache, offset=offset))


@dataclass(frozen=True)
class Whisper:
    """A published Whisper: its encoder, its decoder, and the hash of the file they came from."""

    encoder: WhisperEncoder
    decoder: WhisperDecoder
    sha256: str


@dataclass(frozen=True)
class Hypothesis:
    """What Whisper heard in one utterance."""

    tokens: list[int]
    """Large-v3 ids, without the prompt and without endoftext."""
    avg_logprob: float
    """Mean log-probability of the tokens and endoftext."""
    no_speech_prob: float
    """Probability of the nospeech token right after startoftranscript."""


def window_mel(samples: Sequence[np.ndarray | Tensor], *, n_mels: int, device: str | torch.device = "cpu") -> Tensor:
    """Log-mel windows of 30 s (B, M, 3000) as Whisper's own transcription feeds them to its encoder.

    Beyond a clip's frames they hold 0.0, where `log_mel` with a padded window holds the log-mel of silence.
    Both are found in the field: the first in OpenAI's transcribe() and what descends from it, the second in
    Hugging Face's extractor. They do not always lead to the same text.
    """
    samples_BN = torch.zeros(len(samples), MAX_SAMPLES, device=device)
    for row_N, clip in zip(samples_BN, samples, strict=True):
        # torch.tensor copies, so that a read-only array is no cause for a warning.
        row_N[: len(clip)] = clip if isinstance(clip, Tensor) else torch.tensor(clip)
    frames_B = torch.tensor([len(clip) // HOP for clip in samples], device=device)
    return log_mel_of_padded(samples_BN, frames_B, n_mels=n_mels)


@torch.no_grad()
def greedy(
    decoder: WhisperDecoder,
    audio_BTD: Tensor,
    language: str | Sequence[str],
    *,
    audio_mask_BT: Tensor | None = None,
    max_tokens: int | None = None,
) -> list[Hypothesis]:
    """Transcribe B utterances without timestamps, always taking the likeliest token that Whisper allows.

    `language` is a code or a name, one for all or one for each. Suppressed are the marks of what is not
    spoken and the special tokens, and at the start a space or endoftext: what `suppress_tokens=[-1]` and
    `suppress_blank` mean in other Whispers. An utterance ends with endoftext, or after `max_tokens`:
    by default half of the decoder's positions, which in every published Whisper is 224.
    """
    max_tokens = decoder.config.positions // 2 if max_tokens is None else max_tokens
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    vocab_size, device = decoder.config.vocab_size, audio_BTD.device
    suppressed, at_start = _suppressed(vocab_size, device)
    prompt_BL = prompts(language, len(audio_BTD), vocab_size).to(device)
    memory, cache = decoder.listen(audio_BTD), Cache()
    logits_BLV = decoder(prompt_BL, memory, memory_mask_BT=audio_mask_BT, cache=cache)
    no_speech_B = logits_BLV[:, 0].softmax(-1)[:, whisper_id(NOSPEECH, vocab_size)].tolist()
    logits_BV = logits_BLV[:, -1]
    logits_BV[:, at_start] = -torch.inf

    texts: list[list[int]] = [[] for _ in no_speech_B]
    logprobs: list[list[float]] = [[] for _ in no_speech_B]
    running = list(range(len(texts)))
    limit = min(max_tokens, decoder.config.positions - prompt_BL.shape[1])
    for step in range(limit):
        logits_BV[:, suppressed] = -torch.inf
        best_B, token_B = logits_BV.log_softmax(-1).max(-1)
        for i, token, logprob in zip(running, token_B.tolist(), best_B.tolist(), strict=True):
            texts[i].append(token)
            logprobs[i].append(logprob)
        going_B = token_B != ENDOFTEXT
        if step + 1 == limit or not going_B.any():
            break
        if not going_B.all():
            # What has ended leaves the batch, its keys and values too: it would only cost time.
            cache.keep(going_B)
            memory = [KeysValues(*(x[going_B] for x in layer)) for layer in memory]
            audio_mask_BT = None if audio_mask_BT is None else audio_mask_BT[going_B]
            running = [i for i, going in zip(running, going_B.tolist(), strict=True) if going]
            token_B = token_B[going_B]
        offset = prompt_BL.shape[1] + step
        logits_BV = decoder(token_B[:, None], memory, memory_mask_BT=audio_mask_BT, cache=cache, offset=offset)[:, -1]
    return [
        Hypothesis(
            [id_from_whisper(token, vocab_size) for token in text if token != ENDOFTEXT],
            sum(logprob) / len(logprob),
            no_speech,
        )
        for text, logprob, no_speech in zip(texts, logprobs, no_speech_B, strict=True)
    ]


@torch.no_grad()
def detect_language(
    decoder: WhisperDecoder, audio_BTD: Tensor, *, audio_mask_BT: Tensor | None = None
) -> list[dict[str, float]]:
    """For each utterance, the probability of every language that this Whisper knows, the likeliest first."""
    rows = embedding_rows(decoder.config.vocab_size)
    known = [code for code in LANGUAGES if rows[get_tokenizer().language_id(code)] is not None]
    probabilities = language_logits(decoder, audio_BTD, known, audio_mask_BT).softmax(-1).tolist()
    return [dict(sorted(zip(known, utterance, strict=True), key=lambda pair: -pair[1])) for utterance in probabilities]


@torch.no_grad()
def language_logits(
    decoder: WhisperDecoder,
    audio_BTD: Tensor,
    languages: Sequence[str],
    audio_mask_BT: Tensor | None = None,
    *,
    memory: list[KeysValues] | None = None,
) -> Tensor:
    """Logits (B, X) of languages that this Whisper knows: the first token that it would write.

    `memory`: what the decoder makes of the audio, where that has been made already.
    """
    tokenizer = get_tokenizer()
    ids = [whisper_id(tokenizer.language_id(code), decoder.config.vocab_size) for code in languages]
    start_B1 = torch.full((len(audio_BTD), 1), STARTOFTRANSCRIPT, device=audio_BTD.device)
    memory = decoder.listen(audio_BTD) if memory is None else memory
    states_BD = decoder.states(start_B1, memory, memory_mask_BT=audio_mask_BT)[:, -1]
    # Row by row: a list as an index could not be captured in a graph.
    return (states_BD @ torch.stack([decoder.embed.weight[i] for i in ids]).T).float()


@torch.no_grad()
def log_likelihood(
    decoder: WhisperDecoder,
    audio_BTD: Tensor,
    candidates: Sequence[Sequence[Sequence[int]]],
    language: str | Sequence[str],
    *,
    audio_mask_BT: Tensor | None = None,
) -> list[list[float]]:
    """How likely Whisper finds each candidate: the mean log-probability of its tokens and endoftext.

    `candidates[b]` are those of utterance b as large-v3 ids, without the prompt; what follows an endoftext
    does not count. One teacher-forced pass over all of them, with keys and values of the audio made once per
    utterance.

    Raises ValueError for a candidate longer than the decoder has positions, or with an id that Whisper does
    not have.
    """
    vocab_size, device = decoder.config.vocab_size, audio_BTD.device
    prompt_BL = prompts(language, len(audio_BTD), vocab_size)
    folded = max(map(len, candidates), default=0)
    if not folded:
        return [[] for _ in candidates]
    # Folding needs as many candidates for every utterance; the empty ones that fill up are not returned.
    targets = [
        [*(whisper_id(token, vocab_size) for token in _before_end(tokens)), ENDOFTEXT]
        for utterance in candidates
        for tokens in [*utterance, *[()] * (folded - len(utterance))]
    ]
    lengths_G = torch.tensor([len(tokens) for tokens in targets])
    prompt, longest = prompt_BL.shape[1], int(lengths_G.max())
    if prompt + longest - 1 > decoder.config.positions:
        raise ValueError(f"a candidate has {longest - 1} tokens; Whisper reads {decoder.config.positions - prompt}")
    # Padding lies to the right, where nothing that is scored can see it.
    target_GL = torch.tensor([tokens + [ENDOFTEXT] * (longest - len(tokens)) for tokens in targets])
    input_GL = torch.cat((prompt_BL.repeat_interleave(folded, 0), target_GL[:, :-1]), 1).to(device)
    x_GLD = decoder.states(input_GL, decoder.listen(audio_BTD), memory_mask_BT=audio_mask_BT)[:, prompt - 1 :]
    scored_GL = torch.arange(longest) < lengths_G[:, None]
    x_ND, target_N = x_GLD[scored_GL.to(device)], target_GL[scored_GL].to(device)
    logprob_N = torch.cat(
        [
            -F.cross_entropy(decoder.logits(x), target, reduction="none")
            for x, target in zip(x_ND.split(_SCORED_ROWS), target_N.split(_SCORED_ROWS), strict=True)
        ]
    )
    sums_G = torch.stack([part.sum() for part in logprob_N.split(lengths_G.tolist())]).cpu()
    means_BK = (sums_G / lengths_G).unflatten(0, (-1, folded)).tolist()
    return [means[: len(utterance)] for means, utterance in zip(means_BK, candidates, strict=True)]


def _before_end(tokens: Sequence[int]) -> list[int]:
    """`tokens` before the first endoftext."""
    tokens = list(map(int, tokens))
    return tokens[: tokens.index(ENDOFTEXT)] if ENDOFTEXT in tokens else tokens


def prompts(language: str | Sequence[str], utterances: int, vocab_size: int) -> Tensor:
    """Prompts (B, PROMPT_LENGTH) in the ids of a Whisper with `vocab_size` tokens."""
    languages = [language] * utterances if isinstance(language, str) else language
    if len(languages) != utterances:
        raise ValueError(f"{len(languages)} languages for {utterances} utterances; give one, or one for each")
    return torch.tensor(
        [[whisper_id(token, vocab_size) for token in get_tokenizer().prompt(each)] for each in languages]
    )


def _suppressed(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The ids, in a Whisper with `vocab_size` tokens, never to write, and those not to begin with."""
    special = (STARTOFTRANSCRIPT, TRANSLATE, TRANSCRIBE, STARTOFLM, STARTOFPREV, NOSPEECH)
    never = [whisper_id(token, vocab_size) for token in (*get_tokenizer().non_speech_ids(), *special)]
    return torch.tensor(never, device=device), torch.tensor([_SPACE, ENDOFTEXT], device=device)
