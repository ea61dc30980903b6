#!/bin/bash
# This machine's part of a run on several: `rlhf run` on machine 0, which the others follow.
#
#   machine.sh RECIPE RUN MACHINE MACHINES GPUS ADDRESS [key=value ...]
#
# It is started once on each machine, and only MACHINE differs: its number, from 0 on. GPUS are those of one machine,
# ADDRESS is that of machine 0, RECIPE and RUN lie on a disk that all of them see.
#
#   PRESET   how models are spread, by path or shipped name: ddp (as it is), fsdp2, zero2
#   PORT     where the processes meet on machine 0: 29500, if nothing else is said
set -euo pipefail

recipe=$1 run=${2%/} machine=$3 machines=$4 gpus=$5 address=$6
shift 6

if [ "$machine" -ne 0 ]; then
    exec rlhf follow "$run" "$machine"
fi

find='import sys; from rlhf.pipeline.accelerate_config import config_path; print(config_path(sys.argv[1]))'
preset=$(python -c "$find" "${PRESET:-ddp}")
config=$run.machines.yaml
mkdir -p "$(dirname "$config")"
{
    grep -Ev '^(num_machines|num_processes|machine_rank|main_process_ip|main_process_port):' "$preset"
    echo "num_machines: $machines"
    echo "num_processes: $((machines * gpus))"
    echo "machine_rank: 0"
    echo "main_process_ip: $address"
    echo "main_process_port: ${PORT:-29500}"
} >"$config"
exec rlhf run "$recipe" --run-dir "$run" accelerate_config="$config" "$@"
