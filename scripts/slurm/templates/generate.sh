# shellcheck shell=bash
# The target's answers to one shard of the prompts; a task of the job array is a shard.

shard=${SLURM_ARRAY_TASK_ID:-0}
tag=$(printf '%03dof%03d' "$shard" "$shards")
complete() { [ "$status" = 0 ]; }
progress() { { find "$output" -name "responses-$tag-*.npz" 2>/dev/null || true; } | wc -l; }

enter
segment "${python[@]}" -m drafter_train.generate "${arguments[@]}" --shard "$shard/$shards"
