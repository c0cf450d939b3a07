"""Trainings of modules whose hooks read and write weights and gradients; a job of :mod:`ranks`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, Callback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sd_lightning import UsageError
from sd_lightning.gemini.collectives import Collectives
from sd_lightning.strategies.processes.group import leave_process_group
from strategy_table import strategy_of

WIDTH, BATCHES = 12, 3


class Hooked(pl.LightningModule):
    """A small regression with two networks; subclasses add what people write into hooks."""

    epochs = 2
    callbacks: Callable[[], list[Callback]] = list

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) if i % 2 == 0 else nn.Tanh() for i in range(4)))
        self.head = nn.Linear(WIDTH, 2)
        self.noted: list[float] = []
        self.change()

    def change(self) -> None:
        """Change the networks before the run."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.noted.append(float(loss.detach()))
        return loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self(x) - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.noted.append(float(self.loss(*batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        samples = [(torch.randn(WIDTH, generator=generator), torch.randn(2, generator=generator)) for _ in range(24)]
        return DataLoader(samples, batch_size=24 // BATCHES // self.trainer.world_size)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


class FitStart(Hooked):
    def on_fit_start(self) -> None:
        self.backbone[0].weight.data.zero_()
        assert float(self.backbone[0].weight.detach().abs().sum()) == 0


class TrainStart(Hooked):
    def on_train_start(self) -> None:
        with torch.no_grad():
            self.backbone[2].weight[:3] = 0.25
            nn.init.constant_(self.head.weight, 0.5)
        self.head.load_state_dict({"weight": self.head.state_dict()["weight"] * 2, "bias": torch.ones(2)})
        self.backbone[0].bias.data = torch.full((WIDTH,), 0.125)


class ThroughViews(Hooked):
    """Writes by views that are taken while gradients are recorded."""

    def on_fit_start(self) -> None:
        self.backbone[0].weight[0].data.zero_()
        self.head.weight.view(-1).data.fill_(0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.backbone[2].weight.T.detach().mul_(0.5)
        self.head.weight[0].data.zero_()
        self.noted.append(float(self.head.weight.square().sum()))


class Clamped(Hooked):
    """As in a Wasserstein GAN."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class Averaged(Hooked):
    """A target network that follows the trained one, as in BYOL."""

    def change(self) -> None:
        self.target = copy.deepcopy(self.backbone).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + (self.backbone(x) - self.target(x)).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for p, q in zip(self.backbone.parameters(), self.target.parameters()):
            q.data.lerp_(p.data, 0.1)


class Copied(Averaged):
    """A target network that is loaded now and then, as in DQN; it is made when the fit begins."""

    def change(self) -> None:
        self.target = nn.Identity()

    def on_fit_start(self) -> None:
        self.target = copy.deepcopy(self.backbone).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.target.load_state_dict(self.backbone.state_dict())


class InOneNetwork(Averaged):
    """The target is a frozen part of the trained network."""

    def change(self) -> None:
        online, target = self.backbone, copy.deepcopy(self.backbone).requires_grad_(False)
        self.backbone = nn.ModuleDict({"online": online, "target": target})  # type: ignore[assignment]
        self.backbone = Twofold(online, target)  # type: ignore[assignment]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        online, target = self.backbone(x)
        return (self.head(online) - y).square().mean() + (online - target).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p, q in zip(self.backbone.online.parameters(), self.backbone.target.parameters()):  # type: ignore[union-attr]
                q.mul_(0.9).add_(p, alpha=0.1)


class Twofold(nn.Module):
    def __init__(self, online: nn.Module, target: nn.Module) -> None:
        super().__init__()
        self.online, self.target = online, target

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.online(x), self.target(x)


class EditedGradients(Hooked):
    def on_after_backward(self) -> None:
        self.backbone[0].weight.grad.mul_(0.5)  # type: ignore[union-attr]
        self.backbone[0].bias.grad = None
        self.head.weight.grad = torch.ones_like(self.head.weight)
        self.noted += [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        self.noted.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))


class Penalised(Hooked):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        penalty: Any = sum(parameter.square().sum() for parameter in self.parameters())
        return super().loss(x, y) + 0.01 * penalty


class Unfrozen(Hooked):
    """The backbone is frozen at first, and joins the optimizer later."""

    epochs = 3
    callbacks = staticmethod(lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)])


class OfItsRank(Hooked):
    def on_train_start(self) -> None:
        self.head.weight.data.fill_(0.1 + self.global_rank)


class LateGradients(Hooked):
    def on_train_batch_end(self, *_: Any) -> None:
        self.noted.append(float(sum(p.grad.norm() for p in self.parameters() if p.grad is not None)))


class ThawedByHand(Hooked):
    def change(self) -> None:
        self.backbone[0].weight.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.backbone[0].weight.requires_grad = self.current_epoch > 0


class WrittenInForward(Hooked):
    def change(self) -> None:
        self.backbone = Codebook()  # type: ignore[assignment]


class Codebook(nn.Module):
    """It moves its codes by hand while it runs, as quantisers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.codes = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes.data.lerp_(x.detach().mean(0), 0.1)
        return self.linear(x) + self.codes


class Tempered(nn.Module):
    """A layer with one row of weights and a learned temperature: of two ranks one has no part of either."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.row, self.temperature = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.full((1,), 2.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.row)[:, :2] / self.temperature


class SmallWeights(Hooked):
    """Reads weights that have fewer rows than there are ranks, or rows that ranks cannot share evenly."""

    def change(self) -> None:
        self.head = Tempered()  # type: ignore[assignment]

    def on_train_batch_end(self, *_: Any) -> None:
        for weight in self.head.parameters():
            small = weight.detach()
            self.noted += [float(small.sum()), float(small.max()), float(small.min()), float(small.amax())]
            self.noted += [float(small.argmax()), float(small.argmax(0).sum()), float(small.view(-1).square().sum())]
            self.noted += [float(small.norm(float("inf"))), float(small.norm()), float(small.median())]
            self.noted += [
                float(torch.linalg.vector_norm(small, -1)),
                float(small.aminmax().max),
                float(small.std(0, correction=0).sum()),
            ]
            small.clamp_(-0.3, 2.4)
        temperature: Any = self.head.temperature
        self.noted += [
            int(temperature * 10),
            temperature.item(),
            temperature.tolist()[0],
            float(f"{temperature.item():.3f}"),
        ]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.noted.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()], float("inf"))))


class SmallReadings(SmallWeights):
    """The same without gradients, which DeepSpeed refuses in hooks."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


class WritesViews(Hooked):
    """Writes weights through views of them, as tutorials do (``embedding.weight.data[0].zero_()``)."""

    def change(self) -> None:
        self.head = Tempered()  # type: ignore[assignment]

    def on_train_batch_end(self, *_: Any) -> None:
        for weight in (self.backbone[0].weight, self.head.linear.weight, self.head.row):
            values = weight.data
            values[0].mul_(0.5)
            values[0] += 0.01
            values[-1, 2:] *= 0.9
            values.view(-1)[3:5].zero_()
            values.chunk(2)[0].add_(0.02)
            values.narrow(0, 0, 1)[0].narrow(0, 0, 2).fill_(0.1)
            values.diagonal().mul_(0.9)
            values.t()[1].clamp_(-0.1, 0.1)
            rows = list(values)
            values.mul_(0.99)
            for row in rows:
                row.add_(0.01)
            values[[0]].zero_()
            (values[0] * 2).zero_()
            with torch.no_grad():
                weight[0].clamp_(-0.4, 0.4)
                nn.init.zeros_(weight[:1, 5:])
                nn.init.constant_(weight[:1], 0.07)
                torch.clamp_(input=weight, max=torch.tensor(0.3))
                torch.mul(weight[1:2], 0.5, out=weight[1:2])
                nn.functional.dropout(weight[:1, :1], p=1.0, inplace=True)
            weight.data = weight.data * 0.9
            weight.data = torch.full(weight.shape, 0.01) + weight.data
            values = nn.utils.parameters_to_vector([weight])
            nn.utils.vector_to_parameters(values * 0.8, [weight])


MODULES: dict[str, type[Hooked]] = {
    cls.__name__: cls
    for cls in (FitStart, TrainStart, ThroughViews, Clamped, Averaged, Copied, InOneNetwork, EditedGradients, Penalised)
} | {cls.__name__: cls for cls in (Unfrozen, OfItsRank, LateGradients, ThawedByHand, WrittenInForward)}
MODULES |= {cls.__name__: cls for cls in (SmallWeights, SmallReadings, WritesViews)}


def _sums(module: nn.Module) -> Iterator[tuple[str, list[float]]]:
    for name, value in sorted(module.state_dict().items()):
        value = value.detach().double()
        yield name, [float(value.sum()), float(value.norm()), float((value == 0).sum())]


def alone() -> str:
    """Have only rank 0 touch a weight; return the message of its refusal."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    collectives = Collectives(None, torch.device("cpu"))
    collectives.patience_seconds = 0.5
    if collectives.rank == 0:
        try:
            collectives.meet("touches head.weight")
        except UsageError as error:
            return str(error)
    return ""


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Train a module; return its losses and what it noted, its weights by three sums, or the message of a refusal."""
    warnings.filterwarnings("ignore", module="lightning")
    if job.get("do") == "alone":
        return {"refused": alone()}
    module = MODULES[job["module"]]()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        strategy=strategy_of(job["strategy"]),
        accelerator="cpu",
        devices=job["devices"],
        max_epochs=module.epochs,
        precision=job.get("precision", "32-true"),
        callbacks=module.callbacks(),
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        **options,
    )
    try:
        trainer.fit(module)
    except UsageError as error:
        return {"refused": str(error)}
    finally:
        if job["devices"] == 1:
            leave_process_group()
    return {"noted": module.noted, "weights": dict(_sums(module))}
