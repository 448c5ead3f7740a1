"""A rank on text."""

import threading

import pytest
import torch

from gossipgrad.data import Dataset, DatasetInfo, TextSamples
from gossipgrad.train import TrainConfig
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
