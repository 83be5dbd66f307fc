#!/usr/bin/env bash
# All that docs/results.md says of a model's accuracy: decodes test sets with the model's own settings, detects their
# languages, scores. What is decoded already is skipped.
#
#   runs/scores.sh MODEL SETS WORK RESULT [options of whisfusion evaluate]
#   python benchmarks/report.py
#
# MODEL   a name or a model folder: base
# SETS    a folder of manifests, one for each test set
# WORK    where hypotheses are written
# RESULT  where scores.json goes, and the hypotheses that are kept: benchmarks/results/base
# Wants whisfusion[chinese].
set -euo pipefail
model=$1 sets=$2 work=$3 result=$4
shift 4
hypotheses=()
for set in "$sets"/*.jsonl; do
    hypotheses+=("$work/$(basename "$set")")
    whisfusion evaluate "$model" --data "$set" --out "${hypotheses[-1]}" --resume "$@"
done
# The language is told before the first step: how the text is decoded makes no difference.
whisfusion evaluate "$model" --data "$sets" --out "$work/detected.jsonl" --resume "$@" --detect_language -k 1 -n 1 --no_proofread
python "$(dirname "$0")/../benchmarks/model_scores.py" "${hypotheses[@]}" --detected "$work/detected.jsonl" \
    --data "$sets" --out "$result"
