"""Pages of the site that are no files of docs/: the API reference, and what guides link to elsewhere in the checkout.

A hook of mkdocs, named in mkdocs.yml. Links are written as the repository shows them, such as ``../README.md``; here
they are turned into links between the pages of the site.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "overview.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
"""Page -> the file of the checkout that it shows."""
API = {
    "models": (
        "Models and training",
        [f"sd_lightning.{name}" for name in ("SDLightningModule", "LatentDiffusion", "Objective", "SamplingOptions")]
        + ["sd_lightning.models.loading.PipelineParts", "sd_lightning.quantization", "sd_lightning.UsageError"],
    ),
    "families": ("Families of models", ["sd_lightning.models.families"]),
    "data": (
        "Data",
        ["sd_lightning.SDDataModule", "sd_lightning.data.builders", "sd_lightning.data.source"]
        + [f"sd_lightning.data.sources.{name}" for name in ("digits", "images", "webdataset", "parquet", "huggingface")]
        + ["sd_lightning.data.transform.ImageOptions", "sd_lightning.data.loading.LoaderOptions"]
        + ["sd_lightning.data.contract"],
    ),
    "strategies": (
        "Strategies",
        ["sd_lightning.strategies", "sd_lightning.strategies.ddp", "sd_lightning.strategies.fsdp.FSDPStrategy"]
        + ["sd_lightning.strategies.deepspeed.DeepSpeedStrategy", "sd_lightning.strategies.deepspeed.deepspeed"]
        + ["sd_lightning.strategies.gemini.GeminiStrategy", "sd_lightning.strategies.gemini.gemini"]
        + [
            "sd_lightning.strategies.colossalai.ColossalAIStrategy",
            "sd_lightning.strategies.networks.TrainingProtocol",
        ],
    ),
    "callbacks": ("Callbacks", ["sd_lightning.callbacks"]),
    "state": ("Training state", ["sd_lightning.state.shards"]),
    "planner": ("Planner", ["sd_lightning.planner", "sd_lightning.planner.footprint", "sd_lightning.planner.devices"]),
}
"""Page -> its title, and the names whose docstrings it shows."""
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>(?:~[\w.]*\.)?")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of the API, those of files outside of docs/, and other files that pages link to."""
    from mkdocs.structure.files import File

    for name, (title, shown) in API.items():
        text = "\n".join([f"# {title}\n", *(f"::: {each}\n" for each in shown)])
        files.append(File.generated(config, f"api/{name}.md", content=text))
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(REPO / source)))
    for page in [file.src_uri for file in files if file.is_documentation_page()]:
        for target in linked(page, files.get_file_from_path(page).content_string):
            if files.get_file_from_path(site_path(target)) is None:
                files.append(File.generated(config, site_path(target), abs_src_path=str(REPO / target)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Turn links of the checkout into links of the site."""
    own = page.file.src_uri

    def link(match: re.Match[str]) -> str:
        target = place(own, match[1])
        return match[1] if target is None else posixpath.relpath(site_path(target), posixpath.dirname(own) or ".")

    return _LINK.sub(link, markdown)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Take the names of Sphinx's roles off the docstrings: ``:class:`Family``` shows ``Family``."""
    return _ROLE.sub("<code>", html)


def linked(page: str, markdown: str) -> set[str]:
    """Return the files of the checkout outside of docs/ that a page links to."""
    targets = {place(page, target) for target in _LINK.findall(markdown)}
    return {target for target in targets if target is not None and not target.startswith("docs/")}


def place(page: str, target: str) -> str | None:
    """Return the path in the checkout to which a page's link leads; None if it is no link to a file."""
    source = OUTSIDE.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if os.path.isfile(REPO / path) else None


def site_path(path: str) -> str:
    """Return where a file of the checkout stands in the site."""
    pages = {source: page for page, source in OUTSIDE.items()}
    return pages.get(path) or path.removeprefix("docs/")
