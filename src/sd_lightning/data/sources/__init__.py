"""Sources of captioned images: a folder, a Hugging Face dataset, DreamBooth's photos, the embedded digits."""
