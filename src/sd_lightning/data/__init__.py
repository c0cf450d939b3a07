"""Training data: sources of captioned images, the stateful sampler, and the datamodule.

Importing this package imports nothing heavy; only ``sd_lightning.data.datamodule`` needs Lightning.
"""
