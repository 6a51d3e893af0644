#!/bin/sh
# From prompts to a pinned drafter under the grader at home, at smoke size, on a CPU and without a hub:
#
#   sh scripts/reproduce.sh [--work FOLDER] [--source SOURCE] [--steps N] [--no-rehearsal]
#
# prompts -> generate -> train -> evaluate -> publish (to a stand-in hub in FOLDER) -> pin -> rehearse, each the command
# that a real run uses. FOLDER (default: runs/reproduce) keeps everything; run it again and it goes on where it was
# killed. The drafter it makes is not good: it has seen a few steps. SOURCE (default: self:12, the target writes the
# prompts itself) is one of drafter_train.prompts.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
work=runs/reproduce
source=self:12
steps=20
rehearsal=yes
while [ $# -gt 0 ]; do
    case $1 in
        --no-rehearsal) rehearsal=no ;;
        --work | --source | --steps)
            [ $# -ge 2 ] || {
                printf 'error: %s needs a value\n' "$1" >&2
                exit 2
            }
            case $1 in
                --work) work=$2 ;;
                --source) source=$2 ;;
                --steps) steps=$2 ;;
            esac
            shift
            ;;
        *)
            sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//' >&2
            exit 2
            ;;
    esac
    shift
done
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
[ -f models/smollm2-135m-instruct/config.json ] || "$python" scripts/fetch_default_model.py
mkdir -p "$work/done"
work=$(CDPATH='' cd -- "$work" && pwd)
began=$(date +%s)

# phase NAME COMMAND ...: runs it once. Its output is in FOLDER/NAME.log; one line says how long it took. The shell does
# not stop at a failed command inside of it, so a function of two commands joins them with &&.
phase() {
    name=$1
    shift
    if [ -f "$work/done/$name" ]; then
        printf '%-10s done before (%s s)\n' "$name" "$(cat "$work/done/$name")"
        return
    fi
    started=$(date +%s)
    "$@" >>"$work/$name.log" 2>&1 || {
        printf '%-10s failed; the last lines of %s:\n' "$name" "$work/$name.log" >&2
        tail -n 12 "$work/$name.log" >&2
        exit 1
    }
    seconds=$(($(date +%s) - started))
    # Why a second run may trust it: the name appears when the phase has ended, in one step.
    printf '%s\n' "$seconds" >"$work/done/.$name"
    mv "$work/done/.$name" "$work/done/$name"
    printf '%-10s %4s s  %s\n' "$name" "$seconds" "$(tail -n 1 "$work/$name.log")"
}

# The recipe of every step, with its files in FOLDER.
step() {
    module=$1
    shift
    "$python" -m "drafter_train.$module" --config drafter_train/configs/smoke.yaml \
        --set "data.prompts=$work/prompts.jsonl" --set "data.eval_prompts=$work/eval_prompts.jsonl" \
        --set "data.tokens=$work/tokens" --set "data.eval_tokens=$work/eval_tokens" \
        --set "train.output=$work/drafter" --set "train.max_steps=$steps" \
        --set publish.base_model=HuggingFaceTB/SmolLM2-135M-Instruct "$@"
}

generate() {
    step generate --device cpu --split eval &&
        step generate --device cpu
}

hub() {
    "$python" -m scripts.hub_stand_in "$work/hub" "$@"
}

# The stand-in starts a command, not a function of this shell.
publish() {
    hub "$python" -m drafter_train.publish --config drafter_train/configs/smoke.yaml \
        --set publish.base_model=HuggingFaceTB/SmolLM2-135M-Instruct --drafter "$work/drafter/final" \
        --repo student/smollm2-135m-smoke --manifest "$work/manifest.json"
}

pin() {
    hub sh scripts/make_submission.sh "$work/submission.tar.gz" --manifest "$work/manifest.json" &&
        cat "$work/manifest.json" &&
        printf 'pinned in %s\n' "$work/submission.tar.gz"
}

rehearse() {
    hub "$python" -m eval.rehearse "$work/submission.tar.gz" --quick --out "$work/rehearsal"
}

# Short prompts: writing them is most of the work.
phase prompts step prompts --device cpu --hold-out 0.25 --set data.max_prompt_tokens=48 "$source"
phase generate generate
phase train step train --device cpu
phase evaluate step evaluate --device cpu --drafter "$work/drafter/final" --served 3
phase publish publish
phase pin pin
[ "$rehearsal" = no ] || phase rehearse rehearse
printf '%-10s %4s s  everything is in %s\n' total "$(($(date +%s) - began))" "$work"
