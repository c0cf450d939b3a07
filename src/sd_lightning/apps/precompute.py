"""Encode a data set into a latent store."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from sd_lightning._errors import UsageError
from sd_lightning.apps.encoding import StageProgress, Workers, num_workers, shares
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.apps.store_upkeep import prune, verify
from sd_lightning.data.batch import BadSamples, tell_of_long_captions
from sd_lightning.data.source import BadSample, Source, SourceSubset, hold_out
from sd_lightning.data.store.encoding import ShardEncoder
from sd_lightning.data.store.files import hashes_of
from sd_lightning.data.store.job import StoreJob, rows_per_file
from sd_lightning.data.store.layout import DTYPES, LATENTS, Generation, LatentStore, Recipe, network_hash, recipes
from sd_lightning.data.store.texts import (
    EmbeddedTexts,
    TextEncoder,
    TextJob,
    TextTask,
    Tokenizing,
    captions_per_file,
    missing_texts,
    text_kind,
)
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.remote.launchers import Ray
from sd_lightning.remote.precompute import reserve
from sd_lightning.storage.atomic import check_free_space
from sd_lightning.storage.object_store import open_location

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sd_lightning.data.datamodule import SDDataModule

log = logging.getLogger(__name__)

_COUNTED = 1000
"""Samples whose captions are counted for the prediction of the embeddings' size."""
_ONLY_FOR = {
    "text": ("encode", False),
    "launcher": ("encode", "local"),
    "dry_run": ("prune and verify", True),
    "drop_texts": ("prune", None),
}
"""Settings -> the actions that they are for, and what they are if not given; other actions would ignore them."""


@dataclass(frozen=True)
class Settings:
    """Settings of the job; ``conf/precompute.yaml`` explains the keys."""

    store: str
    latents: Literal["moments", "draw"] = "moments"
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    compute_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    variants: int = 1
    workers: int | str = "auto"
    shard_mb: float = 128.0
    text: bool = False

    def __post_init__(self) -> None:
        if not self.shard_mb > 0:
            raise UsageError(f"precompute got shard_mb={self.shard_mb}; expected megabytes, e.g. shard_mb=128")


def run(cfg: DictConfig) -> int:
    """Encode a data set, or do something else with a store."""
    _check_action(cfg)
    if cfg.action == "prune":
        return prune(cfg.store, dry_run=cfg.dry_run, drop_texts=cfg.drop_texts)
    if cfg.action == "verify":
        return verify(cfg.store, dry_run=cfg.dry_run)
    settings = Settings(**{each.name: cfg[each.name] for each in fields(Settings)})
    root = open_location(settings.store, key="store")
    root.check_writable()
    spec = RunSpec.of(cfg)
    spec.model.check()
    cluster = reserve(spec.launcher, root) if isinstance(spec.launcher, Ray) else None
    datamodule: SDDataModule = spec.build("data")
    sources = sources_of(datamodule)
    model = spec.load_model(deferred=("denoiser",) if settings.text else ("denoiser", "text_encoders"))
    store = LatentStore(root, recipe_of(model, datamodule, settings))
    sources = keep_held_out(store, sources)
    return encode(store, sources, model, datamodule, settings, cluster)


def _check_action(cfg: DictConfig) -> None:
    """Raise a ``UsageError`` if a setting is for another action."""
    who = "precompute" if cfg.action == "encode" else f"precompute {cfg.action}"
    launcher = cfg.launcher._target_.rpartition(".")[2].lower()
    for key, (actions, default) in _ONLY_FOR.items():
        value = launcher if key == "launcher" else cfg[key]
        if cfg.action not in actions and value != default:
            whose = "encoding" if actions == "encode" else f"precompute {actions}"
            value = str(value).lower() if isinstance(value, bool) else value
            raise UsageError(f"{who} got {key}={value}; expected it only with {whose}; leave it out")
    if launcher == "ray" and cfg.workers != "auto":
        raise UsageError(f"{who} got workers={cfg.workers} with launcher=ray; expected launcher.num_workers instead")


def sources_of(datamodule: SDDataModule) -> dict[str, Source]:
    """Return the sources to encode, by split.

    Raises:
        UsageError: A store cannot hold what makes these data special.
    """
    images = datamodule.images
    masked = None if images.masked_loss == "none" else f"data.masked_loss={images.masked_loss}"
    unused = images.changed_captions or masked
    if unused is not None:
        remedy = "leave it out" if masked else "give it to the training on the store instead, beside data=latents"
        raise UsageError(f"precompute got {unused}, which a store does not hold; {remedy}")
    sources = {"train": datamodule.source_train}
    if datamodule.source_val is not None:
        sources["val"] = datamodule.source_val
    for source in sources.values():
        if source.group_size > 1 or source.loss_weights is not None or source.rows is not None:
            raise UsageError(
                "precompute got photos of a subject with pictures of its class, whose pairs and weights a store does "
                "not hold; expected images with captions; write data=images, or train with data.cache_latents=true"
            )
        if source.latents is not None:
            raise UsageError("precompute got data=latents, which are encoded already; write data=images")
    return sources


def keep_held_out(store: LatentStore, sources: dict[str, Source]) -> dict[str, Source]:
    """Return the sources such that what the store holds out stays so, if they are two parts of the same data."""
    train, val = sources["train"], sources.get("val")
    if not isinstance(train, SourceSubset) or not isinstance(val, SourceSubset) or train.source is not val.source:
        return sources
    keys: set[bytes] = set()
    with tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch:
        for entry in store.generation().splits.get("val", []):
            with suppress(FileNotFoundError), store.opened(entry, Path(scratch)) as file:
                keys |= set(map(bytes, file.read("keys").numpy()))
    if not keys:
        return sources

    def was_held(key: str) -> bool:
        return hashes_of([key.encode(errors="surrogatepass")]).tobytes() in keys

    first, others = hold_out(train.source, len(val), was_held=was_held)
    return {"train": first} if others is None else {"train": first, "val": others}


def recipe_of(model: LatentDiffusion, datamodule: SDDataModule, settings: Settings) -> Recipe:
    """Return what the latents will depend on."""
    images = datamodule.images
    model.family.check_latents("precompute")
    images.check_model(model)
    return Recipe(
        family=model.pipeline_class,
        vae=network_hash(model.vae.state_dict(), model.components["vae"].config),
        resolution=images.resolution,
        shapes=tuple(images.shapes) if images.enable_bucket else (),
        crop="center" if images.center_crop else "random",
        flip=images.random_flip,
        variants=settings.variants,
        latents=settings.latents,
        dtype=settings.dtype,
        compute_dtype=settings.compute_dtype,
    )


def encode(
    store: LatentStore,
    sources: Mapping[str, Source],
    model: LatentDiffusion,
    datamodule: SDDataModule,
    settings: Settings,
    cluster: Callable[..., Any] | None = None,
) -> int:
    """Bring a store up to date with the sources, and print what was done.

    Args:
        store: The folder of the recipe.
        sources: By split.
        model: Its encoders encode.
        datamodule: Where the sources are from.
        settings: Of the job.
        cluster: Starts workers on a Ray cluster, given what encodes; None for those of this machine.
    """
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = num_workers(settings.workers, device)
    tokenizing = Tokenizing.of(model)
    kind = text_kind(model) if settings.text else None  # of weights as they were read
    encoder = LatentEncoder(model, train_text_encoder=kind is None, dtype=settings.compute_dtype).to(device)
    shard = ShardEncoder(
        sources,
        encoder,
        store.recipe,
        store.folder,
        device,
        max_pixels=datamodule.images.max_image_pixels,
        num_threads=max(2, len(os.sched_getaffinity(0)) // workers),
    )
    bytes_per_image = _bytes_per_image(shard)
    total = sum(map(len, sources.values()))
    images_per_file, samples_per_file = rows_per_file(total, bytes_per_image, settings.shard_mb)
    latents_bytes = total * bytes_per_image
    print(
        f"{total} images, {bytes_per_image} bytes of latents each: at most {latents_bytes / 1e9:.3g} GB in "
        f"{store.folder.url} ({store.recipe.description()})",
        flush=True,
    )
    need = max(latents_bytes - sum(store.present(LATENTS).values()), 0)
    text_encoder, result = None, ""
    if kind is not None:
        masks = model.family.masks_padding
        text_encoder = TextEncoder(encoder, kind, store.folder, store.recipe.dtype, device, masks_padding=masks)
        caption_bytes, texts_bytes = predicted_texts(text_encoder, tokenizing, sources.values(), latents_bytes)
        need += max(texts_bytes - sum(store.present(kind).values()), 0)
        captions_in_file, text_encoder.group = captions_per_file(caption_bytes, settings.shard_mb)
    check_space(store, need, "latents" if kind is None else "latents and text embeddings")
    progress = StageProgress(total)
    bad = datamodule.bad
    if (workers > 1 or cluster is not None) and device.type == "cuda":
        encoder.to(torch.device("cpu"))
    tell_of_long_captions(sources["train"], model.truncated)
    runner = (cluster or partial(Workers, num_workers=workers))(shard, texts=text_encoder)
    try:
        with store.locked(), progress, tempfile.TemporaryDirectory(prefix="sd_lightning-") as scratch:
            store.create()
            job = StoreJob(
                store,
                lambda tasks: progress.watch(tasks, runner(tasks)),
                tokenizing,
                bad,
                Path(scratch),
                images_per_file,
                samples_per_file,
                looked_at=progress.looked_at,
            )
            generation = job.update(sources)
            if text_encoder is not None:
                texts_job = TextJob(store, text_encoder.kind, tokenizing, Path(scratch), captions_in_file)
                result = _encode_texts(texts_job, generation, caption_bytes, runner.embed, progress)
    finally:
        runner.close()
    print_result(job, generation, bad, progress, time.monotonic() - begin)
    if result:
        print(result)
    which = f" data.recipe={store.recipe.fingerprint}" if len(recipes(store.root)) > 1 else ""
    print(f"train on it: python -m sd_lightning.train data=latents data.store={settings.store}{which}")
    return 0


def _encode_texts(
    job: TextJob,
    generation: Generation,
    caption_bytes: float,
    embed: Callable[[Iterable[TextTask]], Iterator[EmbeddedTexts]],
    progress: StageProgress,
) -> str:
    """Encode the captions of a generation that lack embeddings, and return what was done in a line.

    The sample files are read three times, to count captions, to encode them and to place them: how many are new is
    known only at the end, and what they say need not fit into memory.
    """
    missing = missing_texts(job.store, generation, job.kind)
    new = sum(map(len, job.new(missing)))
    check_space(job.store, int(new * caption_bytes), f"text embeddings of {new} captions")
    texts = list(progress.watch_texts(-(-new // job.per_file), embed(job.tasks(missing))))
    job.place(missing)
    size = sum(each.size for each in texts) / 1e6
    return f"texts: {new} different captions encoded, {size:.3g} MB written in {len(texts)} files"


def print_result(
    job: StoreJob, generation: Generation, bad: BadSamples, progress: StageProgress, seconds: float
) -> None:
    """Print what a job has done."""
    counts = job.counts
    splits = ", ".join(f"{split} {generation.num_samples(split)}" for split in generation.splits)
    kept = f", {counts.found} found that an earlier job had encoded" if counts.found else ""
    moved = f" ({counts.moved} of them moved from another split)" if counts.moved else ""
    speed = f", {progress.images / seconds:.3g} img/s ({shares(progress.seconds)})" if progress.images else ""
    print(
        f"samples: {splits}; {counts.kept} kept, {counts.added} added{moved}, {counts.removed} removed, "
        f"{len(bad.found)} bad; "
        f"{counts.encoded} images encoded{kept}; {counts.bytes_written / 1e6:.3g} MB written in {seconds:.1f} s{speed}"
    )


def _bytes_per_image(shard: ShardEncoder) -> int:
    """Return the bytes of an image's latents, by encoding a black one: the family decides their shape."""
    recipe = shard.recipe
    with torch.no_grad():
        pixels = torch.zeros(1, 3, recipe.resolution, recipe.resolution, device=shard.device)
        encoded = shard.encoder.encode_moments(pixels)
        if recipe.latents == "draw":
            zero = torch.zeros(1, dtype=torch.int64, device=shard.device)
            encoded = shard.encoder.latents(encoded, seed=0, epoch=zero, index=zero)
    return encoded[0].numel() * DTYPES[recipe.dtype].itemsize * recipe.variants


def predicted_texts(
    encoder: TextEncoder, tokenizing: Tokenizing, sources: Iterable[Source], latents_bytes: int
) -> tuple[float, int]:
    """Print how large the embeddings will be: one caption is encoded, those of some samples are looked at.

    Of many samples some are drawn. How many different captions there are follows from those that were seen once and
    twice (Chao 1984, "Nonparametric estimation of the number of classes in a population", bias-corrected).

    Returns:
        Bytes of a caption's embeddings, an estimate where padding is not stored; and bytes of all.
    """
    seen, total, is_exact = Counter[str](), 0.0, True
    for source in sources:
        indices = random.Random(0).sample(range(len(source)), min(len(source), _COUNTED))
        before = seen.total()
        for index in indices:
            with suppress(BadSample):
                seen.update(source.captions(index))
        total += (seen.total() - before) * len(source) / max(len(indices), 1)
        is_exact = is_exact and len(indices) == len(source)
    times = Counter(seen.values())
    unseen = 0.0 if is_exact else times[1] * (times[1] - 1) / (2 * (times[2] + 1))
    count = int(min(len(seen.keys() | {""}) + unseen, total + 1))
    row_bytes = float(sum(each.nbytes for each in encoder.embed(tokenizing.tokenize([""])).values()))
    if encoder.masks_padding:
        row_bytes = encoder.stored_bytes(tokenizing.tokenize(list(seen)[:_COUNTED]))
    num_bytes, about = int(count * row_bytes), "" if is_exact else "about "
    each = f"{'about ' * encoder.masks_padding}{row_bytes:.0f} bytes of text embeddings"
    larger = num_bytes / max(latents_bytes, 1)
    print(
        f"text=true: {each} for each of {about}{count} different captions: {about}{num_bytes / 1e9:.3g} GB more in "
        f"{encoder.folder.url}/{encoder.kind}, {larger:.3g} times the latents "
        f"(whether to store them: python -m sd_lightning.plan captions={count} ...)",
        flush=True,
    )
    return row_bytes, num_bytes


def check_space(store: LatentStore, need_bytes: int, purpose: str) -> None:
    """Raise a ``UsageError`` if the disk of a store has too little space; of object stores nothing is known."""
    folder = store.folder.path("")
    if folder is not None:
        free_bytes = check_free_space(
            folder,
            need_bytes,
            f"precompute store={store.root.url}",
            purpose=purpose,
            remedy="free space, choose a store on another disk, or write latents=draw, dtype=float16 or text=false "
            "(training then encodes captions itself); what is in the store stays",
        )
        print(f"{need_bytes / 1e9:.3g} GB for {purpose}, {free_bytes / 1e9:.3g} GB free", flush=True)
