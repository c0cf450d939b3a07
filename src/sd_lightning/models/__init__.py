"""The latent-diffusion model: its networks, frozen encoders, sampling, and adapters."""
