"""Data sets by name: found, fetched, checked and loaded. Private modules: addresses, digests."""

import gzip
import hashlib
import io
import os
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from gossipgrad import data
from gossipgrad.data import _cifar10, _cifar10_small, _fashion_mnist, _files, _text
from gossipgrad.errors import GossipError
from support.sites import served

SHARED = Path(os.environ["GOSSIPGRAD_DATA"])
RECORDS = 4
ARCHIVE = "cifar-10-binary.tar.gz"


def needs(folder):
    reason = "data set not on this machine"
    return pytest.mark.skipif(not (SHARED / folder).is_dir(), reason=reason)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and no other folder of data sets."""
    monkeypatch.delenv("GOSSIPGRAD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gossipgrad"


@pytest.fixture
def site(cache, monkeypatch):
    """A text of five characters in place of the plays, and a server of it."""
    monkeypatch.setattr(_text, "SHA256", hashlib.sha256(b"To be").hexdigest())
    with served({"/input.txt": b"To be"}) as site:
        monkeypatch.setattr(_text, "ADDRESS", site.address)
        yield site


def find():
    return _text.find_shakespeare()  # loading needs the whole text


def names(folder):
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_a_missing_file_is_fetched_once_into_the_cache(site, cache, tmp_path, monkeypatch):
    assert find() == cache / "tinyshakespeare" / "input.txt"
    assert find().read_bytes() == b"To be"
    assert names(cache / "tinyshakespeare") == {"input.txt"}
    assert len(site.requests) == 1
    # A folder that is named comes first, then the shared one.
    assert _text.find_shakespeare(tmp_path / "d") == cache / "tinyshakespeare/input.txt"
    for root, name in (("shared", "GOSSIPGRAD_DATA"), ("named", None)):
        (tmp_path / root / "tinyshakespeare").mkdir(parents=True)
        (tmp_path / root / "tinyshakespeare" / "input.txt").write_bytes(b"To be")
        if name:
            monkeypatch.setenv(name, str(tmp_path / root))
            assert find() == tmp_path / root / "tinyshakespeare/input.txt"
    named = _text.find_shakespeare(tmp_path / "named")
    assert named == tmp_path / "named" / "tinyshakespeare/input.txt"


def test_a_folder_that_is_named_gets_missing_files(site, tmp_path):
    found = _text.find_shakespeare(tmp_path / "d")
    assert found == tmp_path / "d" / "tinyshakespeare/input.txt"


@pytest.mark.parametrize("damage", ["wrong", "cut", "missing", "silent"])
def test_what_cannot_be_fetched_right_leaves_nothing(site, cache, monkeypatch, damage):
    if damage == "wrong":
        site.files["/input.txt"] = b"To bo"
    elif damage == "missing":
        site.files.clear()
    else:
        site.cut, site.stall = 3, damage == "silent"
        monkeypatch.setattr(_files, "_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(GossipError, match=r"--data-dir or GOSSIPGRAD_DATA") as refused:
        find()
    assert f"{site.address}/input.txt" in str(refused.value)
    assert names(cache / "tinyshakespeare") == set()
    site.files, site.cut = {"/input.txt": b"To be"}, None
    site.over.set()
    monkeypatch.setattr(_files, "_TIMEOUT_SECONDS", 30.0)
    assert find().read_bytes() == b"To be"


def test_what_a_killed_download_left_goes(site, cache):
    folder = cache / "tinyshakespeare"
    folder.mkdir(parents=True)
    (folder / ".input.txt.part.0123.partial").write_bytes(b"To")
    (folder / "mine.txt").write_bytes(b"notes")
    find()
    assert names(folder) == {"input.txt", "mine.txt"}


def test_one_of_several_that_need_a_file_fetches_it(site):
    threads = [threading.Thread(target=find) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(site.requests) == 1


def test_a_user_without_a_home_is_shown_where_files_could_go(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("GOSSIPGRAD_DATA", raising=False)
    with pytest.raises(GossipError, match=r"--data-dir or XDG_CACHE_HOME"):
        data.load("fashion-mnist")


def test_unknown_names_and_folders(tmp_path):
    for function in (data.info, data.load, data.prepare):
        with pytest.raises(ValueError, match="'mnist'") as refused:
            function("mnist")
        assert all(name in str(refused.value) for name in data.NAMES)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file"):
        data.prepare("digits", tmp_path / "file")
    with pytest.warns(UserWarning, match="does not exist"):
        data.prepare("digits", tmp_path / "nowhere")


def test_the_table_of_digits_is_whole():
    images, labels = data.load_digits()
    assert images.shape == (1797, 64)
    assert images.dtype == torch.float32
    assert labels[:12].tolist() == [*range(10), 0, 1]
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (16 * images).sum() == 561_718, "of pixels from 0 to 16"
    assert (16 * images[0, :8]).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_digits_are_split_and_normalised_by_the_training_part():
    digits, again = data.load("digits"), data.load("digits")
    assert digits.info == data.info("digits")
    assert abs(float(digits.train.x.mean())) < 1e-5
    assert abs(float(digits.train.x.std()) - 1) < 1e-3
    assert torch.equal(digits.test.x, again.test.x)
    both = torch.cat([digits.train.x, digits.test.x]).flatten(1)
    assert len(both.unique(dim=0)) == len(both) == 1797
    counts = torch.bincount(digits.test.labels), torch.bincount(digits.train.labels)
    expected = (counts[0] + counts[1]) * 360 / 1797
    assert ((counts[0] - expected).abs() < 1).all(), "every class has its share in the test part"


@needs("fashion-mnist")
def test_fashion_mnist(monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(SHARED))
    fashion = data.load("fashion-mnist")
    assert fashion.info == data.info("fashion-mnist")
    assert np.bincount(fashion.train.y.numpy()).tolist() == [6000] * 10
    x, _ = fashion.train.batch(torch.arange(60_000))
    assert abs(float(x.double().mean())) < 1e-6
    assert abs(float(x.double().std()) - 1) < 1e-6


def test_a_damaged_file_of_fashion_mnist_is_named_before_training(tmp_path):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name in _fashion_mnist.DIGESTS:
        (folder / name).write_bytes(b"?")
    with pytest.raises(ValueError, match=r"train-images.*delete it to fetch it anew"):
        data.prepare("fashion-mnist", tmp_path)


@needs("tinyshakespeare")
def test_shakespeare_reads_on_from_training_to_test(monkeypatch):
    plays = data.load("shakespeare")
    assert plays.info == data.info("shakespeare")
    x, y = plays.train.batch(torch.tensor([0, 7841]))
    assert x.shape == y.shape == (2, 128)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    letters = sorted(set((SHARED / "tinyshakespeare" / "input.txt").read_text()))
    assert "".join(letters[number] for number in x[0, :14]) == "First Citizen:"
    assert len(letters) == plays.info.num_classes


@pytest.fixture
def batches(cache, monkeypatch):
    """The content of six small binary files of CIFAR-10."""
    monkeypatch.setattr(_cifar10, "_RECORDS", RECORDS)
    small = data.DatasetInfo(
        name="cifar10",
        input_shape=(3, 32, 32),
        num_classes=10,
        train_samples=5 * RECORDS,
        test_samples=RECORDS,
    )
    monkeypatch.setattr(_cifar10, "INFO", small)
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
def test_cifar10_reads_label_then_red_green_blue(batches, tmp_path, inner):
    put(batches, tmp_path / "cifar10" / inner)
    cifar = data.load("cifar10", tmp_path)
    third = batches["data_batch_3.bin"]
    assert cifar.train.labels[2 * RECORDS : 3 * RECORDS].tolist() == third[:, 0].tolist()
    red_green_blue = torch.from_numpy(third[1, 1:].reshape(3, 32, 32))
    assert torch.equal(cifar.train.x[2 * RECORDS + 1], red_green_blue)
    assert cifar.test.labels.tolist() == batches["test_batch.bin"][:, 0].tolist()
    # Training is augmented, and testing is not.
    indices = torch.arange(RECORDS)
    plain, _ = cifar.train.batch(indices)
    assert not torch.equal(plain, cifar.train.batch(indices, augment=(0, 0))[0])
    test, _ = cifar.test.batch(indices)
    assert torch.equal(test, cifar.test.batch(indices, augment=(0, 0))[0])
    whole, _ = cifar.train.batch(torch.arange(len(cifar.train)))
    assert abs(float(whole.mean())) < 1e-6


def test_cifar10_is_fetched_and_unpacked(archive, cache, monkeypatch):
    with served({f"/{ARCHIVE}": archive}) as site:
        monkeypatch.setattr(_cifar10, "ADDRESS", site.address)
        for _ in range(2):
            assert len(data.load("cifar10").train) == 5 * RECORDS
        assert len(site.requests) == 1
    assert names(cache / "cifar10") == {ARCHIVE, *_cifar10.MD5}


def test_an_archive_of_cifar10_in_the_folder_is_unpacked(archive, batches, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / ARCHIVE).write_bytes(archive[:-1])
    with pytest.raises(ValueError, match=rf"{ARCHIVE} .*delete it"):
        data.prepare("cifar10", tmp_path)
    (tmp_path / "cifar10" / ARCHIVE).write_bytes(archive)
    data.prepare("cifar10", tmp_path)
    for name, content in batches.items():
        assert (tmp_path / "cifar10" / name).read_bytes() == content.tobytes()


def test_a_full_disk_unpacks_nothing_of_cifar10(archive, tmp_path, monkeypatch):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / ARCHIVE).write_bytes(archive)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(GossipError, match=r"No space left on device.*by hand"):
        data.prepare("cifar10", tmp_path)
    assert names(tmp_path / "cifar10") == {ARCHIVE}


@pytest.mark.parametrize("content", [b"short", bytes(RECORDS * 3073)])
def test_damaged_files_of_cifar10_are_named_before_training(batches, tmp_path, content):
    put(batches, tmp_path / "cifar10")
    (tmp_path / "cifar10" / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"data_batch_2\.bin .*delete"):
        data.prepare("cifar10", tmp_path)


@needs("cifar10-small")
def test_cifar10_small_is_decoded_once(cache, monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(SHARED))
    small = data.load("cifar10-small")
    assert small.info == data.info("cifar10-small")
    assert np.bincount(small.train.labels).tolist() == [1000] * 10
    assert np.bincount(small.test.labels).tolist() == [200] * 10
    whole, _ = small.train.batch(torch.arange(10_000))
    torch.testing.assert_close(whole.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    decoded = list((cache / "cifar10-small").glob("*.npy"))
    written = [path.stat().st_mtime_ns for path in decoded]
    again = data.load("cifar10-small")
    assert torch.equal(small.train.x, again.train.x)
    assert [path.stat().st_mtime_ns for path in decoded] == written
    for path in decoded:  # what is damaged is decoded anew
        path.write_bytes(b"")
    assert torch.equal(data.load("cifar10-small").train.x, small.train.x)


@needs("cifar10-small")
def test_cifar10_small_does_without_a_cache(cache, monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(SHARED))
    cache.parent.mkdir()
    cache.write_text("no folder")
    assert len(data.load("cifar10-small").train) == 10_000


def test_cifar10_small_that_is_wrong_or_missing_names_the_ways_out(cache, tmp_path):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"--data-dir or GOSSIPGRAD_DATA.*'cifar10'"):
            data.load("cifar10-small", tmp_path)
        (tmp_path / "cifar10-small").mkdir(exist_ok=True)
        for name in _cifar10_small.DIGESTS:
            (tmp_path / "cifar10-small" / name).write_bytes(b"wrong")


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return b"\0\0\x08" + bytes([array.ndim]) + sizes + array.tobytes()


def test_idx_gives_back_what_was_written_however_it_is_packed(tmp_path):
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    digest = hashlib.sha256(idx(pixels)).hexdigest()
    path = tmp_path / "a.gz"
    for level in (1, 9):
        path.write_bytes(gzip.compress(idx(pixels), compresslevel=level))
        np.testing.assert_array_equal(data.read_idx(path, sha256=digest), pixels)
    with pytest.raises(ValueError, match=r"a\.gz .*delete it"):
        data.read_idx(path, sha256="00")


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"x" * 1000, mtime=0)[:-20],
        gzip.compress(b"\x89PNG.....", mtime=0),
        gzip.compress(b"\0\0\x0d\x01\0\0\0\x01....", mtime=0),
        gzip.compress(b"\0\0\x08\x03\0\0", mtime=0),
        gzip.compress(idx(np.zeros((2, 2), dtype=np.uint8)) + b"!", mtime=0),
    ],
)
def test_what_is_no_idx_file_is_named(tmp_path, content):
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.gz"):
        data.read_idx(path)
