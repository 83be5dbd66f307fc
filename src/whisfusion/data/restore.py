"""Sentences for corpora that are written without case and punctuation, such as LibriSpeech.

What a recogniser wrote of the same speech lends its case and punctuation wherever its words agree with the corpus; the
words themselves are always the corpus's own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from whisfusion.data.utterance import Utterance
from whisfusion.errors import ManifestError

_ENDS = (".", "?", "!")
_PRONOUN = {"i": "I", "i'm": "I'm", "i'd": "I'd", "i'll": "I'll", "i've": "I've"}


@dataclass(frozen=True)
class Restored:
    """A transcript as sentences, and the share of its words that the recogniser agreed on."""

    text: str
    agreed: float


def restore(text: str, written: str) -> Restored:
    """The words of `text`, which has no case of its own, as `written` writes them where both say the same."""
    words, surface = text.lower().split(), written.split()
    matcher = SequenceMatcher(None, [_bare(word) for word in words], [_bare(word) for word in surface], autojunk=False)
    restored = [_PRONOUN.get(word, word) for word in words]
    agreed = 0
    for block in matcher.get_matching_blocks():
        restored[block.a : block.a + block.size] = surface[block.b : block.b + block.size]
        agreed += block.size
    sentence = " ".join(restored)
    sentence = sentence[:1].upper() + sentence[1:]
    if sentence and written.endswith(_ENDS) and not sentence.endswith(_ENDS):
        sentence = sentence.rstrip(",;:-") + written[-1]
    return Restored(sentence, agreed / max(1, len(words)))


def restore_manifest(
    utterances: Sequence[Utterance], written: Iterable[Mapping[str, str]], *, least: float
) -> tuple[list[Utterance], int]:
    """Utterances with restored texts, and how many were left out because fewer than `least` of their words agree.

    `written` are records with `id` and `text`, as `whisfusion evaluate` makes them. Raises ManifestError where an
    utterance has none.
    """
    texts = {record["id"]: record["text"] for record in written}
    missing = [utterance.id for utterance in utterances if utterance.id not in texts]
    if missing:
        raise ManifestError(f"{len(missing)} utterances have no hypothesis, the first {missing[0]}: evaluate them too")
    restored = [(utterance, restore(utterance.text, texts[utterance.id])) for utterance in utterances]
    kept = [replace(utterance, text=result.text) for utterance, result in restored if result.agreed >= least]
    return kept, len(utterances) - len(kept)


def _bare(word: str) -> str:
    """A word without case and punctuation, for comparing."""
    return "".join(character for character in word.lower() if character.isalnum() or character == "'").strip("'")
