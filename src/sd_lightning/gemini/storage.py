"""The flat memory behind the parameters of one chunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sd_lightning.gemini.layout import ChunkLayout, Slot


class ChunkStorage:
    """Flat memory that the parameters of a chunk are views of.

    It is freed and allocated again through its untyped storage, so that views saved by autograd stay valid. While it
    is freed, parameters read as NaN.

    Args:
        layout: What is in the chunk.
        device: The fast tier.
    """

    def __init__(self, layout: ChunkLayout, device: torch.device) -> None:
        self.full = torch.empty(layout.numel, dtype=layout.dtype, device=device)
        self.parameters: dict[str, nn.Parameter] = {}
        self.slots: dict[nn.Parameter, Slot] = {}
        # Reading memory that is not there would end the process. NaN is seen at once, and cannot be written to.
        self._nan = torch.full((), float("nan"), dtype=layout.dtype, device=device)
        self._faces: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        """The view of each parameter, and the NaNs that it shows while there is no memory behind the view."""

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return self.full.untyped_storage().nbytes()

    def add(self, slot: Slot, parameter: nn.Parameter) -> None:
        """Make a parameter a view of its slot."""
        self.parameters[slot.name] = parameter
        self.slots[parameter] = slot
        view = self.full[slot.begin : slot.end].view(parameter.shape)
        self._faces[parameter] = view, self._nan.expand(parameter.shape)
        parameter.data = view

    def show(self) -> None:
        """Make all parameters views of the memory."""
        for parameter, (view, _) in self._faces.items():
            parameter.data = view

    def hide(self) -> None:
        """Make all parameters read as NaN."""
        for parameter, (_, nan) in self._faces.items():
            parameter.data = nan

    def hide_one(self, parameter: nn.Parameter) -> None:
        """Make one parameter read as NaN."""
        parameter.data = self._faces[parameter][1]

    def resize(self, nbytes: int) -> None:
        """Allocate the memory, or free it with 0 bytes."""
        if not self.full.untyped_storage().resizable():
            # numpy() was called on a weight: that memory is freed when the array is, and the chunk gets another.
            with torch.inference_mode(False):
                self.full = torch.empty_like(self.full)
            for parameter, (_, nan) in self._faces.items():
                slot = self.slots[parameter]
                self._faces[parameter] = self.full[slot.begin : slot.end].view(parameter.shape), nan
        self.full.untyped_storage().resize_(nbytes)

    def discard(self) -> None:
        """Forget the memory; the parameters have other memory by now."""
        self._faces.clear()
        self.full = self.full[:0].clone()
