"""The latent-diffusion model: its parts, its frozen encoders, how it samples, and what can be added to it."""
