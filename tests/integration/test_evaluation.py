"""The evaluation against upstream's own code: pixels, NMS, matching, AP, and the whole of val.py's `run`."""

import cv2
import numpy as np
import pytest
import torch
import yaml
from known_images import MIXED, SQUARE, KnowingModel, write_set
from torchvision.ops import box_convert

from utils import upstream
from utils.core.tasks import Prediction
from utils.evaluation.data_yaml import load_data
from utils.evaluation.dataset import make_loader
from utils.evaluation.letterbox import boxes_to_image
from utils.evaluation.loop import EvalConfig, evaluate
from utils.evaluation.metrics import match, score
from utils.evaluation.nms import non_max_suppression
from utils.jobs.open import open_runner
from utils.runners.pytorch import TorchRunner
from utils.upstream.checkout import CHECKOUT, import_upstream

NAMES = ("cat", "dog", "owl")


@pytest.fixture(scope="session")
def val_program():
    """Upstream's val.py as a module."""
    import_upstream()
    import val

    return val


def upstream_loader(path, imgsz, batch_size, rect, single_cls=False):
    from utils.dataloaders import create_dataloader

    return create_dataloader(path, imgsz, batch_size, 32, single_cls, pad=0.5, rect=rect, workers=0)[0]


def upstream_run(val_program, model, data, imgsz, batch_size, rect, single_cls=False):
    """(AP, AP50, precision, recall) from val.py."""
    paths = data.paths("val")
    content = {"nc": data.nc, "names": dict(data.names), "val": paths[0], "path": str(data.root)}
    with torch.inference_mode():
        precision, recall, ap50, ap, *_ = val_program.run(
            content, model=model, dataloader=upstream_loader(list(paths), imgsz, batch_size, rect, single_cls),
            batch_size=batch_size, imgsz=imgsz, conf_thres=0.001, iou_thres=0.7, plots=False, single_cls=single_cls,
        )[0]  # fmt: skip
    return ap, ap50, precision, recall


def our_run(model, data, out_dir=None, **config):
    result = evaluate(TorchRunner(model, "cpu"), data, EvalConfig(workers=0, **config), out_dir=out_dir, progress=False)
    return result, (result.ap, result.ap50, result.precision, result.recall)


# the parts


def by_class_and_x(labels):
    return labels[np.lexsort((labels[:, 1], labels[:, 0]))]


@pytest.mark.parametrize("rect", [True, False])
@pytest.mark.parametrize("imgsz", [64, 96, 320])
def test_images_and_labels_are_upstreams_to_the_bit(tmp_path, rect, imgsz):
    """Real images of mixed shapes, as the demo set's would be cropped, in upstream's batches of 32."""
    samples = write_set(tmp_path, 40, MIXED)
    rng = np.random.default_rng(0)
    for sample in samples:
        width, height = sample.size
        noise = cv2.resize(rng.integers(0, 255, (9, 9, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(sample.path), noise)
    data = load_data(tmp_path / "data.yaml")
    import_upstream()
    theirs = {
        path: (image, labels[labels[:, 0] == index, 1:], shape)
        for images, labels, paths, shapes in upstream_loader(list(data.paths("val")), imgsz, 32, rect)
        for index, (image, path, shape) in enumerate(zip(images, paths, shapes, strict=True))
    }
    count = 0
    for batch in make_loader(data, "val", imgsz=imgsz, batch_size=5, rect=rect, workers=0):
        for index, (image, path, shape) in enumerate(zip(batch.images, batch.paths, batch.shapes, strict=True)):
            their_image, their_labels, their_shape = theirs[path]
            torch.testing.assert_close(image, their_image, rtol=0, atol=0)
            corners = box_convert(their_labels[:, 1:], "cxcywh", "xyxy") * torch.tensor(image.shape[:0:-1]).repeat(2)
            corners = boxes_to_image(corners, torch.zeros(len(corners), dtype=torch.int64), [their_shape])
            expected = by_class_and_x(torch.cat([their_labels[:, :1], corners], 1))
            torch.testing.assert_close(by_class_and_x(batch.labels[index]), expected, atol=2e-3, rtol=0)
            assert shape == their_shape
            count += 1
    assert count == len(theirs) == 40


def raw_predictions(classes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    middle = torch.rand(3, 2, 500, generator=generator) * 200 + 60
    size = torch.rand(3, 2, 500, generator=generator) * 60 + 40
    return torch.cat([middle, size, torch.rand(3, classes, 500, generator=generator) ** 3], 1)


@pytest.mark.parametrize("classes", [1, 10])
@pytest.mark.parametrize(("conf", "iou"), [(0.001, 0.7), (0.25, 0.45)])
@pytest.mark.parametrize("agnostic", [False, True])
def test_nms_is_upstreams(classes, conf, iou, agnostic):
    import_upstream()
    from utils.general import non_max_suppression as reference

    raw = raw_predictions(classes)
    expected = reference(raw.clone(), conf, iou, max_det=300, multi_label=True, agnostic=agnostic)
    found = non_max_suppression(Prediction(raw), conf, iou, max_det=300, agnostic=agnostic)
    for one, other in zip(found, expected, strict=True):
        assert len(other) > 10
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def random_matches(seed=0, labels=30, found=400, classes=4):
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 250, (labels, 2))
    truth = np.column_stack([rng.integers(classes, size=labels), corner, corner + rng.uniform(20, 80, (labels, 2))])
    chosen = truth[rng.integers(labels, size=found)]
    scores = np.sort(rng.random(found))[::-1]
    rows = np.column_stack([chosen[:, 1:] + rng.normal(0, 5, (found, 4)), scores, chosen[:, 0]])
    return torch.from_numpy(rows).float(), torch.from_numpy(truth).float()


def test_matching_is_upstreams(val_program):
    pairs = [random_matches(seed, labels, 200) for seed, labels in enumerate((1, 5, 30, 60))]
    for correct, (found, truth) in zip(match(*zip(*pairs, strict=True))[0], pairs, strict=True):
        expected = val_program.process_batch(found, truth, torch.linspace(0.5, 0.95, 10))
        assert expected.any()
        torch.testing.assert_close(correct, expected)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_upstreams(seed):
    rng = np.random.default_rng(seed)
    count, classes = 3000, rng.integers(8, size=3000)
    confidence = rng.permutation(np.linspace(0.001, 0.999, count))
    correct = rng.random((count, 1)) < confidence[:, None] * np.linspace(0.9, 0.1, 10)
    labels = rng.integers(10, size=1200)  # two classes without detections
    import_upstream()
    from utils.metrics import ap_per_class

    _, _, precision, recall, _, ap, ids = ap_per_class(
        correct, confidence, classes, labels, names=dict(enumerate("abcdefghij"))
    )
    ours = score(correct, confidence, classes, labels)
    np.testing.assert_array_equal(ours.classes, ids)
    np.testing.assert_allclose(ours.ap, ap, atol=1e-9)
    np.testing.assert_allclose(ours.precision, precision, atol=1e-9)
    np.testing.assert_allclose(ours.recall, recall, atol=1e-9)


# the whole


@pytest.mark.parametrize(
    ("sizes", "rect", "single_cls"),
    [(MIXED, True, False), (MIXED, True, True), (MIXED, False, False), (SQUARE, False, True)],
)
def test_results_are_those_of_val_py(tmp_path, val_program, sizes, rect, single_cls):
    """With a network whose errors are known. Rectangular: val.py at its default batch size, which ours stands for."""
    samples = write_set(tmp_path, 60, sizes)
    data, model = load_data(tmp_path / "data.yaml"), KnowingModel(samples, NAMES, 64)
    expected = upstream_run(val_program, model, data, 64, 32, rect, single_cls)
    assert 0.3 < expected[0] < 0.8
    for batch_size in (1, 9, 32):
        _, found = our_run(model, data, imgsz=64, batch_size=batch_size, rect=rect, single_cls=single_cls)
        assert found == pytest.approx(expected, abs=1e-3)


def test_a_float_checkpoint_opens_as_a_runner(demo_data, demo_weights):
    config, data = EvalConfig(imgsz=320, workers=0, limit=8), load_data(demo_data)
    with open_runner(demo_weights) as runner:
        opened = evaluate(runner, data, config, progress=False)
    model = upstream.call_fused(upstream.fuse(upstream.load_float(demo_weights).model))
    direct = evaluate(TorchRunner(model, "cpu"), data, config, progress=False)
    assert opened.ap == pytest.approx(direct.ap, abs=1e-6)
    assert opened.ap > 0.4


def test_augmented_training_images_come_from_upstream(demo_data):
    hyp = yaml.safe_load((CHECKOUT / "data/demo/hyp.digits.yaml").read_text())
    data = load_data(demo_data)
    loader = make_loader(data, "val", imgsz=320, batch_size=4, workers=0, shuffle=True, augment=True, hyp=hyp)
    batch = next(iter(loader))
    assert batch.images.shape == (4, 3, 320, 320)
    assert batch.images.dtype == torch.uint8
    assert len(batch) == 4
