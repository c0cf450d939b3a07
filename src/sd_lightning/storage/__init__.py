"""Files: safetensors, tensor stores, checkpoint directories, the run's directory, local folders and object stores."""
