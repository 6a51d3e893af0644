#!/bin/sh
# The whole path as Slurm jobs at smoke size on CPUs, to see a cluster (or scripts/slurm/local_cluster.sh) do it:
#
#   sh scripts/slurm/end_to_end.sh FOLDER SITE.yaml RECIPE.yaml [options of submit]
#
# Needs the recipe's prompt files. A generation array, training whose segments of six minutes get USR1 from Slurm after
# one (so it is requeued if it takes longer), evaluation; each waits for the one before. Follows the queue to the end and
# prints what the jobs said of their segments. --gpus 2 or --nodes 2 make the training go through accelerate.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
[ $# -ge 3 ] || {
    sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'
    exit 2
}
folder=$1
site=$2
recipe=$3
shift 3
cd "$root"
python=${PYTHON:-$root/.venv/bin/python}
began=$(date +%s)
submit() {
    step=$1
    shift
    "$python" -m scripts.slurm.submit "$step" --site "$site" --config "$recipe" --folder "$folder" --time 00:06:00 "$@"
}
eval_job=$(submit generate-eval -- --device cpu)
array=$(submit generate --shards 3 --after "$eval_job" -- --device cpu)
train=$(submit train --after "$array" "$@" -- --device cpu)
evaluate=$(submit evaluate --after "$train" -- --device cpu --served 4)
printf 'jobs: generate-eval %s, generate %s, train %s, evaluate %s\n' "$eval_job" "$array" "$train" "$evaluate"
before=''
while :; do
    now=$(squeue -h -o '%i %t %r' -j "$eval_job,$array,$train,$evaluate" 2>/dev/null || true)
    [ "$now" = "$before" ] || printf '%s queue: %s\n' "$(date +%T)" "$(printf '%s' "${now:-empty}" | tr '\n' ';')"
    before=$now
    [ -n "$now" ] || break
    sleep 2
done
for log in "$folder"/*.log; do
    printf '== %s\n' "$log"
    grep -E 'slurm:|saved in|finished at|responses, .* tokens in|acceptance length|rror' "$log" || true
done
printf 'end to end: %s s\n' "$(($(date +%s) - began))"
[ -f "$folder/evaluate-$evaluate.log" ] && grep -q 'slurm: complete' "$folder/evaluate-$evaluate.log"
