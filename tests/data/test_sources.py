"""Data sets by name: found, fetched, checked and loaded. Private modules: addresses, digests."""

import gzip
import hashlib
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from gossipgrad import data
from gossipgrad.data import _fashion_mnist
from gossipgrad.errors import GossipError

SHARED = Path(os.environ["GOSSIPGRAD_DATA"])
NAMES = tuple(_fashion_mnist.DIGESTS)


def needs(folder):
    reason = "data set not on this machine"
    return pytest.mark.skipif(not (SHARED / folder).is_dir(), reason=reason)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and no other folder of data sets."""
    monkeypatch.delenv("GOSSIPGRAD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gossipgrad"


class Site(SimpleHTTPRequestHandler):
    """Serves files, the first so many bytes of each."""

    def do_GET(self):
        site = self.server
        site.requests.append(self.path)
        content = site.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: site.cut])

    def log_message(self, *_):
        pass


@pytest.fixture
def site(cache, monkeypatch):
    """Four small files in place of those of Fashion-MNIST, and a server of them."""
    contents = {name: idx(np.full((2, 3), number, np.uint8)) for number, name in enumerate(NAMES)}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(_fashion_mnist, "DIGESTS", digests)
    files = {f"/{name}": gzip.compress(content) for name, content in contents.items()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads = False  # `server_close` waits for them
    server.files, server.cut, server.requests = files, None, []
    server.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(_fashion_mnist, "ADDRESS", server.address)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def find(data_dir=None):
    return _fashion_mnist.find_fashion_mnist(data_dir)


def names(folder):
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_missing_files_are_fetched_once_into_the_cache(site, cache, tmp_path, monkeypatch):
    assert find() == find() == cache / "fashion-mnist"
    assert names(cache / "fashion-mnist") == {*NAMES}
    assert len(site.requests) == 4
    # A folder that is named comes first, then the shared one.
    shutil.copytree(cache, tmp_path / "shared")
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(tmp_path / "shared"))
    assert find() == tmp_path / "shared" / "fashion-mnist"
    shutil.copytree(cache, tmp_path / "named")
    assert find(tmp_path / "named") == tmp_path / "named" / "fashion-mnist"


@pytest.mark.parametrize("damage", ["wrong", "cut", "missing"])
def test_what_cannot_be_fetched_right_leaves_nothing(site, cache, damage):
    files = dict(site.files)
    if damage == "wrong":
        site.files[f"/{NAMES[0]}"] = gzip.compress(b"To bo")
    elif damage == "missing":
        site.files.clear()
    else:
        site.cut = 3
    with pytest.raises(GossipError, match=r"--data-dir or GOSSIPGRAD_DATA") as refused:
        find()
    assert site.address in str(refused.value)
    assert names(cache / "fashion-mnist") == set()
    site.files, site.cut = files, None
    assert names(find()) == {*NAMES}


def test_a_file_that_is_not_there_leaves_no_connection_open(site, cache):
    site.files.clear()
    with pytest.raises(GossipError) as refused:
        find()
    assert refused.value.__cause__.closed, "the answer of the server"


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


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return b"\0\0\x08" + bytes([array.ndim]) + sizes + array.tobytes()


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
