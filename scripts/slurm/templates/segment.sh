# shellcheck shell=bash
# One segment of a job: environment, the step in the background, signals, and the next segment. Sets no options of the
# step and knows no step. A step is two functions of the template: `complete` (exit status 0: nothing is left to do) and
# `progress` (prints something that changes when work was saved).

stop='' # why the step was asked to end: time (USR1, five minutes before the limit) or cancelled (TERM)
child='' sender=''

say() { printf '%s slurm: %s\n' "$(date +%T)" "$*"; }

# Caches on scratch, where they outlive the segment; a cache that the person has chosen stays. The token of `hf auth
# login` is where it was written, also when HF_HOME moves away from there.
enter() {
    cd "$root"
    mkdir -p "$scratch"
    export HF_TOKEN_PATH=${HF_TOKEN_PATH:-${HF_HOME:-$HOME/.cache/huggingface}/token}
    export HF_HOME=${HF_HOME:-$scratch/huggingface}
    export HF_XET_CACHE=${HF_XET_CACHE:-$scratch/huggingface/xet}
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$scratch/triton}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$scratch/torchinductor}
    export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=$threads
    if [ "$offline" = 1 ]; then
        export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1
    fi
    say "segment $((${SLURM_RESTART_COUNT:-0} + 1)) of job ${SLURM_JOB_ID:-none} on ${SLURM_JOB_NODELIST:-$(hostname)}"
    trap 'pass_on time USR1' USR1
    trap 'pass_on cancelled TERM' TERM
}

# Passes a signal on to the step. One that arrives while Python is still importing is lost, so it is sent until the step
# has ended.
pass_on() {
    stop=$1
    [ -n "$child" ] || return 0
    say "$stop: sending $2 to the step"
    [ -z "$sender" ] || kill "$sender" 2>/dev/null || true
    (
        trap - USR1 TERM
        while kill -s "$2" "$child" 2>/dev/null; do sleep "$resend"; done
    ) >/dev/null 2>&1 &
    sender=$!
}

# Starts the step and waits for it; its exit status is in $status. Under Slurm a step is an srun, which hands signals to
# every process of every node; elsewhere it is the command. A launcher that knows no USR1 would die of it, so the first
# shell ignores it, and who saves sets a handler of its own.
run() {
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        set -- srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpus-per-task="$cpus" \
            bash -c 'trap "" USR1; exec "$@"' step "$@"
    fi
    "$@" &
    child=$!
    [ "$stop" != time ] || pass_on time USR1
    [ "$stop" != cancelled ] || pass_on cancelled TERM
    while :; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break # else a signal ended the wait
    done
    [ -z "$sender" ] || kill "$sender" 2>/dev/null || true
}

# Puts the job back into the queue under its own id, so that what waits for it still waits. Where that is not allowed,
# the script is submitted again behind it, and this job fails: nothing that waits for it may start.
again() {
    trap '' TERM # Slurm ends what is left of a job that it requeues
    if scontrol requeue "$SLURM_JOB_ID"; then
        say "requeued; the next segment goes on from here"
        exit 0
    fi
    local next=(--dependency="afterany:$SLURM_JOB_ID")
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || next+=(--array="$SLURM_ARRAY_TASK_ID")
    say "requeue was refused; the next segment is a job of its own, and jobs that wait for this one must be submitted again"
    sbatch "${next[@]}" "$script"
    exit 1
}

# Runs the step to its end, or to the end of the segment. Only the clock leads to another segment: a job that a person
# cancels must not come back, and one that is preempted or loses a node is requeued by Slurm.
segment() {
    local before
    before=$(progress)
    run "$@"
    if complete; then
        say "complete"
        exit 0
    fi
    if [ "$stop" = time ] && [ -n "${SLURM_JOB_ID:-}" ]; then
        if [ "$(progress)" = "$before" ]; then
            say "this segment saved nothing new (${before:-nothing yet}); not requeued: it needs more time, or does not save"
            exit 1
        fi
        again # whatever the exit status: a launcher may report a process that was signalled while it was leaving
    fi
    if [ "$status" != 0 ] && [ "$status" != 3 ] && [ "$stop" != cancelled ]; then
        say "the step failed with exit status $status; not requeued"
        exit "$status"
    fi
    say "ended before it was complete; what was saved is kept: submit again to go on"
    exit 143
}
