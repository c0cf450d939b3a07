"""Prediction of the memory of training and inference, without a GPU."""
