"""Files: safetensors, tensor stores, checkpoint directories and the run's directory."""
