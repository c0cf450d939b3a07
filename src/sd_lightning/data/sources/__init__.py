"""Sources of captioned images: folders, tars, Parquet files, Hugging Face datasets, DreamBooth's photos, digits."""
