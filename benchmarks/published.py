"""Training runs that others published: their settings, memory and times, and where each figure is from.

Half of the judged cases may set the planner's assumed constants (:data:`SETS`), the other half judges them
(:data:`JUDGES`). Which is which was committed before the planner was first run on them. :data:`SHOWN` are figures
whose settings are too uncertain to judge by; NVIDIA's times with flash attention were added to them after that run.

The T4's, SimpleTuner's and OneTrainer's figures were read at their source, the others as they are quoted.

The rows of transformers, of 2025 and 2026, are divided by a rule: those of a measured table alternate in its order,
the first sets, and a row's memory and time are in the same half. What is a guess ("about 22 GB"), a card's size or a
range is shown only. Rows wait as long as :func:`missing` says why.

Left out are models that are none here and will not be: Ideogram 4, and the video models Wan and Hunyuan, which are all
that NeMo publishes with seconds and GB; and MLPerf's Flux.1, whose number of steps is not stated.
"""

from dataclasses import dataclass, field
from typing import Any

SETS, JUDGES, SHOWN = "sets", "judges", "shown"
MIB, GIB, GB = 2**20, 2**30, 1e9
KNOWN, GUESSED, TIME = 0.15, 0.25, 0.35
"""How far a prediction may be off: memory whose settings are all known, memory otherwise, and times."""


@dataclass(frozen=True)
class Setup:
    """The settings of a published run; those of the planner's ``TrainingRun`` and ``Search``."""

    model: str
    gpu: str
    batch_size: int
    resolution: int = 512
    precision: str = "16-mixed"
    strategy: str = "single"
    """Name of one of the planner's candidates."""
    gpus: int = 1
    explicit_attention: bool = False
    """Whether attention writes the matrix of its weights, as before flash attention."""
    checkpointing: bool = False
    tf32: bool = False
    adam_8bit: bool = False
    lora_rank: int = 0
    """0: all weights are trained."""
    base: str | None = None
    """What the frozen weights below adapters are quantised to."""
    lacks: str = ""
    """What it has that we do not; its figures wait for that."""
    run: dict[str, Any] = field(default_factory=dict)
    """More fields of ``TrainingRun``."""


@dataclass(frozen=True)
class Published:
    """One figure."""

    setup: Setup
    what: str
    """"reserved": bytes as nvidia-smi shows them; "allocated": bytes; or a time in seconds: "forward", "backward",
    "encoding", "step"; or "without_encoding": the speed-up by latents and embeddings from a store; "encoding_share": of
    a step; or "encoders": how many A10G keep a GPU busy that trains only."""
    figure: float
    half: str
    tolerance: float
    source: str
    uncertain: str = ""
    """What is not known of the settings."""


_NVIDIA = "NVIDIA, optimisation of fine-tuning SD 1.4 on one A100 80 GB, talk of 2023"
_T4 = "github.com/ShivamShrirao/diffusers, examples/dreambooth/README.md: a table of runs on a T4"
_COLOSSALAI = "hpc-ai.com, Colossal-AI 0.2.0: Stable Diffusion 2.0 with 5.6 times less memory, 2023"
_SIMPLETUNER = "github.com/bghira/SimpleTuner, documentation/DEEPSPEED.md: SDXL on an RTX 4090"
_ANYSCALE = "anyscale.com, pre-training of Stable Diffusion 2 with Ray on A100"
_KREA = "github.com/bghira/SimpleTuner, documentation/quickstart/KREA2.md: LoRA on an H100, compile off"
_ZIMAGE = "github.com/bghira/SimpleTuner, documentation/quickstart/ZIMAGE.md: LoRA over int8 weights (SDNQ)"
_FLUX2 = "github.com/bghira/SimpleTuner, documentation/quickstart/FLUX2.md: hardware requirements of klein"
_FLUX = "github.com/bghira/SimpleTuner, documentation/quickstart/FLUX.md: NF4-quantised training"
_ONETRAINER = "github.com/Nerogar/OneTrainer, training_presets, of August 2026"
_FUSED = "Adafactor's step in backward on the GPU, with stochastic rounding"
_SHORT = "the size of the images, that of the named example; its only caption is one sign, padding is dropped"
_RANK = "rank and optimizer; those of the page's example are assumed, with its text encoder away"
_TEMPLATE = "github.com/anyscale/templates, stable-diffusion-pretraining, 03_end_to_end.ipynb: 48 A10G, 32 A100 80 GB"
_PROVISIONED = "the same number for both resolutions, and whether fewer would do"


def _nvidia(batch_size: int, **settings: Any) -> Setup:
    encoders = {"encoder_dtype": "float32" if settings.get("tf32") else "float16"}
    return Setup("sd15", "a100-80gb", batch_size, run={"averages": True, **encoders}, **settings)


def _t4(batch_size: int, *, checkpointing: bool) -> Setup:
    """Prior preservation: a batch is a pair of an instance and a class image. Latents and embeddings are cached."""
    run = {"encodes": False}
    return Setup("sd15", "t4", 2 * batch_size, checkpointing=checkpointing, adam_8bit=True, run=run)


def _anyscale(batch_size: int, resolution: int) -> Setup:
    """Weights are gathered once per step; encoders, also the VAE, compute in 16 bits in every step.

    Those are bfloat16 here: with float16, our VAE stays in float32.
    """
    name, run = "fsdp reshard_after_forward=False", {"encoder_dtype": "bfloat16"}
    return Setup("sd21", "a100-80gb", batch_size, resolution, "bf16-mixed", name, 8, run=run)


_TF32 = _nvidia(8, precision="32-true", tf32=True, explicit_attention=True)
_FP16 = _nvidia(8, explicit_attention=True)
_SD2 = {"model": "sd21", "gpu": "a100-80gb", "batch_size": 16}
_SDXL = Setup(
    "sdxl",
    "rtx-4090",
    8,
    1024,
    "bf16-mixed",
    "deepspeed_zero2_offload",
    checkpointing=True,
    run={"encodes": False},
)

# In bf16, the adapters too; embeddings and latents are cached, and encoders are gone.
_TRANSFORMER: dict[str, Any] = {
    "precision": "bf16-true",
    "checkpointing": True,
    "lora_rank": 64,
    "run": {"encodes": False},
}
_KREA_ROWS = (
    ("bf16", 512, 1, 0.353, 31.10),
    ("bf16", 512, 4, 1.230, 39.31),
    ("bf16", 512, 8, 2.430, 50.32),
    ("bf16", 1024, 1, 0.990, 33.28),
    ("bf16", 1024, 4, 3.850, 48.35),
    ("bf16", 1024, 8, 7.690, 67.88),
    ("int8", 512, 1, 0.535, 18.10),
    ("int8", 512, 4, 1.690, 27.46),
    ("int8", 512, 8, 3.220, 40.52),
    ("int8", 1024, 1, 1.330, 20.35),
    ("int8", 1024, 4, 4.850, 36.99),
    ("int8", 1024, 8, 9.520, 58.84),
)
"""Weights, pixels, batch, seconds a step, GiB by nvidia-smi."""


def _krea() -> dict[str, Published]:
    rows = {}
    for number, (weights, size, batch, seconds, gib) in enumerate(_KREA_ROWS):
        setup = Setup("krea2", "h100", batch, size, **_TRANSFORMER, base="int8" if weights == "int8" else None)
        half, name = (SETS, JUDGES)[number % 2], f"krea_{weights}_{size}_b{batch}"
        rows[name] = Published(setup, "reserved", gib * GIB, half, GUESSED, _KREA, _RANK)
        rows[f"{name}_step"] = Published(setup, "step", seconds, half, TIME, _KREA, _RANK)
    return rows


def _onetrainer() -> dict[str, Published]:
    """Presets for cards of 8 to 24 GB, at 512² with a batch of 2."""
    moved = "blocks that are moved to host memory"
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "lora_8gb": (8, {"lora_rank": 16, "base": "int8", "lacks": moved}),
        "lora_16gb": (16, {"lora_rank": 16, "base": "int8"}),
        "full_16gb": (16, {"lora_rank": 0, "lacks": f"{_FUSED}; {moved}"}),
        "full_24gb": (24, {"lora_rank": 0, "lacks": _FUSED}),
    }
    return {
        f"onetrainer_{model}_{kind}": Published(
            Setup(model, "rtx-4090", 2, **(_TRANSFORMER | settings)),
            "reserved",
            size * GB,
            SHOWN,
            GUESSED,
            _ONETRAINER,
            "the size of the card, not a measurement; 8 bit in the weights or in the text encoder",
        )
        for model in ("klein_9b", "z_image")
        for kind, (size, settings) in kinds.items()
    }


def _z_image() -> dict[str, Published]:
    rows = {}
    for number, (gpu, seconds, gib) in enumerate((("h100", 1.107, 9.70), ("l40s", 1.026, 9.66))):
        setup, half = Setup("z_image", gpu, 1, **_TRANSFORMER, base="int8"), (SETS, JUDGES)[number % 2]
        rows[f"z_image_int8_{gpu}"] = Published(setup, "allocated", gib * GIB, half, KNOWN, _ZIMAGE, _SHORT)
        rows[f"z_image_int8_{gpu}_step"] = Published(setup, "step", seconds, half, TIME, _ZIMAGE, _SHORT)
    return rows


_BY_EYE = "the source says 'about'; rank, batch and size of the images are not stated"
PUBLISHED = {
    "nvidia_tf32": Published(_TF32, "reserved", 69479 * MIB, SETS, KNOWN, _NVIDIA),
    "nvidia_fp16": Published(_FP16, "reserved", 71695 * MIB, JUDGES, KNOWN, _NVIDIA),
    "nvidia_flash": Published(_nvidia(8), "reserved", 25481 * MIB, SETS, KNOWN, _NVIDIA),
    "nvidia_batch_48": Published(
        _nvidia(48), "reserved", 72979 * MIB, JUDGES, KNOWN, _NVIDIA, "layers were fused by inductor"
    ),
    "nvidia_zero2": Published(
        _nvidia(56, strategy="deepspeed_zero2", gpus=8),
        "reserved",
        72439 * MIB,
        SHOWN,
        GUESSED,
        _NVIDIA,
        "the number of GPUs; 8 are assumed",
    ),
    "nvidia_forward": Published(
        _FP16, "forward", 0.0817, SETS, TIME, _NVIDIA, "which rung; that before fused AdamW is assumed"
    ),
    "nvidia_backward": Published(_FP16, "backward", 0.1252, JUDGES, TIME, _NVIDIA, "the same"),
    "nvidia_flash_forward": Published(
        _nvidia(8), "forward", 0.0817, SHOWN, TIME, _NVIDIA, "the same; that after flash attention is assumed"
    ),
    "nvidia_flash_backward": Published(_nvidia(8), "backward", 0.1252, SHOWN, TIME, _NVIDIA, "the same"),
    "nvidia_step": Published(
        _FP16, "step", 0.436, SHOWN, TIME, _NVIDIA, "166 ms of it clip, step and average weights one by one"
    ),
    "colossalai_baseline": Published(
        Setup(**_SD2, explicit_attention=True),
        "allocated",
        64.5 * GB,
        JUDGES,
        GUESSED,
        _COLOSSALAI,
        "precision, number of GPUs, how memory was read",
    ),
    "colossalai_optimised": Published(
        Setup(**_SD2, precision="16-mixed", strategy="gemini_offload", checkpointing=True),
        "allocated",
        11.6 * GB,
        JUDGES,
        GUESSED,
        _COLOSSALAI,
        "placement, checkpointing, number of GPUs",
    ),
    "diffusers_16gb": Published(
        Setup("sd15", "a100-80gb", 2, checkpointing=True, adam_8bit=True),
        "reserved",
        16 * GB,
        JUDGES,
        GUESSED,
        "huggingface.co/docs/diffusers, DreamBooth: 8-bit Adam and gradient checkpointing for a card of 16 GB",
        "the size of the card, not a measurement",
    ),
    "t4_checkpointing": Published(_t4(1, checkpointing=True), "reserved", 9.92 * GB, SETS, GUESSED, _T4),
    "t4": Published(_t4(1, checkpointing=False), "reserved", 11.17 * GB, JUDGES, GUESSED, _T4),
    "t4_checkpointing_batch_2": Published(_t4(2, checkpointing=True), "reserved", 10.4 * GB, JUDGES, GUESSED, _T4),
    "t4_batch_2": Published(_t4(2, checkpointing=False), "reserved", 13.67 * GB, SETS, GUESSED, _T4),
    "t4_checkpointing_step": Published(_t4(1, checkpointing=True), "step", 1 / 0.93, SETS, TIME, _T4),
    "t4_step": Published(_t4(1, checkpointing=False), "step", 1 / 1.14, JUDGES, TIME, _T4),
    "t4_checkpointing_batch_2_step": Published(_t4(2, checkpointing=True), "step", 1 / 0.66, JUDGES, TIME, _T4),
    "t4_batch_2_step": Published(_t4(2, checkpointing=False), "step", 1 / 0.82, SETS, TIME, _T4),
    "simpletuner": Published(_SDXL, "reserved", 13102 * MIB, SETS, KNOWN, _SIMPLETUNER),
    "simpletuner_step": Published(_SDXL, "step", 8.0, JUDGES, TIME, _SIMPLETUNER, "the host's CPU"),
    "anyscale_encoding": Published(_anyscale(128, 256), "encoding", 0.44, SETS, TIME, _ANYSCALE),
    "anyscale_256": Published(_anyscale(128, 256), "without_encoding", 1.45, JUDGES, TIME, _ANYSCALE),
    "anyscale_512": Published(_anyscale(32, 512), "without_encoding", 1.26, SETS, TIME, _ANYSCALE),
    "anyscale_share": Published(_anyscale(128, 256), "encoding_share", 0.39, SHOWN, TIME, _ANYSCALE, "the resolution"),
    "anyscale_encoders_256": Published(_anyscale(128, 256), "encoders", 48 / 32, SHOWN, TIME, _TEMPLATE, _PROVISIONED),
    "anyscale_encoders_512": Published(_anyscale(32, 512), "encoders", 48 / 32, SHOWN, TIME, _TEMPLATE, _PROVISIONED),
    "mosaicml_step": Published(
        Setup("sd21", "a100-80gb", 16, 512, "16-mixed", "fsdp", 128, run={"encodes": False, "averages": True}),
        "step",
        16 / 36,
        SHOWN,
        TIME,
        "mosaicml.com, Training Stable Diffusion from scratch for less than $50k, 2023: 36 images/s per A100",
        "batch per GPU, and the network between machines",
    ),
    **_krea(),
    **_z_image(),
    **_onetrainer(),
    **{
        f"simpletuner_{model}": Published(
            Setup(model, "rtx-4090", 1, **_TRANSFORMER), "reserved", size * GB, SHOWN, GUESSED, _FLUX2, _BY_EYE
        )
        for model, size in (("klein_4b", 12), ("klein_9b", 22))
    },
    **{
        f"simpletuner_flux1_{size}_step": Published(
            Setup("flux1_dev", "rtx-4090", 1, size, **_TRANSFORMER, base="nf4"),
            "step",
            seconds,
            SHOWN,
            TIME,
            _FLUX,
            "an example, not a measurement",
        )
        for size, seconds in ((512, 1.4), (1024, 3.5))
    },
    "sd_scripts_flux1_full": Published(
        Setup("flux1_dev", "rtx-5090", 5, 1024, **{**_TRANSFORMER, "lora_rank": 0, "lacks": _FUSED}),
        "step",
        60,
        SHOWN,
        TIME,
        "github.com/kohya-ss/sd-scripts, pull request 2187: about a minute a step, at least 128 GB of host memory",
        _BY_EYE,
    ),
}


AWAITED: frozenset[str] = frozenset()
"""Models of these figures that are not here yet: take a name out when its architecture is there."""


def missing(published: Published) -> str:
    """Return why a figure cannot be predicted yet; "" if it can."""
    model = published.setup.model
    return f"the model {model} is not here yet" if model in AWAITED else published.setup.lacks


@dataclass(frozen=True)
class Recipe:
    """Pre-training in phases of growing images, and what it cost."""

    images: dict[int, float]
    """Side, pixels -> images that pass through training, repetitions counted."""
    distinct: dict[int, float]
    """The same -> images of the data set, each of which is encoded once."""
    batch_size: int
    """Samples per step on all GPUs."""
    images_per_second: dict[int, float]
    """Side, pixels -> published speed of the denoiser's training on latents and embeddings from a store."""
    gpus: int
    gpu: str
    encoding_gpu_hours: float
    """To encode the data set once."""
    online: float
    """How much longer training takes that encodes in its steps."""
    price: float
    """Dollars per GPU and hour."""
    source: str


TWO_PHASES = Recipe(
    images={256: 1126.4e6, 512: 1740.8e6},
    distinct={256: 790e6, 512: 300e6},
    batch_size=2048,
    images_per_second={256: 1100, 512: 290},
    gpus=8,
    gpu="A100",
    encoding_gpu_hours=3784,
    online=1.4,
    price=2.0,
    source="[MosaicML](https://github.com/mosaicml/diffusion), the size of its data set from its "
    "[report](https://www.databricks.com/blog/stable-diffusion-2)",
)
PER_MILLION = {
    "MosaicML, 128 A100 at $2 an hour, encoding not counted": 33874 / 2867.2,
    "Anyscale, A100, reserved": 13.8,
    "Anyscale, A100, on demand": 23.5,
}
"""Who and how -> published dollars for a million images that pass through both phases."""


@dataclass(frozen=True)
class PublishedRung:
    """One line of a published ladder."""

    rung: str
    """Ours that changes the same."""
    title: str
    batch_size: int
    images_per_second: float


NVIDIA_LADDER = (
    PublishedRung("tf32", "Hugging Face's recipe in TF32", 8, 8.1098),
    PublishedRung("bf16", "float16", 8, 9.5520),
    PublishedRung("loader", "data loader: workers and pinned memory", 8, 11.4564),
    PublishedRung("fused_layers", "fused layers and fused Adam", 8, 12.6600),
    PublishedRung("flash", "flash attention", 8, 18.0670),
    PublishedRung("batch", "batch 48", 48, 23.5727),
    PublishedRung("ema", "several streams, fused EMA", 48, 23.7511),
    PublishedRung("zero2", "ZeRO-2, batch 56", 56, 24.0327),
)
"""Fine-tuning of SD 1.4 on one A100 80 GB, images per second: 2.96 times as fast in the end."""
NVIDIA_SOURCE = _NVIDIA
