# shellcheck shell=bash
# What the batch scripts of this folder share; sourced on the first node of the allocation, outside any container.
#
#   train CONFIG [section.key=value ...]     the run, and what becomes of the job afterwards
#   prepare [data_pipeline prepare options]  the data set, by all nodes together
#   evaluate RUN_FOLDER [section.key=value ...]
#
# Everything that nodes must agree on is settled here, once, and written into the folder of the attempt: what a node runs
# depends on that folder alone, not on which variables a container or `--export` lets through.
#
#   RUN_FOLDER/job                           the job that it belongs to
#   RUN_FOLDER/state                         "STATE STEP [REASON]", written by rank 0 (mars_ds/training/job.py)
#   RUN_FOLDER/slurm/JOB.START/environment   master, port, ranks, stop file ...
#   RUN_FOLDER/slurm/JOB.START/hostfile      nodes with their ranks, in rank order
#   RUN_FOLDER/slurm/JOB.START/rank_NNNNN.log, preflight/NODE.log

say() { printf '%s %s\n' "$(date +%FT%T)" "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# From the first moment: a request that comes while files are looked at is not lost.
ASKED=
ask() {
    ASKED=${ASKED:-$1}
    say "$1: asking the run to save and stop"
    ${ON_STOP:-touch_stop_file}
}
touch_stop_file() { [ -z "${MARS_DS_STOP_FILE:-}" ] || : >"$MARS_DS_STOP_FILE"; }
# The pipeline has no ranks to agree: it can be ended at any moment, and goes on from its last unit.
terminate_step() { scancel --signal=TERM "$SLURM_JOB_ID.0"; }
trap 'ask USR1' USR1 # nearly out of time, or notice of a preemption: we come back
trap 'ask TERM' TERM # scancel, or Slurm requeues the job itself: not ours to bring back

CHECKOUT=${MARS_DS_CHECKOUT:-$SLURM_SUBMIT_DIR}
cd "$CHECKOUT" || fail "$CHECKOUT: not there on $(hostname); the checkout must be on a file system that every node sees"
START=${SLURM_RESTART_COUNT:-0}
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID.}
JOB=${JOB:-$SLURM_JOB_ID.}$START
SITE_ENV=${SITE_ENV:-launch/slurm/site.env}
# shellcheck source=launch/slurm/site.env
source "$SITE_ENV" || fail "SITE_ENV: $SITE_ENV cannot be read"
RUNS_DIR=$(realpath -m "${RUNS_DIR:-runs}")
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
RC=0
[[ ${MAX_STARTS:-1} =~ ^[0-9]+$ ]] || fail "MAX_STARTS: $MAX_STARTS; expected a number"
[[ ${SPARE_NODES:-0} =~ ^[0-9]+$ ]] || fail "SPARE_NODES: $SPARE_NODES; expected a number of nodes"
[[ ${NODE_COUNTS:-1} =~ ^[0-9\ ]+$ ]] || fail "NODE_COUNTS: $NODE_COUNTS; expected numbers of nodes, parted by spaces"
[[ ${RANKS_PER_NODE:-1} =~ ^[1-9][0-9]*$ ]] || fail "RANKS_PER_NODE: $RANKS_PER_NODE; expected a positive number"

# ----------------------------------------------------------------------------------------------------- training, and after

train() {
    local config=$1 argument name=${NAME:-}
    [ -r "$config" ] || fail "$config: cannot be read in $CHECKOUT; the first argument is the YAML file of the run"
    for argument in "${@:2}"; do
        case $argument in
        run.name=*) name=${argument#*=} ;;
        run.output_dir=*) RUNS_DIR=$(realpath -m "${argument#*=}") ;;
        -*) fail "$argument: expected section.key=value after the config; options of sbatch stand before the script" ;;
        *=*) ;;
        *) fail "$argument: expected section.key=value after the config" ;;
        esac
    done
    RUN_FOLDER=$RUNS_DIR/${name:=$(basename "$config" .yaml)}
    see_in_container "$(dirname "$config")"
    begin_attempt
    claim_run
    read_state
    if [ "$STATE" = "done" ]; then
        # More steps may be asked for than it was done with: then pretrain.py goes on.
        say "this run was done at step $STEP before; looking whether it is to go on"
    fi
    local before=$STEP
    # What an earlier attempt said must not stand for this one.
    if ! { echo "starting $STEP" >"$MARS_DS_STATE_FILE.tmp" && mv -f "$MARS_DS_STATE_FILE.tmp" "$MARS_DS_STATE_FILE"; }; then
        fail "$MARS_DS_STATE_FILE: cannot be written; is its disk full?"
    fi
    MARS_DS_COMMAND="sbatch launch/slurm/pretrain.sbatch$(printf ' %q' "$@")"
    export MARS_DS_COMMAND
    choose_nodes --config "$config" "${@:2}" "run.output_dir=$RUNS_DIR" || leave_out_sick_nodes
    [ -z "$ASKED" ] || settle_training "$before"
    settle_ranks
    say "job $SLURM_JOB_ID start $START on ${NODES[*]}: $MARS_DS_EXPECTED_WORLD_SIZE ranks, master" \
        "$MASTER_ADDR:$MASTER_PORT, from step $before; $ATTEMPT"
    run_step ranks launch/pretrain.py --config "$config" "${@:2}" "run.name=$name" "run.output_dir=$RUNS_DIR"
    settle_training "$before"
}

# Two jobs on one run folder: the second would overwrite the state of the first, before the lock of the folder refuses it.
claim_run() {
    local owner=
    [ ! -s "$RUN_FOLDER/job" ] || read -r owner <"$RUN_FOLDER/job"
    if [[ $owner =~ ^[0-9]+$ && $owner != "$SLURM_JOB_ID" ]] &&
        [ -n "$(squeue --noheader --jobs="$owner" --states=RUNNING,SUSPENDED,COMPLETING --format=%i 2>/dev/null)" ]; then
        fail "$RUN_FOLDER: in use by job $owner; wait for its end, or choose another run.name"
    fi
    echo "$SLURM_JOB_ID" >"$RUN_FOLDER/job" || fail "$RUN_FOLDER: cannot be written; is its disk full?"
}

# Leaves, or requeues: decided by what rank 0 has written, never by exit codes, which launchers bend on their way.
settle_training() {
    local before=$1 lost
    read_state
    say "the step ended with $RC; state: $STATE at step $STEP${REASON:+ ($REASON)}"
    [ "$STATE" = "done" ] && exit 0
    show_failures
    case $ASKED:$STATE:$REASON in
    TERM:*) say "cancelled, or requeued by Slurm itself: nothing more to do" && exit 143 ;;
    *:failed:*) say "starting it again would not help" && exit 1 ;;
    # Completed would mean done, and start what depends on it.
    :stopped:STOP_FILE | *:SIGINT) say "stopped by a person: not requeued" && exit 75 ;;
    *:stopped:*) requeue "saved and stopped" ;;
    esac
    # A crash, or a stop that came too early to be answered.
    [ "$ASKED" = USR1 ] && requeue "its time was up"
    preempted && requeue "preempted"
    lost=$(lost_nodes)
    [ -z "$lost" ] || requeue "lost $lost"
    [ "$STEP" -gt "$before" ] && requeue "it broke, but had saved $((STEP - before)) more steps"
    say "no progress since step $before: not requeued"
    exit $((RC ? RC : 1))
}

requeue() {
    local starts=$((START + 1))
    if ((starts >= ${MAX_STARTS:-100})); then
        say "$1; it has been started $starts times (MAX_STARTS), not requeued"
        exit 75
    fi
    say "$1: requeued"
    trap '' TERM USR1 # of the requeue itself
    local said tries=0
    until said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1); do
        case $said in
        *pending*) break ;;     # done by Slurm itself: a lost node, a preemption
        *disabled*) tries=10 ;; # sbatch --no-requeue
        esac
        ((++tries < 10)) || { say "Slurm did not requeue it; submit it again to go on: $said" && exit 1; }
        sleep 10
    done
    [ -z "${EXCLUDE:-}" ] || exclude_nodes
    exit 0
}

# "STATE STEP [REASON]" of the run folder; a run that was never started has none.
read_state() {
    STATE=none STEP=0 REASON=
    [ -s "$MARS_DS_STATE_FILE" ] && read -r STATE STEP REASON <"$MARS_DS_STATE_FILE"
    [[ $STEP =~ ^[0-9]+$ ]] || STEP=0
}

# With the default preemption Slurm tells the steps alone; a job that leaves within its grace would count as completed.
preempted() { [[ $(job_field PreemptTime) == [0-9]* ]]; }

# At once after a power-off the ranks break; Slurm calls the node down only after SlurmdTimeout, and requeues the job then.
lost_nodes() {
    sinfo --noheader --Node --nodes="$(IFS=, && echo "${NODES[*]}")" --format='%N %T' |
        awk '$2 ~ /[*]|down|fail/ {print $1}' | sort -u | paste -sd,
}

# A field of this job; nothing where Slurm says (null) or None.
job_field() {
    scontrol show job --oneliner "$SLURM_JOB_ID" | tr ' ' '\n' | sed -n "s/^$1=//p" | grep -vE '^(\(null\)|None)$' | head -n 1
}

# The last words of ranks that broke; rank 0 speaks in this log anyway.
show_failures() {
    local log
    while IFS= read -r log; do
        [ "$log" = "$ATTEMPT/rank_00000.log" ] || sed "s|^|${log##*/}: |" <(tail -n 5 "$log")
    done < <(grep -lE '^(Traceback|error:|[A-Za-z.]*Error)' "$ATTEMPT"/rank_*.log 2>/dev/null | head -n 4)
}

# ------------------------------------------------------------------------------------------------------- data, evaluation

prepare() {
    local output='' previous='' argument
    for argument in "$@"; do
        case $previous:$argument in
        --output:*) output=$argument ;;
        *:--output=*) output=${argument#*=} ;;
        esac
        previous=$argument
    done
    [ -n "$output" ] || fail "--output FOLDER is missing; it must be a folder that every node sees"
    RUN_FOLDER=$RUNS_DIR/data/$(basename "$output")
    see_in_container "$(dirname "$output")"
    begin_attempt
    mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    write_environment
    say "job $SLURM_JOB_ID start $START on ${NODES[*]}: $output"
    # A pipeline that breaks, or ends first, leaves the others at work.
    STEP_OPTIONS=(--kill-on-bad-exit=0 --wait=0)
    ON_STOP=terminate_step
    run_step data "$@"
    # The manifest is the last file of a data set: with it there is nothing left to do, whoever was lost on the way.
    if [ -s "$output/manifest.json" ]; then
        say "the step ended with $RC; $output is whole: $(sha256sum <"$output/manifest.json" | cut -d' ' -f1)"
        exit 0
    fi
    say "the step ended with $RC; $output is not whole yet"
    [ "$ASKED" = TERM ] && exit 143
    if [ "$ASKED" = USR1 ] || preempted || [ -n "$(lost_nodes)" ]; then requeue "it goes on where it was stopped"; fi
    exit $((RC ? RC : 1))
}

evaluate() {
    RUN_FOLDER=$(realpath -m "$1")
    [ -d "$RUN_FOLDER/checkpoints" ] || fail "$1: no run folder with checkpoints"
    RUNS_DIR=${RUN_FOLDER%/*}
    begin_attempt
    unset MARS_DS_STATE_FILE # that is the training's
    choose_nodes || leave_out_sick_nodes
    [ -z "$ASKED" ] || exit 143
    settle_ranks
    say "job $SLURM_JOB_ID on ${NODES[*]}: $RUN_FOLDER"
    run_step ranks launch/evaluate.py "$RUN_FOLDER" "${@:2}"
    show_failures
    exit "$RC"
}

# ------------------------------------------------------------------------------------------------------------ an attempt

begin_attempt() {
    ATTEMPT=$(realpath -m "$RUN_FOLDER/slurm/$JOB")
    mkdir -p "$ATTEMPT/preflight" || fail "RUNS_DIR: $ATTEMPT cannot be made"
    export MARS_DS_STATE_FILE=${ATTEMPT%/slurm/*}/state MARS_DS_STOP_FILE=$ATTEMPT/stop MARS_DS_LOG_FOLDER=$ATTEMPT
    rm -f "$MARS_DS_STOP_FILE"
}

# Master, port, hostfile and world size, from NODES.
settle_ranks() {
    [ -n "$RANKS_PER_NODE" ] ||
        fail "RANKS_PER_NODE: Slurm gives this job no GPUs; set it in $SITE_ENV or when submitting (RANKS_PER_NODE=8 sbatch ...)"
    export MASTER_ADDR=${NODES[0]}${MASTER_SUFFIX:-}
    # One for each job, below the ports that the kernel hands out.
    export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
    export MARS_DS_EXPECTED_WORLD_SIZE=$((${#NODES[@]} * RANKS_PER_NODE))
    # torch would try an unknown name for its whole timeout, twice, and then speak of a time-out.
    getent hosts "$MASTER_ADDR" >/dev/null ||
        fail "master $MASTER_ADDR does not resolve on $(hostname); is MASTER_SUFFIX right, and /etc/hosts or DNS complete?"
    printf "%s slots=$RANKS_PER_NODE\n" "${NODES[@]}" >"$ATTEMPT/hostfile"
    write_environment
}

write_environment() {
    local name
    for name in $(compgen -e | grep -E '^(MARS_DS|MASTER|NCCL|GLOO|UCX|FI|TORCH|OMP|TRITON)_'); do
        printf 'export %s=%q\n' "$name" "${!name}"
    done >"$ATTEMPT/environment"
    for name in LOCAL_SCRATCH NODE_SETUP; do
        printf '%s=%q\n' "$name" "${!name:-}"
    done >>"$ATTEMPT/environment"
    printf 'PYTHON=%q\n' "${PYTHON:-$(default_python)}" >>"$ATTEMPT/environment" ||
        fail "$ATTEMPT/environment: cannot be written; is its disk full?"
}

default_python() { if [ -n "${IMAGE:-}" ]; then echo /opt/venv/bin/python; else echo "$CHECKOUT/.venv/bin/python"; fi; }

# run_step MODE ARGUMENT...: node.sh on every one of NODES, in a container when there is one; sets RC.
run_step() {
    local count=${#NODES[@]} list container=() root=. follow=
    list=$(IFS=, && echo "${NODES[*]}")
    if [ -n "${IMAGE:-}" ]; then
        root=${CONTAINER_ROOT:-/opt/app}
        mkdir -p data "$RUNS_DIR"
        # Image paths are absolute and nothing lives in its entry point: sites differ in what they run of it.
        container=(--container-image="$IMAGE" --container-workdir="$root" --no-container-mount-home
            --no-container-entrypoint --container-mounts="$(mounts "$root")")
    fi
    # Since Slurm 22.05 srun does not take --cpus-per-task from sbatch: ranks would share one core.
    srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --nodelist="$list" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
        --export=ALL --label --unbuffered "${STEP_OPTIONS[@]}" "${container[@]}" \
        /bin/bash "$root/launch/slurm/node.sh" "$ATTEMPT" "$@" &
    STEP_PID=$!
    if [ "$1" = ranks ]; then
        tail -n +1 -F --pid="$STEP_PID" "$ATTEMPT/rank_00000.log" 2>/dev/null &
        follow=$!
    fi
    while :; do # a trap ends a wait early
        wait "$STEP_PID"
        RC=$?
        kill -0 "$STEP_PID" 2>/dev/null || break
    done
    [ -z "$follow" ] || wait "$follow"
}
# One rank that dies ends the step; when one node is ready the others have a minute to follow.
STEP_OPTIONS=(--kill-on-bad-exit=1 --wait=60)

mounts() {
    local root=$1
    echo "$RUNS_DIR:$RUNS_DIR,$CHECKOUT/data:$root/data,$CHECKOUT/configs:$root/configs:ro${MOUNTS:+,$MOUNTS}"
}

# An absolute folder of the command line has the same name inside; relative ones are data/ and configs/ of the checkout.
see_in_container() {
    case $1 in
    /*) MOUNTS=$1:$1${MOUNTS:+,$MOUNTS} ;;
    data | data/* | configs | configs/*) ;;
    *) [ -z "${IMAGE:-}" ] || fail "$1: in a container data/ and configs/ of the checkout are there; name other folders absolutely" ;;
    esac
}

# -------------------------------------------------------------------------------------------------------------- preflight

# choose_nodes [doctor's ARGUMENT ...]: sets NODES, as many as may be used of those that pass launch/doctor.py; false when
# these are too few. Spares stand by, and with NODE_COUNTS so does what is above the largest of these counts.
choose_nodes() {
    local all=() node sick=() limit wanted count
    mapfile -t all < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    limit=$((${#all[@]} - ${SPARE_NODES:-0}))
    ((limit >= 1)) || fail "SPARE_NODES: ${SPARE_NODES:-0} of ${#all[@]} nodes leaves none"
    NODES=("${all[@]}")
    if [ "${PREFLIGHT:-0}" != 0 ]; then
        write_environment
        local STEP_OPTIONS=(--kill-on-bad-exit=0 --wait=0) # one that fails leaves the others at it
        run_step preflight "$RANKS_PER_NODE" "$@"
        [ -z "$ASKED" ] || return 0 # a look that was cut short tells nothing
        NODES=()
        for node in "${all[@]}"; do
            if [ -e "$ATTEMPT/preflight/$node.healthy" ]; then
                NODES+=("$node")
            else
                sick+=("$node")
                say "$node fails the preflight: $(what_is_wrong "$ATTEMPT/preflight/$node.log")"
            fi
        done
    fi
    ((${#NODES[@]} > 0)) || fail "no node passes the preflight, so the fault is not theirs; see $ATTEMPT/preflight"
    EXCLUDE=$(IFS=, && echo "${sick[*]}")
    ((${#NODES[@]} <= limit)) || NODES=("${NODES[@]:0:limit}")
    wanted=$limit
    if [ -n "${NODE_COUNTS:-}" ]; then
        wanted=0
        for count in $NODE_COUNTS; do
            ((count > ${#NODES[@]} || count <= wanted)) || wanted=$count
        done
        ((wanted > 0)) || wanted=$((${#NODES[@]} + 1))
    fi
    ((${#NODES[@]} >= wanted)) || return 1
    NODES=("${NODES[@]:0:wanted}")
    EXCLUDE=
}

what_is_wrong() {
    local found
    found=$(grep -m 2 -E '^(MEND|error)' "$1" 2>/dev/null | tr -s ' ' | paste -sd';')
    echo "${found:-it has not answered}"
}

# Too few healthy nodes: the job goes back into the queue, without the sick ones.
leave_out_sick_nodes() {
    RC=1
    [ -n "$EXCLUDE" ] || fail "NODE_COUNTS: $NODE_COUNTS; this allocation of $SLURM_JOB_NUM_NODES nodes is smaller than each of them"
    requeue "too few healthy nodes (SPARE_NODES would hold some ready); leaving out $EXCLUDE"
}

# Slurm takes this for a pending job only: a moment after the requeue.
exclude_nodes() {
    local list before
    before=$(job_field ExcNodeList)
    list=$EXCLUDE${before:+,$before}
    for _ in $(seq 50); do
        scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$list" 2>/dev/null && return
        sleep 0.2
    done
    say "could not exclude $EXCLUDE; tell those who run the cluster, or: scontrol update JobId=$SLURM_JOB_ID ExcNodeList=$list"
}
