"""The demo: what is said in each clip of this folder, and what the model writes down.

With the bundled model where there is one; until then with Whisper-base, fetched once. `--prepare` does only that.
"""

import sys
import time
from pathlib import Path

import whisfusion
from whisfusion import hub
from whisfusion.data.manifest import read_manifest
from whisfusion.normalise import CHARACTER_LANGUAGES, edit_rate

CLIPS = Path(__file__).parent / "examples.jsonl"
WHISPER = "whisper-base"


def load_demo_model() -> tuple[str, whisfusion.Transcriber]:
    """The model to show, and what to call it."""
    bundled = [entry.name for entry in hub.models() if entry.state == "bundled"]
    if bundled:
        return f"the bundled model {bundled[0]}", whisfusion.load(bundled[0])
    folder = hub.pull(WHISPER, progress=lambda message: print(message, file=sys.stderr))
    return f"{WHISPER} with its own decoder", whisfusion.load(folder, system="whisper")


def main() -> None:
    """Transcribe every clip and print reference, text and error rate."""
    name, transcriber = load_demo_model()
    if "--prepare" in sys.argv:
        return
    clips = read_manifest(CLIPS)
    print(f"{len(clips)} clips, {name}\n")
    started = time.perf_counter()
    for clip in clips:
        heard = transcriber.transcribe(clip.file, language=clip.language)
        measure = "CER" if clip.language in CHARACTER_LANGUAGES else "WER"
        rate = edit_rate(heard.text, clip.text, clip.language)
        print(
            f"{clip.id} ({clip.duration:.1f} s)\n  said   {clip.text}\n  heard  {heard.text}\n  {measure}    {rate:.1%}"
        )
    seconds, spent = sum(clip.duration for clip in clips), time.perf_counter() - started
    print(f"\n{seconds:.0f} s of speech in {spent:.1f} s. Yours: .venv/bin/whisfusion transcribe FILE")


if __name__ == "__main__":
    try:
        main()
    except whisfusion.WhisfusionError as error:
        sys.exit(f"demo: {error}")
