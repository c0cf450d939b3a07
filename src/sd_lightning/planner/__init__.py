"""Memory of training and inference, foretold without a GPU."""
