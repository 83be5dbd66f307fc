"""whisfusion export: a model folder in another form, as it is handed on."""

from whisfusion.cli.decoding import add_pdd_options, pdd_arguments
from whisfusion.cli.parser import Arguments, Commands, checked


def add(commands: Commands) -> None:
    """Describe `whisfusion export`."""
    parser = commands.add(
        "export",
        "write a model folder in the form in which it is handed on",
        run,
        description="Write a model folder again: as int8, with its encoder, in files that are not too large, with\n"
        "other settings for decoding, as the mean with another run. What is not said stays as it is.",
    )
    parser.add_argument("model", metavar="MODEL", help="a model's name or folder")
    parser.add_argument("--out", metavar="FOLDER", required=True)
    parser.add_argument("--int8", action="store_true", help="matrices as whole numbers, with a scale per row")
    parser.add_argument(
        "--drop_unused", action="store_true", help="without the embeddings of tokens that its vocabulary does not have"
    )
    parser.add_argument(
        "--bits",
        type=checked(int, lambda bits: 2 <= bits <= 8, "2 to 8"),
        default=8,
        metavar="B",
        help="of those numbers, but for the encoder's (default 8); 6 take two thirds of the room",
    )
    parser.add_argument("--encoder", action="store_true", help="with the encoder, so that nothing else is needed")
    parser.add_argument(
        "--whisper",
        action="store_true",
        help="with the decoder of the Whisper whose encoder it has: to proofread, to rerank and to tell the language",
    )
    parser.add_argument(
        "--file_mib",
        type=checked(float, lambda size: size > 0, "more than 0"),
        default=4096.0,
        metavar="MIB",
        help="the largest that a file of weights may be, where no single tensor is larger (default 4096)",
    )
    parser.add_argument(
        "--average", metavar="OTHER", help="an earlier or another run of the same model, to average with"
    )
    parser.add_argument("--share", type=float, default=0.2, metavar="S", help="of OTHER in the mean (default 0.2)")
    parser.add_argument(
        "--experimental",
        metavar="LANGUAGE,...",
        help="languages to mark as experimental: too often misheard, or never measured",
    )
    group = parser.add_argument_group("decoding", "The model's own settings, for whoever gives none.")
    add_pdd_options(group)


def run(arguments: Arguments) -> int:
    """Read, write, and say where."""
    from dataclasses import replace

    import torch

    from whisfusion import checkpoint, hub
    from whisfusion.averaging import averaged
    from whisfusion.errors import OptionError
    from whisfusion.pdd import override_options
    from whisfusion.weights import load_whisper

    model = checkpoint.load(hub.resolve(arguments.model), dtype=torch.float32)
    config = model.config
    if arguments.drop_unused and model.vocabulary is None:
        raise OptionError(f"{arguments.model} may write every token: limit it first with whisfusion vocabulary")
    if arguments.experimental is not None:
        config = replace(config, experimental=tuple(arguments.experimental.split(",")))
    weights = model.decoder.state_dict()
    if arguments.average is not None:
        other = checkpoint.load(hub.resolve(arguments.average), dtype=torch.float32)
        weights = averaged(weights, other.decoder.state_dict(), arguments.share)
        config = replace(config, training={**config.training, "share_of_another_run": arguments.share})
    whisper = model.whisper
    if arguments.whisper and whisper is None:
        whisper = load_whisper(config.encoder_name, "cpu", torch.float32).decoder
        config = replace(config, whisper=whisper.config)
    folder = checkpoint.save(
        arguments.out,
        config,
        weights,
        encoder=model.encoder.state_dict() if arguments.encoder else None,
        whisper=None if whisper is None else whisper.state_dict(),
        generation=override_options(model.generation, pdd_arguments(arguments)),
        int8=arguments.int8,
        bits=arguments.bits,
        tokens=model.vocabulary.tokens() if arguments.drop_unused and model.vocabulary is not None else None,
        file_bytes=int(arguments.file_mib * 2**20),
    )
    if model.vocabulary is not None:
        checkpoint.add(folder, model.vocabulary)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")
    return 0
