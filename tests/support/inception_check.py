"""FID's Inception against torchmetrics' FID, in a process of its own: ``python inception_check.py <folder>``.

torch-fidelity is real, from the folder where `make install` puts it. Its torchvision is none: torchvision belongs to
one build of torch, and with another one `import torchmetrics` fails. Inception uses nothing of it.
"""

import sys
import types
from pathlib import Path

TORCH_FIDELITY = Path(__file__).parents[2] / "build" / "torch-fidelity"


def main(folder: Path) -> None:
    """Read weights, compare features, and refuse files that are no weights."""
    assert (TORCH_FIDELITY / "torch_fidelity").is_dir(), f"no torch-fidelity in {TORCH_FIDELITY}; run make install"
    sys.path.append(str(TORCH_FIDELITY))
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    sys.modules.update(modules := {name: types.ModuleType(name) for name in names})
    vars(modules["torchvision.datasets"]).update(dict.fromkeys(("CIFAR10", "CIFAR100", "STL10"), object))
    import torch_fidelity  # noqa: F401  as torchmetrics will find it, which looks for torchvision, too

    for name in names:
        del sys.modules[name]

    import numpy as np
    import pytest
    import torch
    from PIL import Image
    from torchmetrics.image.fid import FrechetInceptionDistance

    from feature_networks import save_inception
    from sd_lightning import UsageError
    from sd_lightning.models.image_features import read_image_features

    def read(path: Path) -> object:
        return read_image_features(str(path), device=torch.device("cpu"))

    rng = np.random.default_rng(0)
    small = [Image.fromarray(rng.integers(0, 256, (8, 6, 3), np.uint8)).resize((48, 64)) for _ in range(2)]
    features = read(file := save_inception(folder / "inception.pth"))
    metric = FrechetInceptionDistance(feature_extractor_weights_path=file)
    found = features.images(small)
    stacked = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in small])
    assert found.shape == (2, features.num_features) == (2, 2048)
    torch.testing.assert_close(found, metric.inception(stacked).double(), rtol=1e-4, atol=1e-5)
    assert float(found.std(0).max()) > 1e-2
    assert (features.metric("F"), features.metric("K"), features.tokenizer) == ("FID", "KID", None)

    weights = torch.load(file)
    torch.save(weights | {"fc.weight": torch.zeros(1000, 2048), "fc.bias": torch.zeros(1000)}, folder / "other.pth")
    torch.save({**weights, "code": Path("/")}, folder / "code.pth")
    (folder / "text.pth").write_text("no weights")
    for name, message in {"other": "size mismatch for fc.weight", "code": "Weights only load", "text": ""}.items():
        with pytest.raises(UsageError, match=f"features=.*{name}.pth gives no features of pictures: .*{message}"):
            read(folder / f"{name}.pth")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
