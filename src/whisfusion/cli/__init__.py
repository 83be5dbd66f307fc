"""The command line: parse, call, print. Nothing heavy is imported before a command needs it.

Every module here has an `add` for each of its commands, which describes it, and a `run` function, which does it and
returns the exit status: 0 done, 1 something could not be done, 2 asked for in a way that makes no sense.
"""

import os
import sys
from collections.abc import Sequence

from whisfusion import __version__
from whisfusion.cli import bench, data, export, judge, models, train, transcribe, vocabulary
from whisfusion.cli.parser import Parser
from whisfusion.errors import LanguageError, OptionError, WhisfusionError

_GROUPS = {
    "Recognise": (transcribe.add,),
    "Models": (models.add_models, models.add_pull, models.add_info, export.add, vocabulary.add),
    "Judge": (judge.add_evaluate, judge.add_score, bench.add),
    "Train": (train.add, data.add),
}


def build_parser() -> Parser:
    """The parser of all commands; a parsed command line has its function as `run`."""
    parser = Parser(
        prog="whisfusion",
        description="Speech recognition by masked diffusion.",
        usage="whisfusion COMMAND ...",
        epilog="whisfusion COMMAND --help explains a command. Start with: whisfusion transcribe speech.mp3",
    )
    parser.add_argument("--version", action="version", version=f"whisfusion {__version__}")
    commands = parser.add_commands()
    for title, adders in _GROUPS.items():
        commands.begin_group(title)
        for add in adders:
            add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status. Whatever a user can cause is told in a sentence."""
    arguments = build_parser().parse(sys.argv[1:] if argv is None else argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except (OptionError, LanguageError) as error:
        return _tell(error, 2)
    except (WhisfusionError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `whisfusion ... | head`: nobody reads on, and nothing is wrong
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + 13
        return _tell(error, 1)
    except ModuleNotFoundError as error:
        return _tell(f"this needs the Python package {error.name}: pip install {error.name}", 1)
    except KeyboardInterrupt:
        return _tell("stopped", 128 + 2)
    except Exception as error:
        # torch's own class, which is not imported here, tells of a GPU's memory.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        return _tell("the device is out of memory: try a smaller --batch_size, or --device cpu", 1)


def _tell(message: object, status: int) -> int:
    print(f"whisfusion: {message}", file=sys.stderr)
    return status
