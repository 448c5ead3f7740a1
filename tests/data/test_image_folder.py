import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from gossipgrad import data
from gossipgrad.data import Samples, _image_ends, image_folder
from gossipgrad.data._image_files import read_cropped, training_box


def photograph(path, *, width=50, height=40, seed=0):
    """Smooth noise, so that JPEG keeps it and crops can be told apart."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=95)


@pytest.fixture
def root(tmp_path):
    """Two classes with three and two training images, and one each to test."""
    folder = tmp_path / "imagefolder"
    names = ["train/cat/b.jpg", "train/cat/a.JPEG", "train/cat/c.jpeg", "train/ant/z.jpg"]
    names += ["train/ant/y.jpg", "val/ant/v.jpg", "val/cat/v.jpg"]
    for seed, name in enumerate(names):
        photograph(folder / name, seed=seed, width=50 + 10 * seed)
    return folder


def test_classes_and_files_are_numbered_by_name(root):
    (root / "train/cat/notes.txt").write_text("no image")
    images = image_folder(root, image_size=32)
    assert [images.train.path(index).relative_to(root).as_posix() for index in range(5)] == [
        "train/ant/y.jpg",
        "train/ant/z.jpg",
        "train/cat/a.JPEG",
        "train/cat/b.jpg",
        "train/cat/c.jpeg",
    ]
    assert images.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert images.test.labels.tolist() == [0, 1]
    assert images.info.num_classes == 2
    assert images.info.input_shape == (3, 32, 32)
    assert isinstance(images.train, Samples)


def test_registry_finds_it_under_the_folder_or_as_the_folder(root, tmp_path):
    for folder in (tmp_path, root):
        assert data.info("imagefolder", folder).input_shape == (3, 224, 224)
        data.prepare("imagefolder", folder, image_size=32)
        images = data.load("imagefolder", folder, image_size=32)
        x, y = images.test.batch(torch.tensor([1, 0]))
        assert x.shape == (2, 3, 32, 32)
        assert y.tolist() == [1, 0]


def test_draw_depends_on_seed_epoch_and_index_alone(root):
    train = image_folder(root, image_size=32).train
    whole, _ = train.batch(torch.arange(5), augment=(0, 1))
    alone, _ = train.batch(torch.tensor([3]), augment=(0, 1))
    assert torch.equal(alone[0], whole[3])
    for other in ((0, 2), (1, 1), None):
        assert not torch.equal(train.batch(torch.tensor([3]), augment=other)[0][0], whole[3])
    assert torch.equal(*(train.batch(torch.arange(5))[0] for _ in range(2)))


def test_evaluation_takes_the_centre(tmp_path):
    pixels = np.zeros((80, 160, 3), dtype=np.uint8)
    pixels[:, 80:] = 255
    Image.fromarray(pixels).save(path := tmp_path / "half.png")
    cut = read_cropped(path, 56, None)
    # The height of 80 becomes 64; of that the middle 56 are taken: 70 pixels of the original.
    assert cut.shape == (3, 56, 56)
    assert not cut[:, :, :27].any()
    assert (cut[:, :, 29:] == 255).all()

    pixels[:6], pixels[-6:] = 128, 128  # what is cut off, 5 and one for the blur of scaling
    Image.fromarray(pixels).save(path)
    assert np.isin(read_cropped(path, 56, None)[:, 3:-3, :20], 0).all()


def test_training_boxes_fit_and_vary():
    rng = np.random.default_rng(0)
    boxes = [training_box(500, 375, rng) for _ in range(2000)]
    left, top, right, bottom = np.array(boxes).T
    assert left.min() >= 0
    assert top.min() >= 0
    assert right.max() <= 500
    assert bottom.max() <= 375
    areas = (right - left) * (bottom - top) / (500 * 375)
    ratios = (right - left) / (bottom - top)
    assert 0.075 < areas.min() < 0.1
    assert 0.9 < areas.max() <= 1
    assert 0.74 < ratios.min() < 0.76
    assert 1.32 < ratios.max() < 1.35
    assert len(set(boxes)) > 1990


@pytest.mark.parametrize(("width", "height"), [(1000, 4), (4, 1000), (1, 1)])
def test_box_of_a_narrow_image_is_its_centre(width, height):
    left, top, right, bottom = training_box(width, height, np.random.default_rng(0))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_half_of_the_training_images_are_mirrored(tmp_path):
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels += np.linspace(0, 255, 32, dtype=np.uint8)[None, :, None]
    Image.fromarray(pixels).save(path := tmp_path / "ramp.png")
    crops = [read_cropped(path, 8, np.random.default_rng(seed)).astype(int) for seed in range(200)]
    falling = sum(bool(crop[0, 0, 0] > crop[0, 0, -1]) for crop in crops)
    assert 70 < falling < 130


def test_grey_images_become_colour(tmp_path):
    Image.new("L", (40, 40), 200).save(path := tmp_path / "grey.jpg")
    assert (read_cropped(path, 32, None) == 200).all()


def remove(folder):
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def test_class_missing_in_a_part_is_named(root):
    remove(root / "val/cat")
    with pytest.raises(
        ValueError, match=r"val has no folder of class 'cat'; train and val need the same classes"
    ):
        image_folder(root)
    for name in ("cat", "dog", "emu"):
        photograph(root / "val" / name / "v.jpg")
    with pytest.raises(ValueError, match=r"train has no folder of class 'dog', and 1 more; train"):
        image_folder(root)


def test_empty_class_is_named(root):
    (root / "train/ant/z.jpg").unlink()
    (root / "train/ant/y.jpg").rename(root / "train/ant/y.png")
    with pytest.raises(
        ValueError, match=r"train/ant has no files that end in \.jpg or \.jpeg; put the images of"
    ):
        data.prepare("imagefolder", root)


def test_part_without_classes_is_named(root):
    for name in ("ant", "cat"):
        remove(root / "val" / name)
    photograph(root / "val" / "flat.jpg")
    with pytest.raises(ValueError, match=r"val has no folders; sort the images into a folder for"):
        image_folder(root)


def test_broken_image_is_named(root):
    broken = root / "train/ant/y.jpg"
    broken.write_bytes(broken.read_bytes()[:700])
    with pytest.raises(
        ValueError, match=r"train/ant/y\.jpg cannot be read as an image \(.*\); replace or delete"
    ):
        data.prepare("imagefolder", root)
    broken.write_bytes(b"no image at all")
    with pytest.raises(ValueError, match=r"y\.jpg cannot be read as an image \(.*\); replace or"):
        data.load("imagefolder", root).train.batch(torch.tensor([1, 0]), augment=(0, 0))


def test_files_that_were_cut_short_are_named_before_the_start(root):
    """Neither is the first of its part, which is decoded in any case."""
    cut = [root / "train/cat/b.jpg", root / "train/cat/c.jpeg"]
    cut[0].write_bytes(cut[0].read_bytes()[:-200])
    with pytest.raises(
        ValueError,
        match=r"train/cat/b\.jpg cannot be read as an image \(.*truncated.*\); replace or "
        r"delete it\.$",
    ):
        data.prepare("imagefolder", root, image_size=32)
    cut[1].write_bytes(cut[1].read_bytes()[:-200])
    with pytest.raises(
        ValueError,
        match=r"cat/b\.jpg cannot be .* delete it\. So are 1 more broken: \S+/train/cat/c\.jpeg$",
    ):
        data.prepare("imagefolder", root, image_size=32)
    for file in cut:
        photograph(file)
    file = root / "val/cat/v.jpg"
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"val/cat/v\.jpg cannot be read as an image"):
        data.prepare("imagefolder", root, image_size=32)


def test_only_files_without_an_end_are_decoded(root, monkeypatch):
    """A few bytes after the end are nothing; a file that only has an end far away is suspect."""
    trailing, far, other = (root / "train/cat" / name for name in ("a.JPEG", "b.jpg", "c.jpeg"))
    trailing.write_bytes(trailing.read_bytes() + bytes(16))
    far.write_bytes(far.read_bytes() + bytes(100))
    Image.new("RGB", (40, 40)).save(other, format="PNG")
    seen = []
    monkeypatch.setattr(_image_ends, "decoded", lambda path: seen.append(path.name))
    data.prepare("imagefolder", root, image_size=32)
    assert sorted(seen) == ["b.jpg", "c.jpeg"]
    monkeypatch.undo()
    data.prepare("imagefolder", root, image_size=32)


def test_many_files_are_looked_at_in_turn(root, monkeypatch):
    monkeypatch.setattr(_image_ends, "_THREADS", 2)
    monkeypatch.setattr(_image_ends, "_FILES_OF_A_THREAD", 3)
    files = [root / f"train/ant/{number:02}.jpg" for number in range(20)]
    for file in files:
        shutil.copy(root / "val/ant/v.jpg", file)
    data.prepare("imagefolder", root, image_size=32)
    for file in files[1:]:
        file.write_bytes(b"no image")
    with pytest.raises(
        ValueError,
        match=r"01\.jpg cannot be .* So are 18 more broken: (\S+0[234]\.jpg,? ){3}\.\.\.$",
    ):
        data.prepare("imagefolder", root, image_size=32)
    monkeypatch.setattr(_image_ends, "_MOST_BROKEN", 5)
    with pytest.raises(ValueError, match=r"So are at least 4 more broken:"):
        data.prepare("imagefolder", root, image_size=32)


def test_missing_folder_names_all_places_and_the_layout(monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_DATA", "/shared")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    with pytest.raises(
        ValueError,
        match=r"needs a folder with train/CLASS/\*\.jpg .*, and none of /shared/imagefolder, "
        r"/cache/gossipgrad/imagefolder has train and val; name it with --data-dir\.",
    ):
        data.prepare("imagefolder")


def test_images_elsewhere_do_not_stand_in_for_a_folder_that_was_named(root, tmp_path, monkeypatch):
    monkeypatch.setenv("GOSSIPGRAD_DATA", str(tmp_path))
    assert data.info("imagefolder").num_classes == 2
    named = tmp_path / "empty"
    with pytest.raises(ValueError, match=rf"none of {named}, {named}/imagefolder has train and"):
        data.info("imagefolder", named)


def test_size_of_images_is_for_image_folders(root):
    with pytest.raises(ValueError, match="image_size is 0, but must be at least 1"):
        image_folder(root, image_size=0)
    with pytest.raises(
        ValueError, match=r"image_size is 32, but data 'digits' has .* \(1, 8, 8\); leave it out"
    ):
        data.load("digits", image_size=32)


def test_what_is_no_image_is_left_out(root):
    cat = root / "train" / "cat"
    (root / "train" / ".hidden").mkdir()
    (cat / "._0.JPEG").write_bytes(b"x")
    (cat / "folder.jpg").mkdir()
    expected = image_folder(root).info
    (cat / "drawing.png").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"1 images in .*train are not used, like .*drawing\.png"):
        assert image_folder(root).info == expected


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_part_that_is_not_there_is_named(root, part):
    shutil.rmtree(root / part)
    with pytest.raises(ValueError, match=f"there is no folder .*{part}; images lie in its class"):
        image_folder(root)


def test_a_data_dir_that_is_not_there_is_told(tmp_path):
    with pytest.warns(UserWarning, match=r"data_dir=.*nope does not exist: digits is taken"):
        data.prepare("digits", tmp_path / "nope")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"data_dir is .*file, a file; name the folder"):
        data.prepare("digits", tmp_path / "file")
