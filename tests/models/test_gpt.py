import pytest
import torch

from gossipgrad.models import GPT

SMALL = {"context": 12, "layers": 2, "width": 16, "heads": 2}


def small(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(9, **{**SMALL, **changes})


@pytest.mark.parametrize(
    ("vocabulary_size", "sizes", "count"),
    [
        (65, {}, 818_048),
        (65, {"layers": 6, "width": 384, "heads": 6, "context": 256}, 10_770_816),
        (9, SMALL, None),
    ],
)
def test_parameter_count_is_the_formula(vocabulary_size, sizes, count):
    with torch.device("meta"):
        model = GPT(vocabulary_size, **sizes)
    sizes = {"context": 128, "layers": 4, "width": 128, **sizes}
    w = sizes["width"]
    formula = (
        sizes["layers"] * (12 * w**2 + 13 * w) + 2 * w + (vocabulary_size + sizes["context"]) * w
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == formula
    assert count in (formula, None)


def test_a_later_character_changes_nothing_before_it():
    model = small()
    x = torch.randint(9, (4, 12))
    before = model(x)
    for place in range(12):
        changed = x.clone()
        changed[:, place] = (x[:, place] + 1) % 9
        after = model(changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).any(-1).all()


def test_dropout_is_for_training():
    model, x = small(dropout=0.5), torch.arange(9)[None]
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    plain = small()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain.eval()(x))


def test_an_input_past_the_context_is_refused():
    with pytest.raises(
        ValueError,
        match="the input has 13 positions, but the context is 12; give the last 12, or make the "
        "model with context=13",
    ):
        small()(torch.zeros(1, 13, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers is 0, but must be at least 1"),
        (
            {"width": 100, "heads": 3},
            "width is 100, but must be a multiple of heads, 3; 102 is one",
        ),
        ({"dropout": 1.0}, "dropout is 1.0, but must be at least 0 and below 1"),
    ],
)
def test_sizes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)
