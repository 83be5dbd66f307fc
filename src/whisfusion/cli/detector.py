"""whisfusion detector: gives a model what tells the language of speech."""

from pathlib import Path

from whisfusion.cli.parser import Arguments, Commands
from whisfusion.cli.progress import count

_EXAMPLES = """\
examples:
  whisfusion detector my-model
  whisfusion detector my-model --data train/*.jsonl synthetic/*.jsonl --layers 4 --hidden 160
"""


def add(commands: Commands) -> None:
    """Describe `whisfusion detector`."""
    parser = commands.add(
        "detector",
        "let a model tell the language as Whisper does",
        run,
        description="Put into a model folder what tells the language of speech: the part of Whisper's decoder that\n"
        "does so, from the published weights of the model's Whisper (whisfusion pull).\n"
        "With --data it is cut down to a few layers and units, and taught to answer as before; transcripts are not\n"
        "looked at, and not every language has to be there.",
        usage="whisfusion detector FOLDER [--data MANIFEST...] [options]",
        epilog=_EXAMPLES,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a model folder, which is changed")
    parser.add_argument("--data", nargs="+", default=[], metavar="MANIFEST", help="speech to learn from")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="that are left (default 4)")
    parser.add_argument("--hidden", type=int, default=160, metavar="N", help="units left in each (default 160)")
    parser.add_argument("--clips", type=int, default=20_000, metavar="N", help="that are heard (default 20,000)")
    parser.add_argument(
        "--odd",
        type=float,
        default=0.75,
        metavar="SHARE",
        help="of them, made odd: backwards, at another speed, cut together, in noise (default 0.75)",
    )
    parser.add_argument("--passes", type=float, default=8, metavar="N", help="over the clips (default 8)")
    parser.add_argument("--learning_rate", type=float, default=5e-4, metavar="R", help="default 5e-4")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="default 42")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default auto)")


def run(arguments: Arguments) -> int:
    """Make it, put it in, and say how well it learned."""
    import tempfile

    import torch

    from whisfusion import checkpoint
    from whisfusion.data.manifest import read_manifest
    from whisfusion.detector import DetectorConfig
    from whisfusion.loading import resolve_device
    from whisfusion.train.detector import Teaching, encoder_of, taught_detector, whole_detector
    from whisfusion.weights import load_whisper

    teaching = Teaching(
        clips=arguments.clips,
        odd=arguments.odd,
        passes=arguments.passes,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
    )
    device = resolve_device(arguments.device)
    utterances = read_manifest(*arguments.data) if arguments.data else []
    model = checkpoint.load(arguments.folder, device=device, dtype=torch.float32)
    whisper = load_whisper(model.config.encoder_name, device, torch.float32)
    detector, learned = whole_detector(whisper.decoder), ""
    if utterances:
        shape = DetectorConfig(arguments.layers, arguments.hidden, detector.config.width, detector.config.heads)
        with tempfile.TemporaryFile() as file:
            taught = taught_detector(
                detector,
                shape,
                utterances,
                encoder_of(model),
                file,
                languages=model.config.languages,
                teaching=teaching,
                progress=count,
            )
        detector = taught.detector
        learned = f"; says what Whisper says in {100 * taught.agreed:.1f} % of {taught.kept_out:,} clips kept out"
    checkpoint.add(arguments.folder, detector=detector)
    size = sum(parameter.numel() for parameter in detector.parameters())
    print(f"{arguments.folder}: a detector of {size:,} parameters{learned}")
    return 0
