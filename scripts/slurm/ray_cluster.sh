#!/bin/bash
# A Ray cluster inside one Slurm job, the server on it, until the job ends:
#   sbatch --nodes 2 --gpus-per-node 4 --cpus-per-task 32 --time 8:00:00 scripts/slurm/ray_cluster.sh scripts/slurm/serve_cluster.yaml
# Submit it from the project's folder, which every node has to see, as the model folder. One task a node.
#SBATCH --job-name foretoken-serve
#SBATCH --ntasks-per-node 1
set -euo pipefail

config=${1:?the YAML of the application, e.g. scripts/slurm/serve_cluster.yaml}
root=$PWD
python=${FORETOKEN_PYTHON:-$root/.venv/bin/python}
ray="$(dirname "$python")/ray"
port=$((20000 + SLURM_JOB_ID % 20000))
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(head -n 1 <<<"$nodes")
address=$(srun --nodes 1 --ntasks 1 --nodelist "$head" hostname --ip-address | awk '{print $1}')

# Whoever reaches Ray's ports may run code as this user: a token of this job alone, kept from other users.
umask 077
mkdir -p "$root/runs/slurm/ray"
export RAY_AUTH_TOKEN_PATH="$root/runs/slurm/ray/token-$SLURM_JOB_ID"
"$python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$RAY_AUTH_TOKEN_PATH"
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

common=(--num-cpus "${SLURM_CPUS_PER_TASK:-$(nproc)}" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats --block)
srun --nodes 1 --ntasks 1 --nodelist "$head" \
    "$ray" start --head --node-ip-address "$address" --port "$port" --include-dashboard=false "${common[@]}" &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    sleep 15
    srun --nodes $((SLURM_JOB_NUM_NODES - 1)) --ntasks $((SLURM_JOB_NUM_NODES - 1)) --exclude "$head" \
        "$ray" start --address "$address:$port" "${common[@]}" &
fi
sleep 20
"$python" -m scripts.cluster --address "$address:$port" --config "$config"
# Until a node's Ray ends, or the job does.
wait -n
