"""Options that every command which recognises speech has: the model, the machine, and how to decode."""

import logging
from typing import TYPE_CHECKING, Any

from whisfusion.cli.parser import Arguments, Parser, checked
from whisfusion.cli.progress import on_terminal
from whisfusion.errors import OptionError

if TYPE_CHECKING:
    from whisfusion.transcriber import Transcriber

_PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"candidates": 1, "steps": 2, "temperature": 0.0},
    "accurate": {"candidates": 15, "steps": 5},
}
_PDD = ("candidates", "steps", "trajectory", "temperature", "remask")


def add_model_options(parser: Parser) -> None:
    """--system, --device, --dtype and --engine; the model itself is each command's own argument."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--system",
        choices=("whisfusion", "whisper"),
        default="whisfusion",
        help="whisper: a published Whisper with its own greedy decoder, for comparison",
    )
    group.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
        default="auto",
        help="auto (default): bfloat16 on CUDA; on a CPU int8 for a model that is stored so, else float32",
    )
    group.add_argument(
        "--engine",
        choices=("auto", "eager", "graph"),
        default="auto",
        help="graph: CUDA graphs, which get ready for each new shape of batch; auto (default): on an NVIDIA GPU graph",
    )


def add_decoding_options(parser: Parser) -> None:
    """The presets, and every setting of diffusion decoding; what is not given is the model's own."""
    group = parser.add_argument_group("decoding", "Without these, the model's own settings are used.")
    preset = group.add_mutually_exclusive_group()
    preset.add_argument(
        "--fast",
        dest="preset",
        action="store_const",
        const="fast",
        help="1 candidate, 2 steps, greedy: the quickest",
    )
    preset.add_argument(
        "--accurate",
        dest="preset",
        action="store_const",
        const="accurate",
        help="15 candidates, 5 steps: the best text",
    )
    add_pdd_options(group)
    group.add_argument(
        "--selection",
        choices=("mbr", "confidence", "spelling", "rerank"),
        help="how one candidate is chosen: mbr (default), the nearest to all others; confidence, the model's "
        "surest; spelling, near to all others and likely to the adapter's CTC; rerank, the likeliest to Whisper",
    )
    group.add_argument(
        "--no_proofread",
        dest="proofread",
        action="store_const",
        const=False,
        help="leave the chosen candidate as it was drawn: no edits that Whisper's decoder finds likelier",
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="S", help="another seed draws other candidates (default 0)"
    )
    group.add_argument(
        "--batch_size",
        type=checked(int, lambda size: size >= 1, "at least 1"),
        default=16,
        metavar="B",
        help="windows of at most 30 s decoded together (default 16)",
    )


def add_pdd_options(group: Any) -> None:
    """The fields of `PDDOptions`, to an argument group."""
    group.add_argument("-k", "--candidates", type=int, metavar="K", help="transcripts drawn, of which one is chosen")
    group.add_argument("-n", "--steps", type=int, metavar="N", help="denoising steps")
    group.add_argument(
        "--trajectory", type=_ratios, metavar="R,R,...", help="mask ratio of each step, such as 1.0,0.9,0.8"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="of drawing tokens; 0 is greedy")
    group.add_argument(
        "--remask", choices=("random", "confidence"), help="which tokens are written again in the next step"
    )


def pdd_arguments(arguments: Arguments) -> dict[str, Any]:
    """Those of them that were given."""
    return {name: getattr(arguments, name) for name in _PDD if getattr(arguments, name) is not None}


def decoding_arguments(arguments: Arguments) -> dict[str, Any]:
    """What the user chose, as keyword arguments of `Transcriber.transcribe`: the preset, and over it single options."""
    given = pdd_arguments(arguments)
    given |= {
        name: getattr(arguments, name) for name in ("selection", "proofread") if getattr(arguments, name) is not None
    }
    if arguments.system == "whisper" and (given or arguments.preset):
        named = [f"--{'no_proofread' if name == 'proofread' else name}" for name in (*given, arguments.preset) if name]
        raise OptionError(f"{', '.join(named)}: for diffusion decoding, so not with --system whisper")
    chosen = _PRESETS.get(arguments.preset, {}) | given
    if "trajectory" in given and "steps" not in given:
        chosen.pop("steps", None)  # the preset's: a trajectory says how many steps there are
    return chosen | {"seed": arguments.seed, "batch_size": arguments.batch_size}


def load_transcriber(arguments: Arguments) -> "Transcriber":
    """The model that the arguments name, run by the system that they name."""
    import whisfusion

    if on_terminal():
        log = logging.getLogger("whisfusion")
        log.setLevel(logging.INFO)
        if not log.handlers:
            log.addHandler(logging.StreamHandler())
            log.handlers[0].setFormatter(logging.Formatter("whisfusion: %(message)s"))
    return whisfusion.load(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        system=arguments.system,
        engine=arguments.engine,
    )


def _ratios(word: str) -> tuple[float, ...]:
    parse = checked(float, lambda _: True, "ratios with commas between them, such as 1.0,0.9,0.8")
    return tuple(parse(ratio) for ratio in word.split(","))
