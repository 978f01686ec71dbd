#!/usr/bin/env bash
# Fresh machine -> environment -> small real corpus -> a trained small GPT-2 with a report and a sample.
#
#   bash launch/quickstart.sh [section.key=value ...]     e.g. schedule.steps=100
#
# A second call reuses everything that is there and continues a run that was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
-h | --help)
    sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
source launch/environment.sh

corpus=data/installed-documentation.jsonl
dataset=data/quickstart
make_environment fast

if [ ! -s "$corpus" ]; then
    say "corpus: documentation prose of the installed Python packages (no download)"
    python -m data_pipeline corpus --output "$corpus"
fi
say "tokens: GPT-2 BPE"
python -m data_pipeline prepare --source "$corpus" --output "$dataset" --val-fraction 0.005

# Two processes show the partitioning; a machine with one core or one device runs one.
devices=$(python -c 'import os, torch; print(torch.cuda.device_count() or len(os.sched_getaffinity(0)))')
processes=$((devices < 2 ? 1 : 2))
say "training: deepspeed --num_gpus $processes launch/pretrain.py --config configs/quickstart.yaml $*"
deepspeed --num_gpus "$processes" launch/pretrain.py --config configs/quickstart.yaml "$@"

say "a sample of the model"
python launch/generate.py runs/quickstart --prompt "This function returns" --tokens 60
say "the run is in runs/quickstart: report.md with loss.png and training.png, log.jsonl, config.yaml, checkpoints/"
say "the same command continues a stopped run; schedule.steps=N makes it longer"
