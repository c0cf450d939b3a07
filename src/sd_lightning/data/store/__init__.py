"""The latent store: encoded images and their captions as files that are never changed, only added and removed.

A store is a folder, local or in an object store. Every :class:`~sd_lightning.data.store.layout.Recipe`, which is all
that latents depend on, has a subfolder::

    <store>/recipes/<fingerprint>.json
    <store>/<fingerprint>/
        latents/<name>.safetensors  latents of some images, all of one shape
        samples/<name>.safetensors  captions and token ids of some samples, and where their latents lie
        texts/<text encoders>/<name>.safetensors  text embeddings of some captions, each once, if asked for
        places/<text encoders>/<captions>.safetensors  where those of the captions of a sample file are
        generations/<number>.json   the samples of the store, as a list of the files above; the highest number counts

A file is created whole and only if there is none of its name; its name is a hash of what it holds. So its existence
says that it is done, and two jobs that write the same file agree.
"""
