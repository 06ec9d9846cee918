"""data.yaml, letterboxing, the loader (batches, order, processes that read ahead)."""

import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
import yaml
from known_images import MIXED, write_set

from utils.core.errors import DataError
from utils.evaluation.batch import RaggedBatch
from utils.evaluation.data_yaml import check_classes, load_data
from utils.evaluation.dataset import ImageDataset, loading_processes, make_loader
from utils.evaluation.image_files import find_images
from utils.evaluation.letterbox import Letterbox, boxes_to_image, letterboxed_planes, rectangular_shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("set")
    write_set(path, 20, splits=("train", "val"))
    return path


@pytest.fixture(scope="module")
def data(folder):
    return load_data(folder / "data.yaml")


def test_a_ragged_batch_is_a_sequence_of_the_rows_of_each_image():
    parts = [torch.rand(3, 2), torch.rand(0, 2), torch.rand(1, 2)]
    found = RaggedBatch.of(parts)
    assert (len(found), found.counts, found.flat.shape) == (3, [3, 0, 1], (4, 2))
    assert all(map(torch.equal, found, parts))
    assert torch.equal(found[-1], parts[2])
    assert found.owners().tolist() == [0, 0, 0, 2]
    with pytest.raises(IndexError):
        found[3]


def test_items(data):
    dataset = ImageDataset(data.read("val"), 64, single_cls=True)
    image, path, letterbox, labels, masks = dataset[0]
    assert masks is None
    entry = cv2.imread(path)[:, :, ::-1]
    np.testing.assert_array_equal(image.permute(1, 2, 0), entry)  # 64×64 needs no resizing
    assert (labels[:, 0] == 0).all()  # single class
    cx, cy, w, h = dataset.images[0].labels.rows[:, 1:].T * 64
    np.testing.assert_allclose(labels[:, 1:], np.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], 1), atol=1e-4)
    assert letterbox.original == (64, 64)


@pytest.mark.parametrize("batch_size", [1, 8, 50])
@pytest.mark.parametrize("rect", [True, False])
def test_every_image_comes_once_and_batches_have_one_shape(folder, data, batch_size, rect):
    seen = []
    for batch in make_loader(data, "val", imgsz=64, batch_size=batch_size, workers=0, rect=rect):
        assert len(batch) == len(batch.images) == len(batch.letterboxes) == len(batch.labels) <= batch_size
        seen += batch.paths
    assert sorted(seen) == sorted(str(path) for path in (folder / "images/val").iterdir())


def test_shuffling_is_fixed_by_the_seed(data):
    def order(seed, state, **how):
        random.seed(state)
        torch.manual_seed(state)
        loader = make_loader(data, "train", imgsz=64, workers=0, shuffle=True, seed=seed, **{"batch_size": 3, **how})
        return [path for batch in loader for path in batch.paths]

    assert order(1, 0) == order(1, 99) == order(1, 0, batch_size=7)  # calibration's images
    assert order(1, 0, first=8) == order(1, 0)[:8]
    assert order(1, 0) != order(2, 0)
    assert sorted(order(1, 0)) == sorted(order(2, 0))


@pytest.mark.parametrize(("free", "workers"), [(1e12, 2), (0, 0)])
def test_workers_give_the_same_batches(data, monkeypatch, free, workers):
    """Also where shared memory has no room for any."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    loaders = [make_loader(data, "val", imgsz=64, batch_size=8, workers=workers, rect=True) for workers in (0, 2)]
    assert [loader.num_workers for loader in loaders] == [0, min(workers, os.cpu_count())]
    for alone, helped in zip(*loaders, strict=True):
        torch.testing.assert_close(alone.images, helped.images)
        torch.testing.assert_close(alone.labels.flat, helped.labels.flat)
        assert (alone.paths, alone.letterboxes) == (helped.paths, helped.letterboxes)


@pytest.mark.parametrize(("free", "workers"), [(0, 0), (64, 0), (500, 4), (24_000, 8)])
def test_as_many_processes_read_as_their_batches_have_room(monkeypatch, caplog, free, workers):
    batch = 32 * 3 * 640 * 640  # bytes
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free * 1_000_000))
    assert loading_processes(8, batch) == workers
    assert not workers or (2 * workers + 2) * batch <= 0.8e6 * free
    assert len(caplog.records) == (workers < 8)
    assert loading_processes(0, batch) == 0


def test_limit_takes_images_evenly_spread(data):
    assert [Path(image.path).stem[-2:] for image in data.read("val", 3).images] == ["01", "10", "20"]
    assert len(data.read("val", 99).images) == 20


def test_keep_takes_only_the_images_that_it_holds_for(folder, data):
    kept = find_images([str(folder / "images/val")])[1::3]
    loader = make_loader(data, "val", imgsz=64, batch_size=3, workers=0, shuffle=True, keep=kept.__contains__)
    assert sorted(path for batch in loader for path in batch.paths) == kept
    with pytest.raises(DataError, match="'val'"):
        make_loader(data, "val", imgsz=64, batch_size=3, keep=lambda _: False)


# data.yaml


def write_yaml(file, **content):
    file.write_text(yaml.safe_dump(content))
    return file


def test_data_yaml(folder, tmp_path):
    data = load_data(folder / "data.yaml")
    assert (data.names, data.nc, data.is_coco) == ({0: "cat", 1: "dog", 2: "owl"}, 3, False)
    assert data.splits["val"] == (str(folder / "images/val"),)
    assert data.annotations_of("val") == folder / "annotations/instances_val.json"
    assert data.annotations_of("test") is None
    content = yaml.safe_load((folder / "data.yaml").read_text()) | {"path": str(folder)}
    data = load_data(write_yaml(tmp_path / "data.yaml", **content | {"train": ["images/val", "images/train2017"]}))
    with pytest.raises(DataError, match=f"train images 'images/train2017' not found in {folder}; correct 'path:' or"):
        data.paths("train")
    with pytest.raises(DataError, match=r"has no 'test:' entry; it has val"):
        data.paths("test")


@pytest.mark.parametrize("root", [None, ".", "..", "elsewhere"])
def test_root_is_found_beside_the_yaml_or_in_the_working_folder(tmp_path, monkeypatch, root):
    """Upstream counts a relative `path:` from the checkout, which here is tried first, then these two."""
    base = {"..": tmp_path, "elsewhere": tmp_path / "work" / "elsewhere"}.get(root, tmp_path / "yamls")
    for each in (tmp_path / "yamls", base / "images" / "a", tmp_path / "work"):
        each.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    content = {"path": root} if root else {}
    file = write_yaml(tmp_path / "yamls" / "d.yaml", train="../images/a", val=["images/a"], names=["x"], **content)
    assert load_data(file).splits == {split: (str(base / "images/a"),) for split in ("train", "val")}


@pytest.mark.parametrize(
    ("path", "entry", "expected"),
    [
        (None, "images/val", "yamls"),
        (None, "../images/val", "parent"),  # as it is written before as upstream searches
        ("", "images/val", "yamls"),
        (".", "images/val", "work"),  # the working folder comes before that of the YAML, as written for upstream
        ("absolute", "images/val", "elsewhere"),
    ],
)
def test_the_folder_of_the_yaml_comes_first_and_a_choice_is_said(tmp_path, monkeypatch, caplog, path, entry, expected):
    roots = {"yamls": tmp_path / "set/yamls", "parent": tmp_path / "set", "work": tmp_path / "work"}
    roots["elsewhere"] = tmp_path / "elsewhere"
    for name, root in roots.items():
        (root / "images/val").mkdir(parents=True)
        cv2.imwrite(str(root / f"images/val/{name}.png"), np.zeros((20, 20, 3), np.uint8))
    monkeypatch.chdir(roots["work"])
    content = {} if path is None else {"path": str(roots["elsewhere"]) if path == "absolute" else path}
    file = write_yaml(roots["yamls"] / "d.yaml", val=entry, names=["x"], **content)
    with caplog.at_level("WARNING"):
        data = load_data(file)
    assert data.splits["val"] == (str(roots[expected] / "images/val"),)
    taken = [message for message in caplog.messages if str(roots[expected] / "images/val") in message]
    assert len(taken) == (path != "absolute")


def test_one_candidate_is_not_worth_a_line(folder, monkeypatch, caplog):
    monkeypatch.chdir(folder)
    write_yaml(folder / "beside.yaml", val="images/val", names=["a", "b", "c"])
    assert load_data("beside.yaml").splits["val"] == (str(folder / "images/val"),)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("names: [0, 1.5, yes]\nnc: 3", ["0", "1.5", "True"]),
        ("names: {1: b, 0: a}\nnc: 2.0", ["a", "b"]),
        ("names: [a, b]\nnc: '2'", ["a", "b"]),
        ("names: [a]\npath:\ntrain:\ntest: ''", ["a"]),  # empty entries are none
        ("names: [a]\nnc: 1\nroboflow: {version: 1}\ndownload: |\n  import os\nminival: x", ["a"]),
    ],
)
def test_the_forms_that_users_have(folder, tmp_path, text, names):
    file = tmp_path / "data.yaml"
    file.write_text(f"{text}\nval: {folder}/images/val\n")
    data = load_data(file)
    assert list(data.names.items()) == list(enumerate(names))
    assert list(data.splits) == ["val"]


BAD_YAML = {  # content → what the message names beside the file
    None: "",
    "names: [a": "",
    "val: .": "names",
    "val: .\nnames: []": "names",
    "val: .\nnames: {a: b}": "names",
    "val: .\nnames: {1: a, 2: b}": "label files",
    "val: .\nnames: {1: a, 3: b}": "names",
    "val: .\nnames: [a, null]": "names",
    "val: .\nnc: 3\nnames: [a, b]": "nc",
    "val: .\nnc: '3'\nnames: [a, b]": "nc",
    "val: .\nnc: many\nnames: [a]": "nc",
    "val: .\nnc: true\nnames: [a]": "nc",
    "val: nowhere\nnames: [a]": "val",
    "val: 3\nnames: [a]": "val",
    "val: .\npath: 3\nnames: [a]": "path",
}


def test_a_set_may_have_a_test_split_alone(folder, tmp_path):
    (tmp_path / "data.yaml").write_text(f"names: [a, b, c]\ntest: {folder}/images/val\n")
    data = load_data(tmp_path / "data.yaml")
    assert len(data.read("test").images) == 20
    with pytest.raises(DataError, match="has no 'val:' entry; it has test"):
        data.read("val")


@pytest.mark.parametrize(
    ("names", "problem"),
    [(["cat", "owl", "dog"], "in another order: class 1 is 'dog' there and 'owl' in the model"),
     (["cat", "dog"], "model.pt detects 2 classes ['cat', 'dog'], and ")],
)  # fmt: skip
def test_other_classes_are_refused(data, names, problem):
    with pytest.raises(DataError, match=re.escape(problem)):
        check_classes(dict(enumerate(names)), data, "model.pt")


def test_other_names_of_as_many_classes_are_a_warning(data, caplog):
    assert check_classes(dict(data.names), data, "model.pt")
    assert caplog.messages == []
    assert not check_classes({0: "person", 1: "dog", 2: "owl"}, data, "model.pt")
    assert "classes are matched by number" in caplog.text


@pytest.mark.parametrize("content", BAD_YAML, ids=lambda content: str(content)[-40:].replace("\n", " "))
def test_a_bad_yaml_says_what_is_wrong(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "data.yaml"
    if content:
        file.write_text(content)
    with pytest.raises(DataError) as caught:
        load_data(file)
    assert str(caught.value).startswith(str(file))
    assert BAD_YAML[content] in str(caught.value).removeprefix(str(file))


# letterboxing, and boxes on the way there and back


@pytest.mark.parametrize("size", [*MIXED, (640, 427), (333, 500)])
def test_letterbox_centres_the_image_on_grey(size):
    image = np.full((size[1], size[0], 3), 255, np.uint8)
    planes, box = letterboxed_planes(image, (64, 64), (96, 64))
    assert planes.shape == (3, 96, 64)
    assert planes.flags.c_contiguous
    rows, columns = np.where((planes != 114).all(0))
    assert (rows.max() - rows.min() + 1, columns.max() - columns.min() + 1) == box.resized
    assert (columns.min(), rows.min()) == tuple(np.ceil(np.array(box.pad) - 0.5))  # halves further left and up
    assert max(box.resized) == pytest.approx(64, abs=1)


def test_letterbox_keeps_the_pixels_of_a_image_that_fits():
    image = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    planes, box = letterboxed_planes(image, (64, 64), (64, 64))
    np.testing.assert_array_equal(planes[:, 8:56], image[..., ::-1].transpose(2, 0, 1))
    assert box == Letterbox((48, 64), (48, 64), (0.0, 8.0))


def test_letterbox_into_a_rectangle_that_the_network_prescribes():
    """A static 32×64 input: the height decides for this image, and not the longer side."""
    box = Letterbox.of((50, 62), (32, 64), (32, 64))
    assert box == Letterbox((50, 62), (32, 39), (12.5, 0.0))  # 39.68, truncated
    assert box.ratio == (0.64, 39 / 62)
    assert Letterbox.of((2, 4000), (64, 64), (64, 64)).resized == (1, 64)


def test_boxes_to_the_image_by_hand():
    """Two images of other ratios for height and width; what lies outside of an image is clipped."""
    boxes = torch.tensor([[-5.0, 0, 50, 100], [7, 16, 23, 32], [4, 8, 5, 10]])
    letterboxes = [Letterbox((20, 40), (20, 40), (0.0, 10.0)), Letterbox((10, 20), (20, 60), (2.0, 6.0))]
    found = boxes_to_image(boxes, torch.tensor([0, 0, 1]), letterboxes)
    np.testing.assert_allclose(found, [[0, 0, 40, 20], [7, 6, 23, 20], [2 / 3, 1, 1, 2]], rtol=1e-6)


def test_rectangular_shapes_are_the_smallest_that_hold_the_group():
    """With half a stride of 32 as a border."""
    assert rectangular_shapes([(640, 480)] * 3, 640, 32) == [(512, 672)] * 3
    assert rectangular_shapes([(100, 50), (50, 100)], 64, 32) == [(96, 96)] * 2  # wide and tall in one group
    wide, tall = [(100, 50)] * 32, [(50, 100)] * 32
    assert rectangular_shapes(tall + wide, 64, 32) == [(96, 64)] * 32 + [(64, 96)] * 32
    for (width, height), shape in zip(MIXED, rectangular_shapes(MIXED, 64, 32), strict=True):
        assert shape[0] >= int(height * 64 / max(width, height))
        assert shape[1] >= int(width * 64 / max(width, height))
