"""Training data: sources of captioned images, the stateful sampler, and the datamodule.

Importing this package imports nothing heavy; only the datamodule and its builders need Lightning.
"""
