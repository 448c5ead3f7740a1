import pytest
import torch

from gossipgrad.models import GPT, training_loss

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


def test_parameter_count_of_nanogpts_characters():
    """Its `config/train_shakespeare_char.py` prints 10.65M: no biases, positions not counted."""
    with torch.device("meta"):
        model = GPT(65, context=256, layers=6, width=384, heads=6)
    counts = {name: p.numel() for name, p in model.named_parameters() if "bias" not in name}
    assert round((sum(counts.values()) - counts["positions.weight"]) / 1e6, 2) == 10.65


@pytest.mark.parametrize("length", [1, 5, 12])
def test_every_position_has_logits(length):
    assert small()(torch.zeros(3, length, dtype=torch.int64)).shape == (3, length, 9)


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


def test_positions_matter():
    logits = small()(torch.zeros(1, 12, dtype=torch.int64))
    assert not torch.allclose(logits[:, 0], logits[:, 1])


def test_starts_as_gpt_2_does():
    model = small(layers=8, width=256)
    block = model.blocks[3]
    assert model.characters.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert block.attention_in.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention_out.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert block.perceptron_out.weight.std().item() == pytest.approx(0.005, rel=0.05)
    assert not block.attention_in.bias.any()
    assert (block.attention_norm.weight == 1).all()


def test_learns_to_repeat():
    model = small(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.arange(13).remainder(9).expand(2, 13)
    for _ in range(60):
        training_loss(model, x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model(x[:, :-1]).argmax(-1), x[:, 1:])


def test_dropout_is_for_training():
    model, x = small(dropout=0.5), torch.arange(9)[None]
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    plain = small()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain.eval()(x))


def test_tied_weights_are_one_entry():
    names = [name for name, _ in small().named_parameters()]
    assert sorted(names) == sorted(small().state_dict())


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
