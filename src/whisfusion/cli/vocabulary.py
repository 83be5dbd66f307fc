"""whisfusion vocabulary: the tokens that a model's languages use."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from whisfusion.cli.parser import Arguments, Commands, checked
from whisfusion.errors import OptionError

_EXAMPLES = """\
examples:
  whisfusion vocabulary my-model --data train/*.jsonl
  whisfusion vocabulary my-model --text en=sentences.txt --text de=saetze.txt.xz --least 2 --check dev/*.jsonl
"""


def add(commands: Commands) -> None:
    """Describe `whisfusion vocabulary`."""
    parser = commands.add(
        "vocabulary",
        "limit a model to the tokens that its languages use",
        run,
        description="Limit a model folder to the tokens that occur in text of each language.\n"
        "Half of Whisper's tokens are of no use to one language: without them a CPU decodes faster, and nothing is "
        "written in another script. A language without text may write every token.",
        usage="whisfusion vocabulary FOLDER [--data MANIFEST...] [--text LANGUAGE=FILE]... [options]",
        epilog=_EXAMPLES,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a model folder, which is changed")
    parser.add_argument(
        "--data", nargs="+", default=[], metavar="MANIFEST", help="transcripts, each in its own language"
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="LANGUAGE=FILE",
        help="one sentence a line, .xz too; may be given several times",
    )
    parser.add_argument(
        "--least",
        type=checked(int, lambda count: count >= 1, "at least 1"),
        default=1,
        metavar="N",
        help="times that a token must occur (default 1)",
    )
    parser.add_argument(
        "--check",
        nargs="+",
        default=[],
        metavar="MANIFEST",
        help="other transcripts: tell how many of their tokens can no longer be written",
    )


def run(arguments: Arguments) -> int:
    """Count, write, and tell how many tokens are left in each language, and how many are missing elsewhere."""
    from whisfusion import checkpoint
    from whisfusion.data.manifest import read_manifest
    from whisfusion.normalise import normalise
    from whisfusion.tokenizer import SAMPLEABLE
    from whisfusion.vocabulary import Vocabulary, token_list

    config, _ = checkpoint.read_config(arguments.folder)

    def styled(text: str, language: str) -> str:
        return normalise(text, language) if config.text_style == "normalised" else text

    texts: dict[str, list[str]] = defaultdict(list)
    for language, text in _texts(arguments):
        texts[language].append(styled(text, language))
    if not texts:
        raise OptionError("give text to take the tokens from: --data MANIFEST, or --text LANGUAGE=FILE")
    others = read_manifest(*arguments.check) if arguments.check else []
    vocabulary = Vocabulary({language: token_list(own, least=arguments.least) for language, own in texts.items()})
    checkpoint.add(arguments.folder, vocabulary)
    for language, ids_V in vocabulary.items():
        line = f"{language}  {len(ids_V):,} of {SAMPLEABLE:,} tokens, from {len(texts[language]):,} sentences"
        unseen = [styled(other.text, language) for other in others if other.language == language]
        if unseen:
            line += f"; without {100 * vocabulary.missing(language, unseen):.2f} % of the tokens to check"
        print(line)
    return 0


def _texts(arguments: Arguments) -> Iterator[tuple[str, str]]:
    """Every sentence with its language."""
    from whisfusion.data.manifest import read_manifest

    if arguments.data:
        for utterance in read_manifest(*arguments.data):
            yield utterance.language, utterance.text
    yield from _lines("--text", arguments.text)


def _lines(option: str, values: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Every line of the files of an option, with its language."""
    from whisfusion.data.sentences import read_sentences
    from whisfusion.tokenizer import canonical_language

    for given in values:
        language, separator, path = given.partition("=")
        if not separator:
            raise OptionError(f"{option} takes LANGUAGE=FILE, such as en=sentences.txt, not {given!r}")
        code = canonical_language(language)
        yield from ((code, line) for line in read_sentences([path]))
