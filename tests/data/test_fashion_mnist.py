import gzip
import hashlib
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from gossipgrad import data
from gossipgrad.data import _fashion_mnist
from gossipgrad.data._fashion_mnist import find_fashion_mnist
from gossipgrad.errors import GossipError

REPOSITORY = Path(__file__).parents[2]
SHARED = Path(os.environ.get("GOSSIPGRAD_DATA", REPOSITORY.parent / "shared" / "data"))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Four small files behind a local server, their digests in place of the real ones."""
    folder = tmp_path / "site"
    folder.mkdir()
    digests = {}
    for name in _fashion_mnist.DIGESTS:
        content = b"\0\0\x08\x01\0\0\0\x04" + name[:4].encode()
        (folder / name).write_bytes(gzip.compress(content))
        digests[name] = hashlib.sha256(content).hexdigest()
    monkeypatch.setattr(_fashion_mnist, "DIGESTS", digests)
    monkeypatch.delenv("GOSSIPGRAD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_fetches_into_the_cache_once(site, tmp_path):
    folder, address = site
    cached = find_fashion_mnist(address=address)
    assert cached == tmp_path / "cache" / "gossipgrad" / "fashion-mnist"
    assert names(cached) == names(folder)
    for file in folder.iterdir():
        file.unlink()
    assert find_fashion_mnist(address=address) == cached


def test_fetches_into_the_folder_that_was_named(site, tmp_path):
    _, address = site
    assert find_fashion_mnist(tmp_path / "d", address=address) == tmp_path / "d/fashion-mnist"


def test_shared_folder_comes_before_the_cache(site, tmp_path, monkeypatch):
    _, address = site
    shared = find_fashion_mnist(tmp_path / "shared", address=address)
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(tmp_path / "shared"))
    assert find_fashion_mnist(address="http://127.0.0.1:9") == shared


def test_wrong_content_is_refused_and_leaves_nothing(site, tmp_path):
    folder, address = site
    wrong = folder / "t10k-images-idx3-ubyte.gz"
    wrong.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x01?"))
    with pytest.raises(GossipError, match=r"t10k-images.* did not serve the expected file.*SHA"):
        find_fashion_mnist(tmp_path / "d", address=address)
    assert names(tmp_path / "d/fashion-mnist") == names(folder) & {
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte.gz",
    }


def test_missing_file_names_the_address_and_the_way_out(site, tmp_path):
    folder, address = site
    (folder / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(
        GossipError, match=r"could not fetch http://127.*404.*put the four files .*--data-dir"
    ):
        find_fashion_mnist(tmp_path / "d", address=address)
    assert names(tmp_path / "d/fashion-mnist") == set()


def test_preparing_finds_a_damaged_file_before_anyone_loads_it(site, tmp_path):
    _, address = site
    folder = find_fashion_mnist(tmp_path, address=address)
    data.prepare("fashion-mnist", tmp_path)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"?")
    with pytest.raises(ValueError, match=r"t10k-labels.*is damaged .*delete it to fetch it anew"):
        data.prepare("fashion-mnist", tmp_path)


@pytest.mark.skipif(not (SHARED / "fashion-mnist").is_dir(), reason="data set not on this machine")
def test_loads_what_info_says(monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(SHARED))
    fashion = data.load("fashion-mnist")
    assert fashion.info == data.info("fashion-mnist")
    assert np.bincount(fashion.train.y.numpy()).tolist() == [6000] * 10
    x, _ = fashion.train.batch(torch.arange(60_000))
    assert abs(float(x.double().mean())) < 1e-6
    assert abs(float(x.double().std()) - 1) < 1e-6
