"""`--source` that cannot be decoded or has the name of another, and texts that would be written over labels."""

import shutil

import pytest
from known_images import SQUARE, KnowingModel, damaged_png, export_answers, write_set

import val_trt
from utils.core.errors import InputError
from utils.evaluation.coco import TextWriter
from utils.evaluation.images import target_names

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = tmp_path_factory.mktemp("network")
    model = KnowingModel(write_set(folder, 4, SQUARE), ("cat", "dog", "owl"), 64)
    return export_answers(model, folder / "a.onnx", 1, 64)


def test_files_whose_drawings_have_one_name():
    names = target_names(["in/a.jpg", "in/a.JPG", "in/a.png", "in/A.png", "in/a.mpo", "in/a-2.png"])
    assert len({name.casefold() for name in names}) == 6
    assert names[0] == "a.jpg"


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.mp4", b"none"), ("a.avi", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom\0\0\0\x08mdat"), ("a.png", b""),
     ("a.png", damaged_png())],
)  # fmt: skip
def test_a_source_that_cannot_be_decoded_leaves_nothing(network, tmp_path, capfd, name, content):
    def draw(*sources):
        words = ["--engine-file", network, "--project", tmp_path / "made/runs", "--device", "cpu", "--source", *sources]
        return val_trt.main([str(word) for word in words]), capfd.readouterr().err

    (tmp_path / name).write_bytes(content)
    assert draw(tmp_path / name) == (2, f"error: {tmp_path / name} cannot be decoded\n")
    code, err = draw(tmp_path / name, shutil.copy(tmp_path / name, tmp_path / f"b{name}"))
    said = f"none of 2 files can be read; the first: {tmp_path / name} cannot be decoded\n"
    assert (code, err.split("error: ")[1]) == (2, said)
    assert not list((tmp_path / "made/runs").iterdir())


def test_texts_of_images_of_one_stem_go_to_files_of_their_own_and_never_over_labels(tmp_path):
    paths = [str(tmp_path / name) for name in ("x/a.jpg", "y/a.jpg", "y/A.png")]
    writer = TextWriter(tmp_path / "labels", False, paths)
    for path in paths:
        writer.add(path, [[0.0, 0, 10, 10, 0.5, 1]], (100, 100))
    assert sorted(path.name for path in (tmp_path / "labels").iterdir()) == ["A-3.txt", "a-2.txt", "a.txt"]
    for image in ("images/a.jpg", "labels/a.jpg"):
        with pytest.raises(InputError, match="would be overwritten"):
            TextWriter(tmp_path / "labels", False, [str(tmp_path / image)])
