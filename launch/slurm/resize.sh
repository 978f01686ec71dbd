#!/usr/bin/env bash
# Gives a training job another number of nodes: it saves, is requeued, and goes on with them.
#
#   bash launch/slurm/resize.sh JOB NODES
#
# Slurm grows a job only up to the range it was submitted with (sbatch --nodes=2-8 ...); the ranks must divide the batch.
set -euo pipefail

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

[ $# = 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 2; }
job=$1 nodes=$2
[[ $nodes =~ ^[1-9][0-9]*$ ]] || fail "$nodes: expected a number of nodes"
field() { scontrol show job "$job" | grep -oP "(?<=\b$1=)[^ ]+" | head -n 1; }

restarts=$(field Restarts) || fail "$job: no such job"
cpus=$(field CPUs/Task) before=$(field NumTasks)
if [ "$(field JobState)" = RUNNING ]; then
    scancel --batch --signal=USR1 "$job" # the script saves and requeues
    echo "asked job $job to save and come back"
    for ((waited = 0; $(field Restarts) == restarts; waited++)); do
        case $(field JobState) in RUNNING | COMPLETING | PENDING | REQUEUED) ;; *) fail "$job has ended; see its log" ;; esac
        ((waited < 1800)) || fail "$job has not come back within 30 minutes"
        sleep 1
    done
fi
for _ in $(seq 50); do # Slurm takes it once the job is pending
    [ "$(field JobState)" = PENDING ] && break
    sleep 0.2
done
set_nodes() { scontrol update JobId="$job" NumNodes="$1" NumTasks="$1" NumCPUs=$(($1 * cpus)); }
if ! set_nodes "$nodes"; then
    set_nodes "$before" # Slurm keeps the cores of what it refuses
    fail "Slurm refuses $nodes nodes; the range of nodes of its submission holds a job (sbatch --nodes=MIN-MAX)"
fi
echo "job $job starts with $nodes nodes as soon as they are free"
