import typing

import pytest
import torch

from gossipgrad import data, models
from gossipgrad.data import DatasetInfo
from gossipgrad.train import TrainConfig


def info(name, *shape, num_classes=10, kind="images"):
    return DatasetInfo(
        name=name,
        input_shape=shape,
        num_classes=num_classes,
        train_samples=100,
        test_samples=10,
        kind=kind,
    )


DIGITS, FASHION = data.info("digits"), data.info("fashion-mnist")
CIFAR = info("cifar10", 3, 32, 32)
IMAGENET = info("imagefolder", 3, 224, 224, num_classes=1000)
TEXT = info("shakespeare", 24, num_classes=65, kind="text")


def test_names_are_those_of_the_command():
    hints = typing.get_type_hints(TrainConfig)
    assert typing.get_args(hints["model"]) == models.NAMES


@pytest.mark.parametrize(
    ("name", "dataset", "parameters"),
    [
        ("mlp", DIGITS, 26_122),
        ("mlp", FASHION, 118_282),
        ("mlp-wide", FASHION, 1_863_690),
        ("lenet", FASHION, 61_706),
        ("cifarnet", CIFAR, 145_578),
        ("resnet20", DIGITS, 269_722 - 2 * 16 * 9),
        ("resnet20", CIFAR, 269_722),
        ("resnet50", CIFAR, 25_557_032 - 990 * 2049),
        ("resnet50", IMAGENET, 25_557_032),
        ("googlenet", IMAGENET, 13_004_888),
        ("gpt", TEXT, 818_048 - 104 * 128),
    ],
)
def test_sizes_follow_the_data(name, dataset, parameters):
    with torch.device("meta"):
        model = models.build(name, dataset)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (DIGITS, ["mlp", "mlp-wide", "resnet20"]),
        (FASHION, ["mlp", "mlp-wide", "lenet", "resnet20"]),
        (CIFAR, ["mlp", "mlp-wide", "cifarnet", "resnet20", "resnet50", "googlenet"]),
        (TEXT, ["gpt"]),
    ],
)
def test_every_model_takes_the_data_it_says_it_takes(dataset, names):
    is_text = dataset.kind == "text"
    x = torch.zeros(2, *dataset.input_shape, dtype=torch.int64 if is_text else torch.float32)
    labels = x.shape if is_text else (2,)
    for name in models.NAMES:
        if name in names:
            model = models.build(name, dataset).eval()
            assert model(x).shape == (*labels, dataset.num_classes)
        else:
            with pytest.raises(ValueError, match=f"model '{name}' takes"):
                models.build(name, dataset)


@pytest.mark.parametrize(
    ("name", "dataset", "message"),
    [
        (
            "lenet",
            DIGITS,
            "model 'lenet' takes inputs of shape (1, 28, 28), but data 'digits' has (1, 8, 8); "
            "use model 'mlp' or 'mlp-wide' or 'resnet20', or data such as 'fashion-mnist'.",
        ),
        (
            "cifarnet",
            FASHION,
            "model 'cifarnet' takes images of 32x32, but data 'fashion-mnist' has (1, 28, 28); "
            "use model 'mlp' or 'mlp-wide' or 'lenet' or 'resnet20', or data such as 'cifar10'.",
        ),
        (
            "resnet50",
            FASHION,
            "model 'resnet50' takes images of at least 32x32, but data 'fashion-mnist' has "
            "(1, 28, 28); use model 'mlp' or 'mlp-wide' or 'lenet' or 'resnet20', or data such as "
            "'imagefolder'.",
        ),
        (
            "googlenet",
            info("wide", 3, 31, 64),
            "model 'googlenet' takes images of at least 32x32, but data 'wide' has (3, 31, 64); "
            "use model 'mlp' or 'mlp-wide' or 'resnet20', or data such as 'imagefolder'.",
        ),
        (
            "resnet20",
            TEXT,
            "model 'resnet20' takes images of at least 4x4, but data 'shakespeare' has text; use "
            "model 'gpt', or data such as 'cifar10'.",
        ),
        (
            "gpt",
            DIGITS,
            "model 'gpt' takes text, but data 'digits' has (1, 8, 8); use model 'mlp' or "
            "'mlp-wide' or 'resnet20', or data such as 'shakespeare'.",
        ),
    ],
)
def test_data_that_does_not_fit(name, dataset, message):
    with pytest.raises(ValueError, match="takes") as caught:
        models.build(name, dataset)
    assert str(caught.value) == message


def test_unknown_name_tells_the_known_ones():
    with pytest.raises(
        ValueError,
        match="model 'vgg' is not known; choose one of mlp, mlp-wide, lenet, cifarnet, resnet20, "
        "resnet50, googlenet, gpt",
    ):
        models.build("vgg", data.info("digits"))
