import threading

import torch
from torch import nn

from gossipgrad.decentralized._section import Section
from gossipgrad.decentralized._tensors import weight_entries


def test_the_square_of_a_delta_is_the_same_in_any_thread_and_at_any_address():
    torch.manual_seed(0)
    values = torch.randn(25_000)
    model = nn.Linear(25_000, 1, bias=False)
    section = Section(
        weight_entries(dict(model.named_parameters())),
        first_bucket=0,
        bucket_bytes=1 << 20,
        wire_dtype=None,
        snapshots=1,
        of_weights=True,
    )
    squares = []

    def note(flat):
        squares.append(section.delta(0, flat, round=0).square.item())

    for offset in range(16):
        flat = torch.empty(len(values) + offset)[offset:].copy_(values)
        note(flat)
        thread = threading.Thread(target=note, args=(flat,))
        thread.start()
        thread.join()
    assert len({*squares}) == 1
    assert abs(squares[0] / values.double().square().sum().item() - 1) < 1e-5
