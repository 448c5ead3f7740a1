"""The data sets of the shared folder as they are."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from gossipgrad import data
from gossipgrad.data import _cifar10_small, _shakespeare
from gossipgrad.errors import GossipError
from support.sites import served

SHARED = Path(os.environ["GOSSIPGRAD_DATA"])


def needs(folder):
    reason = "data set not on this machine"
    return pytest.mark.skipif(not (SHARED / folder).is_dir(), reason=reason)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gossipgrad"


@needs("cifar10-small")
def test_cifar10_small_is_decoded_once(cache, monkeypatch):
    small = data.load("cifar10-small")
    assert small.info == data.info("cifar10-small")
    assert np.bincount(small.train.labels).tolist() == [1000] * 10
    assert np.bincount(small.test.labels).tolist() == [200] * 10
    whole, _ = small.train.batch(torch.arange(10_000))
    torch.testing.assert_close(whole.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    assert len(list((cache / "cifar10-small").iterdir())) == 4

    monkeypatch.setattr(_cifar10_small, "_decoded", None)
    again = data.load("cifar10-small")
    assert torch.equal(small.train.x, again.train.x)
    assert torch.equal(small.test.x, again.test.x)


@needs("cifar10-small")
@pytest.mark.parametrize("damage", ["empty", "zeros", "no digest"])
def test_damaged_pixels_in_the_cache_are_decoded_anew(cache, monkeypatch, damage):
    decoded = np.ones((10_000, 3, 32, 32), dtype=np.uint8)
    monkeypatch.setattr(_cifar10_small, "_decoded", lambda _, offsets: decoded[: len(offsets) - 1])
    data.load("cifar10-small")
    for cached in (cache / "cifar10-small").glob("*.npy"):
        if damage == "empty":
            cached.write_bytes(b"")
        elif damage == "zeros":
            np.save(cached, np.zeros_like(np.load(cached)))
        else:
            cached.with_suffix(".sha256").unlink()
    decoded[:] = 2
    for _ in range(2):
        assert (data.load("cifar10-small").train.x == 2).all()
        monkeypatch.setattr(_cifar10_small, "_decoded", None)  # the second time from the cache


def test_wrong_archive_of_cifar10_small_names_what_can_be_done(tmp_path):
    (tmp_path / "cifar10-small").mkdir()
    for name in _cifar10_small.DIGESTS:
        (tmp_path / "cifar10-small" / name).write_bytes(b"wrong")
    with pytest.raises(
        ValueError, match=r"jpeg\.npz has SHA-256 .*; put the right one there, .* or take data 'cif"
    ) as caught:
        data.load("cifar10-small", tmp_path)
    assert "fetch" not in str(caught.value)


@needs("cifar10-small")
def test_cifar10_small_does_without_a_cache(cache, monkeypatch):
    cache.parent.mkdir()
    cache.write_text("no folder")
    decoded = np.zeros((10_000, 3, 32, 32), dtype=np.uint8)
    monkeypatch.setattr(_cifar10_small, "_decoded", lambda _, offsets: decoded[: len(offsets) - 1])
    assert len(data.load("cifar10-small").train) == 10_000


def test_cifar10_small_has_no_address(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(
        ValueError,
        match=r"'cifar10-small' has no public address to fetch it from, and is in none of \S+"
        r"elsewhere/cifar10-small, \S+; name the folder .*--data-dir .*, or take data 'cifar10'",
    ):
        data.prepare("cifar10-small")


def test_missing_pillow_is_told(monkeypatch):
    monkeypatch.setattr("gossipgrad.data._cifar10_small.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"read with Pillow: pip install 'gossipgrad\[images\]'"):
        data.prepare("cifar10-small")


@needs("tinyshakespeare")
def test_shakespeare_reads_on_from_training_to_test():
    plays = data.load("shakespeare")
    assert plays.info == data.info("shakespeare")
    x, y = plays.train.batch(torch.tensor([0, 7841]))
    assert x.shape == y.shape == (2, 128)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    letters = sorted(set((SHARED / "tinyshakespeare" / "input.txt").read_text()))
    assert "".join(letters[number] for number in x[0, :14]) == "First Citizen:"
    assert len(letters) == plays.info.num_classes


def test_shakespeare_is_fetched_and_its_digest_checked(cache, monkeypatch):
    monkeypatch.delenv("GOSSIPGRAD_DATA")
    with served({"/input.txt": b"To be"}) as site:
        with pytest.raises(
            GossipError, match=rf"/input\.txt did not serve .*, expected {_shakespeare.SHA256}; put"
        ):
            _shakespeare.find_shakespeare(address=site.address)
        assert not list((cache / "tinyshakespeare").iterdir())
        digest = hashlib.sha256(b"To be").hexdigest()
        monkeypatch.setattr(_shakespeare, "SHA256", digest)
        found = _shakespeare.find_shakespeare(address=site.address)
    assert found.read_bytes() == b"To be"
