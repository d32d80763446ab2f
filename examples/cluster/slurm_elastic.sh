#!/usr/bin/env bash
# sbatch examples/cluster/slurm_elastic.sh, from a directory shared by all nodes: checkpoints go there.
#
# A job that goes on when it loses a node, on those that are left. The script on the first node is what
# starts the tasks again, so only the loss of that node ends the job; then it is requeued.
#SBATCH --job-name=shardwise-elastic
#SBATCH --nodes=4
# One task per GPU, as in slurm.sh.
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# Keep the other nodes when one fails.
#SBATCH --no-kill
set -uo pipefail

per_node=8
least=$((1 * per_node))
# What accumulate= and the batch are for: all tasks. train.py passes elastic=True.
export SHARDWISE_ELASTIC_MOST=$((SLURM_JOB_NUM_NODES * per_node))
# Copies of the state, in the memory of each node, outlive the tasks.
export SHARDWISE_COPIES=/dev/shm/shardwise-$SLURM_JOB_ID
trap 'srun --overlap --ntasks-per-node=1 rm -rf "$SHARDWISE_COPIES"' EXIT

alive() { # the nodes of this job that answer
  for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    if ! sinfo --noheader --nodes="$node" --format=%T | grep -qiE 'down|fail|drain|\*'; then echo "$node"; fi
  done
}

status=1
for ((attempt = 0; attempt < 20; attempt++)); do
  mapfile -t nodes < <(alive)
  tasks=$((${#nodes[@]} * per_node))
  if [ "$tasks" -lt "$least" ]; then break; fi
  echo "attempt $attempt: $tasks of $SHARDWISE_ELASTIC_MOST tasks on ${nodes[*]}"
  # A new port: the one of the attempt before may still be taken.
  export JAX_COORDINATOR_PORT=$((55527 + attempt))
  status=0
  srun --kill-on-bad-exit=1 --nodes="${#nodes[@]}" --ntasks="$tasks" \
    --nodelist="$(IFS=,; echo "${nodes[*]}")" python examples/cluster/train.py || status=$?
  # Done, or stopped by SIGTERM after saving.
  if [ "$status" -eq 0 ] || [ "$status" -eq 143 ]; then break; fi
  sleep 10 # until Slurm has noticed which node is gone
done

if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
