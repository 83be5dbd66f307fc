#!/usr/bin/env bash
# A model like the bundled one, from manifests to a model folder; docs/model_card.md says how that one's training
# differed. What is done already is skipped, and a run that was stopped is resumed.
#
#   runs/base.sh SPEECH TEXT OUT
#
# SPEECH  train/ and dev/ with manifests and shards as `whisfusion data check` reads them:
#           librispeech-en    LibriSpeech train-clean-5 and part of train-clean-100, CC BY 4.0
#           commonvoice-en    Mozilla Common Voice, CC0
#           commonvoice-zh    Mozilla Common Voice, CC0
#           ljspeech-en       part of LJ Speech, public domain
#           kerstin-de        Kerstin voice dataset, CC0
#         and pseudo/, manifests and shards too: 139 h of Common Voice English (CC0) with Whisper-small's words as text
# TEXT    de.txt.xz ... zh.txt.xz: Common Voice's sentences, CC0, one a line
# Wants on PATH: pico2wave (SVOX Pico), open_jtalk with a voice (Open JTalk), RHVoice-test with the voices
# Letícia-F123, Alicja and Michał (RHVoice; Debian has the first alone), espeak-ng (eSpeak NG).
set -euo pipefail
speech=$(realpath "$1") text=$(realpath "$2") out=$(realpath -m "$3")
hearing=${HEARING_STEPS:-8000} stage1=${STAGE1_STEPS:-25000} stage2=${STAGE2_STEPS:-5000}
evaluation=("$speech/test" "$speech/dev" "$(dirname "$0")/../examples/examples.jsonl")
mkdir -p "$out"
cd "$out"

# LibriSpeech is in capitals: Whisper-base lends it case and punctuation where its words agree.
whisfusion pull whisper-base
mkdir -p train
if [ ! -e train/librispeech-en.jsonl ]; then
    whisfusion evaluate whisper-base --system whisper --data "$speech/train/librispeech-en.jsonl" --out written.jsonl
    whisfusion data restore "$speech/train/librispeech-en.jsonl" --written written.jsonl --out train/librispeech-en.jsonl
fi

# Silence, noise and music; and speech where nobody was recorded.
[ -e nothing ] || whisfusion data nothing --hours 1 --out nothing
speak() { # language, engine, hours, voices held out for tuning
    [ -e "synthetic/$1-$2" ] || whisfusion data synthesise "$text/$1.txt.xz" --language "$1" --engine "$2" --hours "$3" \
        --held_out_voices "$4" --held_out_sentences 40 --coding opus --against "${evaluation[@]}" --out "synthetic/$1-$2"
}
speak de pico 6 2
for language in es fr it; do speak $language pico 5 2; done
for language in pl pt; do speak $language rhvoice 3 2; done
speak nl espeak 3 3
speak ko espeak 1.5 3
speak zh espeak 1.2 3
speak en pico 0.4 4
speak ja jtalk 3 2

data=(train "$speech"/train/{commonvoice-en,commonvoice-zh,ljspeech-en,kerstin-de}.jsonl "$speech/pseudo" nothing synthetic/*/)
dev=("$speech/dev" synthetic/*/heldout)
train() { # folder, the model that it ends with, recipe, more
    local name=$1 model=$2 recipe=$3
    shift 3
    if [ -e "$model" ]; then return; fi
    if [ -e "$name/config.json" ] || [ -e "$name/stages.json" ]; then
        whisfusion train --resume --out "$name"
    else
        whisfusion train --recipe "$recipe" --data "${data[@]}" --dev "${dev[@]}" --out "$name" "$@"
    fi
    # A run that was asked to stop ends well but has no model: then this script ends here.
    [ -e "$model" ]
}
# One command, so that the spectrograms are made once.
train stages stages/4-base_stage2_uniform/model base_hearing --steps "$hearing" \
    --then "base_stage1 --steps $stage1" --then "base_stage2 --steps $stage2" \
    --then "base_stage2_uniform --steps $stage2 --init_from 2-base_stage1"

if [ ! -e base ]; then
    whisfusion vocabulary stages/3-base_stage2/model --data "${data[@]}" $(for file in "$text"/*.txt.xz; do echo "--text $(basename "$file" .txt.xz)=$file"; done)
    whisfusion export stages/3-base_stage2/model --out base --int8 --bits 6 --encoder --whisper --drop_unused --file_mib 44 \
        --trajectory 1,0.6,0.3 --remask confidence
fi
# As the paper draws: benchmarks/stages.py makes a table of it.
trajectories=("" 1 1,0.9 1,0.9,0.8)
for run in stages/{2-base_stage1,3-base_stage2,4-base_stage2_uniform}/model; do
    for set in "$speech"/test/*.jsonl; do
        for steps in 1 2 3; do
            file=hypotheses/$(basename "${run%/model}")/n$steps/$(basename "$set")
            mkdir -p "$(dirname "$file")"
            whisfusion evaluate "$run" --data "$set" --out "$file" --resume -k 5 -n $steps --trajectory "${trajectories[steps]}" \
                --temperature 0.1 --remask random --no_proofread --batch_size 64
        done
    done
done
