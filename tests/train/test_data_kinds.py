"""A rank on text."""

import torch

from gossipgrad.data import Dataset, DatasetInfo, TextSamples
from support.alone import begin_alone, train_alone


def test_text_is_learned_character_by_character(tmp_path):
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
    options = {"model": "gpt", "optimizer": "adamw", "lr": 3e-3, "epochs": 6, "trace": 0}
    result = train_alone(*begin_alone(tmp_path, **options), dataset=dataset)
    assert result.accuracy > 0.95
    assert result.samples == 6 * 74
