"""A rank on each kind of data: image files that are decoded, and text."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

from gossipgrad import data
from gossipgrad.data import Dataset, DatasetInfo
from gossipgrad.data._text import TextSamples
from gossipgrad.train import TrainConfig
from gossipgrad.train._check import check
from gossipgrad.train._layout import claim
from gossipgrad.train._rank import train_rank
from support.jobs import job_of


@pytest.fixture
def train(tmp_path):
    """Train one rank alone, in this process; gives its result and the bytes of its model."""
    threads = torch.get_num_threads()

    def train_alone(dataset, name="run", **options):
        run_dir = claim(tmp_path / name, name="", overwrite=True)
        config = TrainConfig(strategy="local", trace=0, **options)
        config = config.resolved(nproc=1, out=run_dir.path)
        config.write(run_dir.config, {})
        result = train_rank(
            config,
            job_of(config, dataset),
            run_dir,
            rank=0,
            world_size=1,
            stop=threading.Event(),
            emit=lambda event: None,
        )
        return result, run_dir.rank_model(0).read_bytes()

    yield train_alone
    torch.set_num_threads(threads)


@pytest.fixture
def shades(tmp_path):
    """A folder of dark and bright images."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 4)):
        for label, level in (("bright", 150), ("dark", 50)):
            folder = tmp_path / "imagefolder" / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(level - 40, level + 40, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return tmp_path


def test_image_folder_is_learned_with_threads_as_without(train, shades):
    options = {"data": "imagefolder", "data_dir": shades, "image_size": 16}
    options |= {"epochs": 3, "lr": 0.02, "batch_size": 8}
    check(TrainConfig(**options), 1)
    dataset = data.load("imagefolder", shades, image_size=16)
    result, model = train(dataset, **options)
    assert result.accuracy == 1.0
    assert result.samples == 3 * 32
    _, without = train(dataset, "without", data_threads=0, **options)
    assert model == without


def test_broken_image_ends_the_rank_with_its_name(train, shades):
    (shades / "imagefolder/train/dark/7.jpg").write_bytes(b"?")
    dataset = data.load("imagefolder", shades, image_size=16)
    with pytest.raises(ValueError, match=r"train/dark/7\.jpg cannot be read as an image"):
        train(dataset, data="imagefolder", epochs=1)
    assert not [thread for thread in threading.enumerate() if "gossipgrad-data" in thread.name]


def test_text_is_learned_character_by_character(train):
    text = torch.arange(5, dtype=torch.uint8).repeat(120)
    samples = TextSamples(text, 8)
    info = DatasetInfo(
        name="counting",
        input_shape=(8,),
        num_classes=5,
        train_samples=len(samples),
        test_samples=len(samples),
        kind="text",
    )
    dataset = Dataset(info=info, train=samples, test=samples)
    result, _ = train(dataset, model="gpt", optimizer="adamw", lr=3e-3, epochs=6)
    assert result.accuracy > 0.95
    assert result.samples == 6 * 74
