"""The programs, callable without Hydra's command line."""

PROGRAMS = ("train", "dreambooth", "generate", "evaluate", "export", "precompute", "plan", "compare", "doctor", "ui")
"""Names of the programs: each is a module in the package's root, a module here and a primary config in ``conf/``."""
