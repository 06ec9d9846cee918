"""The evaluation loop on a network whose answers are known, in PyTorch and in ONNX Runtime, against pycocotools."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
import yaml
from known_images import MIXED, SQUARE, KnowingModel, coco_json, export_answers, numbers, write_set

from utils.core.errors import DataError, InputError
from utils.core.tasks import DETECT, Prediction
from utils.evaluation.coco import COCO_CATEGORIES, CocoGroundTruth
from utils.evaluation.dataset import load_data
from utils.evaluation.detector import Detector
from utils.evaluation.input_plan import InputPlan
from utils.evaluation.loop import EvalConfig, evaluate
from utils.evaluation.nms import non_max_suppression
from utils.evaluation.results import table
from utils.jobs.open import open_runner
from utils.runners.base import TensorSpec
from utils.runners.pytorch import TorchRunner

NAMES = ("cat", "dog", "owl")
CONFIG = EvalConfig(imgsz=64, batch_size=8, workers=0)


class Known:
    """A set, its data configuration, and the network that knows it."""

    def __init__(self, folder, sizes, count=40):
        self.folder = folder
        self.samples = write_set(folder, count, sizes)
        self.data = load_data(folder / "data.yaml")
        self.model = KnowingModel(self.samples, NAMES, 64)

    def evaluate(self, config=CONFIG, **more):
        return evaluate(TorchRunner(self.model, "cpu"), self.data, config, progress=False, **more)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return Known(tmp_path_factory.mktemp("mixed"), MIXED)


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    return Known(tmp_path_factory.mktemp("square"), SQUARE)


@pytest.mark.parametrize("rect", [False, True])
def test_ap_agrees_with_pycocotools_and_does_not_depend_on_the_batch(mixed, tmp_path, rect):
    results = [
        mixed.evaluate(replace(CONFIG, rect=rect, batch_size=size, save_json=True), out_dir=tmp_path)
        for size in (1, 7, 64)
    ]
    for result in results:
        assert 0.3 < result.ap < 0.8
        assert result.coco is not None
        assert result.ap == pytest.approx(result.coco["ap"], abs=0.005)
        assert result.ap50 == pytest.approx(result.coco["ap50"], abs=0.005)
        assert (result.ap_coco, result.ap50_coco) == pytest.approx((result.coco["ap"], result.coco["ap50"]), abs=5e-4)
        assert numbers(result) == pytest.approx(numbers(results[0]), abs=1e-6)
    assert results[0].images == 40
    assert results[0].instances == sum(len(sample.labels) for sample in mixed.samples)


def test_rectangular_and_square_inference_find_the_same(mixed):
    square, rect = mixed.evaluate(), mixed.evaluate(replace(CONFIG, rect=True))
    assert numbers(square) == pytest.approx(numbers(rect), abs=0.002)
    assert "8, 64x64" in square.measured_on
    assert "rectangular" in rect.measured_on


def test_result_rows_and_table(mixed):
    result = mixed.evaluate()
    assert [row.name for row in result.per_class] == list(NAMES)
    assert sum(row.instances for row in result.per_class) == result.instances
    assert np.mean([row.ap for row in result.per_class]) == pytest.approx(result.ap)
    lines = table(result, per_class=True)
    assert lines[0].split() == ["Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95"]
    assert lines[1].split()[:3] == ["all", "40", str(result.instances)]
    assert float(lines[1].split()[-1]) == pytest.approx(result.ap, abs=1e-3)
    assert lines[-1].endswith(result.measured_on)
    assert "PyTorch" in result.measured_on
    assert set(result.ms) == {"preprocess", "inference", "nms"}
    assert all(value > 0 for value in result.ms.values())


def test_single_class_ignores_classes(mixed, tmp_path):
    result = mixed.evaluate(replace(CONFIG, single_cls=True, save_json=True), out_dir=tmp_path)
    assert [row.name for row in result.per_class] == ["object"]
    assert result.ap > mixed.evaluate().ap  # wrong classes no longer count
    assert result.coco is not None
    assert result.ap == pytest.approx(result.coco["ap"], abs=0.005)


def test_limit(mixed):
    assert mixed.evaluate(replace(CONFIG, limit=10)).images == 10


# ONNX Runtime: fixed and variable batches and sizes


@pytest.mark.parametrize(("batch", "size"), [(None, None), (None, 64), (7, 64), (64, 64)])
def test_onnx_gives_the_same_as_pytorch(square, tmp_path, batch, size):
    """40 images in batches of 7: the last one is filled up; in one of 64, there is nothing but filling for 24."""
    path = export_answers(square.model, tmp_path / "a.onnx", batch, size)
    with open_runner(path) as runner:
        result = evaluate(runner, square.data, replace(CONFIG, imgsz=64), progress=False)
    assert result.images == 40
    assert numbers(result) == pytest.approx(numbers(square.evaluate()), abs=1e-6)
    assert "ONNX Runtime" in result.measured_on
    assert f"batch {batch or 8}" in result.measured_on


def test_onnx_in_float16(square, tmp_path):
    with open_runner(export_answers(square.model, tmp_path / "a.onnx", half=True)) as runner:
        result = evaluate(runner, square.data, CONFIG, progress=False)
    assert numbers(result) == pytest.approx(numbers(square.evaluate()), abs=0.01)


def test_a_variable_batch_of_any_length_is_split_for_a_fixed_one(square, tmp_path):
    runner = open_runner(export_answers(square.model, tmp_path / "a.onnx", 3, 64))
    arrays = np.stack([cv2.imread(str(sample.path))[..., ::-1] for sample in square.samples[:8]])
    images = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    shapes = [((64, 64), ((1.0, 1.0), (0.0, 0.0)))] * 8
    split = Detector(runner, square.data)(images, shapes).rows
    whole = Detector(TorchRunner(square.model, "cpu"), square.data)(images, shapes).rows
    for one, other in zip(split, whole, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


# what the network takes


def plan(square, tmp_path, imgsz, rect=False, **export):
    runner = open_runner(export_answers(square.model, tmp_path / "a.onnx", **export))
    return InputPlan.of(runner, imgsz, 8, rect=rect)


def test_input_plan(square, tmp_path, caplog):
    assert plan(square, tmp_path, None, size=96) == InputPlan((96, 96), 8)
    assert plan(square, tmp_path, 96, size=96, batch=5) == InputPlan((96, 96), 5)
    assert plan(square, tmp_path, None) == InputPlan((640, 640), 8)
    assert plan(square, tmp_path, 50) == InputPlan((64, 64), 8)
    assert "50 is no multiple of the stride 32; using 64" in caplog.text
    with pytest.raises(
        InputError, match=r"--imgsz 64 was asked for, and the network takes images float32 \[any, 3, 96, 96\]"
    ):
        plan(square, tmp_path, 64, size=96)
    with pytest.raises(InputError, match="rectangular inference needs a network of dynamic size"):
        plan(square, tmp_path, 96, rect=True, size=96)


@pytest.mark.parametrize(
    ("stride", "imgsz", "shape", "says"),
    [
        (
            32768,
            None,
            (None, 3, None, None),
            "the imgsz of the network is 32768 .* an integer from 1 to 8,192; ",
        ),
        (32, (32768, 32768), (None, 3, None, None), "the imgsz of the network is 32768 "),
        (32, None, (None, 3, 64, 32768), "the imgsz of the network is 32768 "),
        (32, None, (5000, 3, 64, 64), "the batch size of the network is 5000 .* expected an integer from 1 to 4,096; "),
    ],
)
def test_sizes_of_a_file_have_the_bounds_of_options(square, stride, imgsz, shape, says):
    runner = Shell(square, (TensorSpec("images", shape, "float32"),))
    runner.metadata |= {"stride": str(stride)} | ({"imgsz": str(list(imgsz))} if imgsz else {})
    with pytest.raises(InputError, match=says):
        InputPlan.of(runner, None, 8)


@pytest.mark.parametrize(
    ("batch", "side", "asked", "together"),
    [(8, 64, 32, 16), (8, 640, 32, 4), (32, 320, 32, 4), (32, 640, 1, 1), (48, 320, 32, 2), (200, 64, 32, 1),
     (1, 1280, 32, 8), (None, 320, 8, 1)],
)  # fmt: skip
def test_a_gpu_gets_several_static_batches_at_once(square, batch, side, asked, together):
    """As many as hold no more than 32 images of 640 pixels, and no more than 128 images."""
    runner = Shell(square, (TensorSpec("images", (batch, 3, side, side), "float32"),))
    assert InputPlan.of(runner, None, asked) == InputPlan((side, side), batch or asked)
    runner.device = torch.device("cuda")
    found = InputPlan.of(runner, None, asked)
    assert found == InputPlan((side, side), batch or asked, together)
    assert found.describe(False) == f"batch {batch or asked}, {side}x{side}"
    runner.metadata["task"] = "segment"
    assert InputPlan.of(runner, None, asked).together == 1


def test_a_gpu_gets_several_batches_at_once_where_a_profile_ends_below_the_wish(square):
    runner = Shell(square, (TensorSpec("images", (None, 3, None, None), "float32"),))
    runner.device, runner.limits = torch.device("cuda"), {"images": ((1, 3, 32, 32), (8, 3, 640, 640))}
    assert InputPlan.of(runner, 320, 16) == InputPlan((320, 320), 8, 16)
    for asked in (4, 8):
        assert InputPlan.of(runner, 320, asked) == InputPlan((320, 320), asked)
    assert InputPlan.of(runner, 320, 16, rect=True) == InputPlan((320, 320), 8)


@pytest.mark.parametrize("overlap", [False, True])
def test_batches_that_are_read_at_once_give_the_same(square, tmp_path, monkeypatch, overlap):
    with open_runner(export_answers(square.model, tmp_path / "a.onnx", 2, 64)) as runner:
        config = replace(CONFIG, overlap=overlap)
        alone = evaluate(runner, square.data, config, progress=False)
        plan, calls = InputPlan.of, []
        monkeypatch.setattr(InputPlan, "of", lambda *words, **options: replace(plan(*words, **options), together=16))
        inputs, infer = [], runner.infer
        monkeypatch.setattr(runner, "infer", lambda feeds: inputs.append(len(feeds["images"])) or infer(feeds))
        monkeypatch.setattr(Detector, "_found", lambda *words: calls.append(words[2][0]) or found_in(*words))
        result = evaluate(runner, square.data, config, progress=False)
    assert calls == [2, *[4] * 9, 2]  # the first alone, with which the network warms up
    assert inputs == [2] * 20
    assert numbers(result) == numbers(alone)
    assert result.measured_on == alone.measured_on
    assert "batch 2, 64x64" in result.measured_on


found_in = Detector._found


class Shell(TorchRunner):
    """The knowing network behind other inputs or outputs than it has."""

    def __init__(self, known, inputs=None, outputs=None):
        super().__init__(known.model, "cpu")
        self.inputs = inputs or self.inputs
        self.outputs = outputs or self.outputs

    def _infer(self, feeds):
        (images,) = feeds.values()
        result = super()._infer({"images": images.float() / (255 if images.dtype == torch.uint8 else 1)})
        return {self.outputs[0].name: result["output0"]}


class Suppressed(TorchRunner):
    """The knowing network with NMS inside, in fixed batches; behind the last detection lies anything."""

    def __init__(self, known, topk=300):
        super().__init__(known.model, "cpu")
        self._topk = topk
        self.metadata["nms"] = json.dumps({"topk": topk, "conf_thres": 0.001})
        self.inputs = (TensorSpec("images", (6, 3, 64, 64), "float32"),)
        shapes = {"num_dets": (6, 1), "det_boxes": (6, topk, 4), "det_scores": (6, topk), "det_classes": (6, topk)}
        self.outputs = tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items())

    def _infer(self, feeds):
        prediction = Prediction.of_boxes(super()._infer(feeds)["output0"])
        found = non_max_suppression(prediction, CONFIG.conf_thres, DETECT.nms_iou, max_det=self._topk)
        rows = torch.full((6, self._topk, 6), 0.9)
        for row, one in zip(rows, found, strict=True):
            row[: len(one)] = one
        counts = torch.tensor([[len(one)] for one in found], dtype=torch.int32)
        parts = counts, rows[..., :4], rows[..., 4], rows[..., 5].int()
        return dict(zip((spec.name for spec in self.outputs), parts, strict=True))


def test_a_network_with_nms_inside_scores_the_same(square, caplog):
    usual = square.evaluate()
    result = evaluate(Suppressed(square), square.data, CONFIG, progress=False)
    assert numbers(result) == pytest.approx(numbers(usual), abs=1e-6)
    assert "inside the network (topk: 300, conf_thres: 0.001); the loop's is conf_thres 0.001, iou_thres" in caplog.text
    few = evaluate(Suppressed(square), square.data, replace(CONFIG, max_det=1), progress=False)
    assert numbers(few) == pytest.approx(numbers(square.evaluate(replace(CONFIG, max_det=1))), abs=1e-6)
    high = evaluate(Suppressed(square), square.data, replace(CONFIG, conf_thres=0.5), progress=False)
    assert numbers(high) == pytest.approx(numbers(square.evaluate(replace(CONFIG, conf_thres=0.5))), abs=1e-6)


def test_other_names_and_bytes_as_input(square):
    """Some exports take bytes, and call their tensors otherwise; half a static size is read as the whole."""
    spec = TensorSpec("pixels", (None, 3, 64, None), "uint8")
    runner = Shell(square, (spec,), (TensorSpec("boxes", (None, None, None), "float32"),))
    result = evaluate(runner, square.data, replace(CONFIG, imgsz=None), progress=False)
    assert numbers(result) == pytest.approx(numbers(square.evaluate()), abs=1e-6)
    assert "64x64" in result.measured_on


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([TensorSpec("a", (1, 3, 64, 64), "float32")] * 2, r"64\], a float32 .*; expected one input"),
        ([TensorSpec("a", (1, 1, 64, 64), "float32")], "expected one input"),
        ([TensorSpec("a", (1, 3, 64, 64), "int64")], "expected float32, float16, uint8 or int8"),
    ],
)  # fmt: skip
def test_a_network_that_takes_no_images(square, inputs, message):
    with pytest.raises(InputError, match=message):
        evaluate(Shell(square, inputs), square.data, CONFIG, progress=False)


def test_a_rectangular_fixed_input(tmp_path):
    """A network exported for 32×64: every image is fitted into it, and its boxes come back."""
    known = Known(tmp_path, ((64, 32), (60, 20)), 16)
    plain = known.evaluate()

    runner = Shell(known, (TensorSpec("images", (None, 3, 32, 64), "float32"),))
    result = evaluate(runner, known.data, CONFIG, progress=False)
    assert "32x64" in result.measured_on
    assert numbers(result) == pytest.approx(numbers(plain), abs=0.002)


def test_a_wrong_class_count_names_both(square, tmp_path):
    content = yaml.safe_load((square.folder / "data.yaml").read_text()) | {"names": ["a", "b", "c", "d"]}
    file = tmp_path / "four.yaml"
    file.write_text(yaml.safe_dump(content))
    message = r"the network has 3 classes \(cat, dog, owl\), and .*four.yaml has 4 \(a, b, c, ...\)"
    for runner in (TorchRunner(square.model, "cpu"), open_runner(export_answers(square.model, tmp_path / "a.onnx"))):
        with pytest.raises(InputError, match=message) as caught:
            evaluate(runner, load_data(file), CONFIG, progress=False)
        assert "\n" not in str(caught.value)


def test_a_wrong_class_count_is_found_without_names(square, tmp_path):
    """Nothing but the output itself tells."""
    model = KnowingModel(square.samples, ("cat", "dog", "owl", "bat"), 64)
    del model.names
    model.names_hidden = None
    runner = TorchRunner(model, "cpu")
    model.names = dict(enumerate("abcd"))  # the network itself still needs them
    with pytest.raises(InputError, match=r"output output0 is \[8, 8, \d+\]; expected \[batch, 7, anchors\]"):
        evaluate(runner, square.data, CONFIG, progress=False)


def test_other_class_names_are_a_warning(square, tmp_path, caplog):
    path = export_answers(square.model, tmp_path / "a.onnx", names=dict(enumerate("abc")))
    evaluate(open_runner(path), square.data, replace(CONFIG, limit=2), progress=False)
    assert "class names (a, b, c) differ from those of" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"), [("conf_thres", 1.5), ("iou_thres", -0.1), ("batch_size", 0), ("max_det", 0), ("imgsz", 0)]
)
def test_config_is_checked(field, value):
    with pytest.raises(InputError, match=rf"--{field.replace('_', '-')} is {value}"):
        EvalConfig(**{field: value})


# data that is not as it should be


def test_images_that_cannot_be_read_are_counted(tmp_path, caplog):
    known = Known(tmp_path, SQUARE, 12)
    paths = [sample.path for sample in known.samples]
    paths[0].write_bytes(b"no image")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    for path in paths[4:9]:  # one whole batch, and more
        path.write_bytes(cv2.imencode(".png", noise)[1].tobytes()[:6000])
    with caplog.at_level(logging.INFO):
        result = known.evaluate(replace(CONFIG, batch_size=4))
    assert result.images == 6
    assert result.instances == sum(len(known.samples[i].labels) for i in (1, 2, 3, 9, 10, 11))
    assert len(result.left_out) == 6
    assert "6 images were left out" in caplog.text


def test_nothing_can_be_decoded(tmp_path):
    known = Known(tmp_path, SQUARE, 2)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    for sample in known.samples:
        sample.path.write_bytes(cv2.imencode(".png", noise)[1].tobytes()[:6000])
    with pytest.raises(DataError, match="no image could be decoded"):
        known.evaluate()


def test_no_label_files(tmp_path):
    known = Known(tmp_path, SQUARE, 3)
    for file in (tmp_path / "labels/val").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"no image of 'val' has a label file; expected.*labels/val/000000000001\.txt"):
        known.evaluate()
    (tmp_path / "labels/val/000000000001.txt").write_text("")
    result = known.evaluate()
    assert (result.ap, result.instances, result.per_class) == (0, 0, ())


def test_no_detections(square):
    result = square.evaluate(replace(CONFIG, conf_thres=1.0))
    assert numbers(result) == (0, 0, 0, 0)
    assert result.instances > 0


# files


def test_text_files(mixed, tmp_path):
    config = replace(CONFIG, save_txt=True, save_conf=True, conf_thres=0.25)
    for _ in range(2):  # a second run replaces the files instead of appending to them
        mixed.evaluate(config, out_dir=tmp_path)
    files = sorted((tmp_path / "labels").iterdir())
    assert 20 < len(files) <= 40
    sample = next(s for s in mixed.samples if (s.answers[:, 5] > 0.25).sum() == 1)
    label, x1, y1, x2, y2, score = next(row for row in sample.answers.tolist() if row[5] > 0.25)
    width, height = sample.size
    x1, x2, y1, y2 = max(x1, 0), min(x2, width), max(y1, 0), min(y2, height)
    expected = [label, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height, score]
    found = (tmp_path / "labels" / f"{sample.path.stem}.txt").read_text().split()
    assert [float(word) for word in found] == pytest.approx(expected, abs=0.01)
    mixed.evaluate(replace(config, save_conf=False), out_dir=tmp_path)
    assert len((tmp_path / "labels" / f"{sample.path.stem}.txt").read_text().split()) == 5
    with pytest.raises(ValueError, match="need out_dir"):
        mixed.evaluate(config)


def test_json_uses_the_ids_of_the_annotations(tmp_path):
    """Images called by name have other ids, and the categories of `known_images` are 3, 6, 9."""
    samples = write_set(tmp_path, 6, SQUARE, stem="image_{}")
    evaluate(TorchRunner(KnowingModel(samples, NAMES, 64), "cpu"), load_data(tmp_path / "data.yaml"),
             replace(CONFIG, save_json=True), out_dir=tmp_path / "out", progress=False, name="m")  # fmt: skip
    results = json.loads((tmp_path / "out/m_predictions.json").read_text())
    assert {row["category_id"] for row in results} == {3, 6, 9}
    assert {row["image_id"] for row in results} == set(range(1, 7))
    best = max(results, key=lambda row: row["score"])
    answers = samples[best["image_id"] - 1].answers
    label, x1, y1, x2, y2, score = answers[answers[:, 5].argmax()]
    assert (best["category_id"], best["score"]) == (3 * (label + 1), pytest.approx(score, abs=1e-5))
    assert best["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=1.5)  # clipped to the image


def coco_set(folder):
    """A set in COCO's own form: 80 classes, val2017.txt, numbered images, annotations with 91 ids."""
    names = [f"class {index}" for index in range(80)]
    samples = write_set(folder, 24, ((64, 64), (64, 48)), names, split="val2017")
    (folder / "val2017.txt").write_text("".join(f"./images/val2017/{sample.path.name}\n" for sample in samples))
    (folder / "annotations/instances_val2017.json").write_text(json.dumps(coco_json(samples, names, COCO_CATEGORIES)))
    content = {"path": str(folder), "train": "train2017.txt", "val": "val2017.txt", "names": dict(enumerate(names))}
    (folder / "coco.yaml").write_text(yaml.safe_dump(content))
    return samples, names


def test_coco_form(tmp_path):
    samples, names = coco_set(tmp_path)
    data = load_data(tmp_path / "coco.yaml")
    assert data.is_coco
    result = evaluate(TorchRunner(KnowingModel(samples, names, 64), "cpu"), data, replace(CONFIG, save_json=True),
                      out_dir=tmp_path / "out", progress=False)  # fmt: skip
    results = json.loads((tmp_path / "out/model_predictions.json").read_text())
    assert {row["category_id"] for row in results} <= set(COCO_CATEGORIES)
    assert max(row["category_id"] for row in results) > 80
    assert {row["image_id"] for row in results} == set(range(1, 25))
    assert result.coco is not None
    assert result.ap50 == pytest.approx(result.coco["ap50"], abs=0.02)  # a label or two per class: coarse curves
    assert result.coco["ap50"] > 0.5


def test_coco_categories_are_cocos():
    assert len(COCO_CATEGORIES) == 80
    assert COCO_CATEGORIES[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13]  # there is no 12
    assert COCO_CATEGORIES[-3:] == [88, 89, 90]


def test_json_without_annotations(tmp_path, caplog):
    known = Known(tmp_path, SQUARE, 4)
    (tmp_path / "annotations/instances_val.json").unlink()
    with caplog.at_level(logging.INFO):
        result = known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)
    assert result.coco is None
    assert "no annotations for this split" in caplog.text
    assert {row["category_id"] for row in json.loads((tmp_path / "model_predictions.json").read_text())} <= {0, 1, 2}


def test_json_without_pycocotools(square, tmp_path, monkeypatch, caplog):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pycocotools" else find(name, *a))
    result = square.evaluate(replace(CONFIG, save_json=True, limit=3), out_dir=tmp_path)
    assert result.coco is None
    assert "pip install pycocotools" in caplog.text
    assert (tmp_path / "model_predictions.json").is_file()


def test_json_without_detections(square, tmp_path):
    result = square.evaluate(replace(CONFIG, save_json=True, conf_thres=1.0), out_dir=tmp_path)
    assert result.coco is not None
    assert set(result.coco.values()) == {0.0}


def test_images_of_one_name_in_two_folders_have_their_own_ids(tmp_path):
    known = Known(tmp_path, SQUARE, 4)
    file = tmp_path / "annotations/instances_val.json"
    content = json.loads(file.read_text())
    first = content["images"][0]
    content["images"].append({**first, "id": 99, "file_name": f"elsewhere/{first['file_name']}"})
    file.write_text(json.dumps(content))
    path = known.data.paths("val")[0]
    truth = CocoGroundTruth(known.data, "val")
    assert [truth.image_id(f"{path}/{folder}{first['file_name']}") for folder in ("", "elsewhere/")] == [
        first["id"],
        99,
    ]
    first["file_name"] = f"here/{first['file_name']}"
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"has the name of several images of .*, and is none of them: here/"):
        known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)


BAD_ANNOTATIONS = {
    "no JSON": ("{", "is not valid JSON .*; expected COCO's annotations"),
    "no annotations": ("{}", "is no COCO annotation file: its 'images' is None; expected a list"),
    "no categories": (
        '{"annotations": [], "images": [{"id": 1, "file_name": "a"}], "categories": []}',
        "no categories",
    ),
    "other category": (
        '{"annotations": [], "images": [{"id": 1, "file_name": "a"}], "categories": [{"id": 1, "name": "cat"}]}',
        "has no category 'dog', which .*data.yaml names; it has cat",
    ),
    "other images": (None, r"000000000001\.png is not among the images of .* \(4 such images\)"),
}


@pytest.mark.parametrize("kind", BAD_ANNOTATIONS)
def test_bad_annotations_are_found_before_the_evaluation(tmp_path, kind):
    known = Known(tmp_path, SQUARE, 4)
    content, message = BAD_ANNOTATIONS[kind]
    file = tmp_path / "annotations/instances_val.json"
    if content is None:
        content = file.read_text().replace("0000", "1111")
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        known.evaluate(replace(CONFIG, save_json=True), out_dir=tmp_path)
    assert not (tmp_path / "model_predictions.json").exists()
