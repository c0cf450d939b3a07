"""Training state of any engine: this rank's part of every trained parameter, with optimizer states."""
