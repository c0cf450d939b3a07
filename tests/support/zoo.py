"""A zoo of small LightningModules as other people write them: each does one thing that an engine might not expect.

Nobody tailored them to a strategy of ours. What a hook computes goes into ``seen``, to be compared.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

STEPS = 4
"""Steps of an epoch of one rank of two; one process takes twice as many."""


class Plain(pl.LightningModule):
    """Two networks and SGD; the base of all others."""

    dtype_of_data: ClassVar[torch.dtype] = torch.float32

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seen: list[float] = []
        self.body: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head: nn.Module = nn.Linear(8, 4)
        self.build()

    def build(self) -> None:
        """Change what was built."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def samples(self) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        kind: dict[str, Any] = {"generator": generator, "dtype": self.dtype_of_data}
        return [(torch.randn(8, **kind), torch.randn(4, **kind)) for _ in range(4 * STEPS)]

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples(), batch_size=2)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


class WritesAtFitStart(Plain):
    def on_fit_start(self) -> None:
        with torch.no_grad():
            self.body[0].weight.zero_()


class WritesAtTrainStart(Plain):
    def on_train_start(self) -> None:
        nn.init.constant_(self.head.weight, 0.1)
        self.body[2].bias.data[:] = 0.3


class LoadsAtFitStart(Plain):
    """Starts from weights of another run."""

    def on_fit_start(self) -> None:
        torch.manual_seed(7)
        self.head.load_state_dict(nn.Linear(8, 4).state_dict())


class EditsGradients(Plain):
    def on_after_backward(self) -> None:
        for parameter in self.body.parameters():
            parameter.grad.mul_(0.1)


class DropsGradients(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step % 2:
            for parameter in self.head.parameters():
                parameter.grad = None


class GradNorm(Plain):
    """Adds up the norm of gradients by hand, as tutorials do."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.detach().norm() ** 2 for parameter in self.parameters() if parameter.grad is not None]
        self.seen.append(float(sum(norms)) ** 0.5)


class LightningsGradNorm(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.seen.append(float(grad_norm(self, norm_type=2)["grad_2.0_norm_total"]))


class ClipsByHook(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class ClipsByConfigure(Plain):
    """Decides itself how gradients are clipped."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class LogsWeights(Plain):
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(float(self.head.weight.detach().square().sum()))


class SavesItself(Plain):
    """Copies its weights in a hook."""

    def on_train_epoch_end(self) -> None:
        self.seen += [float(value.double().sum()) for value in self.head.state_dict().values()]


class Target(Plain):
    """A slow copy of a trained network (BYOL)."""

    def build(self) -> None:
        self.target = copy.deepcopy(self.body).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            aim = self.target(x)
        hidden = self.body(x)
        return F.mse_loss(self.head(hidden), y) + F.mse_loss(hidden, aim)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for p, q in zip(self.body.parameters(), self.target.parameters()):
            q.data.lerp_(p.data, 0.1)


class LoadsTarget(Target):
    """A copy of a trained network that is renewed now and then (DQN)."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step % 2 == 0:
            self.target.load_state_dict(self.body.state_dict())


class OwnAverage(Plain):
    """Averages its weights into buffers of its own."""

    def build(self) -> None:
        for name, value in self.head.named_parameters():
            self.register_buffer(f"mean_{name}", value.detach().clone())

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for name, value in self.head.named_parameters():
            mean = getattr(self, f"mean_{name}")
            mean.mul_(0.9).add_(value, alpha=0.1)


class PenaltyOfAll(Plain):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 1e-2 * sum(p.square().sum() for p in self.parameters())


class CallsFunctional(Plain):
    """Takes a layer's weight without calling the layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x), self.head.weight)


class CallsParts(Plain):
    """Calls parts of a network, never the whole (an autoencoder's ``encode``)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body[2](self.body[1](self.body[0](x))))


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.scale = nn.Linear(8, 4), nn.Linear(4, 8), nn.Parameter(torch.ones(4))

    def encode(self, x: Tensor) -> Tensor:
        return self.down(x) * self.scale

    def decode(self, z: Tensor) -> Tensor:
        return self.up(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


class CallsMethods(Plain):
    """Calls other methods of a network than its ``forward``."""

    def build(self) -> None:
        self.body = Coder()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body.decode(self.body.encode(x)))


class Clamps(Plain):
    """Keeps weights in a range (WGAN)."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.body.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class NormalisesBatches(Plain):
    def build(self) -> None:
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Doubles(Plain):
    """Trained with ``precision="64-true"``."""

    dtype_of_data = torch.float64


class TwoOptimizers(Plain):
    """A generator and a discriminator, stepped by hand."""

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizers: Any = self.optimizers()
        for optimizer, loss_of in zip(
            optimizers, (lambda: F.mse_loss(self.body(x), x), lambda: F.mse_loss(self.head(self.body(x).detach()), y))
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss_of())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.body, self.head)]


class Manual(Plain):
    """One optimizer, stepped by hand at every second batch."""

    clips = False

    def build(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            if self.clips:
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class ManualClips(Manual):
    clips = True


class FrozenInOptimizer(Plain):
    """A frozen block whose weights the optimizer got, too."""

    def build(self) -> None:
        self.body[0].requires_grad_(False)


class Unfreezes(Plain):
    """Unfreezes a block when it has trained for a while; the optimizer has all weights from the start."""

    def build(self) -> None:
        self.body.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.requires_grad_(True)


class Freezes(Plain):
    """Freezes a block when it has trained for a while."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.body.requires_grad_(False)


class Backbone(Plain):
    """With the names that BackboneFinetuning expects."""

    def build(self) -> None:
        self.backbone = self.body
        del self.body

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class UnfreezesLast(BaseFinetuning):
    """Finetuning as in Lightning's documentation: a layer more with each epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(modules=pl_module.backbone[2], optimizer=optimizer, lr=0.05)


class Schedulers(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Plateau(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


class Groups(Plain):
    """Weight decay for matrices only, and another learning rate for the head."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.body.parameters() if p.dim() > 1]
        other = [p for p in self.body.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": other},
            {"params": self.head.parameters(), "lr": 0.02},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


class Lbfgs(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


class WarmsUp(Plain):
    """Sets the learning rate itself when it steps (Lightning's documentation)."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.global_step + 1) / 4)


class Words(Plain):
    """Batches of numbers of words."""

    def samples(self) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        return [
            (torch.randint(12, (3,), generator=generator), torch.randint(12, (3,), generator=generator))
            for _ in range(4 * STEPS)
        ]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())


class Tied(Words):
    """Words go in and come out by one weight of a network."""

    def build(self) -> None:
        embedding, out = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        out.weight = embedding.weight
        self.body, self.head = nn.Sequential(embedding, nn.Linear(8, 8), out), nn.Identity()


class TiedAcross(Words):
    """The same, in two networks."""

    def build(self) -> None:
        self.body, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.body.weight


class Sparse(Words):
    """Sparse gradients of an embedding."""

    def build(self) -> None:
        self.body, self.head = nn.Embedding(12, 8, sparse=True), nn.Linear(8, 12)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnParameter(Plain):
    """A parameter of the LightningModule itself."""

    def build(self) -> None:
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, more: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"levels": [self.first(x), {"deep": self.second(more["x"])}], "name": "two", "none": None}


class NestedOutputs(Plain):
    """A network that takes and gives dictionaries of lists."""

    def build(self) -> None:
        self.body = ManyOutputs()

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(x, more={"x": x})["levels"]
        return self.head(found[0] + found[1]["deep"])

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss(batch), "extra": batch_idx}


class Unused(Plain):
    """A network of which a part is never used."""

    def build(self) -> None:
        self.head.register_module("spare", nn.Linear(3, 2))


class CalledTwice(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x)))


class Recomputes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Attends(Plain):
    """Attention and a recurrent layer, which read the weights of parts that they do not call."""

    def build(self) -> None:
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x[:, None, :].expand(-1, 3, -1))
        return self.head(self.recurrent(hidden)[0][:, -1])


class Parametrized(Plain):
    """Weights that are computed from others."""

    def build(self) -> None:
        nn.utils.parametrizations.weight_norm(self.body[0])
        nn.utils.parametrizations.spectral_norm(self.body[2])


class Pruned(Plain):
    """Weights of which some are zero from the start."""

    def build(self) -> None:
        prune.l1_unstructured(self.body[0], "weight", amount=0.5)


class GradientPenalty(Plain):
    """The gradient of an output by the input is a part of the loss (WGAN-GP)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_(True)
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + slope.square().mean()


class BuildsLate(Plain):
    """Builds its networks in ``configure_model``."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.seen: list[float] = []
        self.body = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.body is None:
            torch.manual_seed(0)
            self.body, self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 4)


class Hooked(Plain):
    """Forward hooks that look at activations and change them."""

    def build(self) -> None:
        self.body[0].register_forward_hook(lambda part, args, out: self.seen.append(float(out.sum())) or out * 0.5)


class Lists(Plain):
    """Networks in lists and dictionaries."""

    def build(self) -> None:
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.ModuleDict({"main": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = x + layer(x).tanh()
        return self.head["main"](x)
