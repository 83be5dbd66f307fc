#!/usr/bin/env bash
# What each part is worth: runs of equal length, each but for one thing the recipe `trial`, over the same speech in the
# same order unless that is the thing; decoded on the dev sets in 1, 2 and 3 steps. What is done already is skipped, and a
# run that was stopped is resumed.
#
#   runs/ablations.sh SPEECH OUT [ROW...]
#   python benchmarks/ablations.py OUT --data SPEECH/dev/{librispeech,commonvoice}-en.jsonl --out benchmarks/results/ablations.json
#
# SPEECH  train/, dev/ and pseudo/ as in runs/base.sh; synthetic/ too, for the row `synthetic`
# ROW     NAME or NAME:SEED, of those below; all of them if none is given
# STEPS (3,000) and OPTIONS, more for `whisfusion train`, come from the environment: to try this out on a CPU.
set -euo pipefail
speech=$(realpath "$1") out=$(realpath -m "$2")
shift 2
steps=${STEPS:-3000}
rows=("$@")
if [ ${#rows[@]} = 0 ]; then
    # Two seeds where the question is the paper's or the answer has to be sure.
    rows=(trial trial:43 no_anchors no_anchors:43 uniform uniform:43 padded clip paper_blocks scratch_embeddings
        adapter adapter_no_ctc adapter_told drafts pseudo synthetic)
fi
data=("$speech"/train/{librispeech-en,commonvoice-en,ljspeech-en}.jsonl)
dev=("$speech"/dev/{librispeech-en,commonvoice-en}.jsonl)
adapter=(--decoder.adapter 4 --decoder.stride 2 --ctc_weight 1)
for row in "${rows[@]}"; do
    name=${row%:*} seed=42 recipe=trial length=$steps
    [ "$name" = "$row" ] || seed=${row#*:}
    case $name in
    trial) options=() ;;
    no_anchors) options=(--decoder.anchors false) ;;
    uniform) options=(--masks '[[0,0,1]]') ;; # high mask ratios at no time
    # A bank of spectrograms has windows of the clips alone: this pair reads audio while it trains, and is half as long.
    padded) options=(--window padded --feeder stream --graphs false) length=$((steps / 2)) ;;
    clip) options=(--feeder stream --graphs false) length=$((steps / 2)) ;;
    paper_blocks) recipe=trial_paper options=() ;;
    scratch_embeddings) recipe=trial_paper options=(--start random) ;;
    adapter) options=("${adapter[@]}") ;;
    adapter_no_ctc) options=("${adapter[@]}" --ctc_weight 0) ;;
    adapter_told) options=("${adapter[@]}" --decoder.spells_every 2) ;;
    drafts) options=(--decoder.drafts true) ;;
    pseudo) options=(--data "${data[@]}" "$speech/pseudo") ;;
    synthetic) options=(--data "${data[@]}" "$speech/synthetic") ;;
    *)
        echo "there is no row $name" >&2
        exit 1
        ;;
    esac
    run=$out/$name-$seed
    if [ -e "$run/model" ]; then
        :
    elif [ -e "$run/config.json" ]; then
        whisfusion train --resume --out "$run"
    else
        # What is given twice counts as it was given last.
        # shellcheck disable=SC2086
        whisfusion train --recipe $recipe --data "${data[@]}" --dev "${dev[@]}" --out "$run" --steps "$length" \
            --seed "$seed" --eval_every "$length" ${OPTIONS:-} "${options[@]}"
    fi
    for n in 1 2 3; do
        whisfusion evaluate "$run/model" --data "${dev[@]}" --out "$run/n$n.jsonl" -k 5 -n $n --temperature 0.1 --batch_size 64 --resume
    done
done
