"""The evaluation against upstream's own code: pixels, labels, NMS, matching, AP, masks, and both val.py."""

import cv2
import numpy as np
import pytest
import torch
from known_images import MIXED, SQUARE, numbers, write_set
from known_masks import KnowingMasks, write_outlined_set
from known_sets import Known
from torchvision.ops import box_convert

from utils import upstream
from utils.core.tasks import Prediction
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.detector import Detector
from utils.evaluation.letterbox import boxes_to_image
from utils.evaluation.loop import evaluate
from utils.evaluation.masks import image_pixels
from utils.evaluation.metrics import ap_per_class, match
from utils.evaluation.nms import non_max_suppression
from utils.jobs.open import open_runner
from utils.runners.pytorch import TorchRunner
from utils.upstream.checkout import import_upstream

# sizes that are resized by one ratio: of others upstream takes the height's for both axes, which moves clipped boxes
EXACT = ((64, 64), (64, 48), (48, 64), (64, 32), (128, 96), (16, 64))


def upstream_loader(path, imgsz, rect, single_cls=False, masks=False):
    import_upstream()
    if masks:
        from utils.segment.dataloaders import create_dataloader
    else:
        from utils.dataloaders import create_dataloader

    return create_dataloader(path, imgsz, 32, 32, single_cls, pad=0.5, rect=rect, workers=0)[0]


def upstream_run(model, data, imgsz, rect, single_cls=False, **options):
    """AP, AP50, P and R of boxes, and of a network for segmentation of masks, from val.py or segment/val.py."""
    import_upstream()
    masks = isinstance(model, KnowingMasks)
    if masks:
        import segment.val as program
    else:
        import val as program

        options = {"conf_thres": 0.001, "iou_thres": 0.7, **options}
    paths = data.paths("val")
    content = {"nc": data.nc, "names": dict(data.names), "val": paths[0], "path": str(data.root)}
    loader = upstream_loader(list(paths), imgsz, rect, single_cls, masks)
    with torch.inference_mode():
        found = program.run(content, model=model, dataloader=loader, batch_size=32, imgsz=imgsz, plots=False,
                            single_cls=single_cls, **options)[0]  # fmt: skip
    scores = list(found[: 8 if masks else 4])
    return [scores[start + index] for start in range(0, len(scores), 4) for index in (3, 2, 0, 1)]


# the parts


def by_class_and_x(labels):
    return labels[np.lexsort((labels[:, 1], labels[:, 0]))]


LONG = [((4000, 200),), ((20, 4000),), ((12, 4000),)]


@pytest.mark.parametrize(
    ("imgsz", "rect", "sizes"),
    [*((imgsz, rect, MIXED) for imgsz in (64, 96, 320) for rect in (True, False)), *((640, True, one) for one in LONG)],
)
def test_images_and_labels_are_upstreams_to_the_bit(tmp_path, imgsz, rect, sizes):
    """Real images of mixed shapes, as the demo set's would be cropped, in upstream's batches of 32; very long ones."""
    samples = write_set(tmp_path, 40 if sizes == MIXED else 1, sizes)
    rng = np.random.default_rng(0)
    for sample in samples:
        width, height = sample.size
        noise = cv2.resize(rng.integers(0, 255, (9, 9, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(sample.path), noise)
    data = load_data(tmp_path / "data.yaml")
    theirs = {
        path: (image, labels[labels[:, 0] == index, 1:], shape)
        for images, labels, paths, shapes in upstream_loader(list(data.paths("val")), imgsz, rect)
        for index, (image, path, shape) in enumerate(zip(images, paths, shapes, strict=True))
    }
    count = 0
    for batch in make_loader(data, "val", imgsz=imgsz, batch_size=5, rect=rect, workers=0):
        for index, (image, path, box) in enumerate(zip(batch.images, batch.paths, batch.letterboxes, strict=True)):
            their_image, their_labels, their_shape = theirs[path]
            torch.testing.assert_close(image, their_image, rtol=0, atol=0)
            assert (box.original, (box.ratio, box.pad)) == their_shape
            corners = box_convert(their_labels[:, 1:], "cxcywh", "xyxy") * torch.tensor(image.shape[:0:-1]).repeat(2)
            corners = boxes_to_image(corners, torch.zeros(len(corners), dtype=torch.int64), [box])
            expected = by_class_and_x(torch.cat([their_labels[:, :1], corners], 1))
            torch.testing.assert_close(by_class_and_x(batch.labels[index]), expected, atol=2e-3, rtol=0)
            count += 1
    assert count == len(theirs) == len(samples)


@pytest.mark.parametrize("rect", [True, False])
@pytest.mark.parametrize("imgsz", [64, 320])
def test_masks_of_labels_are_upstreams_to_the_bit(tmp_path, rect, imgsz):
    """Resized to the grid as upstream's val.py does it."""
    write_outlined_set(tmp_path, 40, MIXED)
    data = load_data(tmp_path / "data.yaml")
    theirs = {}
    for images, labels, paths, _, masks in upstream_loader(list(data.paths("val")), imgsz, rect, masks=True):
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


@pytest.mark.parametrize("classes", [1, 10])
@pytest.mark.parametrize(("conf", "iou"), [(0.001, 0.7), (0.25, 0.45)])
@pytest.mark.parametrize("agnostic", [False, True])
def test_nms_is_upstreams(classes, conf, iou, agnostic):
    import_upstream()
    from utils.general import non_max_suppression as reference

    generator = torch.Generator().manual_seed(0)
    middle = torch.rand(3, 2, 500, generator=generator) * 200 + 60
    size = torch.rand(3, 2, 500, generator=generator) * 60 + 40
    raw = torch.cat([middle, size, torch.rand(3, classes, 500, generator=generator) ** 3], 1)
    expected = reference(raw.clone(), conf, iou, max_det=300, multi_label=True, agnostic=agnostic)
    found = non_max_suppression(Prediction(raw), conf, iou, max_det=300, agnostic=agnostic)
    for one, other in zip(found, expected, strict=True):
        assert len(other) > 10
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_matching_is_upstreams():
    import_upstream()
    from val import process_batch

    for seed, labels in enumerate((1, 5, 30, 60)):
        rng = np.random.default_rng(seed)
        corner = rng.uniform(0, 250, (labels, 2))
        truth = np.column_stack([rng.integers(4, size=labels), corner, corner + rng.uniform(20, 80, (labels, 2))])
        chosen = truth[rng.integers(labels, size=200)]
        scores = np.sort(rng.random(200))[::-1]
        rows = np.column_stack([chosen[:, 1:] + rng.normal(0, 5, (200, 4)), scores, chosen[:, 0]])
        found, truth = torch.from_numpy(rows).float(), torch.from_numpy(truth).float()
        expected = process_batch(found, truth, torch.linspace(0.5, 0.95, 10))
        assert expected.any()
        torch.testing.assert_close(match([found], [truth])[0][0], expected)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_upstreams(seed):
    rng = np.random.default_rng(seed)
    count, classes = 3000, rng.integers(8, size=3000)
    confidence = rng.permutation(np.linspace(0.001, 0.999, count))
    correct = rng.random((count, 1)) < confidence[:, None] * np.linspace(0.9, 0.1, 10)
    labels = rng.integers(10, size=1200)  # two classes without detections
    import_upstream()
    from utils.metrics import ap_per_class as reference

    names = dict(enumerate("abcdefghij"))
    _, _, precision, recall, _, ap, ids = reference(correct, confidence, classes, labels, names=names)
    ours = ap_per_class(correct, confidence, classes, labels)
    np.testing.assert_array_equal(ours.classes, ids)
    for found, expected in ((ours.ap, ap), (ours.precision, precision), (ours.recall, recall)):
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_masks_in_the_pixels_of_an_image_are_upstreams(tmp_path):
    """What goes into COCO's JSON; of more detections than OpenCV resizes at a time."""
    import_upstream()
    from segment import val

    known = Known(tmp_path, ((90, 40), (33, 70)), 6, masks=True, imgsz=160)
    batch = next(iter(make_loader(known.data, "val", imgsz=160, batch_size=3, workers=0, masks=True)))
    found = Detector(TorchRunner(known.model, "cpu"), known.data, conf_thres=0.001, iou_thres=1.0)(batch)
    for index, box in enumerate(batch.letterboxes):
        masks = found.masks
        expected = val.process_mask_upsample(masks.source[index], masks.picks[index], masks.boxes[index], masks.size)
        planes = [val.scale_image(masks.size, one[..., None].numpy(), box.original, (box.ratio, box.pad))
                  for one in expected.byte()]  # fmt: skip
        ours = np.concatenate(list(image_pixels(masks, index, box)))
        assert ours.shape == (len(found.rows[index]), *box.original)
        np.testing.assert_array_equal(ours, np.concatenate(planes, 2).transpose(2, 0, 1))
        assert ours.any()


# the whole


@pytest.mark.parametrize(
    ("sizes", "rect", "single_cls", "masks", "imgsz", "of_boxes"),
    [(MIXED, True, False, False, 64, 1e-3), (MIXED, True, True, False, 64, 1e-3),
     (MIXED, False, False, False, 64, 1e-3), (SQUARE, False, True, False, 64, 1e-3),
     (EXACT, False, False, True, 128, 1e-6), (EXACT, True, True, True, 256, 1e-6),
     (MIXED, True, False, True, 64, 1e-3), (MIXED, False, True, True, 256, 1e-3)],
)  # fmt: skip
def test_results_are_those_of_val_py(tmp_path, sizes, rect, single_cls, masks, imgsz, of_boxes):
    """With a network whose errors are known. Rectangular: val.py at its default batch size, which ours stands for.

    Objects overlap, and some images have none. On a grid of a few pixels a mask may overlap two labels alike; which one
    upstream takes then depends on its sort.
    """
    known = Known(tmp_path, sizes, 60, masks, imgsz)
    assert min(len(sample.labels) for sample in known.samples) == 0
    expected = upstream_run(known.model, known.data, imgsz, rect, single_cls)
    assert 0.2 < expected[-4] <= expected[0] < 0.9
    for batch_size in (1, 9, 32):
        config = EvalConfig(imgsz=imgsz, batch_size=batch_size, workers=0, rect=rect, single_cls=single_cls)
        result = known.evaluate(config)
        found = [value for part in (result, result.masks) if part for value in numbers(part)]
        assert found[:4] == pytest.approx(expected[:4], abs=of_boxes)
        assert found[4:] == pytest.approx(expected[4:], abs=1e-6)


def test_a_float_checkpoint_opens_as_a_runner(demo_data, demo_weights):
    config, data = EvalConfig(imgsz=320, workers=0, limit=8), load_data(demo_data)
    with open_runner(demo_weights) as runner:
        opened = evaluate(runner, data, config, progress=False)
    model = upstream.call_fused(upstream.fuse(upstream.load_float(demo_weights).model))
    direct = evaluate(TorchRunner(model, "cpu"), data, config, progress=False)
    assert opened.ap == pytest.approx(direct.ap, abs=1e-6)
    assert opened.ap > 0.4
