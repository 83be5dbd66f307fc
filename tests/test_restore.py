import pytest

from whisfusion.data.restore import restore, restore_manifest
from whisfusion.data.utterance import Utterance
from whisfusion.errors import ManifestError


@pytest.mark.parametrize(
    ("text", "written", "expected"),
    [
        ("HE WENT TO PARIS", "He went to Paris.", "He went to Paris."),
        ("HE WENT TO PARIS", "he went to Harris", "He went to paris"),
        ("I SAID I'M HERE MISTER SMITH", "I said, I'm here, Mr. Smith!", "I said, I'm here, mister Smith!"),
        ("DO YOU KNOW I DON'T", "Do you know? No, you don't.", "Do you know? I don't."),
        ("ONE TWO THREE", "", "One two three"),
        ("WAIT FOR IT", "Wait for a bit.", "Wait for it."),
        ("", "Something.", ""),
    ],
)
def test_words_are_the_corpus_and_their_dress_the_recognisers(text, written, expected):
    assert restore(text, written).text == expected


def test_agreement_is_the_share_of_words():
    assert restore("A B C D", "a, b x d.").agreed == 0.75
    assert restore("A B", "").agreed == 0.0


def test_a_manifest_keeps_what_agrees():
    utterances = [Utterance(str(i), "a.flac", 2.0, text, "en") for i, text in enumerate(["GOOD DAY SIR", "NOT AT ALL"])]
    written = [{"id": "0", "text": "Good day, Sir."}, {"id": "1", "text": "Nothing else."}]
    kept, dropped = restore_manifest(utterances, written, least=0.8)
    assert [(u.id, u.text) for u in kept] == [("0", "Good day, Sir.")]
    assert dropped == 1
    with pytest.raises(ManifestError, match="the first 1"):
        restore_manifest(utterances, written[:1], least=0.0)
