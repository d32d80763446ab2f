#!/usr/bin/env bash
# sbatch examples/cluster/slurm.sh, from a directory that all nodes share: the checkpoints go there.
#SBATCH --job-name=shardwise
#SBATCH --nodes=2
# One task for each GPU: JAX gives every task under Slurm the one GPU of its local number. All
# GPUs of the node must be visible to each task for that, so no --gpus-per-task here.
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# A preempted job goes back into the queue, and resumes from its newest checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM to every task 120 s before the end of the time, so that a checkpoint can be written.
#SBATCH --signal=TERM@120
set -euo pipefail

# One task for each node instead, with all of its GPUs: --ntasks-per-node=1 above, and
# export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7

# JAX takes a port from the job's number; set one if the nodes' firewall wants it.
# export JAX_COORDINATOR_PORT=61234

# When one task ends with an error, the others end too: each names the one that was lost.
status=0
srun --kill-on-bad-exit=1 python examples/cluster/train.py || status=$?

# Three more tries, each from the newest checkpoint.
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
