"""Spelled English numbers in digits: "two hundred and five dollars" as "$205", "nineteen sixty" as "1960".

The rules are those of Whisper's English normaliser, matched exactly. Where they do something that nobody
would have chosen, a comment begins with "Quirk".
"""

import re
from fractions import Fraction

_ZEROS = frozenset({"o", "oh", "zero"})
# fmt: off
_ONES = {name: value for value, name in enumerate((
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
), start=1)}
_TENS = {name: 10 * value for value, name in enumerate((
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
), start=2)}
_SCALES = {"hundred": 100} | {name: 1000**power for power, name in enumerate((
    "thousand", "million", "billion", "trillion", "quadrillion", "quintillion", "sextillion", "septillion",
    "octillion", "nonillion", "decillion",
), start=1)}
_SIGNS = {"minus": "-", "negative": "-", "plus": "+", "positive": "+"}
_CURRENCIES = {
    "pound": "£", "pounds": "£", "euro": "€", "euros": "€",
    "dollar": "$", "dollars": "$", "cent": "¢", "cents": "¢",
}
# fmt: on
_REPEATS = {"double": 2, "triple": 3}
_DIGIT_WORDS = _ZEROS | _ONES.keys() | _TENS.keys()

_Forms = dict[str, tuple[int, str]]


def _plurals_and_ordinals() -> _Forms:
    """Value and suffix of each word below a hundred that ends a number: "twelfth" is (12, "th")."""
    ordinals = {"first": "one", "second": "two", "third": "three", "fifth": "five", "twelfth": "twelve"}
    endings = {"first": "st", "second": "nd", "third": "rd"}
    forms: _Forms = {"zeroth": (0, "th")}
    for ordinal, name in ordinals.items():
        forms[ordinal] = _ONES[name], endings.get(ordinal, "th")
    for name, value in _ONES.items():
        forms["sixes" if name == "six" else name + "s"] = value, "s"
        if name not in ordinals.values():
            # Quirk: the rule gives "nineth", so "ninth" is left in letters.
            forms[name + ("h" if name.endswith("t") else "th")] = value, "th"
    for name, value in _TENS.items():
        forms[name.removesuffix("y") + "ies"] = value, "s"
        forms[name.removesuffix("y") + "ieth"] = value, "th"
    return forms


_SMALL: _Forms = {name: (value, "") for name, value in (_ONES | _TENS).items()} | _plurals_and_ordinals()
_LARGE: _Forms = {name + ending: (value, ending) for name, value in _SCALES.items() for ending in ("", "s", "th")}
_NUMBER_WORDS = frozenset(
    {*_ZEROS, *_SMALL, *_LARGE, *_SIGNS, *_CURRENCIES, "per", "percent", "and", "point", *_REPEATS}
)
_BEGINNINGS = _NUMBER_WORDS - {"and"}  # which alone means nothing, and is in every other sentence

_MAX_DIGITS = 1000  # Python refuses to convert integers beyond a few thousand digits; such text is no number
_NUMERAL = re.compile(rf"\d{{1,{_MAX_DIGITS}}}(?:\.\d{{1,{_MAX_DIGITS}}})?")
_DIGIT = re.compile(r"\d")
_AND_A_HALF = re.compile(r"\band\s+a\s+half\b")
_LETTER_THEN_DIGIT = re.compile(r"([a-z])([0-9])")
_DIGIT_THEN_LETTER = re.compile(r"([0-9])([a-z])")
_APART_SUFFIX = re.compile(r"([0-9])\s+(st|nd|rd|th|s)\b")
_AMOUNT_AND_CENTS = re.compile(r"([€£$][0-9]+) (?:and )?¢([0-9]{1,2})\b")
# Quirk: the stop stands for any character, so that "$0 50" is fifty cents as well; "$0.5" is five.
_CENTS_ALONE = re.compile(r"[€£$]0.([0-9]{1,2})\b")
_LONE_ONE = re.compile(r"\b1(s?)\b")


def numbers_in_digits(text: str) -> str:
    """`text` with spelled numbers in digits, currency signs before and percent signs after them.

    `text` is in lower case, without symbols other than .%$¢€£. Words come back with single spaces between
    them; a lone 1 comes back as "one".
    """
    text = _halves_as_decimals(text)
    has_digits = _DIGIT.search(text) is not None
    if has_digits:
        text = _LETTER_THEN_DIGIT.sub(r"\1 \2", text)
        text = _DIGIT_THEN_LETTER.sub(r"\1 \2", text)
        text = _APART_SUFFIX.sub(r"\1\2", text)
    words = text.split()
    if not has_digits and _BEGINNINGS.isdisjoint(words):
        return " ".join(words)

    text = " ".join(_NumberReader().read(words))
    text = _AMOUNT_AND_CENTS.sub(lambda match: f"{match[1]}.{int(match[2]):02d}", text)
    text = _CENTS_ALONE.sub(lambda match: f"¢{int(match[1])}", text)
    return _LONE_ONE.sub(r"one\1", text)  # Quirk: in decimals too, so "1.5" becomes "one.5"


def _halves_as_decimals(text: str) -> str:
    """ "two and a half" as "two point five". Quirk: a half that opens the text is dropped."""
    *starts, rest = _AND_A_HALF.split(text)
    pieces = []
    for start in starts:
        if words := start.split():
            after_number = words[-1] in _DIGIT_WORDS or words[-1] in _SCALES
            pieces += [start, "point five" if after_number else "and a half"]
    return " ".join([*pieces, rest])


class _NumberReader:
    """Reads words from left to right and writes each run of number words as one number.

    `value` is the number so far: None between numbers, an int while words add up ("twenty one"), a str once
    they are digits in a row ("nineteen twenty", "one oh one", "two point five"). `prefix` is the sign or
    currency that goes before what is written next.
    """

    def __init__(self) -> None:
        self.value: int | str | None = None
        self.prefix = ""
        self.written: list[str] = []

    def read(self, words: list[str]) -> list[str]:
        """All of `words`, numbers in digits."""
        consumed = False
        for previous, word, following in zip(["", *words], words, [*words[1:], ""], strict=False):
            if consumed:
                consumed = False
            elif word in _NUMBER_WORDS:
                consumed = self._read_number_word(previous, word, following)
            elif word.isalpha() or not self._read_numeral(word):
                if self.value is None and not self.prefix:
                    self.written.append(word)
                else:
                    self._end_number()
                    self._write(word)
        self._end_number()
        return self.written

    def _write(self, text: str) -> None:
        # Quirk: a sign is written before any word that follows it: "minus and" becomes "-and".
        self.written.append(self.prefix + text)
        self.prefix = ""
        self.value = None

    def _end_number(self) -> None:
        if self.value is not None:
            self._write(str(self.value))

    def _read_numeral(self, word: str) -> bool:
        """Take in digits, perhaps with decimals and a currency in front; False if `word` is anything else."""
        currency, digits = (word[0], word[1:]) if word[0] in "$¢€£" else ("", word)
        if not _NUMERAL.fullmatch(digits):
            return False
        if isinstance(self.value, str) and self.value.endswith("."):
            self.value += digits
            return True
        self._end_number()
        self.prefix = currency or self.prefix
        whole, _, decimals = digits.partition(".")
        # Quirk: "5.00" becomes 5, and "007" becomes 7.
        self.value = digits if int(decimals or 0) else int(whole)
        return True

    def _read_number_word(self, previous: str, word: str, following: str) -> bool:
        """Take in a word of _NUMBER_WORDS; True if `following` has been taken in with it."""
        if word in _SMALL:
            number, suffix = _SMALL[word]
            self._add(number, previous)
            self._end_with(suffix)
        elif word in _LARGE:
            scale, suffix = _LARGE[word]
            self._multiply(scale)
            self._end_with(suffix)
        elif word in _ZEROS:
            self._append("0")
        elif word in _CURRENCIES and self.value is not None:
            self.prefix = _CURRENCIES[word]  # Quirk: in place of a sign, so "minus five dollars" loses it
            self._end_number()
        elif word == "percent" and self.value is not None:
            self._end_with("%")
        elif word == "per" and following == "cent" and self.value is not None:
            self._end_with("%")
            return True
        elif following in _NUMBER_WORDS or _NUMERAL.fullmatch(following):
            return self._read_link(previous, word, following)
        else:
            self._end_number()
            self._write(word)
        return False

    def _read_link(self, previous: str, word: str, following: str) -> bool:
        """Take in a word that means something only before a number; True if `following` went with it."""
        if word in _SIGNS:
            self._end_number()
            self.prefix = _SIGNS[word]
        elif word in _REPEATS and (following in _ONES or following in _ZEROS):
            self._append(str(_ONES.get(following, 0)) * _REPEATS[word])
            return True
        elif word == "point":
            # Quirk: before a number word that is no digit ("point million"), it is dropped.
            if following in _DIGIT_WORDS or _NUMERAL.fullmatch(following):
                self._append(".")
        elif word != "and" or previous not in _SCALES:  # "two hundred and five" is one number
            self._end_number()
            self._write(word)
        return False

    def _append(self, digits: str) -> None:
        # Quirk: a numeral 0 is lost here, so "0 point 5" becomes ".5".
        self.value = str(self.value or "") + digits

    def _add(self, number: int, previous: str) -> None:
        """Take in a number below a hundred: where it fits behind round numbers, else as digits in a row."""
        value = self.value
        if value is None:
            self.value = number
        elif isinstance(value, str) and previous in _TENS and number < 10:
            self.value = value[:-1] + str(number)  # "nineteen twenty" and "one"
        elif isinstance(value, int) and previous not in _ONES and value % (10 if number < 10 else 100) == 0:
            self.value = value + number
        else:
            self.value = f"{value}{number}"

    def _multiply(self, scale: int) -> None:
        """Take in "hundred", "million" and the like; a number that cannot be scaled ends before it."""
        value = self.value
        if value is None:
            self.value = scale
        elif isinstance(value, int):
            thousands, below = divmod(value, 1000)
            self.value = thousands * 1000 + below * scale
        elif (product := _whole_product(value, scale)) is not None:
            self.value = product
        else:
            self._end_number()
            self.value = scale

    def _end_with(self, suffix: str) -> None:
        if suffix:
            self._write(f"{self.value}{suffix}")


def _whole_product(digits: str, scale: int) -> int | None:
    """`digits` (perhaps with decimals) times `scale`; None if that is not whole or `digits` no number."""
    if len(digits) > _MAX_DIGITS:
        return None
    try:
        product = Fraction(digits) * scale
    except ValueError:  # an address, a version: "1.2.3"
        return None
    return product.numerator if product.denominator == 1 else None
