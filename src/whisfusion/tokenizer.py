"""Whisper-large-v3's multilingual tokens plus one mask token.

Ids are the same whatever the encoder. From low to high: 50,257 text tokens, endoftext, startoftranscript, 100
languages, six tasks and marks, 1,501 timestamps (0.00 to 30.00 s), mask.

Whisper sizes before large-v3 know no Cantonese, so their ids above the languages are one lower:
`whisper_id`, `id_from_whisper` and `embedding_rows` translate where such a model is called or copied from.
"""

import base64
import difflib
import functools
from collections.abc import Iterable
from importlib import resources

import tiktoken

from whisfusion.errors import LanguageError, ModelError

# Whisper's codes and names, in the order of their tokens; jw is its own code for what ISO calls jv.
# fmt: off
LANGUAGES: dict[str, str] = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean",
    "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan",
    "nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi",
    "fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay",
    "cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin",
    "mi": "maori", "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian",
    "lv": "latvian", "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian",
    "kn": "kannada", "et": "estonian", "mk": "macedonian", "br": "breton", "eu": "basque",
    "is": "icelandic", "hy": "armenian", "ne": "nepali", "mn": "mongolian", "bs": "bosnian", "kk": "kazakh",
    "sq": "albanian", "sw": "swahili", "gl": "galician", "mr": "marathi", "pa": "punjabi", "si": "sinhala",
    "km": "khmer", "sn": "shona", "yo": "yoruba", "so": "somali", "af": "afrikaans", "oc": "occitan",
    "ka": "georgian", "be": "belarusian", "tg": "tajik", "sd": "sindhi", "gu": "gujarati", "am": "amharic",
    "yi": "yiddish", "lo": "lao", "uz": "uzbek", "fo": "faroese", "ht": "haitian creole", "ps": "pashto",
    "tk": "turkmen", "nn": "nynorsk", "mt": "maltese", "sa": "sanskrit", "lb": "luxembourgish",
    "my": "myanmar", "bo": "tibetan", "tl": "tagalog", "mg": "malagasy", "as": "assamese", "tt": "tatar",
    "haw": "hawaiian", "ln": "lingala", "ha": "hausa", "ba": "bashkir", "jw": "javanese", "su": "sundanese",
    "yue": "cantonese",
}
# fmt: on
PAPER_LANGUAGES = ("en", "ja", "de", "fr", "nl", "es", "ko", "it", "zh", "pl", "pt")

_ALIASES = {
    "burmese": "my",
    "castilian": "es",
    "flemish": "nl",
    "haitian": "ht",
    "jv": "jw",
    "letzeburgesch": "lb",
    "mandarin": "zh",
    "moldavian": "ro",
    "moldovan": "ro",
    "panjabi": "pa",
    "pushto": "ps",
    "sinhalese": "si",
    "valencian": "ca",
}
_CODES = {name: code for code, name in LANGUAGES.items()} | _ALIASES | {code: code for code in LANGUAGES}

ENDOFTEXT = 50_257
STARTOFTRANSCRIPT = 50_258
_FIRST_LANGUAGE = 50_259
TRANSLATE = 50_359
TRANSCRIBE = 50_360
STARTOFLM = 50_361
STARTOFPREV = 50_362
NOSPEECH = 50_363
NOTIMESTAMPS = 50_364
TIMESTAMP_BEGIN = 50_365
MASK = 51_866
VOCAB_SIZE = 51_867
PROMPT_LENGTH = 4
SAMPLEABLE = ENDOFTEXT + 1  # decoding may write an id below this: text or endoftext, nothing else

_LANGUAGE_IDS = {code: _FIRST_LANGUAGE + place for place, code in enumerate(LANGUAGES)}
_LANGUAGE_OF = {language_id: code for code, language_id in _LANGUAGE_IDS.items()}

# GPT-2's split into contractions, words, numbers, punctuation and spaces: no merge crosses its borders.
_SPLIT = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def canonical_language(name_or_code: str) -> str:
    """Whisper's code for a code ("en", "pt-BR") or an English name ("English"), in any case.

    Raises LanguageError for anything else, naming the closest.
    """
    key = name_or_code.strip().lower()
    code = _CODES.get(key) or _CODES.get(key.replace("_", "-").split("-")[0])
    if code is None:
        close = difflib.get_close_matches(key, _CODES, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise LanguageError(
            f"unknown language {name_or_code!r}. {hint}Give a code such as {', '.join(PAPER_LANGUAGES[:5])}, "
            f"or an English name such as {LANGUAGES['de']}; there are {len(LANGUAGES)}"
        )
    return code


class Tokenizer:
    """Text to ids and back, and the prompt that opens every canvas. `get_tokenizer` makes the shared one."""

    endoftext = ENDOFTEXT
    startoftranscript = STARTOFTRANSCRIPT
    translate = TRANSLATE
    transcribe = TRANSCRIBE
    startoflm = STARTOFLM
    startofprev = STARTOFPREV
    nospeech = NOSPEECH
    notimestamps = NOTIMESTAMPS
    timestamp_begin = TIMESTAMP_BEGIN
    mask = MASK
    vocab_size = VOCAB_SIZE
    text_ids = range(ENDOFTEXT)

    def __init__(self) -> None:
        # No special tokens here: text that spells "<|endoftext|>" stays text. Built from our own file,
        # because tiktoken's loaders would look at the network or a cache.
        self._bpe = tiktoken.Encoding(
            name="whisper-multilingual", pat_str=_SPLIT, mergeable_ranks=_read_ranks(), special_tokens={}
        )

    def encode(self, text: str) -> list[int]:
        """Text ids of `text` with one leading space, as Whisper writes a transcript; none for blank text."""
        stripped = text.strip()
        return self._bpe.encode_ordinary(" " + stripped) if stripped else []

    def decode(self, ids: Iterable[int]) -> str:
        """The stripped text of `ids` before the first endoftext.

        Other special ids are passed over, and bytes that are not UTF-8 become U+FFFD. `ids` may also be a
        one-dimensional array or tensor.
        """
        text_ids = []
        for token_id in map(int, ids):
            if token_id == ENDOFTEXT:
                break
            if token_id < ENDOFTEXT:
                text_ids.append(token_id)
        return self._bpe.decode(text_ids, errors="replace").strip()

    def token_bytes(self) -> list[bytes]:
        """The UTF-8 bytes that each text id stands for, by id."""
        return self._token_bytes

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        return [self._bpe.decode_single_token_bytes(token_id) for token_id in self.text_ids]

    def prompt(self, language: str) -> list[int]:
        """The PROMPT_LENGTH ids before a transcript in `language` (a code or a name)."""
        return [STARTOFTRANSCRIPT, self.language_id(language), TRANSCRIBE, NOTIMESTAMPS]

    def language_id(self, language: str) -> int:
        """The token of a language (a code or a name). Raises LanguageError for an unknown one."""
        return _LANGUAGE_IDS[canonical_language(language)]

    def language_of(self, language_id: int) -> str:
        """The code of a language token. Raises LanguageError for any other id."""
        code = _LANGUAGE_OF.get(int(language_id))
        if code is None:
            last = _FIRST_LANGUAGE + len(LANGUAGES) - 1
            raise LanguageError(f"id {language_id} is not a language token; those are {_FIRST_LANGUAGE} to {last}")
        return code

    def non_speech_ids(self) -> tuple[int, ...]:
        """Ids of brackets, music notes and other marks of what is not spoken, ascending.

        What `suppress_tokens=-1` stands for in Whisper, without the special tokens. A mark is suppressed with
        and without a leading space where that is one token; hyphen and apostrophe only with it, where they
        cannot be inside a word.
        """
        marks = [*'"#()*+/:;<=>@[\\]^_`{|}~「」『』']
        marks += ["<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))"]
        marks += ["[[", "]]", "{{", "}}", "♪♪", "♪♪♪"]
        # Some notes are two byte tokens; the first is enough, as it opens only symbols from U+2640 to U+267F.
        notes = [*"♩♪♫♬♭♮♯"]
        spellings = [self._bpe.encode_ordinary(space + mark) for mark in marks for space in ("", " ")]
        first_of = [self._bpe.encode_ordinary(space + note) for note in notes for space in ("", " ")]
        first_of += [self._bpe.encode_ordinary(mark) for mark in (" -", " '")]
        single = {ids[0] for ids in spellings if len(ids) == 1}
        return tuple(sorted(single | {ids[0] for ids in first_of}))


@functools.cache
def get_tokenizer() -> Tokenizer:
    """The one tokenizer of this process; building it takes a moment, keeping it some megabytes."""
    return Tokenizer()


def embedding_rows(vocab_size: int) -> list[int | None]:
    """For each of our VOCAB_SIZE ids, its row in the token embedding of a Whisper with `vocab_size` rows.

    None where that Whisper has no such token: mask always, Cantonese before large-v3. Raises ModelError for
    a vocabulary that is not Whisper's multilingual one.
    """
    shift = _shift(vocab_size)
    cantonese = _LANGUAGE_IDS["yue"]
    rows: list[int | None] = list(range(cantonese))
    rows.append(None if shift else cantonese)
    rows += range(TRANSLATE - shift, MASK - shift)
    return [*rows, None]


def whisper_id(token_id: int, vocab_size: int) -> int:
    """Our id in a Whisper with `vocab_size` tokens.

    Raises LanguageError for Cantonese before large-v3, ValueError for mask and what is no id at all, and
    ModelError for a vocabulary that is not Whisper's multilingual one.
    """
    shift = _shift(vocab_size)
    if not 0 <= token_id < MASK:
        raise ValueError(f"Whisper has no token for our id {token_id}; give one of 0 to {MASK - 1}")
    if shift and token_id == _LANGUAGE_IDS["yue"]:
        raise LanguageError("this Whisper does not know Cantonese (yue); use large-v3 or turbo, or zh")
    return token_id - shift if token_id >= TRANSLATE else token_id


def id_from_whisper(token_id: int, vocab_size: int) -> int:
    """Our id for one that a Whisper with `vocab_size` tokens wrote: the inverse of `whisper_id`."""
    shift = _shift(vocab_size)
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"id {token_id} is outside a vocabulary of {vocab_size}")
    return token_id + shift if token_id >= TRANSLATE - shift else token_id


def _shift(vocab_size: int) -> int:
    """How much lower the ids above the languages are in a Whisper with `vocab_size` tokens."""
    shift = MASK - vocab_size
    if shift not in (0, 1):
        raise ModelError(
            f"a Whisper vocabulary of {vocab_size} tokens is not supported: multilingual sizes have {MASK} "
            f"(large-v3, turbo) or {MASK - 1}; choose a model whose name does not end in .en"
        )
    return shift


def _read_ranks() -> dict[bytes, int]:
    """Token bytes to merge rank, which is also the id. The last is an empty token, kept to hold its id."""
    lines = resources.files("whisfusion").joinpath("assets/multilingual.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
