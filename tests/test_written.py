import jiwer
import pytest

from whisfusion.evaluate.written import judge_written, punctuation, written_units

# Both count whole numbers and divide once.
RATE_TOLERANCE = 1e-12


@pytest.mark.parametrize(
    ("text", "language", "units"),
    [
        ("Well, it's late.", "en", ["Well", ",", "it's", "late", "."]),
        ("The well-known 3.5, at 10:30 -", "en", ["The", "well-known", "3.5", ",", "at", "10:30", "-"]),
        ("“No,” he said—twice…", "en", ['"', "No", ",", '"', "he", "said", "-", "twice", "…"]),
        ("wait... why?!", "en", ["wait", "…", "why", "?", "!"]),
        ("The boys’ $5", "en", ["The", "boys'", "$5"]),
        ("¿Qué?", "es", ["¿", "Qué", "?"]),
        ("„Grüße“ aus Köln", "de", ['"', "Grüße", '"', "aus", "Köln"]),
        ("今日は、晴れ。", "ja", [*"今日は、晴れ。"]),
        ("他说：「好」！", "zh", [*'他说:"好"!']),
        ("", "en", []),
    ],
)
def test_words_and_marks(text: str, language: str, units: list[str]):
    assert written_units(text, language) == units


def test_accents_count_alike_however_they_are_stored():
    assert written_units("cafe\u0301", "fr") == written_units("caf\u00e9", "fr") == ["caf\u00e9"]


def test_a_missing_comma_is_one_edit_and_leaves_its_word_right():
    judged = judge_written("Well it is", "Well, it is", "en")
    assert (judged.punctuated.deletions, judged.punctuated.total, judged.punctuated.units) == (1, 1, 4)
    assert (judged.cased.total, judged.cased.units) == (0, 3)


def test_case_counts_and_spelling_is_not_normalised():
    assert judge_written("well IT is", "Well it is", "en").cased.substitutions == 2
    assert judge_written("twenty", "20", "en").cased.total == 1


def test_edits_are_those_that_jiwer_counts_on_text_with_spaced_marks():
    hypothesis, reference = "Oh, I see you There. Do you", "Oh I see: you, there. Do you?"
    theirs = jiwer.process_words("Oh I see : you , there . Do you ?", "Oh , I see you There . Do you")
    ours = judge_written(hypothesis, reference, "en").punctuated
    assert (ours.substitutions, ours.deletions, ours.insertions) == (
        theirs.substitutions,
        theirs.deletions,
        theirs.insertions,
    )
    assert ours.total / ours.units == pytest.approx(theirs.wer, abs=RATE_TOLERANCE)


def counts(hypothesis: str, reference: str, language: str = "en") -> dict[str, tuple[int, int, int]]:
    """How often each mark is right, written, and in the reference."""
    _, marks = punctuation([judge_written(hypothesis, reference, language)])
    return {mark: (of.right, of.hypothesis, of.reference) for mark, of in marks.items()}


def test_marks_are_right_after_the_word_they_belong_to():
    assert counts("One two, three.", "One, two three.") == {",": (0, 1, 1), ".": (1, 1, 1)}
    assert counts("One, two three?", "One, two three.") == {",": (1, 1, 1), ".": (0, 0, 1), "?": (0, 1, 0)}


def test_words_are_put_side_by_side_before_their_marks():
    # Another case, another spelling, another word, one too many, one too few.
    assert counts("the colour, grey.", "The color, gray.") == {",": (1, 1, 1), ".": (1, 1, 1)}
    assert counts("A cut, sat.", "A cat, sat.") == {",": (1, 1, 1), ".": (1, 1, 1)}
    assert counts("A very big cat, sat.", "A cat, sat.") == {",": (1, 1, 1), ".": (1, 1, 1)}
    assert counts("A cat sat.", "A cat, which, sat.") == {",": (0, 0, 2), ".": (1, 1, 1)}


def test_marks_before_the_first_word_have_a_place_too():
    assert counts("¿Qué?", "¿Qué?", "es") == {"?": (1, 1, 1), "¿": (1, 1, 1)}
    assert counts("Qué ¿no?", "¿Qué no?", "es")["¿"] == (0, 1, 1)


def test_characters_take_the_place_of_words_where_there_are_none():
    assert counts("今日は、暗れ。", "今日は、晴れ。", "ja") == {"。": (1, 1, 1), "、": (1, 1, 1)}
    assert counts("今日、は晴れ。", "今日は、晴れ。", "ja")["、"] == (0, 1, 1)


def test_precision_recall_and_f1_add_up_over_utterances():
    judged = [
        judge_written("One, two, three.", "One, two three.", "en"),
        judge_written("Four", "Four.", "en"),
        judge_written("", "", "en"),
    ]
    together, marks = punctuation(judged)
    assert (together.right, together.hypothesis, together.reference) == (2, 3, 3)
    assert together.f1 == pytest.approx(2 / 3)
    assert (marks[","].precision, marks[","].recall) == (0.5, 1.0)
    assert (marks["."].precision, marks["."].recall, marks["."].f1) == (1.0, 0.5, pytest.approx(2 / 3))
    assert list(marks) == [".", ","]


def test_nothing_written_is_no_division_by_nothing():
    together, marks = punctuation([judge_written("", "", "en")])
    assert (together.precision, together.recall, together.f1, marks) == (0.0, 0.0, 0.0, {})
