#!/usr/bin/env bash
# Submits data -> train -> evaluate, each started by the success of the one before; prints the three job ids.
#
#   bash launch/slurm/chain.sh CONFIG [section.key=value ...] -- --source SOURCE --output FOLDER [prepare's options ...]
#   bash launch/slurm/chain.sh configs/small_mars_m.yaml -- --source fineweb-edu-10b --output data/fineweb_edu_10b
#
# FOLDER should be the config's data.path. Options of sbatch for each of the jobs: DATA_OPTIONS, TRAIN_OPTIONS and
# EVALUATE_OPTIONS ("--nodes=8 --time=2-0"); for all of them SBATCH_ACCOUNT and the like, also from site.env.
set -euo pipefail

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=launch/slurm/site.env
source "${SITE_ENV:-launch/slurm/site.env}"
config=${1:-}
case $config in
'' | -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
esac
[ -r "$config" ] || fail "$config: cannot be read; the first argument is the YAML file of the run"
shift
overrides=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    overrides+=("$1")
    shift
done
[ $# -gt 1 ] || fail "after the config and its overrides, \`--\` and the options of prepare are missing"
shift
runs=${RUNS_DIR:-runs} name=${NAME:-$(basename "$config" .yaml)}
for argument in "${overrides[@]}"; do
    case $argument in
    run.name=*) name=${argument#*=} ;;
    run.output_dir=*) runs=${argument#*=} ;;
    *=*) ;;
    *) fail "$argument: expected section.key=value between the config and \`--\`" ;;
    esac
done
read -ra data_options <<<"${DATA_OPTIONS:-}"
read -ra train_options <<<"${TRAIN_OPTIONS:-}"
read -ra evaluate_options <<<"${EVALUATE_OPTIONS:-}"
# A job whose predecessor fails would wait for ever.
after=(--kill-on-invalid-dep=yes)
data=$(sbatch --parsable "${data_options[@]}" launch/slurm/data.sbatch "$@")
train=$(sbatch --parsable "${after[@]}" --dependency="afterok:$data" "${train_options[@]}" \
    launch/slurm/pretrain.sbatch "$config" "${overrides[@]}")
evaluate=$(sbatch --parsable "${after[@]}" --dependency="afterok:$train" "${evaluate_options[@]}" \
    launch/slurm/evaluate.sbatch "$runs/$name")
echo "data $data, train $train, evaluate $evaluate; scancel $data ends them all"
