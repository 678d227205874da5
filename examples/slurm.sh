#!/bin/bash
# Train under Slurm until it is done, however often the time is up:    sbatch examples/slurm.sh --steps 100000
# What stands behind the script's name goes to `microparallel train`.
#SBATCH --job-name=microparallel
#SBATCH --ntasks=4
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120        # two minutes before the time is up, the ranks are told: they save, and end
#SBATCH --requeue                # if a node fails, Slurm starts the job again
#SBATCH --open-mode=append       # one log for all attempts
#SBATCH --output=slurm-%j.log

# RUN=runs/slurm-17 sbatch examples/slurm.sh    goes on with the run of an earlier job
srun microparallel train --resume auto --out "${RUN:-runs/slurm-$SLURM_JOB_ID}" "$@"
code=$?
if [ "$code" -eq 130 ] || [ "$code" -eq 143 ]; then  # stopped before its last step: 130 saved, 143 had done no step
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
