import dataclasses
import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch

from gossipgrad import data
from gossipgrad.data import _cifar10
from gossipgrad.errors import GossipError
from support.sites import served

RECORDS = 4


@pytest.fixture
def batches(monkeypatch, tmp_path):
    """The content of six small binary files; the loader is told of their size."""
    monkeypatch.setattr(_cifar10, "_RECORDS", RECORDS)
    small = dataclasses.replace(
        _cifar10.INFO, train_samples=5 * RECORDS, test_samples=RECORDS, num_classes=10
    )
    monkeypatch.setattr(_cifar10, "INFO", small)
    monkeypatch.delenv("GOSSIPGRAD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    contents = {name: rng.integers(0, 10, (RECORDS, 3073), dtype=np.uint8) for name in _cifar10.MD5}
    digests = {name: hashlib.md5(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(_cifar10, "MD5", digests)
    return contents


@pytest.fixture
def archive(batches, monkeypatch):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in batches.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = content.nbytes
            tar.addfile(member, io.BytesIO(content.tobytes()))
    monkeypatch.setattr(_cifar10, "SHA256", hashlib.sha256(packed.getvalue()).hexdigest())
    return packed.getvalue()


def put(batches, folder):
    folder.mkdir(parents=True)
    for name, content in batches.items():
        (folder / name).write_bytes(content.tobytes())


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-bin"])
def test_reads_label_then_red_green_blue(batches, tmp_path, inner):
    put(batches, tmp_path / "cifar10" / inner)
    data.prepare("cifar10", tmp_path)
    cifar = data.load("cifar10", tmp_path)
    third = batches["data_batch_3.bin"]
    assert cifar.train.labels[2 * RECORDS : 3 * RECORDS].tolist() == third[:, 0].tolist()
    assert torch.equal(
        cifar.train.x[2 * RECORDS + 1], torch.from_numpy(third[1, 1:].reshape(3, 32, 32))
    )
    assert cifar.test.labels.tolist() == batches["test_batch.bin"][:, 0].tolist()


def test_training_is_augmented_and_testing_is_not(batches, tmp_path):
    put(batches, tmp_path / "cifar10")
    cifar = data.load("cifar10", tmp_path)
    indices = torch.arange(RECORDS)
    plain, _ = cifar.train.batch(indices)
    assert plain.dtype == torch.float32
    assert not torch.equal(plain, cifar.train.batch(indices, augment=(0, 0))[0])
    test, _ = cifar.test.batch(indices)
    assert torch.equal(test, cifar.test.batch(indices, augment=(0, 0))[0])
    whole, _ = cifar.train.batch(torch.arange(len(cifar.train)))
    assert abs(float(whole.mean())) < 1e-6


def test_archive_in_place_is_unpacked(archive, batches, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(archive)
    data.prepare("cifar10", tmp_path)
    for name, content in batches.items():
        assert (tmp_path / "cifar10" / name).read_bytes() == content.tobytes()
    assert len(list((tmp_path / "cifar10").iterdir())) == 7


def test_missing_archive_is_fetched_and_unpacked(archive, tmp_path):
    with served({"/cifar-10-binary.tar.gz": archive}) as site:
        folder = _cifar10.find_cifar10(address=site.address)
        assert folder == tmp_path / "cache" / "gossipgrad" / "cifar10"
        assert _cifar10.find_cifar10(address=site.address) == folder
    assert len(site.requests) == 1
    assert len(data.load("cifar10").train) == 5 * RECORDS


def test_way_out_where_nothing_can_be_fetched(batches, tmp_path):
    with pytest.raises(
        GossipError,
        match=r"could not fetch http://127\S+ to \S+cifar10 .*; put cifar-10-binary.tar.gz, or the "
        r"six .bin files in it, into \S+cifar10, or name the folder .* cifar10/ with --data-dir",
    ):
        _cifar10.find_cifar10(tmp_path, address="http://127.0.0.1:9")


def test_wrong_archive_in_place_is_named(archive, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(archive[:-1])
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz has SHA-256 .*; delete it to fe"):
        data.prepare("cifar10", tmp_path)


def test_archive_that_cannot_be_unpacked_names_the_way_out(archive, tmp_path, monkeypatch):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").write_bytes(archive)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(
        GossipError, match=r"could not unpack \S+ \(No space left on device\); unpack it by hand to"
    ):
        data.prepare("cifar10", tmp_path)
    assert len(list((tmp_path / "cifar10").iterdir())) == 1


def test_damaged_files_are_named_before_training(batches, tmp_path):
    folder = tmp_path / "cifar10"
    put(batches, folder)
    (folder / "data_batch_2.bin").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"data_batch_2\.bin has 5 bytes, expected 12,292; delete"):
        data.prepare("cifar10", tmp_path)
    batches["data_batch_2.bin"][:] = 0
    (folder / "data_batch_2.bin").write_bytes(batches["data_batch_2.bin"].tobytes())
    with pytest.raises(
        ValueError, match=r"data_batch_2\.bin has MD5 \w{32}, expected \w{32}; delete it to unpack"
    ):
        data.prepare("cifar10", tmp_path)


def test_zeros_of_the_right_size_are_no_batch(tmp_path):
    assert (*_cifar10.TRAIN_FILES, _cifar10.TEST_FILE) == tuple(_cifar10.MD5)
    assert len({*_cifar10.MD5.values()}) == 6
    (tmp_path / "test_batch.bin").write_bytes(bytes(30_730_000))
    with pytest.raises(ValueError, match=r"has MD5 \w+, expected 803d5f7f4d78ea53de84dbe85f74fb6d"):
        _cifar10.read_batch(tmp_path / "test_batch.bin")
