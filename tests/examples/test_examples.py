"""Every example runs, at a small size."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHARED = Path(os.environ["GOSSIPGRAD_DATA"])
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARIES = []


def test_the_table_lists_every_example():
    table = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"| `{path.name}` |" in table
        command = (f"examples/{path.name}", f"--job examples.{path.stem}:job")
        assert any(one in path.read_text() for one in command)


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
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def on_two_ranks(name, **options):
    """The example on two threads; all ranks come to the same figure, which is returned."""
    example = load(name)
    first, second = run_ranks(2, lambda _, group: example.train(example.Options(**options), group))
    assert first == second
    return first


def striped(count, size, channels=1):
    """Images of ten classes, each with a bright row of its own."""
    draw = torch.Generator().manual_seed(count)
    labels = torch.randint(10, (count,), generator=draw)
    images = 0.3 * torch.rand(count, channels, size, size, generator=draw)
    images[torch.arange(count), :, 2 * labels + 4] = 1.0
    return images, labels


@pytest.mark.parametrize("example", ["shakespeare_gpt.py", "cifar_resnet20.py"])
def test_a_job_file_trains(example, monkeypatch):
    if not SHARED.is_dir():
        pytest.skip("data sets not on this machine")
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(SHARED))
    torch.manual_seed(0)
    job = importlib.import_module(f"examples.{Path(example).stem}").job()
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    rows = [job.train[index] for index in range(8)]
    x, y = job.collate(rows)
    losses = []
    for _ in range(6):
        losses.append(job.loss(job.model(x), y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert min(losses[1:]) < losses[0]


@pytest.mark.parametrize("model", ["resnet50", "googlenet"])
def test_imagenet(model, tmp_path):
    """Two ranks, a few small images; the rest is as in the example.

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
