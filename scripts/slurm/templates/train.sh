# shellcheck shell=bash
# Training: one process, or one per GPU through accelerate, with the nodes meeting at the first one.

# The drafter is written after the last checkpoint; an older one is of an earlier, shorter run.
complete() {
    [ "$status" = 0 ] && [ -f "$output/final/config.json" ] && ! [ "$output/latest" -nt "$output/final/config.json" ]
}
progress() { cat "$output/latest" 2>/dev/null || true; }

enter
if [ $((nodes * gpus)) -le 1 ]; then
    segment "${python[@]}" -m drafter_train.train "${arguments[@]}"
fi
address=127.0.0.1
if [ -n "${SLURM_JOB_ID:-}" ]; then
    # The address by which Slurm itself reaches the first node; its bare name need not resolve.
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    address=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p' | head -n 1)
fi
export address nodes gpus port=$((20000 + ${SLURM_JOB_ID:-0} % 20000))
# SLURM_NODEID differs from node to node, so it is expanded there.
# shellcheck disable=SC2016
node='exec "$@" -m accelerate.commands.launch --multi_gpu --num_machines "$nodes" --num_processes "$((nodes * gpus))" \
    --machine_rank "${SLURM_NODEID:-0}" --rdzv_backend static --main_process_ip "$address" --main_process_port "$port" \
    --mixed_precision no --dynamo_backend no -m drafter_train.train'
segment bash -c "$node$(printf ' %q' "${arguments[@]}")" node "${python[@]}"
