#!/bin/bash
# A job of Slurm that trains on two nodes of 8 GPUs each, once responses and hidden states are there (see
# docs/gpus.md): sbatch examples/slurm.sh target=model target.path=… data=conversations data.path=…
#SBATCH --job-name=draftsmith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export first
# shellcheck disable=SC2016  # each node has its own number
srun bash -c 'accelerate launch --config_file conf/accelerate/several_nodes.yaml \
  --num_machines "$SLURM_NNODES" --num_processes "$((8 * SLURM_NNODES))" \
  --machine_rank "$SLURM_NODEID" --main_process_ip "$first" train.py "$@"' launch "$@"
