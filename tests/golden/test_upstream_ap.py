"""AP of the demo models is what upstream's own val.py and segment/val.py give on the same images."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from utils import upstream
from utils.evaluation.config import EvalConfig
from utils.evaluation.confusion import ConfusionMatrix
from utils.evaluation.data_yaml import DataConfig, load_data
from utils.evaluation.image_files import find_images
from utils.evaluation.labels import label_file
from utils.evaluation.loop import evaluate
from utils.runners.pytorch import TorchRunner
from utils.upstream.checkout import import_upstream


def network(weights: Path) -> Any:
    return upstream.call_fused(upstream.fuse(upstream.load_float(weights).model))


def of_upstream(program: Any, create_dataloader: Any, model: Any, data: Any, rect: bool, **more: Any) -> list[float]:
    """Precision, recall, AP50 and AP of boxes, and of masks."""
    (path,) = data.paths("val")
    content = {"nc": data.nc, "names": dict(data.names), "val": path, "path": str(data.root)}
    loader = create_dataloader([path], 320, 32, 32, False, pad=0.5, rect=rect, workers=0)[0]
    with torch.inference_mode():
        found = program.run(content, model=model, dataloader=loader, batch_size=32, imgsz=320, plots=False, **more)[0]
    return list(found)[:8]


CLIPPED = "3 1.005 0.5 0.1 0.2"
LEAVES_OUT = (
    *("1 0.5 0.5 0.1 0.1 0.93", "-1 0.5 0.5 0.1 0.1", "2 1.3 0.5 0.1 0.1", "2 0.5 0.5 0.1", "cat 0.5 0.5 0.1 0.1"),
    *("3 0.5 0.5 -0.1 0.1", "nan 0.5 0.5 0.1 0.1", " \n4 0.5 0.5 0.1 0.1", "1 0.1 0.1 1.3 0.1 1.3 0.9 2 1"),
)
KEEPS = ("2 0.99 0.5 0.4 0.3", "5 0.2 0.2 0.3 0.3\n5 0.2 0.2 0.3 0.3", "\n\n")


def odd_set(demo_data: Path, folder: Path, for_upstream: bool) -> DataConfig:
    """Images of the demo set in all ways that are wrong or rare.

    Args:
        for_upstream: write those labels plainly that only our reader takes, and upstream's leaves out.
    """
    demo = load_data(demo_data)
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    sources = find_images(demo.paths("val"))[::5][:64]
    images = [Path(shutil.copy(file, folder / "images")) for file in sources]
    labels = [Path(shutil.copy(label_file(file), folder / "labels")) for file in sources]
    for number, (image, orientation) in enumerate(zip(images[:24], [1, 3, 6, 8] * 6, strict=True)):
        shown = Image.open(image).resize([(320, 200), (180, 320), (320, 260)][number % 3])
        exif = Image.Exif()
        exif[0x0112] = orientation
        turned = {1: 0, 3: 180, 6: 90, 8: 270}[orientation]
        shown.rotate(turned, expand=True).save(image, quality=98, exif=exif)
    for label, line in zip(labels, [*LEAVES_OUT, *KEEPS], strict=False):
        label.write_text(f"{label.read_text()}{line}\n")
    for label, encoding in zip(labels[14:18], ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"), strict=True):
        label.write_bytes(label.read_text().encode("utf-8" if for_upstream else encoding))
    labels[18].write_text(labels[18].read_text() + ("3 0.9775 0.5 0.045 0.2" if for_upstream else CLIPPED))
    labels[19].write_text("")
    labels[20].unlink()
    labels[21].unlink()
    corners = "{0} {1} {2} {3} {2} {3} {4} {1} {4}".format
    boxes = [[float(word) for word in line.split()] for line in labels[22].read_text().splitlines()]
    polygons = (corners(int(c), x - w / 2, y - h / 2, x + w / 2, y + h / 2) for c, x, y, w, h in boxes)
    labels[22].write_text("\n".join(polygons))
    images[30].write_bytes(images[30].read_bytes()[:-2])
    images[31].write_bytes(images[31].read_bytes()[:-999])
    Image.open(images[32]).save(images[32], "GIF")
    Image.open(images[33]).resize((9, 40)).save(images[33])
    Image.open(images[34]).save(images[34].with_suffix(".png"))
    (folder / "images/cut.png").write_bytes(images[34].with_suffix(".png").read_bytes()[:-20])
    images[34].unlink()
    shutil.copy(images[35], folder / "images/left.gif")
    content = {"path": str(folder), "train": "images", "val": "images", "names": dict(demo.names)}
    (folder / "data.yaml").write_text(yaml.safe_dump(content))
    return load_data(folder / "data.yaml")


@pytest.mark.parametrize("rect", [False, True])
def test_boxes_of_a_set_with_every_oddity(demo_data, demo_weights, tmp_path, rect):
    import_upstream()
    import val

    from utils.dataloaders import create_dataloader

    model = network(demo_weights)
    data = odd_set(demo_data, tmp_path / "ours", for_upstream=False)
    before = {path: path.read_bytes() for path in (tmp_path / "ours").rglob("*") if path.is_file()}
    found = evaluate(TorchRunner(model, "cpu"), data, EvalConfig(imgsz=320, rect=rect, workers=0), progress=False)
    assert {path: path.read_bytes() for path in (tmp_path / "ours").rglob("*") if path.is_file()} == before
    (counts,) = data.counts()
    assert (counts.left_out, counts.bad_label_lines, counts.clipped_labels) == (len(LEAVES_OUT) + 6, len(LEAVES_OUT), 1)
    assert (counts.images, counts.without_a_label_file) == (found.images, 2) == (66 - counts.left_out, 2)
    plain = odd_set(demo_data, tmp_path / "upstream", for_upstream=True)
    expected = of_upstream(val, create_dataloader, model, plain, rect, conf_thres=0.001, iou_thres=0.7)[:4]
    assert expected[3] > 0.4
    assert [found.precision, found.recall, found.ap50, found.ap] == pytest.approx(expected, abs=1e-6)


def test_masks(checkout, start, tmp_path):
    import_upstream()
    import segment.val

    from utils.segment.dataloaders import create_dataloader

    assert start("data/demo/make_digits.py", "--segments", tmp_path / "set", "--train", 20, "--val", 40).returncode == 0
    data, model = load_data(tmp_path / "set/data.yaml"), network(checkout / "data/demo/gelan-digits-seg.pt")
    expected = of_upstream(segment.val, create_dataloader, model, data, False)
    found = evaluate(TorchRunner(model, "cpu"), data, EvalConfig(imgsz=320, workers=0), progress=False)
    ours = [value for part in (found, found.masks) for value in (part.precision, part.recall, part.ap50, part.ap)]
    assert expected[7] > 0.4
    assert ours == pytest.approx(expected, abs=1e-6)


def test_the_confusion_matrix_of_separate_objects():
    """Objects that do not overlap, found once, twice, as another class, at a distance, faintly, or not at all.

    Upstream counts no false positive of an image without a pair, so that every image has a certain one.
    """
    import_upstream()
    from utils.metrics import ConfusionMatrix as OfUpstream

    generator, classes = torch.Generator().manual_seed(0), 4
    ours, theirs = ConfusionMatrix(classes), OfUpstream(classes)
    for _ in range(50):
        places = torch.arange(12)
        corners = torch.stack([places % 4 * 100, places // 4 * 100], 1).float()
        labels = torch.randint(classes, (12, 1), generator=generator)
        truth = torch.cat([labels, corners, corners + 60], 1)
        found = torch.randint(3, (12,), generator=generator)  # how often
        found[0] = 1
        owners = places.repeat_interleave(found)
        shift = torch.rand(len(owners), 2, generator=generator) * 40
        shift[0] = 0
        wrong = torch.rand(len(owners), 1, generator=generator) < 0.3
        predicted = torch.where(wrong, (labels[owners] + 1) % classes, labels[owners])
        scores = torch.rand(len(owners), 1, generator=generator)
        scores[0] = 0.9
        boxes = torch.cat([corners[owners] + shift, corners[owners] + shift + 60], 1)
        detections = torch.cat([boxes, scores, predicted], 1)
        ours.add([detections], [truth])
        theirs.process_batch(detections, truth)
    assert ours.counts.tolist() == theirs.matrix.tolist()
    assert (ours.counts > 0).sum() == classes * 4  # right, the next class, missed, nothing
