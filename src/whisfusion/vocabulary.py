"""Which tokens a model may write in each language: a shorter output head, and no letters of another script.

A list is made once, from text in the language, and kept in the model folder as one bit a token.

Letters: V ids that may be written, B utterances.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whisfusion.errors import ModelError, OptionError
from whisfusion.tokenizer import ENDOFTEXT, LANGUAGES, MASK, SAMPLEABLE, TIMESTAMP_BEGIN, get_tokenizer

_BITS = 8


@dataclass(frozen=True)
class Columns:
    """What the columns of a batch's logits stand for."""

    ids_V: Tensor
    """Token ids, ascending; the last is endoftext."""
    allowed_BV: Tensor | None = None
    """Which of them each utterance may write; None where that is all of them."""

    @classmethod
    def all(cls, device: torch.device) -> "Columns":
        """Every id that may be written at all."""
        return cls(torch.arange(SAMPLEABLE, device=device))


class Vocabulary(Mapping[str, Tensor]):
    """By language the ids that may be written in it, ascending; endoftext, the highest, is always among them."""

    def __init__(self, ids: Mapping[str, Iterable[int]]) -> None:
        unknown = sorted(set(ids) - set(LANGUAGES))
        OptionError.collect([f"{code!r} is not a language that Whisper knows" for code in unknown])
        self._ids = {code: torch.tensor(sorted({*map(int, listed), ENDOFTEXT})) for code, listed in ids.items()}
        outside = [code for code, listed in self._ids.items() if listed[0] < 0 or listed[-1] > ENDOFTEXT]
        OptionError.collect([f"the ids of {code!r} must be those of text: 0 to {ENDOFTEXT - 1}" for code in outside])

    def __getitem__(self, language: str) -> Tensor:
        return self._ids[language]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def columns(self, languages: Sequence[str], device: torch.device) -> Columns:
        """The ids that utterances in `languages`, one of each, may write; a language without a list may write any.

        Where the languages differ the columns are all ids, some of them not allowed: an utterance is written as if it
        were alone, as its own ids keep their order.
        """
        if not self:
            return Columns.all(device)
        every_V = torch.arange(SAMPLEABLE)
        lists = {language: self._ids.get(language, every_V) for language in languages}
        if len(lists) == 1:
            return Columns(lists[languages[0]].to(device))
        allowed = {language: torch.isin(every_V, listed) for language, listed in lists.items()}
        return Columns(every_V.to(device), torch.stack([allowed[language] for language in languages]).to(device))

    def tokens(self) -> Tensor:
        """All ids that a model of these languages reads or writes: their own, those of prompts, and the mask."""
        prompts_V = torch.arange(ENDOFTEXT, TIMESTAMP_BEGIN)
        return torch.cat([*self._ids.values(), prompts_V, torch.tensor([MASK])]).unique()

    def missing(self, language: str, texts: Iterable[str]) -> float:
        """The share of the tokens of `texts` that cannot be written in `language`."""
        tokens = torch.tensor([token_id for text in texts for token_id in get_tokenizer().encode(text)])
        return 1 - torch.isin(tokens, self._ids[language]).double().mean().item() if len(tokens) else 0.0

    def pack(self) -> dict[str, Tensor]:
        """One bit a token, eight to a byte, lowest first: 6 KB a language."""
        packed = {}
        for language, listed in self._ids.items():
            bits = torch.zeros(-(-SAMPLEABLE // _BITS) * _BITS, dtype=torch.uint8)
            bits[listed] = 1
            packed[language] = (bits.view(-1, _BITS) << torch.arange(_BITS)).sum(1).to(torch.uint8)
        return packed

    @classmethod
    def unpack(cls, packed: Mapping[str, Tensor]) -> "Vocabulary":
        """What `pack` was given. Raises ModelError for anything else."""
        lists = {}
        for language, octets in packed.items():
            if octets.dtype != torch.uint8 or octets.shape != (-(-SAMPLEABLE // _BITS),):
                raise ModelError(f"the vocabulary of {language!r} is not one bit a token: pull the model again")
            lists[language] = ((octets[:, None] >> torch.arange(_BITS)) & 1).flatten().nonzero().flatten().tolist()
        try:
            return cls(lists)
        except OptionError as error:
            raise ModelError(f"the model's vocabulary is not usable: {error}") from None


def token_list(texts: Iterable[str], *, least: int = 1) -> list[int]:
    """The ids that occur at least `least` times in `texts`, in the style that the model writes.

    The 256 single bytes are among them, whatever the texts: with these, every text can be written.
    """
    tokenizer = get_tokenizer()
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text))
    octets = {token_id for token_id, spelling in enumerate(tokenizer.token_bytes()) if len(spelling) == 1}
    return sorted(octets | {token_id for token_id, count in counts.items() if count >= least})
