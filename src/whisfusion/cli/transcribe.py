"""whisfusion transcribe: files, folders or stdin to text."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whisfusion.cli.decoding import add_decoding_options, add_model_options, decoding_arguments, load_transcriber
from whisfusion.cli.parser import Arguments, Commands
from whisfusion.cli.progress import AudioProgress, on_terminal
from whisfusion.errors import AudioError, OptionError

if TYPE_CHECKING:
    import numpy as np

    from whisfusion.transcript import Transcript

_MORE_SUFFIXES = (".aif", ".aiff", ".oga", ".wma", ".mov", ".mkv")
"""Files in folders that are taken for sound, besides those that a corpus may hold."""
_WINDOW_SECONDS = 30

_EXAMPLES = """\
examples:
  whisfusion transcribe talk.mp3 --language en
  whisfusion transcribe recordings/ --output_dir texts --output_format all
  whisfusion transcribe film.mkv --output_format srt > film.srt
  ffmpeg -i film.mkv -f wav - | whisfusion transcribe - --fast
  whisfusion transcribe talk.mp3 --system whisper --model whisper-base
"""


def add(commands: Commands) -> None:
    """Describe the command."""
    parser = commands.add(
        "transcribe",
        "write down what is said in sound files",
        run,
        description="Write down what is said in sound files: the text goes to stdout, and to files with --output_dir.",
        usage="whisfusion transcribe FILE... [options]",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="sound or video files of any common format, folders of them, or - for stdin",
    )
    parser.add_argument(
        "--language", metavar="L", help="en, de, Japanese, ...; without it the model listens for it, if it can"
    )
    add_model_options(parser)
    parser.add_argument("--model", metavar="NAME", help="a name that `whisfusion models` lists, or a model folder")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output_dir", type=Path, metavar="DIR", help="write one file per input here, named by its stem"
    )
    output.add_argument(
        "--output_format",
        choices=("txt", "json", "srt", "vtt", "all"),
        default="txt",
        help="txt (default); json with segments, candidates and scores, without --output_dir on stdout, one line per "
        "input; srt or vtt, subtitles; or all of them",
    )
    output.add_argument(
        "--word_timestamps", action="store_true", help="json: when each word was said; subtitles use it in any case"
    )
    output.add_argument(
        "--trace", action="store_true", help="json: every denoising step too, its tokens, masks and confidences"
    )
    loudness = output.add_mutually_exclusive_group()
    loudness.add_argument(
        "--verbose", action="store_true", help="tell language, confidence and speed of each file on stderr"
    )
    loudness.add_argument("--quiet", action="store_true", help="no progress, and with --output_dir no text on stdout")
    add_decoding_options(parser)


def run(arguments: Arguments) -> int:
    """Transcribe all that can be, tell of all that cannot; 1 where there was any of the latter."""
    decoding = decoding_arguments(arguments) | {"language": arguments.language, "trace": arguments.trace}
    subtitled = arguments.output_format in ("srt", "vtt", "all")
    if arguments.word_timestamps and arguments.output_format == "txt":
        raise OptionError("--word_timestamps is for --output_format json, srt, vtt or all")
    if arguments.trace and (arguments.output_format not in ("json", "all") or arguments.system == "whisper"):
        raise OptionError("--trace is for diffusion decoding with --output_format json or all")
    if arguments.output_format == "all" and arguments.output_dir is None:
        raise OptionError("--output_format all writes files: say where with --output_dir")
    sources, problems = expand(arguments.files)
    if subtitled and len(sources) > 1 and arguments.output_dir is None:
        raise OptionError("subtitles of several files are files too: say where with --output_dir")
    for problem in problems:
        _complain(problem)
    if not sources:
        return 1
    transcriber = load_transcriber(arguments)
    decoding["word_timestamps"] = arguments.word_timestamps or (subtitled and transcriber.system.times_words)
    transcriber.transcribe([], **decoding)  # refuses options that do not fit before any audio is read

    printer = _Printer(arguments, sources)
    failed = len(problems)
    watched = on_terminal() and not arguments.quiet
    announced = [announced_seconds(s) if watched and s != "-" else 0.0 for s in sources]
    done = 0.0
    with AudioProgress(sum(announced), shown=watched) as progress:
        for group in _groups(sources, decoding["batch_size"]):
            loaded: dict[int, np.ndarray] = {}
            for index, samples in group:
                if isinstance(samples, AudioError):
                    with progress.paused():
                        _complain(samples)
                    failed += 1
                    progress.grow(-announced[index])
                else:
                    loaded[index] = samples
                    progress.grow(_seconds(samples) - announced[index])
            transcripts = transcriber.transcribe(
                list(loaded.values()),
                **decoding,
                on_progress=lambda seconds, before=done: progress.reach(before + seconds),
            )
            done += sum(map(_seconds, loaded.values()))
            with progress.paused():
                for index, transcript in zip(loaded, transcripts, strict=True):
                    printer.give(index, transcript)
    return 1 if failed else 0


def expand(files: Sequence[str]) -> tuple[list[str], list[str]]:
    """Each file, and all sound files in or under each folder; a sentence for each folder that has none."""
    from whisfusion.data.manifest import AUDIO_SUFFIXES

    sources: list[str] = []
    problems: list[str] = []
    for file in files:
        if file == "-" or not Path(file).is_dir():
            sources.append(file)
            continue
        found = sorted(
            str(path)
            for path in Path(file).rglob("*")
            if path.suffix.lower() in (*AUDIO_SUFFIXES, *_MORE_SUFFIXES) and not path.name.startswith(".")
        )
        sources += found
        if not found:
            problems.append(f"{file} is a folder without sound files")
    return sources, problems


def announced_seconds(source: str) -> float:
    """The duration that a file's header states, for the progress bar; 0 where it states none."""
    import av

    try:
        with av.open(source) as container:
            return (container.duration or 0) / av.time_base
    except (av.FFmpegError, OSError):
        return 0.0


def _groups(sources: Sequence[str], batch_size: int) -> Iterator[list[tuple[int, "np.ndarray | AudioError"]]]:
    """Sources by index, with their samples or why there are none; as many at a time as fill a batch.

    So memory does not grow with the list, and the first texts appear while others wait.
    """
    from whisfusion.audio import load_audio

    group: list[tuple[int, np.ndarray | AudioError]] = []
    windows = 0.0
    for index, source in enumerate(sources):
        try:
            samples = load_audio(source)
            windows += max(1.0, _seconds(samples) / _WINDOW_SECONDS)
            group.append((index, samples))
        except AudioError as error:
            group.append((index, error))
        if windows >= batch_size:
            yield group
            group, windows = [], 0.0
    if group:
        yield group


def _seconds(samples: "np.ndarray") -> float:
    from whisfusion.audio import SAMPLE_RATE

    return len(samples) / SAMPLE_RATE


class _Printer:
    """Puts a transcript where it was asked for."""

    def __init__(self, arguments: Arguments, sources: Sequence[str]) -> None:
        from whisfusion.formats import FORMATS, output_names

        self._sources, self._names = sources, output_names(sources)
        self._folder: Path | None = arguments.output_dir
        self._format = arguments.output_format
        self._formats = list(FORMATS) if self._format == "all" else [self._format]
        self._speaks = not (arguments.quiet and self._folder)
        self._verbose = arguments.verbose

    def give(self, index: int, transcript: "Transcript") -> None:
        """Write the files and print the line of one source."""
        from whisfusion.formats import FORMATS, write

        source = self._sources[index]
        for segment in transcript.segments:
            if not segment.complete:
                _complain(
                    f"{source}: the text of {segment.start:.1f} to {segment.end:.1f} s is cut off: no room for more"
                )
        if self._folder:
            write(transcript, self._folder, self._names[index], self._formats)
        if self._verbose:
            spent = sum(transcript.timings.values())
            print(
                f"{source}: {transcript.duration:.1f} s, language {transcript.language}, confidence "
                f"{transcript.confidence:.3f}, {transcript.duration / max(spent, 1e-9):.1f}x real time",
                file=sys.stderr,
            )
        if not self._speaks:
            return
        if self._format == "json" and not self._folder:
            print(json.dumps({"file": source, **transcript.to_dict()}, ensure_ascii=False), flush=True)
        elif self._format in ("srt", "vtt") and not self._folder:
            print(FORMATS[self._format](transcript), end="", flush=True)
        elif len(self._sources) == 1:
            print(transcript.text, flush=True)
        else:
            print(f"{source}: {transcript.text}", flush=True)


def _complain(problem: object) -> None:
    print(f"whisfusion: {problem}", file=sys.stderr)
