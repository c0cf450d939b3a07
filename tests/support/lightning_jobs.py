"""Trainings with what Lightning does by default, or by its own callbacks; jobs of strategy_jobs.py or of a test."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import small_training as small
from sd_lightning.callbacks import EMA, PortableCheckpoint
from sd_lightning.training.lr_schedules import cosine

STEPS = 2 * small.STEPS_PER_EPOCH


class Losses(Callback):
    """The mean loss of every step over all ranks, and the names of the learning rates that were logged."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        loss: Tensor = pl_module.last_loss.detach().double().clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        self.values.append(float(loss))


def trainer(strategy: Any, folder: Path, losses: Losses, *callbacks: Callback, **options: Any) -> pl.Trainer:
    """Return a trainer with Lightning's defaults: its logger and its checkpoints, in a folder."""
    warnings.filterwarnings("ignore", module="lightning")
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "enable_progress_bar": False}
    return pl.Trainer(strategy=strategy, default_root_dir=folder, callbacks=[losses, *callbacks], **defaults | options)


def module() -> Any:
    return small.module(
        optimizer=partial(torch.optim.AdamW, lr=3e-4, fused=True),
        lr_scheduler=partial(cosine, total_steps=STEPS, warmup_steps=2),
    )


def defaults(strategy_of: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Fit for two epochs at once, and for one and then one from its last checkpoint."""
    whole, first, second = Losses(), Losses(), Losses()
    trained = trainer(strategy_of(), folder / "whole", whole, **options)
    trained.fit(module(), small.data())
    found: dict[str, Any] = {"whole": whole.values, "steps": trained.global_step}
    found["ckpt"] = str(next((folder / "whole").rglob("*.ckpt")))
    for losses, epochs, path in ((first, 1, None), (second, 2, "last")):
        rates = LearningRateMonitor()
        saving = ModelCheckpoint(folder / "parts", save_last=True, save_top_k=-1)
        callbacks = [rates, EarlyStopping("val/loss", patience=9), saving]
        parts = trainer(strategy_of(), folder / "parts", losses, *callbacks, **options | {"max_epochs": epochs})
        parts.fit(module(), small.data(), ckpt_path=path, weights_only=False)
        found["rates"] = sorted(rates.lrs)
    found |= {"parts": first.values + second.values, "first": str(folder / "parts" / "epoch=0-step=5.ckpt")}
    return found


def own_folder(strategy_of: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Go on from the run's own folder by ``ckpt_path``, and from one of its checkpoints."""
    losses = Losses()
    for steps, path in ((2, None), (4, folder), (5, folder / "checkpoints/step-00000004")):
        saving = PortableCheckpoint(folder, every_n_steps=0)
        options |= {"max_steps": steps, "logger": False, "limit_val_batches": 0}
        trainer(strategy_of(), folder, losses, saving, **options).fit(module(), small.data(), ckpt_path=path)
    return {"losses": losses.values}


def load(strategy_of: Any, path: Path, **options: Any) -> dict[str, Any]:
    """Go on from a file that another strategy has written."""
    losses = Losses()
    again = trainer(strategy_of(), path.parent, losses, logger=False, enable_checkpointing=False, **options)
    again.fit(module(), small.data(), ckpt_path=path, weights_only=False)
    return {"losses": losses.values}


class Boring(pl.LightningModule):
    """A module that knows no strategy: children in lists, a frozen one, a buffer, batches as dictionaries or tuples."""

    def __init__(self, batches: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batches = batches
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleDict({"main": nn.Linear(8, 4)})
        self.register_buffer("scale", torch.tensor(0.5))
        self.last_loss: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        hidden = self.inner(self.frozen(x)) + torch.ones(8, device=x.device)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh() * self.scale
        return (self.heads["main"](hidden) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.last_loss = loss.detach()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        samples = [(torch.randn(8, generator=generator), torch.randn(4, generator=generator)) for _ in range(24)]
        if self.batches == "dict":
            return DataLoader([{"x": x, "y": y} for x, y in samples], batch_size=2)  # type: ignore[arg-type]
        return DataLoader(samples, batch_size=2)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


class Language(Boring):
    """A tiny model of transformers, whose input and output weights are one parameter."""

    def __init__(self, name: str) -> None:
        pl.LightningModule.__init__(self)
        import transformers

        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 8, "resid_pdrop": 0.0}
        if name == "bert":
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
            config: Any = transformers.BertConfig(**sizes, intermediate_size=32, hidden_dropout_prob=0.0)
            config.attention_probs_dropout_prob = 0.0
            self.model: Any = transformers.BertForMaskedLM(config)
        else:
            config = transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
            self.model = transformers.GPT2LMHeadModel(config)

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        return DataLoader([torch.randint(32, (6,), generator=generator) for _ in range(24)], batch_size=2)  # type: ignore[arg-type]


def foreign(name: str) -> Any:
    """Return a module that nobody wrote for us."""
    if name == "bert_with_example":
        module = Language("bert")
        module.example_input_array = torch.zeros(2, 6, dtype=torch.int64)
        return module
    return Boring(name) if name in ("dict", "tuple") else Language(name)


def anything(
    strategy_of: Any, folder: Path, *, name: str, precisions: Sequence[str], **options: Any
) -> dict[str, dict[str, Any]]:
    """Train a foreign module in each precision, validate it, and test it after."""
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_model_summary": False} | options
    found: dict[str, dict[str, Any]] = {}
    for precision in precisions:
        losses, trained = Losses(), foreign(name)
        fitting = trainer(strategy_of(), folder, losses, precision=precision, **options)
        fitting.fit(trained)
        found[precision] = {"losses": losses.values, "tested": fitting.test(trained, verbose=False)[0]["val"]}
    return found


class Shape:
    """What a module is, apart from its values."""

    def __init__(self, module: Any) -> None:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        parts = dict(module.named_modules())
        self.facts = {
            "classes": {name: type(part) for name, part in parts.items()},
            "hooks": {name: [len(part.__dict__[each]) for each in hooks] for name, part in parts.items()},
            "members": {name: sorted(part.__dict__) for name, part in parts.items() if part is not module},
            "containers": {name: type(part._parameters) for name, part in parts.items()},
            "parameters": {
                name: (type(p), tuple(p.shape), p.dtype, p.requires_grad, str(p.device), sorted(vars(p)))
                for name, p in module.named_parameters(remove_duplicate=False)
            },
            "buffers": {name: (b.dtype, str(b.device)) for name, b in module.named_buffers()},
        }

    def differences(self, module: Any) -> list[str]:
        """Name what is not as it was."""
        now = Shape(module).facts
        wrong = [
            f"{kind}: {name}: {value} -> {now[kind].get(name)}"
            for kind, known in self.facts.items()
            for name, value in known.items()
            if now[kind].get(name) != value
        ]
        return wrong + [n for n, p in module.named_parameters() if p.untyped_storage().nbytes() < p.nbytes]


def fits(strategies: list[Any], folder: Path, **options: Any) -> dict[str, Any]:
    """Fit one module under one strategy after the other, with one average; tell what it is after each."""
    module, ema = foreign("dict"), EMA(0.5)
    shape = Shape(module)
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_model_summary": False} | options
    options["use_distributed_sampler"] = options["devices"] > 1  # it shuffles
    found: dict[str, Any] = {"losses": [], "differences": [], "unchanged": [], "averages": [], "tested": []}
    for strategy in strategies:
        before, losses = small.weights(module), Losses()
        fitting = trainer(strategy, folder, losses, ema, **options)
        fitting.fit(module)
        found["losses"].append(losses.values)
        found["differences"] += shape.differences(module)
        after = small.weights(module)
        trained = [n for n, p in module.named_parameters() if p.requires_grad]
        found["unchanged"] += [n for n in trained if torch.equal(after[n], before[n])]
        found["averages"].append([float(weight.double().sum()) for weight in after.values()])
        found["tested"].append(fitting.test(module, verbose=False)[0]["val"])
        found["differences"] += shape.differences(module)
        found["unchanged"] += [f"{n} by test" for n, p in module.named_parameters() if not torch.equal(after[n], p)]
    module.loss(next(iter(module.train_dataloader()))).backward()  # as anybody's module
    found["no_gradient"] = [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]
    return found


def run(strategy_of: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Do a job of strategy_jobs.py."""
    options = {"devices": job["devices"]}
    if job["do"] == "load_file":
        return load(strategy_of, Path(job["path"]), **options)
    if job["do"] == "fits":
        return fits([strategy_of(name) for name in job["strategies"]], Path(job["folder"]), **options)
    if job["do"] == "anything":
        options |= {"name": job["name"], "precisions": job["precisions"]}
    jobs: dict[str, Any] = {"defaults": defaults, "own_folder": own_folder, "anything": anything}
    return jobs[job["do"]](strategy_of, Path(job["folder"]), **options)
