#!/bin/sh
# The whole recipe of the default model's drafter, from prompts to a measured drafter folder, in MINUTES.
#
#   scripts/train_small_drafter.sh PROMPTS_DIR MINUTES [--set section.key=value ...]
#
# PROMPTS_DIR holds prompts_train.jsonl(.gz) and prompts_eval.jsonl. A third of the time writes responses, the rest
# trains; run it again and each step goes on from what is there. Result: runs/smollm2/drafter/final.
set -eu
cd "$(dirname "$0")/.."
[ $# -ge 2 ] || { sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 2; }
prompts=$1
seconds=$(($2 * 60))
shift 2
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && [ -z "${PYTHON:-}" ] && python=.venv/bin/python
config=drafter_train/configs/smollm2-135m.yaml
train_prompts=$prompts/prompts_train.jsonl.gz
[ -f "$train_prompts" ] || train_prompts=$prompts/prompts_train.jsonl
set -- --config "$config" --set "data.prompts=$train_prompts" --set "data.eval_prompts=$prompts/prompts_eval.jsonl" "$@"
[ -f models/smollm2-135m-instruct/config.json ] || "$python" scripts/fetch_default_model.py
"$python" -m drafter_train.generate "$@" --split eval
# Exit code 3 is "out of time": what was written is enough to train on.
"$python" -m drafter_train.generate "$@" --max-seconds $((seconds / 3)) || [ $? -eq 3 ]
"$python" -m drafter_train.train "$@" --max-seconds $((seconds * 3 / 5))
"$python" -m drafter_train.evaluate "$@" --drafter runs/smollm2/drafter/final
