"""Builder functions with flat keyword arguments that are grouped into dataclasses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from sd_lightning.data.datamodule.module import SDDataModule

_Builder = Callable[..., SDDataModule]


def flat(*, without: Sequence[str] = (), **groups: Any) -> Callable[[_Builder], _Builder]:
    """Replace a builder's dataclass parameters by the fields of these dataclasses.

    The signature and the annotations of the result are flat, too: the configuration is checked against them.

    Args:
        without: Fields without meaning for this builder; they keep their defaults.
        **groups: Parameter -> instance of its dataclass, with the defaults of this builder.
    """

    def decorate(build: _Builder) -> _Builder:
        own = inspect.signature(build, eval_str=True).parameters.values()
        flat = [each for each in own if each.name not in groups]
        for group in groups.values():
            hints = get_type_hints(type(group))
            flat += [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
                for name, default in vars(group).items()
                if name not in without
            ]
        signature = inspect.Signature(flat, return_annotation=SDDataModule)

        @functools.wraps(build)
        def built(*args: Any, **kwargs: Any) -> SDDataModule:
            given = signature.bind(*args, **kwargs).arguments
            for name, group in groups.items():
                fields = {field: given.pop(field) for field in vars(group) if field in given}
                given[name] = dataclasses.replace(group, **fields)
            return build(**given)

        del built.__wrapped__  # or inspect would use its signature and annotations
        built.__annotations__ = {each.name: each.annotation for each in flat}
        built.__signature__ = signature  # type: ignore[attr-defined]
        return built

    return decorate
