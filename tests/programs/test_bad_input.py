"""What a person can get wrong on the command line: one line that says how to mend it, and nothing touched on disk."""

import json
import os
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from refusals import call, contents, refuse, remove_new
from sd_lightning.apps import dreambooth, export, generate, train
from sd_lightning.storage import checkpoint
from sd_lightning.storage.runs import RunFolder

# (command line, words of the message in their order: who, what was given, what is expected, how to mend it)
KEYS = [
    ("train bogus=1", "bogus=1", "no key 'bogus'", "top-level keys are"),
    ("train data.bach_size=4", "data.bach_size=4", "no key", "write data.batch_size=4"),
    ("train +trainer.maxsteps=3", "trainer.maxsteps", "Trainer has no argument", "nearest is trainer.max_steps"),
    ("train +callbacks.ema.decya=3", "callbacks.ema.decya", "EMA has no argument", "nearest is callbacks.ema.decay"),
    ("train +speed.compile=true", "speed.compile", "Speed has no argument", "nearest is speed.compile_blocks"),
    ("train +trainer.strategy=ddp", "trainer.strategy=ddp", "sets this argument", "choose with strategy=<option>"),
    ("train +callbacks.checkpoint.resume=x", "callbacks.checkpoint.resume=x", "sets this argument", "leave it out"),
    ("train strategy.bucket_cap_mb=25", "no key", "write strategy=ddp strategy.bucket_cap_mb=25"),
    ("train strategy.bucket=25", "strategy.bucket=25", "no key", "strategy has no keys below it"),
    ("train lora.rank=8", "no key 'lora.rank'", "write trainable=lora lora.rank=8"),
    ("train lora=4", "lora=4", "expected a section", "write trainable=lora lora.rank=4, or lora=null"),
    ("train train_batch_size=4", "no key 'train_batch_size'", "write data.batch_size=4"),
    ("train mixed_precision=bf16", "no key 'mixed_precision'", "write trainer.precision=bf16-mixed"),
    ("train rank=8", "no key 'rank'", "write trainable=lora lora.rank=8"),
    ("train precision=fp16", "no key 'precision'", "write trainer.precision=16-mixed"),
    ("train trainer.precison=bf16", "no key", "write trainer.precision=bf16-mixed"),
    ("train trainer.gpus=1", "no key 'trainer.gpus'", "write trainer.devices=1"),
    ("train train_data_dir=foo", "no key", "write data=images data.train_data_dir=foo"),
    ("dreambooth train_data_dir=foo", "no key", "write instance_data_dir=foo"),
    ("train trainer.max_epochs=3", "no key", "write trainer.max_steps=<n>"),
    ("train epochs=2", "no key 'epochs'", "write trainer.max_steps=<n>"),
    ("dreambooth epochs=2", "no key 'epochs'", "write max_train_steps=<n>"),
    ("train trainer.strategy=ddp", "no key 'trainer.strategy'", "write strategy=ddp"),
    ("train steps=3", "no key 'steps'", "write trainer.max_steps=3"),
    ("generate steps=3", "no key 'steps'", "write num_inference_steps=3"),
    ("generate prompt=cat", "no key 'prompt'", "write 'prompts=[cat]'"),
    ("generate bogus=1", "no key 'bogus'", "top-level keys are run, model, prompts"),
    ("generate 'prompts=[a cat&co, seven]'", "cannot read", """'prompts=["a cat&co",seven]'"""),
    ("dreambooth", "instance_data_dir has no value and no default", "give one: instance_data_dir=<value>"),
    ("dreambooth merge_lora=true", "no key 'merge_lora'", "write trainable=lora merge_lora=true"),
    ("train ~data", "data is missing", "expected a section", "leave it as it was"),
    ("train ~callbacks.checkpoint", "callbacks.checkpoint is missing", "expected a section", "leave it as it was"),
    ("train ~trainer.precision", "there is no key 'trainer.precision'", "give trainer.precision=<value>, or module"),
    ("train callbacks.ema=3", "callbacks.ema=3", "expected a section", "callbacks.ema=null to go without"),
    ("train optimizer._target_=torch.optim.Adamw", "torch.optim.Adamw", "no 'Adamw'", "nearest is torch.optim.Adam"),
    ("generate sede=1", "sede=1", "no key", "write seed=1"),
]
GROUPS = [
    ("train model=sd16", "model=sd16", "no such option", "available: sd15, sd21, sdxl, tiny"),
    (
        "train model=stabilityai/stable-diffusion-2-1",
        "write model=sd21 model.pretrained=stabilityai/stable-diffusion-2",
    ),
    ("train data=imagefolder", "no such option", "write data=images"),
    ("train strategy=deepspeed_stage_2", "no such option", "write strategy=deepspeed_zero2"),
    ("train --strategy auto", "unrecognized arguments: --strategy", "write strategy=auto,"),
    ("train --train_batch_size=4", "unrecognized", "write data.batch_size=4,"),
    ("train --experiment sd21_finetune", "unrecognized", "write experiment=sd21_finetune,"),
    (
        "train experiment=dreambooth_8gb",
        "of dreambooth, not of train",
        "sd_lightning.dreambooth experiment=dreambooth_8",
    ),
    ("train +experiment=dreambooth_8gb", "of dreambooth", "write python -m sd_lightning.dreambooth experiment="),
    ("dreambooth experiment=sd21_finetune", "of train, not of dreambooth", "write python -m sd_lightning.train exp"),
    ("train quantization=int8", "no group 'quantization'", "write python -m sd_lightning.generate quantization=int8"),
    ("train +quantization=int8", "no group 'quantization'", "of generate"),
    ("generate strategy=ddp", "no group 'strategy'", "of train and dreambooth", "leave it out"),
    ("generate model=sd15", "no group 'model'", "write run=runs/<name>, or model.pretrained="),
    ("export model=sd15", "no group 'model'", "write run=runs/<name>"),
    ("train strategy=dpp", "strategy=dpp", "available: ", "write strategy=ddp"),
    ("train experiment=foo", "experiment=foo", "no such option"),
    ("train logger=null", "logger=null", "is a group of configs", "available: csv, default, wandb"),
    ("train model=3", "model=3", "is a group of configs", "available: sd15"),
    ("train -cn trian", "no config 'trian'", "available: ", "write -cn train"),
    ("train --cfg jobb", "--cfg", "'jobb'", "'job', 'hydra', 'all'"),
]
TYPES = [
    ("train data.batch_size=hello", "data.batch_size=hello", "expected int", "write data.batch_size=64"),
    ("train trainer.max_steps=1.5", "trainer.max_steps=1.5", "expected int", "write trainer.max_steps="),
    (
        "train module.train_text_encoder=3",
        "train_text_encoder=3",
        "expected bool",
        "write module.train_text_encoder=true",
    ),
    ("train module.encoder_dtype=half", "encoder_dtype=half", "expected one of float32", "write module.encoder_dtype="),
    ("train optimizer.lr=fast", "optimizer.lr=fast", "expected float", "write optimizer.lr=0.002"),
    ("train optimizer.betas=0.9", "optimizer.betas=0.9", "expected a list of 2 (float, float)", "[0.9,0.99]"),
    ("train optimizer=adamw8bit optimizer.lr=fast", "optimizer: cannot build it", "lr=fast", "leave out optimizer.lr"),
    ("train callbacks.samples.prompts=seven", "prompts=seven", "expected a list of str", "prompts=[seven]"),
    ("train overwrite=maybe", "overwrite=maybe", "expected bool", "write overwrite=false"),
    ("train output_dir=3", "output_dir=3", "expected str", "write 'output_dir=runs/${name}'"),
    ("train resume=true", "resume=true", "expected str or null", "write resume=auto"),
    ("train seed=abc", "seed=abc", "expected int", "write seed=0"),
    ("generate guidance_scale=x", "guidance_scale=x", "expected float", "write guidance_scale=7.5"),
    ("generate run=run prompts=3", "prompts=3", "expected a list of str", """write prompts=['"3"']"""),
    ("generate run=run prompts=[3]", "prompts=[3]", "expected a list of str", """write prompts=['"3"']"""),
    ("generate prompt=3", "prompt=3", "no key 'prompt'", """write 'prompts=["3"]'"""),
]
MISSING = [
    ("train data=images", "data.train_data_dir has no value", "give one: data.train_data_dir=<value>"),
    ("train data=huggingface", "data.dataset_name has no value", "give one: data.dataset_name=<value>"),
    ("train ~model.architecture", "load_model needs architecture", "give it: +model.architecture=<value>"),
    ("generate prompts=[a]", "neither of run= and model.pretrained=", "give run=runs/<name>"),
    ("generate run=run", "got no prompts", "write 'prompts=[a handwritten three]'"),
    ("generate run=run prompts=blank.txt", "got no prompts", "write 'prompts=[a handwritten three]'"),
]
NUMBERS = [
    ("train optimizer.lr=-1", "optimizer.lr=-1", "expected a number of at least 0", "write optimizer.lr=1e-5"),
    ("train optimizer.lr=nan", "optimizer.lr=nan", "expected a finite number", "write optimizer.lr=0.002"),
    ("train optimizer.eps=inf", "optimizer.eps=inf", "expected a finite number", "write optimizer.eps=1e-08"),
    (
        "train optimizer.betas=[0.9,2]",
        "optimizer: cannot build",
        "Invalid beta parameter at index 1: 2",
        "leave out optimizer.betas",
    ),
    ("train optimizer.weight_decay=-1", "optimizer: ", "Invalid weight_decay", "given weight_decay=-1", "change"),
    ("train lr_scheduler.warmup_steps=-1", "lr_scheduler got warmup_steps=-1", "expected at least 0"),
    ("train lr_scheduler.final_fraction=2", "lr_scheduler=cosine got final_fraction=2", "expected a number in [0, 1]"),
    (
        "train module.text_encoder_lr=-1",
        "text_encoder_lr=-1",
        "expected a number of at least 0",
        "text_encoder_lr=1e-5",
    ),
    ("train callbacks.ema.decay=1.5", "EMA got decay=1.5", "expected a number in [0, 1]", "decay=0.9999"),
    (
        "train callbacks.ema.decay=nan",
        "callbacks.ema.decay=nan",
        "expected a finite number",
        "callbacks.ema.decay=0.99",
    ),
    ("train callbacks.checkpoint.keep=0", "PortableCheckpoint got keep=0", "expected at least 1"),
    ("train callbacks.samples.columns=0", "SampleGrid got columns=0", "expected at least 1"),
    ("train objective.snr_gamma=nan", "objective.snr_gamma=nan", "expected a finite number"),
    ("train objective.noise_offset=-1", "noise_offset=-1", "expected a number >= 0", "objective.noise_offset=0"),
    ("train seed=-1", "seed=-1", "expected a whole number from 0", "write seed=0"),
    ("train trainer.max_steps=0", "trainer.max_steps=0", "expected at least 1", "write trainer.max_steps=1"),
    ("train trainer.num_nodes=0", "trainer.num_nodes=0", "expected at least 1", "write trainer.num_nodes=1"),
    ("train trainer.devices=0", "trainer.devices=0", "expected a number of at least 1", "write trainer.devices=1"),
    ("train trainer.val_check_interval=0", "val_check_interval=0", "expected", "write trainer.val_check_interval=60"),
    ("train trainer.gradient_clip_val=-1", "gradient_clip_val=-1", "expected a norm of at least 0", "null for no"),
    ("train trainer.limit_val_batches=-1", "trainer: ", "limit_val_batches", "has to be in", "change"),
    ("train data.num_workers=-1", "data.num_workers=-1", "expected auto, or 0 or more", "write data.num_workers=auto"),
    ("train data.batch_size=-8", "data.batch_size=-8", "cannot be split", "write data.batch_size=1 or more"),
    ("train data.max_bad_fraction=2", "max_bad_fraction=2", "expected a fraction", "data.max_bad_fraction=0.01"),
    ("train data.resolution=30", "data.resolution=30", "multiple of 8", "write data.resolution=32"),
    ("train +sampling.height=30", "sampling got height=30", "expected a multiple of 8", "height=24"),
    ("train sampling.num_inference_steps=0", "num_inference_steps=0", "expected at least 1", "num_inference_steps=16"),
    ("generate run=run prompts=[a] width=30", "width=30", "expected a multiple of 8", "width=24"),
    (
        "generate run=run prompts=[a] guidance_scale=-1",
        "guidance_scale=-1",
        "expected at least 0",
        "guidance_scale=7.5",
    ),
    ("generate run=run prompts=[a] seed=-1", "seed=-1", "expected a whole number from 0", "seed=0"),
    ("generate run=run prompts=[a] num_images_per_prompt=0", "num_images_per_prompt=0", "expected at least 1"),
]
CONSTRUCTORS = [
    ("train +optimizer.foreach=true", "optimizer: ", "`fused` and `foreach`", "leave out optimizer.foreach"),
    (
        "train optimizer.fused=false +optimizer.differentiable=true",
        *("AdamW cannot step on the CPU", "leave out optimizer.fused and optimizer.differentiable"),
    ),
    (
        "train optimizer.fused=false +optimizer.capturable=true",
        *("AdamW cannot step on the CPU", "leave out optimizer.capturable"),
    ),
    (
        "train optimizer._target_=torch.optim.SparseAdam ~optimizer.fused ~optimizer.weight_decay",
        *("SparseAdam", "does not support dense gradients", "leave out optimizer._target_"),
    ),
    (
        "train optimizer=sgd optimizer.momentum=0 +optimizer.nesterov=true",
        *("optimizer: ", "Nesterov momentum requires", "leave out optimizer.momentum,"),
    ),
    ("train +trainer.profiler=fast", "trainer: ", "profiler", "leave out trainer.profiler"),
    ("train trainer.accelerator=abacus", "trainer: ", "abacus", "leave out trainer.accelerator"),
    ("generate run=run prompts=[a] device=meta", "device=meta", "not there", "write device=cpu"),
    ("generate run=run prompts=[a] device=hpu", "device=hpu", "not there", "write device=cpu"),
]
COMBINATIONS = [
    ("train data.batch_size=3 trainer.accumulate_grad_batches=4", "batch_size=3", "4 parts", "=4 or more"),
    (
        "train strategy=ddp trainer.devices=2 data.batch_size=1",
        *("data.batch_size=1", "2 process(es)", "write data.batch_size=2 or more"),
    ),
    ("train strategy=ddp trainer.devices=4096", "trainer.devices=4096", "CPU core(s)", "write trainer.devices="),
    (
        "train data.batch_size=5000",
        "data.batch_size=5000",
        "larger than the training set",
        "write data.batch_size=1437",
    ),
    ("train trainer.devices=2", "strategy=single is one process", "trainer.devices=2", "add strategy=ddp"),
    (
        "train trainer.precision=fp16",
        "trainer.precision=fp16",
        "expected one of 32",
        "write trainer.precision=16-mixed",
    ),
    ("train trainer.precision=bf16", "expected one of 32", "write trainer.precision=bf16-mixed"),
    ("train trainer.precision=16", "expected one of 32", "write trainer.precision=16-mixed"),
    ("train trainer.precision=fp32", "expected one of 32", "write trainer.precision=32"),
    (
        "train callbacks=memory",
        "EngineMemory got strategy=SingleDevice",
        "expected strategy=gemini",
        "leave callbacks=",
    ),
    ("train +trainer.max_epochs=3", "trainer.max_epochs=3", "expected only", "write trainer.max_steps=<n>"),
    (
        "train trainer.check_val_every_n_epoch=1",
        *("trainer.val_check_interval=60", "only 22 forward passes", "check_val_every_n_epoch=null"),
    ),
    (
        "train objective=flow objective.snr_gamma=5",
        "snr_gamma=5",
        "prediction_type=flow",
        "Set objective.snr_gamma=null",
    ),
    (
        "train objective=epsilon objective.rescale_betas_zero_snr=true",
        *("rescale_betas_zero_snr=true", "expected v_prediction or sample", "objective.prediction_type=v_prediction"),
    ),
    ("train objective.logit_mean=1", "logit_mean=1", "timestep_sampling=uniform", "timestep_sampling=logit_normal"),
    (
        "train module.train_text_encoder=false module.text_encoder_lr=1e-4",
        *("text_encoder_lr=0.0001", "the text encoder is frozen", "train_text_encoder=true"),
    ),
    ("train data.prefetch_factor=2", "data.prefetch_factor=2", "no effect with data.num_workers=0", "num_workers=4"),
    ("train data.random_flip=true", "cache_latents=true", "data.random_flip=true", "data.cache_latents=false"),
    ("train output_dir=run resume=auto init_from=torn", "resume=auto and init_from=torn", "give one of the two"),
    ("train resume=auto overwrite=true", "overwrite=true and resume=auto", "give one of the two"),
    (
        "train model=sd21 model.architecture=tiny model.revision=main",
        *("revision=main", "without pretrained weights", "add model.pretrained="),
    ),
    ("train model.fresh_denoiser=true", "fresh_denoiser=true", "without pretrained weights", "add model.pretrained="),
    (
        "train init_from=run model.fresh_denoiser=true",
        *("init_from=run and model.fresh_denoiser=true", "replaces the weights", "write model.fresh_denoiser=false"),
    ),
    ("train sampling.scheduler=foo", "scheduler=foo", "no such scheduler", "expected ddim"),
    (
        "train sampling.scheduler=FlowMatchEulerDiscreteScheduler",
        "scheduler=FlowMatch",
        "cannot sample",
        "choose another",
    ),
    ("generate run=run model.pretrained=x prompts=[a]", "both of run= and model.pretrained=", "give run="),
    ("generate run=run model.revision=x prompts=[a]", "model.revision=x with run=run", "leave it out"),
    ("generate run=run prompts=[a] scheduler=foo", "scheduler=foo", "no such scheduler", "expected ddim"),
    (
        "generate run=run prompts=[a] scheduler=pndm num_inference_steps=3",
        *("num_inference_steps=3", "PNDMScheduler", "give another number"),
    ),
]
WITHOUT_CUDA = [
    ("train trainer.precision=16-mixed", "16-mixed needs a CUDA device", "write trainer.precision=bf16-mixed or 32"),
    ("train trainer.accelerator=cuda", "trainer.accelerator=cuda", "no CUDA device", "write cpu or auto"),
    ("train speed.attention=cudnn", "attention='cudnn'", "no CUDA device", "write attention=auto"),
    ("generate run=run prompts=[a] device=cuda", "device=cuda", "not there", "write device=cpu or auto"),
]
FILES = [
    (
        "train data=images data.train_data_dir=nowhere",
        "no folder 'nowhere'",
        "expected a folder",
        "data.train_data_dir=",
    ),
    (
        "train data=images data.train_data_dir=empty",
        "'empty' holds no usable captioned image",
        "give a folder of images",
    ),
    (
        "train data=images data.train_data_dir=corrupt",
        "'corrupt' holds no usable",
        "not a JSON object",
        "metadata.jsonl",
    ),
    (
        "train data=images data.train_data_dir=column",
        "=text",
        "which has file_name, caption",
        "data.caption_column=caption",
    ),
    (
        "train data=images data.train_data_dir=column data.caption_column=file_name",
        *("caption_column=file_name, which names the image", "data.caption_column=caption"),
    ),
    (
        "train data=images data.train_data_dir=few data.max_image_pixels=9",
        *("data.max_image_pixels=9", "at least the 262144 pixels", "write data.max_image_pixels=128000000"),
    ),
    ("train data=images data.train_data_dir=few", "data.batch_size=16", "training set of 3", "write data.batch_size=3"),
    (
        "train data=images data.train_data_dir=few data.num_val_samples=9",
        "num_val_samples=9",
        "expected 0 to 2",
        "null",
    ),
    (
        "train data=huggingface data.dataset_name=empty",
        "data.dataset_name=empty",
        "cannot load",
        "give the name of",
    ),
    ("train output_dir=run", "output_dir=run already holds a run", "resume=auto", "overwrite=true"),
    ("train output_dir=file", "output_dir=file", "a file is in the way", "choose another output_dir"),
    ("train output_dir=file/run", "output_dir=file/run", "cannot be written", "choose another output_dir"),
    ("train output_dir=/proc/run", "output_dir=/proc/run", "cannot be written", "choose another output_dir"),
    ("train output_dir=run overwrite=true data=images data.train_data_dir=nowhere", "there is no folder 'nowhere'"),
    (
        "train output_dir=run overwrite=true init_from=run",
        *("init_from=run is output_dir=run", "expected two folders apart", "write output_dir=run-2"),
    ),
    ("train output_dir=", "output_dir=: it is empty", "expected a folder", "write output_dir=runs/new"),
    ("train output_dir=/", "output_dir=/: it is the root folder", "expected a folder of its own", "output_dir=runs/"),
    (
        "train output_dir=.",
        "output_dir=.: it is the current folder",
        "expected a folder of its own",
        "output_dir=runs/",
    ),
    ("""train 'output_dir="~/a"'""", "output_dir=~/a: only a shell knows ~", "expected a whole path", "output_dir=/"),
    ("train output_dir=few", "output_dir=few holds", "0.png, 0.txt,", "and 1 more (6 in all)", "output_dir=few/run"),
    ("train output_dir=torn overwrite=true", "output_dir=torn holds", "model_index.json", "write output_dir=torn/run"),
    ("train output_dir=torn resume=auto", "output_dir=torn holds", "model_index.json", "write output_dir=torn/run"),
    ("train output_dir=torn model.pretrained=torn", "model.pretrained=torn is output_dir=torn", "output_dir=torn-2"),
    (
        "train output_dir=run resume=auto data=images data.train_data_dir=run/samples",
        *("data.train_data_dir=run/samples lies in output_dir=run", "write output_dir=run-2"),
    ),
    (
        "train data=huggingface data.dataset_name=few output_dir=few/run",
        *("data.dataset_name=few: output_dir=few/run lies in it", "write output_dir=few-runs/run"),
    ),
    (
        "dreambooth instance_data_dir=few instance_prompt=x output_dir=run overwrite=true model=tiny "
        "model.pretrained=good class_data_dir=run/class with_prior_preservation=true class_prompt=y",
        *("class_data_dir=run/class lies in output_dir=run", "write output_dir=run-2"),
    ),
    (
        "dreambooth instance_data_dir=few instance_prompt=x model=tiny model.pretrained=good class_prompt=y "
        "class_data_dir= with_prior_preservation=true",
        *("class_data_dir= without a value", "leave class_data_dir out"),
    ),
    ("generate run=run prompts=[a] output_dir=", "output_dir=: it is empty", "write output_dir=runs/new"),
    (
        "generate run=run prompts=[a] output_dir=.",
        "output_dir=.: it is the current folder",
        "write output_dir=runs/new",
    ),
    ("generate run=run prompts=[a] num_inference_steps=1001", "1001", "expected 1 to 1000", "num_inference_steps=25"),
    ("train sampling.num_inference_steps=1001", "1001", "expected 1 to 1000", "num_inference_steps=25"),
    ("train resume=nowhere", "resume=nowhere", "no such folder", "expected auto, a run or one of its checkpoints"),
    ("train resume=empty", "resume=empty", "no valid checkpoint", "expected a run or one of its checkpoints"),
    ("train resume=run data.batch_size=32", "data.batch_size=32", "data.batch_size=64", "or start a new run"),
    ("train resume=run seed=1", "seed=1", "seed=0", "or start a new run", "init_from="),
    ("train resume=run model=tiny_frozen", "another model", "absent in the model", "Give the model="),
    ("train init_from=nowhere", "init_from=nowhere", "no such folder", "expected a run, a checkpoint or a pipeline"),
    ("train init_from=empty", "init_from=empty", "neither a finished pipeline nor", "a folder with model_index.json"),
    (
        "train model.pretrained=nowhere/at/all",
        "model.pretrained=nowhere/at/all",
        "no such folder",
        "or a hub id such as",
    ),
    ("train model.pretrained=no/such", "model.pretrained=no/such", "cannot be downloaded", "or give a local folder"),
    (
        "train model=sdxl init_from=run",
        "model=sdxl",
        "run/pipeline holds a StableDiffusionPipeline",
        "write model=tiny",
    ),
    ("train model.pretrained=empty", "model.pretrained=empty", "no model_index.json", "expected a pipeline"),
    ("train model.pretrained=other", "other", "FluxPipeline", "expected StableDiffusionPipeline", "give a Stable"),
    ("train model.pretrained=torn", "torn/unet", "not a complete safetensors file", "copy or download"),
    ("train model.pretrained=run/pipeline +model.vae=nowhere", "nowhere", "AutoencoderKL"),
    ("generate run=nowhere prompts=[a]", "run=nowhere", "no such folder", "expected a run"),
    ("generate run=empty prompts=[a]", "run=empty", "neither a finished pipeline", "a folder with model_index.json"),
    ("generate run=torn prompts=[a]", "torn/unet", "not a complete safetensors file", "copy or download"),
    ("generate run=run prompts=nofile.txt", "prompts='nofile.txt'", "not a file", "write 'prompts=[nofile.txt]'"),
    ("""generate run=run prompts='"3"'""", "prompts='3'", "not a file", """write 'prompts=["3"]'"""),
    ("generate run=run prompts=latin1.txt", "prompts=latin1.txt", "UTF-8", "save it as UTF-8"),
    ("generate run=run prompts=[a] output_dir=file", "output_dir=file", "a file is in the way", "choose another"),
    ("generate run=run prompts=[a] device=gpuu", "device=gpuu", "not there", "write device=cpu or auto"),
    ("generate run=run prompts=[a] device=meta quantization=int8", "device=meta", "not there", "device=cpu or auto"),
]
CASES = [*KEYS, *GROUPS, *TYPES, *MISSING, *NUMBERS, *CONSTRUCTORS, *COMBINATIONS, *WITHOUT_CUDA, *FILES]
FEW = "data=images data.train_data_dir=few"
SD21 = "train model=sd21 model.pretrained=stabilityai/stable-diffusion-2-1"
REMEDIES = {
    # keys
    "train bogus=1": "train",
    "train data.bach_size=4": "train data.batch_size=4",
    "train +trainer.maxsteps=3": "train trainer.max_steps=3",
    "train +callbacks.ema.decya=3": "train callbacks.ema.decay=3",
    "train +speed.compile=true": "train speed.compile_blocks=true",
    "train +trainer.strategy=ddp": "train strategy=ddp",
    "train +callbacks.checkpoint.resume=x": "train",
    "train strategy.bucket_cap_mb=25": "train strategy=ddp strategy.bucket_cap_mb=25",
    "train strategy.bucket=25": "train",
    "train lora.rank=8": "train trainable=lora lora.rank=8",
    "train lora=4": "train trainable=lora lora.rank=4",
    "train train_batch_size=4": "train data.batch_size=4",
    "train mixed_precision=bf16": "train trainer.precision=bf16-mixed",
    "train rank=8": "train trainable=lora lora.rank=8",
    "train precision=fp16": "train trainer.precision=16-mixed",
    "train trainer.precison=bf16": "train trainer.precision=bf16-mixed",
    "train trainer.gpus=1": "train trainer.devices=1",
    "train train_data_dir=foo": "train data=images data.train_data_dir=foo",
    "dreambooth train_data_dir=foo": "dreambooth instance_data_dir=foo",
    "train trainer.max_epochs=3": "train trainer.max_steps=3",
    "train epochs=2": "train trainer.max_steps=3",
    "dreambooth epochs=2": "dreambooth max_train_steps=3 instance_data_dir=few",
    "train trainer.strategy=ddp": "train strategy=ddp",
    "train steps=3": "train trainer.max_steps=3",
    "generate steps=3": "generate num_inference_steps=3",
    "generate prompt=cat": "generate 'prompts=[cat]'",
    "generate bogus=1": "generate",
    "generate 'prompts=[a cat&co, seven]'": """generate 'prompts=["a cat&co",seven]'""",
    "dreambooth": "dreambooth instance_data_dir=few",
    "dreambooth merge_lora=true": "dreambooth trainable=lora merge_lora=true instance_data_dir=few",
    "train ~data": "train",
    "train ~callbacks.checkpoint": "train",
    "train ~trainer.precision": "train ~trainer.precision +trainer.precision=32",
    "train callbacks.ema=3": "train callbacks.ema=null",
    "train optimizer._target_=torch.optim.Adamw": "train optimizer._target_=torch.optim.Adam",
    "generate sede=1": "generate seed=1",
    # groups
    "train model=sd16": "train model=sd15",
    "train model=stabilityai/stable-diffusion-2-1": SD21,
    "train data=imagefolder": "train data=images data.train_data_dir=few",
    "train strategy=deepspeed_stage_2": "train strategy=deepspeed_zero2",
    "train --strategy auto": "train strategy=auto",
    "train --train_batch_size=4": "train data.batch_size=4",
    "train --experiment sd21_finetune": "train experiment=sd21_finetune data.train_data_dir=few",
    "train experiment=dreambooth_8gb": "dreambooth experiment=dreambooth_8gb instance_data_dir=few",
    "train +experiment=dreambooth_8gb": "dreambooth experiment=dreambooth_8gb instance_data_dir=few",
    "dreambooth experiment=sd21_finetune": "train experiment=sd21_finetune data.train_data_dir=few",
    "train quantization=int8": "generate quantization=int8",
    "train +quantization=int8": "generate quantization=int8",
    "generate strategy=ddp": "generate",
    "generate model=sd15": "generate run=runs/x",
    "export model=sd15": "export run=runs/x",
    "train strategy=dpp": "train strategy=ddp",
    "train experiment=foo": "train experiment=sd21_finetune data.train_data_dir=few",
    "train logger=null": "train logger=csv",
    "train model=3": "train model=sd15",
    "train -cn trian": "train -cn train",
    "train --cfg jobb": "train --cfg job",
    # types
    "train data.batch_size=hello": "train data.batch_size=64",
    "train trainer.max_steps=1.5": "train trainer.max_steps=360",
    "train module.train_text_encoder=3": "train module.train_text_encoder=true",
    "train module.encoder_dtype=half": "train module.encoder_dtype=float32",
    "train optimizer.lr=fast": "train optimizer.lr=0.002",
    "train optimizer.betas=0.9": "train optimizer.betas=[0.9,0.99]",
    "train optimizer=adamw8bit optimizer.lr=fast": "train optimizer=adamw8bit",
    "train callbacks.samples.prompts=seven": "train callbacks.samples.prompts=[seven]",
    "train overwrite=maybe": "train overwrite=false",
    "train output_dir=3": "train 'output_dir=runs/${name}'",
    "train resume=true": "train resume=auto",
    "train seed=abc": "train seed=0",
    "generate guidance_scale=x": "generate guidance_scale=7.5",
    "generate run=run prompts=3": """generate run=run prompts=['"3"']""",
    "generate run=run prompts=[3]": """generate run=run prompts=['"3"']""",
    "generate prompt=3": """generate 'prompts=["3"]'""",
    # missing
    "train data=images": "train data=images data.train_data_dir=few",
    "train data=huggingface": "train data=huggingface data.dataset_name=few",
    "train ~model.architecture": "train ~model.architecture +model.architecture=tiny",
    "generate prompts=[a]": "generate prompts=[a] run=run",
    "generate run=run": "generate run=run 'prompts=[a handwritten three]'",
    "generate run=run prompts=blank.txt": "generate run=run 'prompts=[a handwritten three]'",
    # numbers
    "train optimizer.lr=-1": "train optimizer.lr=1e-5",
    "train optimizer.lr=nan": "train optimizer.lr=0.002",
    "train optimizer.eps=inf": "train optimizer.eps=1e-08",
    "train optimizer.betas=[0.9,2]": "train",
    "train optimizer.weight_decay=-1": "train",
    "train lr_scheduler.warmup_steps=-1": "train lr_scheduler.warmup_steps=0",
    "train lr_scheduler.final_fraction=2": "train lr_scheduler.final_fraction=0.1",
    "train module.text_encoder_lr=-1": "train module.text_encoder_lr=1e-5",
    "train callbacks.ema.decay=1.5": "train callbacks.ema.decay=0.9999",
    "train callbacks.ema.decay=nan": "train callbacks.ema.decay=0.99",
    "train callbacks.checkpoint.keep=0": "train callbacks.checkpoint.keep=3",
    "train callbacks.samples.columns=0": "train callbacks.samples.columns=1",
    "train objective.snr_gamma=nan": "train",
    "train objective.noise_offset=-1": "train objective.noise_offset=0",
    "train seed=-1": "train seed=0",
    "train trainer.max_steps=0": "train trainer.max_steps=1",
    "train trainer.num_nodes=0": "train trainer.num_nodes=1",
    "train trainer.devices=0": "train trainer.devices=1",
    "train trainer.val_check_interval=0": "train trainer.val_check_interval=60",
    "train trainer.gradient_clip_val=-1": "train trainer.gradient_clip_val=1",
    "train trainer.limit_val_batches=-1": "train",
    "train data.num_workers=-1": "train data.num_workers=auto",
    "train data.batch_size=-8": "train data.batch_size=1",
    "train data.max_bad_fraction=2": "train data.max_bad_fraction=0.01",
    "train data.resolution=30": "train data.resolution=32",
    "train +sampling.height=30": "train +sampling.height=24",
    "train sampling.num_inference_steps=0": "train sampling.num_inference_steps=16",
    "generate run=run prompts=[a] width=30": "generate run=run prompts=[a] width=24",
    "generate run=run prompts=[a] guidance_scale=-1": "generate run=run prompts=[a] guidance_scale=7.5",
    "generate run=run prompts=[a] seed=-1": "generate run=run prompts=[a] seed=0",
    "generate run=run prompts=[a] num_images_per_prompt=0": "generate run=run prompts=[a] num_images_per_prompt=4",
    # what a constructor raises
    "train +optimizer.foreach=true": "train",
    "train optimizer.fused=false +optimizer.differentiable=true": "train",
    "train optimizer.fused=false +optimizer.capturable=true": "train optimizer.fused=false",
    "train optimizer._target_=torch.optim.SparseAdam ~optimizer.fused ~optimizer.weight_decay": "train",
    "train optimizer=sgd optimizer.momentum=0 +optimizer.nesterov=true": "train optimizer=sgd +optimizer.nesterov=true",
    "train +trainer.profiler=fast": "train",
    "train trainer.accelerator=abacus": "train",
    "generate run=run prompts=[a] device=meta quantization=int8": (
        "generate run=run prompts=[a] device=cpu quantization=int8"
    ),
    "generate run=run prompts=[a] device=meta": "generate run=run prompts=[a] device=cpu",
    "generate run=run prompts=[a] device=hpu": "generate run=run prompts=[a] device=auto",
    # combinations
    "train data.batch_size=3 trainer.accumulate_grad_batches=4": (
        "train data.batch_size=4 trainer.accumulate_grad_batches=4"
    ),
    "train strategy=ddp trainer.devices=2 data.batch_size=1": (
        "train strategy=ddp trainer.devices=2 data.batch_size=2"
    ),
    "train strategy=ddp trainer.devices=4096": f"train strategy=ddp trainer.devices={os.cpu_count()}",
    "train data.batch_size=5000": "train data.batch_size=1437",
    "train trainer.devices=2": "train trainer.devices=2 strategy=ddp",
    "train trainer.precision=fp16": "train trainer.precision=16-mixed",
    "train trainer.precision=bf16": "train trainer.precision=bf16-mixed",
    "train trainer.precision=16": "train trainer.precision=16-mixed",
    "train trainer.precision=fp32": "train trainer.precision=32",
    "train callbacks=memory": "train",
    "train +trainer.max_epochs=3": "train trainer.max_steps=3",
    "train trainer.check_val_every_n_epoch=1": "train trainer.check_val_every_n_epoch=null",
    "train objective=flow objective.snr_gamma=5": "train objective=flow objective.snr_gamma=null",
    "train objective=epsilon objective.rescale_betas_zero_snr=true": (
        "train objective=epsilon objective.rescale_betas_zero_snr=true objective.prediction_type=v_prediction"
    ),
    "train objective.logit_mean=1": "train objective.logit_mean=1 objective.timestep_sampling=logit_normal",
    "train module.train_text_encoder=false module.text_encoder_lr=1e-4": (
        "train module.train_text_encoder=true module.text_encoder_lr=1e-4"
    ),
    "train data.prefetch_factor=2": "train data.prefetch_factor=2 data.num_workers=4",
    "train data.random_flip=true": "train data.random_flip=true data.cache_latents=false",
    "train output_dir=run resume=auto init_from=torn": "train output_dir=run resume=auto",
    "train resume=auto overwrite=true": "train resume=auto",
    "train model=sd21 model.architecture=tiny model.revision=main": (
        "train model=sd21 model.architecture=tiny model.revision=main model.pretrained=run/pipeline"
    ),
    "train model.fresh_denoiser=true": "train model.fresh_denoiser=true model.pretrained=run/pipeline",
    "train init_from=run model.fresh_denoiser=true": "train init_from=run model.fresh_denoiser=false",
    "train sampling.scheduler=foo": "train sampling.scheduler=ddim",
    "train sampling.scheduler=FlowMatchEulerDiscreteScheduler": "train",
    "generate run=run model.pretrained=x prompts=[a]": "generate run=run prompts=[a]",
    "generate run=run model.revision=x prompts=[a]": "generate run=run prompts=[a]",
    "generate run=run prompts=[a] scheduler=foo": "generate run=run prompts=[a] scheduler=ddim",
    "generate run=run prompts=[a] scheduler=pndm num_inference_steps=3": (
        "generate run=run prompts=[a] scheduler=pndm num_inference_steps=25"
    ),
    # without CUDA
    "train trainer.precision=16-mixed": "train trainer.precision=bf16-mixed",
    "train trainer.accelerator=cuda": "train trainer.accelerator=cpu",
    "train speed.attention=cudnn": "train speed.attention=auto",
    "generate run=run prompts=[a] device=cuda": "generate run=run prompts=[a] device=cpu",
    # places of output
    "train output_dir=": "train output_dir=runs/new",
    "train output_dir=/": "train output_dir=runs/new",
    "train output_dir=.": "train output_dir=runs/new",
    "train 'output_dir=\"~/a\"'": "train output_dir=new",
    "train output_dir=few": "train output_dir=few/run",
    "train output_dir=torn overwrite=true": "train overwrite=true output_dir=torn/run",
    "train output_dir=torn resume=auto": "train resume=auto output_dir=torn/run",
    "train output_dir=torn model.pretrained=torn": "train model.pretrained=torn output_dir=torn-2",
    "train output_dir=run resume=auto data=images data.train_data_dir=run/samples": (
        "train resume=auto data=images data.train_data_dir=run/samples output_dir=run-2"
    ),
    "train data=huggingface data.dataset_name=few output_dir=few/run": (
        "train data=huggingface data.dataset_name=few output_dir=few-runs/run"
    ),
    "dreambooth instance_data_dir=few instance_prompt=x output_dir=run overwrite=true model=tiny "
    "model.pretrained=good class_data_dir=run/class with_prior_preservation=true class_prompt=y": (
        "dreambooth instance_data_dir=few instance_prompt=x overwrite=true model=tiny model.pretrained=good "
        "class_data_dir=run/class with_prior_preservation=true class_prompt=y output_dir=run-2"
    ),
    "dreambooth instance_data_dir=few instance_prompt=x model=tiny model.pretrained=good class_prompt=y "
    "class_data_dir= with_prior_preservation=true": (
        "dreambooth instance_data_dir=few instance_prompt=x model=tiny model.pretrained=good class_prompt=y "
        "with_prior_preservation=true"
    ),
    "generate run=run prompts=[a] output_dir=": "generate run=run 'prompts=[a]' output_dir=runs/new",
    "generate run=run prompts=[a] output_dir=.": "generate run=run 'prompts=[a]' output_dir=runs/new",
    "generate run=run prompts=[a] num_inference_steps=1001": "generate run=run 'prompts=[a]' num_inference_steps=25",
    "train sampling.num_inference_steps=1001": "train sampling.num_inference_steps=25",
    # files
    "train data=images data.train_data_dir=nowhere": f"train {FEW}",
    "train data=images data.train_data_dir=empty": f"train {FEW}",
    "train data=images data.train_data_dir=corrupt": f"train {FEW}",
    "train data=images data.train_data_dir=column": (
        "train data=images data.train_data_dir=column data.caption_column=caption"
    ),
    "train data=images data.train_data_dir=column data.caption_column=file_name": (
        "train data=images data.train_data_dir=column data.caption_column=caption"
    ),
    "train data=images data.train_data_dir=few": "train data=images data.train_data_dir=few data.batch_size=3",
    "train data=images data.train_data_dir=few data.num_val_samples=9": (
        "train data=images data.train_data_dir=few data.num_val_samples=null"
    ),
    "train data=images data.train_data_dir=few data.max_image_pixels=9": (
        "train data=images data.train_data_dir=few data.max_image_pixels=128000000"
    ),
    "train data=huggingface data.dataset_name=empty": "train data=huggingface data.dataset_name=saved",
    "train output_dir=run": "train output_dir=run resume=auto",
    "train output_dir=file": "train output_dir=new",
    "train output_dir=file/run": "train output_dir=new",
    "train output_dir=/proc/run": "train output_dir=new",
    "train output_dir=run overwrite=true data=images data.train_data_dir=nowhere": (
        f"train output_dir=run overwrite=true {FEW}"
    ),
    "train output_dir=run overwrite=true init_from=run": "train output_dir=run-2 init_from=run",
    "train resume=nowhere": "train resume=run",
    "train resume=empty": "train resume=run",
    "train resume=run data.batch_size=32": "train resume=run data.batch_size=64",
    "train resume=run seed=1": "train resume=run seed=0",
    "train resume=run model=tiny_frozen": "train resume=run model=tiny",
    "train init_from=nowhere": "train init_from=run",
    "train model=sdxl init_from=run": "train model=tiny init_from=run",
    "train init_from=empty": "train init_from=run",
    "train model.pretrained=nowhere/at/all": "train model.pretrained=run/pipeline",
    "train model.pretrained=no/such": "train model.pretrained=run/pipeline",
    "train model.pretrained=empty": "train model.pretrained=run/pipeline",
    "train model.pretrained=other": "train model.pretrained=run/pipeline",
    "train model.pretrained=torn": "train model.pretrained=run/pipeline",
    "train model.pretrained=run/pipeline +model.vae=nowhere": "train model.pretrained=run/pipeline",
    "generate run=nowhere prompts=[a]": "generate run=run prompts=[a]",
    "generate run=empty prompts=[a]": "generate run=run prompts=[a]",
    "generate run=torn prompts=[a]": "generate run=run prompts=[a]",
    "generate run=run prompts=nofile.txt": "generate run=run 'prompts=[nofile.txt]'",
    "generate run=run prompts='\"3\"'": """generate run=run 'prompts=["3"]'""",
    "generate run=run prompts=latin1.txt": "generate run=run prompts=utf8.txt",
    "generate run=run prompts=[a] output_dir=file": "generate run=run prompts=[a] output_dir=new",
    "generate run=run prompts=[a] device=gpuu": "generate run=run prompts=[a] device=cpu",
}
"""What a person who follows the message writes next, by the command that was refused."""
OWN_CHOICE = (
    *("<", "choose another", "expected a", "give ", "Give ", "available: ", "save it as UTF-8", "cpu or auto"),
    *("or a class name", "copy or download"),
)
"""How messages ask for a value that only the person knows."""
FLOW = {
    "train": [("train", name) for name in ("run", "build_trainer", "build_module", "check_parts", "open_run")],
    "dreambooth": [("dreambooth", "run")],
    "generate": [("generate", name) for name in ("run", "read_prompts", "_device", "_load", "generate")],
    "export": [("export", "run")],
}
"""Functions that a program enters one after the other, each when all checks before it have passed."""
# (package, command line, words)
WITHOUT_PACKAGE = [
    ("wandb", "train logger=wandb", "logger=wandb", "'wandb' is not installed", "pip install 'sd-lightning[loggers]'"),
    (
        *("datasets", "train data=huggingface data.dataset_name=x"),
        *("data=huggingface", "'datasets' is not installed", "pip install 'sd-lightning[datasets]'"),
    ),
    (
        *("pyarrow", "train data=parquet data.train_data_dir=few"),
        *("data=parquet", "'pyarrow' is not installed", "pip install 'sd-lightning[parquet]'"),
    ),
    (
        *("deepspeed", "train strategy=deepspeed_zero2"),
        *("'deepspeed' is not installed", "pip install 'sd-lightning[deepspeed]'"),
    ),
    ("bitsandbytes", "train optimizer=adamw8bit", "bitsandbytes.optim.AdamW8bit", "not installed", "install it"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that all cases run in: a trained run and all kinds of broken things."""
    root = tmp_path_factory.mktemp("bad_input")
    before = Path.cwd()
    os.chdir(root)
    code = call(
        "train output_dir=run trainer.max_steps=1 trainer.limit_val_batches=0 callbacks.samples.columns=1 "
        "callbacks.samples.accuracy_samples=0 sampling.num_inference_steps=1 data.cache_latents=false"
    )
    assert code == 0, code
    for name in ("empty", "corrupt", "column", "few", "other"):
        Path(name).mkdir()
    Image.new("RGB", (32, 32)).save("column/0.png")
    Path("utf8.txt").write_text("une pièce", encoding="utf-8")
    Path("file").write_text("in the way")
    Path("blank.txt").write_text("\n \n")
    Path("latin1.txt").write_bytes("une pièce".encode("latin-1"))
    Path("corrupt/metadata.jsonl").write_text("{torn\n[1]\n")
    Path("column/metadata.jsonl").write_text('{"file_name": "0.png", "caption": "x"}\n')
    for i in range(3):
        Image.new("RGB", (32, 32)).save(f"few/{i}.png")
        Path(f"few/{i}.txt").write_text("black")
    Path("other/model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    for name in ("good", "torn"):
        shutil.copytree("run/pipeline", name)
    weights = Path("torn/unet/diffusion_pytorch_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100_000])
    datasets = pytest.importorskip("datasets")
    image = {"bytes": Path("few/0.png").read_bytes(), "path": None}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict({"image": [image] * 16, "text": ["black"] * 16}, features).save_to_disk("saved")
    yield root
    os.chdir(before)


PASSED: dict[str, int] = {}
"""How many functions of ``FLOW`` a mended command has entered before it was stopped: many mistakes have one remedy."""


class Reached(BaseException):
    """A command has passed the checks that matter; what follows would take time."""


def follow(monkeypatch: pytest.MonkeyPatch, stop_after: int) -> list[str]:
    """Note which functions of ``FLOW`` programs enter, and end them when they enter one more than ``stop_after``."""
    entered: list[str] = []

    def noting(name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            entered.append(name)
            if len(entered) > stop_after:
                raise Reached(name)
            return function(*args, **kwargs)

        return noted

    modules = {"train": train, "dreambooth": dreambooth, "generate": generate, "export": export}
    for program, name in (each for flow in FLOW.values() for each in flow):
        monkeypatch.setattr(modules[program], name, noting(name, getattr(modules[program], name)))
    return entered


def assert_remedy_is_in(message: str, command: str, mended: str) -> None:
    """Assert that the message says what to change in a command to get the mended one."""
    other_program = command.split()[0] != mended.split()[0]
    assert not other_program or f"sd_lightning.{mended.split()[0]} " in message
    before, after = shlex.split(command)[1:], shlex.split(mended)[1:]
    needed = ("data.train_data_dir=few", "instance_data_dir=few")  # before and after
    added = [token for token in after if token not in before and token not in needed]
    for token in added:
        _, _, last = token.partition("=")[0].rpartition(".")
        short = f"{last}={token.partition('=')[2]}"  # a constructor does not know where it stands in the configuration
        said = any(each in message for each in (token, short, shlex.quote(token))) or '"' in token
        assert said or any(word in message for word in OWN_CHOICE), f"nothing of {token} in: {message}"
    if not added and not other_program:
        ways = ("leave", "give one of the two", "give it", "no keys below it", "top-level keys are")
        assert any(way in message for way in ways) or any(word in message for word in OWN_CHOICE), message


def test_the_table_is_long_enough_and_has_a_remedy_for_all() -> None:
    assert len({command for command, *_ in CASES}) == len(CASES) >= 36
    assert {command for command, *_ in CASES} == REMEDIES.keys()


@pytest.mark.parametrize(("command", "words"), [(c, tuple(w)) for c, *w in CASES], ids=[c for c, *_ in CASES])
def test_mistake_is_one_line_and_touches_nothing(
    command: str,
    words: tuple[str, ...],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And who does what the line says gets past the check that has refused: the run stops at the next one's entry."""
    if command in [c for c, *_ in WITHOUT_CUDA] and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here, so this is no mistake")
    with monkeypatch.context() as patch:
        entered = follow(patch, stop_after=99)
        message = refuse(command, words, folder, capfd)
    mended = REMEDIES[command]
    assert_remedy_is_in(message, command, mended)
    if PASSED.get(mended, -1) >= len(entered):
        return
    before = contents(folder)
    follow(monkeypatch, stop_after=len(entered))
    try:
        code = call(mended)
    except Reached:
        PASSED[mended] = len(entered)
        return
    finally:
        remove_new(before, folder)
    assert code == 0, f"{mended}: {code}: {capfd.readouterr().err}"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("objective=flow objective.snr_gamma=5", ("snr_gamma=5",)),
        ("optimizer.betas=[0.9,2]", ("Invalid beta parameter at index 1: 2",)),
        ("lr_scheduler.final_fraction=2", ("final_fraction=2", "expected a number in [0, 1]")),
        ("callbacks.ema.decay=1.5", ("EMA got decay=1.5",)),
    ],
)
def test_settings_are_refused_before_data_and_model_take_time(
    setting: str, words: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    unreachable = "data=images data.train_data_dir=nowhere model.pretrained=nowhere/at/all"
    refuse(f"train {unreachable} {setting}", words, folder, capfd)


class Blocker:
    """Finds no package of one name, as if it were not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(
    ("package", "command", "words"), [(p, c, tuple(w)) for p, c, *w in WITHOUT_PACKAGE], ids=lambda v: str(v)[:20]
)
def test_missing_package_is_named_with_its_remedy(
    package: str,
    command: str,
    words: tuple[str, ...],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker(package), *sys.meta_path])
    refuse(command, words, folder, capfd)


def test_damaged_checkpoint_is_named_before_the_run_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder / "run", damaged)
    (newest,) = checkpoint.all_checkpoints(damaged)
    with open(newest / "trainer.json", "a") as file:
        file.write(" ")
    before = contents(damaged)
    capfd.readouterr()
    assert call(f"train resume={damaged}") == 2
    warning, error = capfd.readouterr().err.splitlines()
    assert "trainer.json has" in warning and str(newest) in warning
    assert error == f"error: resume={damaged}: no valid checkpoint in it; expected a run or one of its checkpoints"
    assert call(f"train resume={newest}") == 2
    assert f"error: resume={newest}: the checkpoint is damaged: trainer.json has" in capfd.readouterr().err
    assert contents(damaged) == before


def test_overwrite_deletes_what_a_run_left_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(folder / "run", run_dir)
    (run_dir / "photos").mkdir()
    (run_dir / "photos/me.jpg").touch()
    (run_dir / ".sd_lightning").unlink()  # as an earlier release left it
    folder_of_run = RunFolder(run_dir)
    folder_of_run.open(overwrite=False)
    assert set(os.listdir(run_dir)) - {".lock"} == {*os.listdir(folder / "run"), "photos"}
    folder_of_run.open(overwrite=True)
    left = contents(run_dir).keys() - {str(run_dir / ".lock")}
    assert left == {str(run_dir / name) for name in ("photos", "photos/me.jpg", ".sd_lightning")}
    assert (folder / "run/pipeline/model_index.json").exists()


def test_logger_that_cannot_start_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def refuse_to_start(self: CSVLogger) -> None:
        raise ConnectionError("no route to the server")

    monkeypatch.setattr(CSVLogger, "experiment", property(refuse_to_start))
    assert call("train output_dir=unlogged logger=csv") == 2
    shutil.rmtree("unlogged")
    err = capfd.readouterr().err
    assert "error: logger: CSVLogger cannot start (ConnectionError: no route to the server)" in err
    assert "write logger=default" in err


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_resuming_a_finished_run_says_so_and_touches_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `python -m`, where the module's name is not its own."""
    before = contents(folder)
    monkeypatch.setattr(sys, "argv", ["train.py", "output_dir=run", "resume=auto", "trainer.max_steps=1"])
    runpy.run_module("sd_lightning.train", run_name="__main__")
    assert "is complete; raise trainer.max_steps to train on" in capfd.readouterr().err
    assert contents(folder) == before
