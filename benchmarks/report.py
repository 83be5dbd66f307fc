"""docs/results.md from the JSON under benchmarks/results: no figure is written by hand.

    python benchmarks/report.py

A test checks that the page is what this script writes.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
LENGTHS_PLOT = RESULTS / "rtfx_lengths.png"

HEAD = """# Results

Every figure on this page is made by `benchmarks/report.py` from the JSON under `benchmarks/results`, which also holds
the machine, the versions, the seed and the command. Error rates are corpus error rates in percent, on normalised text
where nothing else is said, with 95 % bootstrap intervals.
"""

PARITY = """## Whisper, the peer

`--system whisper` with Whisper-base's published weights against faster-whisper, both greedy in float32 on a CPU, on
{clips:,} clips ({hours} h) of {data}. Made by `{command}`.

| system | WER |
|---|---|
{rows}

Identical normalised text on {identical:,} of {clips:,} clips ({share:.2f} %). The clips that differ are listed in
`benchmarks/results/whisper_parity.json`.
"""

RUNS = """## Training trials

A decoder over the frozen encoder of Whisper-base, trained on 25 h of English (LibriSpeech, Common Voice, LJ Speech) in
minutes on one {device}: a check of the training code, not a model to use. Decoded with K = {candidates}, N = {steps},
temperature {temperature}, MBR.

| recipe | steps | ms a step | hours heard | {datasets} | of matrix peak |
|---|---|---|---|{dashes}---|
{rows}
{notes}
Their loss and dev WER: {curves}.
"""

STEP = """## A training step at full size

The paper's decoder ({parameters:,} parameters) over a frozen encoder of large-v3's shape ({encoder_parameters:,}),
{utterances_per_step} utterances of {window_s} s a step, random weights, through the training loop itself, on one
{device}. Median of {timed_steps} steps; FLOPs counted by hand without recomputation, against a measured matrix peak of
{matrix_peak_tflops:.0f} TFLOP/s. Made by `{command}`.

| fed from | ms a step | encoder | decoder | utterances/s | of matrix peak | peak memory, GB |
|---|---|---|---|---|---|---|
{rows}
"""

MODEL = """## The bundled model

`base` as it is shipped (int8), on a CPU, decoded with its own settings: K = {candidates}, N = {steps}, trajectory
{trajectory}, {remask} remasking, temperature {temperature}, MBR, then proofread (`src/whisfusion/proofread.py`); the
language is given. "As drawn" is the error of what MBR chose: parallel diffusion decoding and nothing else.{note}
Whisper-base's own decoder over the same encoder has {whisper:.2f} % on librispeech-test-clean-a (below). How it was
trained: [the model card](model_card.md).

| set | language | clips | error | 95 % | as drawn | 95 % |
|---|---|---|---|---|---|---|
{rows}

A set that is named again has both sides folded to simplified characters first, by the tool named.
{greedy}{peer}
With case and punctuation, on the sets whose references have any: the error rate over words and punctuation marks, each
mark counted like a word; over words alone, case kept; and how much of the punctuation is there and after the right word
(F1 by mark for those that the references have {frequent} times or more). Mandarin and Japanese by character. How it is
counted: `src/whisfusion/evaluate/written.py`.

| set | words and marks | 95 % | cased words | 95 % | precision | recall | F1 | F1 by mark |
|---|---|---|---|---|---|---|---|---|
{written}

{detected}By duration, on librispeech-test-clean-a:

| seconds | clips | WER | 95 % |
|---|---|---|---|
{bins}

Its last training, from the model that was shipped before, on one {device}. The dev error is a mean over eleven
languages, most of them synthetic, of {dev_clips} clips in all, as drawn (by set in `dev_sets.csv` beside its
curve); in `base_hearing` it is that of what CTC spells by itself:

| stage | steps | speech a step, s | ms a step | hours heard | dev error | curves |
|---|---|---|---|---|---|---|
{stages}
"""

GREEDY = """
One draft in one step (`-k 1 -n 1 --temperature 0`: greedy), then proofread, on a CPU.{note}

| set | clips | error | 95 % | as drawn | 95 % |
|---|---|---|---|---|---|
{rows}
"""

PEER = """
Whisper-base's own greedy decoder (`--system whisper`), over the same encoder in float32, scored in the same way:

| set | clips | error | 95 % |
|---|---|---|---|
{rows}
"""

DETECTED = """The language, where it is detected among those that the model knows:

| set | language | clips | right | else taken for |
|---|---|---|---|---|
{rows}

"""

CPU = """## {title}

{model} against faster-whisper with Whisper-base in int8 (beam 1, no timestamps, language given), from samples
to text, {clips} clips of {mean_seconds} s on average, {threads} threads of an {processor}, K = {candidates},
N = {steps}, the systems taking turns clip by clip. Made by `{command}`.{note}

| system | ms a clip | times real time | speed | WER |
|---|---|---|---|---|
{rows}
"""

SPELLING = """## What a speller brings

{note} On the dev sets (real speech) and on held-out voices of the synthesisers, {limit} clips of each at most: the
error of what CTC spells by itself, and of the text. Made by `{command}`.

| set | clips | {header} |
|---|---|{dashes}
{rows}
"""

WORDS = """## Word times

Of the bundled model, on words that SVOX Pico spoke one by one with pauses between them, so that it is known where each
begins and ends: by how many milliseconds its times are late (median; negative: early), and how far off they are, either
way (median, and what nine in ten are within). Real speech, which has no such gaps, is harder. Made by
`{command}`.{note}

| language | words | recognised | start late | start off | 90 % | end late | end off | 90 % |
|---|---|---|---|---|---|---|---|---|
{rows}
"""

FREQUENT = 5
"""Marks that are rarer in the references of a set have no F1 of their own on the page."""

GPU = """## Speed on a GPU

The paper's shapes at full size, {weights} weights, bf16, N = {n}, on one {device}, by the paper's protocol:
{clips} clips of {mean_seconds} s on average ({set});
encoder, decoding and selection timed, the spectrogram outside the timer and, in the last column, inside. At batch 1
utterances run one after another with nothing overlapped.{sparse} Made by
`{command}`{note}.

| engine | batch | K | canvas | window, s | rerank | ms an utterance | RTFx | target, ms | ms with spectrogram |
|---|---|---|---|---|---|---|---|---|---|
{rows}

{verdict}

Where the time of the graph engine goes, and what share of the measured matrix peak of {matrix_peak_tflops:.0f} TFLOP/s
each stage reaches:

| stage | {batches} |
|---|{dashes}
{stages}
"""

PEERS = """In the same run: Whisper by Hugging Face's `generate`, at the token counts of the same utterances, of which
it hears every {every}th.

| model | batch | ms an utterance | RTFx |
|---|---|---|---|
{rows}
"""

LENGTHS = """Cost against the length of the transcript, for 30 s of audio, one utterance at a time, K = 5 (medians of
{rounds}; [plot](../{plot})):

| tokens | {models} |
|---|{dashes}
{rows}
"""

BATCHES = """## The same clip in other batches

Whether a transcript depends on what else is in its batch: `{model}` on {clips:,} clips ({data}), {engine} engine,
{dtype} on one {device}, K = {candidates}, N = {steps}, MBR{proofread}. Compared with the first row. Made by
`{command}`.

| batch | clips that differ | share | WER | moved by |
|---|---|---|---|---|
{rows}
"""

ABLATIONS = """## What each part is worth

Runs of `trial`'s length, each but for one thing that recipe (or its data), on one {device};
error rates on the dev sets with 95 % intervals, K = {candidates}, temperature {temperature}, MBR, as drawn (not
proofread). Made by `{command}`, which says what each row is.

| row | seed | steps | {header} |
|---|---|---|{dashes}
{rows}
"""

STAGES = """## What the second stage does

The second stage (t ~ U(0.7, 1)) and its control (t ~ U(0, 1)), both from the same first stage and equally long: {note}
K = {candidates}, trajectory 1, 0.9, 0.8 from its start, {remask} remasking, temperature {temperature}, MBR, as drawn
(not proofread), on one {device}; 95 % intervals. Made by `{command}`; the hypotheses with all candidates are in
`benchmarks/results/stages`.

| set | model | {header} |
|---|---|{dashes}
{rows}
"""

TARGETS = {
    ("eager", 1, 5, 192, 30, False): 50.0,
    ("graph", 1, 5, 192, 30, False): 14.7,
    ("graph", 32, 5, 192, 30, False): 11.3,
    ("graph", 32, 5, "follow", 30, False): 8.8,
    ("graph", 1, 15, 192, 30, False): 29.5,
    ("graph", 1, 5, 192, 30, True): 21.0,
}
"""Milliseconds an utterance that were set as the aim, by engine, batch, K, canvas, window and reranking."""


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text("utf-8"))


def note_of(result: dict[str, Any]) -> str:
    """What a result says of itself, such as that it is of an earlier state, as one more sentence."""
    return f" {result['note']}" if result.get("note") else ""


def parity() -> str:
    result = read("whisper_parity.json")
    names = {"whisfusion": "whisfusion --system whisper", "faster_whisper": "faster-whisper"}
    rows = "\n".join(f"| {names[name]} | {rate['percent']:.2f} |" for name, rate in result["wer"].items())
    facts = {name: result[name] for name in ("clips", "hours", "data", "identical", "command")}
    return PARITY.format(rows=rows, share=100 * result["identical_share"], **facts)


def runs(*names: str) -> str:
    results = {name: read(f"{name}/result.json") for name in names}
    first = next(iter(results.values()))
    datasets = [part["dataset"] for part in first["test"]]
    rows, notes = [], []
    for result in results.values():
        cells = [f"{part['percent']:.2f} ({part['low']:.2f} to {part['high']:.2f})" for part in result["test"]]
        mark = f" [{len(notes) + 1}]" if result["note"] else ""
        if result["note"]:
            notes.append(f"[{len(notes) + 1}] {result['recipe']}: {result['note']}.")
        rows.append(
            f"| `{result['recipe']}`{mark} | {result['model_step']:,} | {result['ms_per_step']:.1f} "
            f"| {result['hours_heard']:,.0f} | {' | '.join(cells)} | {100 * result['peak_share']:.0f} % |"
        )
    return RUNS.format(
        device=first["machine"]["device_name"],
        **{name: first["decoding"][name] for name in ("candidates", "steps", "temperature")},
        datasets=" | ".join(datasets),
        dashes="---|" * len(datasets),
        rows="\n".join(rows),
        notes="".join(f"\n{note}\n" for note in notes),
        curves=", ".join(
            f"[{name} loss](../benchmarks/results/{name}/loss.png), [dev WER](../benchmarks/results/{name}/wer.png)"
            for name in results
        ),
    )


def step() -> str:
    result = read("train_step.json")
    rows = "\n".join(
        f"| {row['feed']} | {row['ms_per_step']:.1f} | {row['encoder_ms']:.1f} | {row['decoder_ms']:.1f} "
        f"| {row['utterances_per_s']:.1f} | {100 * row['mfu']:.1f} % | {row['peak_memory_gb']:.1f} |"
        for row in result.pop("rows")
    )
    return STEP.format(rows=rows, device=result["machine"]["device_name"], **result)


def cpu(title: str, model: str, name: str) -> str:
    """Speed of a model; `model` says which it is."""
    result = read(name)
    rows = "\n".join(
        f"| {system} | {row['ms']:.0f} | {row['rtfx']:.1f} | {row['speedup']:.2f} | {row['wer']:.2f} % |"
        for system, row in result["systems"].items()
    )
    facts = result | {"note": note_of(result), "title": title, "model": model}
    return CPU.format(rows=rows, processor=result["machine"]["processor"], **facts)


def spelling() -> list[str]:
    """What models spell and write side by side, where it was measured."""
    if not (RESULTS / "spelling.json").exists():
        return []
    result = read("spelling.json")
    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    rows = []
    for name, clips in dict.fromkeys((row["set"], row["clips"]) for row in result["rows"]):
        own = {row["model"]: row for row in result["rows"] if row["set"] == name}
        cells = [f"{own[model][kind]:.2f} %" for kind in ("ctc", "written") for model in names]
        rows.append(f"| {name} | {clips} | {' | '.join(cells)} |")
    header = [f"{what}, {model}" for what in ("CTC", "text") for model in names]
    return [
        SPELLING.format(
            note=result["note"],
            limit=max(row["clips"] for row in result["rows"]),
            command=result["command"],
            header=" | ".join(header),
            dashes="---|" * len(header),
            rows="\n".join(rows),
        )
    ]


def words() -> list[str]:
    """The times of words, where they were measured."""
    if not (RESULTS / "word_times.json").exists():
        return []
    result = read("word_times.json")
    times = [f"{end}_{what}_ms" for end in ("start", "end") for what in ("median", "off_median", "off_90")]
    rows = []
    for row in result["rows"]:
        cells = [row["language"], str(row["words"]), str(row["recognised"]), *(f"{row[name]:.0f} ms" for name in times)]
        rows.append(f"| {' | '.join(cells)} |")
    return [WORDS.format(command=result["command"], note=note_of(result), rows="\n".join(rows))]


def gpu() -> str:
    result = read("rtfx.json")
    rows, missed = [], []
    for row, inside in zip(result["rows"], result["rows_with_mel"], strict=True):
        case = (row["engine"], row["batch"], row["k"], row["canvas"], row["window_s"], row["rerank"])
        target = TARGETS.get(case)
        cells = [*case[:5], "yes" if row["rerank"] else "", f"{row['ms']:.2f}", f"{row['rtfx']:,.0f}"]
        cells += ["" if target is None else f"{target:.1f}", f"{inside['ms']:.2f}"]
        rows.append(f"| {' | '.join(map(str, cells))} |")
        if target is not None and row["ms"] > target:
            words = f"{row['engine']}, batch {row['batch']}, K = {row['k']}, canvas {row['canvas']}"
            missed.append(f"{words}{', rerank' * row['rerank']} ({row['ms']:.2f} ms against {target:.1f})")
    verdict = "All targets are met."
    if missed:
        verdict = f"Not met, of {len(TARGETS)} targets:\n\n" + "\n".join(f"- {miss}" for miss in missed)
    parts = {part["batch"]: {stage["stage"]: stage for stage in part["stages"]} for part in result["breakdown"]}

    def cell(stage: dict[str, Any]) -> str:
        share = stage["of_matrix_peak"]
        return f"{stage['ms']:.2f} | {'' if share is None else f'{100 * share:.0f} %'}"

    sparse = ""
    if result.get("rest_hears_every", 1) > 1:
        every = result["rest_hears_every"], result["eager_hears_every"]
        sparse = " Rows without a target hear one clip in {}, eager ones one in {}.".format(*every)
    return GPU.format(
        rows="\n".join(rows),
        sparse=sparse,
        note="; " + result["note"] if result.get("note") else "",
        verdict=verdict,
        n=result["rows"][0]["n"],
        device=result["machine"]["device_name"],
        batches=" | ".join(f"batch {batch}, ms | of peak" for batch in parts),
        dashes="---|---|" * len(parts),
        stages="\n".join(
            f"| {name} | {' | '.join(cell(stages[name]) for stages in parts.values())} |" for name in parts[1]
        ),
        **{
            name: result[name]
            for name in (
                "weights",
                "clips",
                "mean_seconds",
                "set",
                "command",
                "matrix_peak_tflops",
            )
        },
    )


def peers() -> list[str]:
    """Nothing until they have been measured."""
    result = read("rtfx.json")
    if "peers" not in result:
        return []
    rows = "\n".join(
        f"| {row['model']} | {row['batch']} | {row['ms']:.1f} | {row['rtfx']:,.0f} |" for row in result["peers"]
    )
    return [PEERS.format(rows=rows, every=result["peers_hear_every"])]


def lengths() -> list[str]:
    """Nothing until they have been measured."""
    rows = read("rtfx.json").get("lengths")
    if not rows:
        return []
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_tokens: dict[int, dict[str, float]] = {}
    for row in rows:
        by_tokens.setdefault(row["tokens"], {})[row["model"]] = row["ms"]
    lines = [
        f"| {tokens} | {' | '.join(f'{of[model]:.1f} ms' if model in of else '' for model in models)} |"
        for tokens, of in by_tokens.items()
    ]
    plot = LENGTHS_PLOT.relative_to(ROOT)
    text = LENGTHS.format(
        rounds=min(row["rounds"] for row in rows),
        plot=plot,
        models=" | ".join(models),
        dashes="---|" * len(models),
        rows="\n".join(lines),
    )
    return [text]


def draw_lengths() -> None:
    """The plot of `lengths`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read("rtfx.json")["lengths"]
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for model in dict.fromkeys(row["model"] for row in rows):
        points = [(row["tokens"], row["ms"]) for row in rows if row["model"] == model]
        axes.plot(*zip(*points, strict=True), marker="o", label=model)
    axes.set(xlabel="tokens of the transcript (30 s of audio)", ylabel="ms an utterance", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(LENGTHS_PLOT, dpi=150)


def batches() -> list[str]:
    """Nothing until they have been measured."""
    if not (RESULTS / "batches.json").exists():
        return []
    result = read("batches.json")
    first = result["rows"][0]
    rows = [
        f"| {row['batch']} | {row['differ']} | {100 * row['share']:.2f} % | {row['wer']:.2f} % "
        f"| {row['wer'] - first['wer']:+.3f} |"
        for row in result["rows"]
    ]
    facts = {name: result[name] for name in ("model", "clips", "data", "engine", "dtype", "command")}
    facts |= {name: result[name] for name in ("candidates", "steps")}
    return [
        BATCHES.format(
            rows="\n".join(rows),
            device=result["machine"]["device_name"],
            proofread=", then proofread" if result["proofread"] else "",
            **facts,
        )
    ]


def ablations() -> list[str]:
    """Nothing until they have been measured."""
    if not (RESULTS / "ablations.json").exists():
        return []
    result = read("ablations.json")
    columns = [(dataset, n) for dataset, rates in result["rows"][0]["dev"].items() for n in rates]

    def cell(rate: dict[str, float]) -> str:
        return f"{rate['percent']:.2f} ({rate['low']:.1f} to {rate['high']:.1f})"

    rows = [
        f"| `{row['row']}` | {row['seed']} | {row['steps']:,} "
        f"| {' | '.join(cell(row['dev'][dataset][n]) for dataset, n in columns)} |"
        for row in result["rows"]
    ]
    return [
        ABLATIONS.format(
            device=result["machine"]["device_name"],
            **{name: result["decoding"][name] for name in ("candidates", "temperature")},
            command=result["command"],
            header=" | ".join(f"{dataset}, N = {n}" for dataset, n in columns),
            dashes="---|" * len(columns),
            rows="\n".join(rows),
        )
    ]


def stages() -> list[str]:
    """Nothing until they have been measured."""
    if not (RESULTS / "stages/result.json").exists():
        return []
    result = read("stages/result.json")
    found = {(row["dataset"], row["model"], row["n"]): row for row in result["rows"]}
    steps = sorted({n for _, _, n in found})
    rows = []
    for dataset, model in dict.fromkeys((dataset, model) for dataset, model, _ in sorted(found)):
        of = [found[dataset, model, n] for n in steps]
        cells = [f"{row['percent']:.2f} ({row['low']:.1f} to {row['high']:.1f})" for row in of]
        rows.append(f"| {dataset} ({of[0]['measure'].upper()}) | `{model}` | {' | '.join(cells)} |")
    decoding = next(iter(result["runs"].values()))["decoding"]
    return [
        STAGES.format(
            note=result["note"],
            device=result["machine"]["device_name"],
            command=result["command"],
            header=" | ".join(f"N = {n}" for n in steps),
            dashes="---|" * len(steps),
            rows="\n".join(rows),
            **{name: decoding[name] for name in ("candidates", "remask", "temperature")},
        )
    ]


def model() -> str:
    scores, training = read("base/scores.json"), read("base/result.json")

    def rate(part: dict[str, Any]) -> str:
        return f"{part['percent']:.2f} % | {part['low']:.2f} to {part['high']:.2f}"

    def cells(part: dict[str, Any]) -> str:
        return f"{part['utterances']:,} | {rate(part)}"

    rows = []
    for part in scores["sets"]:
        name, measure = part["dataset"], part["measure"].upper()
        rows.append(f"| {name} ({measure}) | {part['language']} | {cells(part)} | {rate(part['drawn'])} |")
        if folded := part["folded"]:
            drawn = rate(folded["drawn"])
            rows.append(
                f"| {name} ({measure}, {folded['by']}) | {part['language']} | {cells(part | folded)} | {drawn} |"
            )
    greedy = ""
    if (RESULTS / "base_greedy/scores.json").exists():
        result = read("base_greedy/scores.json")
        lines = [f"| {part['dataset']} | {cells(part)} | {rate(part['drawn'])} |" for part in result["sets"]]
        greedy = GREEDY.format(rows="\n".join(lines), note=note_of(result))
    peer = ""
    if (RESULTS / "whisper_base/scores.json").exists():
        lines = []
        for part in read("whisper_base/scores.json")["sets"]:
            lines.append(f"| {part['dataset']} | {cells(part)} |")
            if folded := part["folded"]:
                lines.append(f"| {part['dataset']} ({folded['by']}) | {cells(part | folded)} |")
        peer = PEER.format(rows="\n".join(lines))
    [clean] = [part for part in scores["sets"] if part["dataset"] == "librispeech-test-clean-a"]
    bins = [f"| {group['seconds'][0]:.0f} to {group['seconds'][1]:.0f} | {cells(group)} |" for group in clean["bins"]]
    detected = [detected_row(part) for part in scores["sets"] if part["detected"]]
    decoding = scores["decoding"]
    return MODEL.format(
        rows="\n".join(rows),
        note=note_of(scores),
        greedy=greedy,
        peer=peer,
        frequent=FREQUENT,
        written="\n".join(written_row(part) for part in scores["sets"] if part["written"]),
        detected=DETECTED.format(rows="\n".join(detected)) if detected else "",
        bins="\n".join(bins),
        trajectory=", ".join(f"{ratio:g}" for ratio in decoding["trajectory"]),
        **{name: decoding[name] for name in ("candidates", "steps", "temperature", "remask")},
        stages="\n".join(stage_row(*numbered) for numbered in enumerate([*training["before"], training], start=1)),
        dev_clips=training["settings"]["dev_clips"],
        device=training["trained_on"],
        whisper=read("whisper_parity.json")["wer"]["whisfusion"]["percent"],
    )


def stage_row(number: int, run: dict[str, Any]) -> str:
    folder = f"../benchmarks/results/base/{number}-{run['recipe']}"
    settings, dev = run["settings"], [f"{point['percent']:.1f} % (step {point['step']:,})" for point in run["dev_wer"]]
    twice = ", heard twice" if settings["consistency_weight"] else ""
    curves = f"[loss]({folder}/loss.png), [dev error]({folder}/wer.png)"
    speech = f"{settings['sampler']['seconds']:,.0f}{twice} | {run['ms_per_step']:.0f} | {run['hours_heard']:,.0f}"
    return f"| `{run['recipe']}` | {run['steps']:,} | {speech} | {', '.join(dev)} | {curves} |"


def written_row(part: dict[str, Any]) -> str:
    written = part["written"]

    def error(rate: dict[str, float]) -> str:
        return f"{rate['percent']:.2f} % | {rate['low']:.2f} to {rate['high']:.2f}"

    marks = [f"`{mark}` {of['f1']:.0f}" for mark, of in written["marks"].items() if of["reference"] >= FREQUENT]
    shares = [f"{written['punctuation'][name]:.1f} %" for name in ("precision", "recall", "f1")]
    cells = [part["dataset"], error(written["punctuated"]), error(written["cased"]), *shares, ", ".join(marks)]
    return f"| {' | '.join(cells)} |"


def detected_row(part: dict[str, Any]) -> str:
    detected = part["detected"]
    mistaken = ", ".join(f"{language} {count:,}" for language, count in detected["mistaken"].items())
    share = 100 * detected["right"] / detected["utterances"]
    return f"| {part['dataset']} | {part['language']} | {detected['utterances']:,} | {share:.1f} % | {mistaken} |"


def render() -> str:
    return "\n".join(
        [
            HEAD,
            model(),
            *stages(),
            *words(),
            *spelling(),
            cpu("Speed on a CPU", "The bundled model, proofreading included,", "cpu_speed.json"),
            cpu(
                "Speed on a CPU without an adapter",
                "A model of the recipe `trial`, which nobody proofreads,",
                "cpu_speed_trial.json",
            ),
            gpu(),
            *peers(),
            *lengths(),
            *batches(),
            parity(),
            step(),
            runs("trial", "trial_paper"),
            *ablations(),
        ]
    )


if __name__ == "__main__":
    if lengths():
        draw_lengths()
    PAGE.write_text(render(), "utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
