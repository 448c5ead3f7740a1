"""Every recipe runs, at a small size."""

import gzip
import importlib.util
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gossipgrad import data
from support.ranks import run_ranks

RECIPES = Path(__file__).parents[2] / "recipes"
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARIES = []


def test_the_table_lists_every_recipe():
    table = (RECIPES / "README.md").read_text()
    for path in RECIPES.glob("*.py"):
        assert f"| `{path.name}` |" in table
        assert f"recipes/{path.name}" in path.read_text(), "the command to run it"


def import_torchvision():
    """Torchvision beside another build of torch: its `nms` and `qnms` are declared, not loaded."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(name + _BOXES)
        _LIBRARIES.append(library)  # what is declared goes with it
        import torchvision
    return torchvision


def load(name):
    """A recipe as a module, in spite of its folder being no package."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def on_two_ranks(name, **options):
    """The recipe on two threads; all ranks come to the same figure, which is returned."""
    recipe = load(name)
    first, second = run_ranks(2, lambda _, group: recipe.train(recipe.Options(**options), group))
    assert first == second
    return first


def striped(count, size, channels=1):
    """Images of ten classes, each with a bright row of its own."""
    draw = torch.Generator().manual_seed(count)
    labels = torch.randint(10, (count,), generator=draw)
    images = 0.3 * torch.rand(count, channels, size, size, generator=draw)
    images[torch.arange(count), :, 2 * labels + 4] = 1.0
    return images, labels


def counting(count, length=128):
    """Text that counts up, each piece from another place on."""
    draw = torch.Generator().manual_seed(count)
    starts = torch.randint(65, (count, 1), generator=draw)
    pieces = (starts + torch.arange(length + 1)) % 65
    return pieces[:, :-1], pieces[:, 1:]


@pytest.fixture
def small_data(monkeypatch):
    """Lets `data.load` give data sets of the named shape that take no time to learn."""
    make = {
        "fashion-mnist": lambda count: striped(count, 28),
        "cifar10": lambda count: striped(count, 32, channels=3),
        "shakespeare": counting,
    }

    def load_small(name, data_dir=None):
        parts = [data.TensorSamples(*make[name](count)) for count in (512, 64)]
        x = parts[0].x
        return data.Dataset(
            info=data.DatasetInfo(
                name=name,
                input_shape=tuple(x.shape[1:]),
                num_classes=65 if x.ndim == 2 else 10,
                train_samples=512,
                test_samples=64,
                kind="text" if x.ndim == 2 else "images",
            ),
            train=parts[0],
            test=parts[1],
        )

    monkeypatch.setattr(data, "load", load_small)


@pytest.mark.slow
def test_lenet_on_fashion_mnist(small_data):
    assert on_two_ranks("mnist_lenet", epochs=6, steps=30, batch_size=8, lr=0.03) > 0.4


def test_lenet_on_the_files_of_mnist(tmp_path):
    for part, count in (("train", 512), ("t10k", 64)):
        images, labels = striped(count, 28)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", (255 * images[:, 0]).byte().numpy())
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels.byte().numpy())
    training, test = load("mnist_lenet").read_mnist(tmp_path)
    assert training.x.shape == (512, 1, 28, 28)
    assert training.x.max() == 255 / 256
    assert test.y.tolist() == striped(64, 28)[1].tolist()
    on_two_ranks("mnist_lenet", mnist=tmp_path, epochs=1, steps=2, batch_size=8)


def write_idx(path, array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + np.ascontiguousarray(array).tobytes()))


@pytest.mark.slow
def test_cifarnet_on_cifar10(small_data):
    assert on_two_ranks("cifar10_cifarnet", epochs=2, steps=24, batch_size=8) > 0.4


@pytest.mark.slow
def test_gpt_on_shakespeare(small_data):
    reached = on_two_ranks(
        "shakespeare_gpt", epochs=1, steps=16, batch_size=4, layers=1, lr=0.01, warmup_steps=4
    )
    assert reached < 2.0  # knowing nothing is ln 65, 4.2


@pytest.mark.parametrize("model", ["resnet50", "googlenet"])
def test_imagenet(model, tmp_path):
    """Two ranks, a few small images; the rest is as in the recipe.

    Torchvision from PyPI does not import next to torch for the CPU, since its operators `nms` and
    `qnms` are of another build: `import_torchvision` declares the two, which no image model calls.
    """
    try:
        import_torchvision()
    except ModuleNotFoundError:
        pytest.skip("torchvision is not installed")
    images, _ = striped(12, 48, channels=3)
    for number, image in enumerate((255 * images).byte().permute(0, 2, 3, 1).numpy()):
        folder = tmp_path / ("val" if number < 4 else "train") / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.jpg")
    options = {"data_dir": tmp_path, "model": model, "image_size": 32, "workers": 0}
    reached = on_two_ranks("imagenet", **options, epochs=1, steps=1, batch_size=2)
    assert reached in (0.0, 0.25, 0.5, 0.75, 1.0), "all four images of val are judged once"
