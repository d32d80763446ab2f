#!/usr/bin/env bash
# sbatch examples/cluster/slurm.sh, from a directory shared by all nodes: checkpoints go there.
#SBATCH --job-name=shardwise
#SBATCH --nodes=2
# One task per GPU: under Slurm, JAX gives each task the GPU with the task's local index. For that,
# each task must see all GPUs of the node, so do not add --gpus-per-task.
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# A preempted job is requeued, and resumes from its newest checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
# Send SIGTERM to every task 120 s before the time limit, so that a checkpoint can be written.
#SBATCH --signal=TERM@120
set -euo pipefail

# For one task per node with all of its GPUs, use --ntasks-per-node=1 above, and
# export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7

# JAX derives a port from the job id; set one if the firewall of the nodes requires it.
# export JAX_COORDINATOR_PORT=61234

# When one task fails, the others end too, and each names the task that was lost.
status=0
srun --kill-on-bad-exit=1 python examples/cluster/train.py || status=$?

# Retry up to three times, each time from the newest checkpoint.
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
