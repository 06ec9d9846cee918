"""Masks against upstream's own code: the truth of its loader, and the whole of segment/val.py's `run`."""

import numpy as np
import pytest
import torch
from known_images import MIXED, SQUARE
from known_masks import KnowingMasks, write_outlined_set

from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.loop import EvalConfig, evaluate
from utils.runners.pytorch import TorchRunner
from utils.upstream.checkout import import_upstream

NAMES = ("cat", "dog", "owl")
# sizes that are resized by one ratio: of others upstream takes the height's for both axes, which moves clipped boxes
EXACT = ((64, 64), (64, 48), (48, 64), (64, 32), (128, 96), (16, 64))


@pytest.fixture(scope="session")
def val_program():
    """Upstream's segment/val.py as a module."""
    import_upstream()
    import segment.val

    return segment.val


def upstream_loader(path, imgsz, batch_size, rect, single_cls=False):
    from utils.segment.dataloaders import create_dataloader

    return create_dataloader(path, imgsz, batch_size, 32, single_cls, pad=0.5, rect=rect, workers=0)[0]


def upstream_run(val_program, model, data, imgsz, rect, single_cls=False, **options):
    """Box and mask (P, R, AP50, AP) from segment/val.py, one after the other."""
    paths = data.paths("val")
    content = {"nc": data.nc, "names": dict(data.names), "val": paths[0], "path": str(data.root)}
    with torch.inference_mode():
        found = val_program.run(
            content, model=model, dataloader=upstream_loader(list(paths), imgsz, 32, rect, single_cls),
            batch_size=32, imgsz=imgsz, plots=False, single_cls=single_cls, **options,
        )[0]  # fmt: skip
    return list(found[:8])


def our_run(model, data, **config):
    result = evaluate(TorchRunner(model, "cpu"), data, EvalConfig(workers=0, **config), progress=False)
    return result, [
        value for part in (result, result.masks) for value in (part.precision, part.recall, part.ap50, part.ap)
    ]


@pytest.mark.parametrize("rect", [True, False])
@pytest.mark.parametrize("imgsz", [64, 320])
def test_the_truth_is_upstreams_to_the_bit(tmp_path, rect, imgsz):
    """Resized to the grid as upstream's val.py does it."""
    write_outlined_set(tmp_path, 40, MIXED)
    data = load_data(tmp_path / "data.yaml")
    import_upstream()
    theirs = {}
    for images, labels, paths, _, masks in upstream_loader(list(data.paths("val")), imgsz, 32, rect):
        grid = [side // 4 for side in images.shape[2:]]
        wide = torch.nn.functional.interpolate(masks[None].float(), grid, mode="bilinear", align_corners=False)
        for index, path in enumerate(paths):
            theirs[path] = labels[labels[:, 0] == index, 1:], wide[0][labels[:, 0] == index] > 0.5
    count = 0
    for batch in make_loader(data, "val", imgsz=imgsz, batch_size=7, rect=rect, workers=0, masks=True):
        for index, path in enumerate(batch.paths):
            their_labels, their_masks = theirs[path]
            mine = batch.labels.owners() == index
            labels = batch.labels[index]
            order = np.lexsort((labels[:, 1] + labels[:, 3], labels[:, 0]))
            their_order = np.lexsort((their_labels[:, 1], their_labels[:, 0]))
            assert torch.equal(batch.masks[mine][order], their_masks[their_order])
            count += int(mine.sum())
    assert count == sum(len(labels) for labels, _ in theirs.values()) > 100


@pytest.mark.parametrize(
    ("sizes", "imgsz", "of_boxes", "rect", "single_cls"),
    [(EXACT, 128, 1e-6, False, False), (EXACT, 256, 1e-6, True, True), (MIXED, 64, 1e-3, True, False),
     (MIXED, 256, 1e-3, False, True)],
)  # fmt: skip
def test_results_are_those_of_segment_val_py(tmp_path, val_program, sizes, imgsz, of_boxes, rect, single_cls):
    """Objects overlap, and some images have none.

    On a grid of a few pixels a mask may overlap two labels alike; which one upstream takes then depends on its sort.
    """
    samples = write_outlined_set(tmp_path, 60, sizes)
    data, model = load_data(tmp_path / "data.yaml"), KnowingMasks(samples, NAMES, imgsz)
    assert min(len(sample.labels) for sample in samples) == 0
    expected = upstream_run(val_program, model, data, imgsz, rect, single_cls)
    assert 0.2 < expected[7] < expected[3] < 0.9
    for batch_size in (9, 32):
        _, found = our_run(model, data, imgsz=imgsz, batch_size=batch_size, rect=rect, single_cls=single_cls)
        assert found[:4] == pytest.approx(expected[:4], abs=of_boxes)
        assert found[4:] == pytest.approx(expected[4:], abs=1e-6)


def test_no_detections_and_one_class(tmp_path, val_program):
    samples = write_outlined_set(tmp_path, 12, SQUARE, NAMES[:1])
    data, model = load_data(tmp_path / "data.yaml"), KnowingMasks(samples, NAMES[:1], 64)
    expected = upstream_run(val_program, model, data, 64, True)
    assert our_run(model, data, imgsz=64, rect=True)[1] == pytest.approx(expected, abs=1e-6)
    assert expected[7] > 0.2
    assert our_run(model, data, imgsz=64, conf_thres=1.0)[1] == [0.0] * 8
    assert upstream_run(val_program, model, data, 64, False, conf_thres=1.0) == [0.0] * 8


def test_masks_in_the_pixels_of_an_image_are_upstreams(tmp_path, val_program):
    """What goes into COCO's JSON; of more detections than OpenCV resizes at a time."""
    from utils.evaluation.detector import Detector
    from utils.evaluation.masks import image_pixels

    samples = write_outlined_set(tmp_path, 6, ((90, 40), (33, 70)))
    data, model = load_data(tmp_path / "data.yaml"), KnowingMasks(samples, NAMES, 160)
    batch = next(iter(make_loader(data, "val", imgsz=160, batch_size=3, workers=0, masks=True)))
    found = Detector(TorchRunner(model, "cpu"), data, conf_thres=0.001, iou_thres=1.0)(batch.images, batch.shapes)
    for index in range(3):
        masks = found.masks
        expected = val_program.process_mask_upsample(
            masks.source[index], masks.picks[index], masks.boxes[index], masks.size
        ).byte()
        shape, ratio_pad = batch.shapes[index]
        planes = [val_program.scale_image(masks.size, one[..., None].numpy(), shape, ratio_pad) for one in expected]
        ours = np.concatenate(list(image_pixels(masks, index, batch.shapes[index])))
        assert ours.shape == (len(found.rows[index]), *shape)
        np.testing.assert_array_equal(ours, np.concatenate(planes, 2).transpose(2, 0, 1))
        assert ours.any()
