"""Small things that only a GPU shows: NMS of a batch, times, outputs of several types, copying ahead, timing caches."""

import time
import warnings

import numpy as np
import onnx
import pytest
import torch
from one_conv import reference, write_onnx
from onnx import TensorProto, helper

from models.quantize.fake_quantize import fake_quantize, float16_scale
from utils.core.tasks import Prediction
from utils.evaluation import masks as masks_module
from utils.evaluation.batch import RaggedBatch
from utils.evaluation.masks import Masks, mask_overlaps
from utils.evaluation.metrics import EvalStatistics
from utils.evaluation.nms import non_max_suppression
from utils.evaluation.stage_clock import StageClock
from utils.jobs.open import open_runner
from utils.trt.build import build
from utils.trt.build_options import BuildConfig


@pytest.mark.parametrize(("conf", "iou", "max_det"), [(0.001, 0.7, 300), (0.25, 0.45, 100), (0.001, 0.3, 20)])
def test_nms_keeps_what_it_keeps_on_the_cpu(conf, iou, max_det):
    generator = torch.Generator().manual_seed(0)
    middle, size = torch.rand(16, 2, 2000, generator=generator), torch.rand(16, 2, 2000, generator=generator)
    scores = torch.rand(16, 10, 2000, generator=generator) ** 6
    raw = torch.cat([middle * 300, size * 60 + 10, (scores * 128).round() / 128], 1)  # with ties
    expected = non_max_suppression(Prediction(raw), conf, iou, max_det=max_det)
    found = non_max_suppression(Prediction(raw.cuda()), conf, iou, max_det=max_det)
    for one, same in zip(found, expected, strict=True):
        assert len(one) == len(same) > 10
        torch.testing.assert_close(one.cpu(), same, atol=1e-3, rtol=0)


@pytest.mark.parametrize("anchors", [0, 50, 2000])
def test_nms_of_one_image_gives_the_boxes_of_the_cpu_and_waits_little(anchors):
    """Few candidates go to the CPU; many, as AP wants them, stay on the GPU."""
    generator = torch.Generator().manual_seed(3)
    place = torch.rand(1, 4, anchors, generator=generator) * 200 + 10
    scores = torch.rand(1, 10, anchors, generator=generator)
    raw = torch.cat([place, (scores * 128).round() / 128], 1)  # with ties
    expected, device = non_max_suppression(Prediction(raw), 0.25, 0.45), raw.cuda()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            rows = non_max_suppression(Prediction(device), 0.25, 0.45)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rows.counts == expected.counts
    if anchors == 2000:
        assert rows.flat.is_cuda
        torch.testing.assert_close(rows.flat.cpu(), expected.flat, atol=1e-3, rtol=0)
    else:
        assert torch.equal(rows.flat, expected.flat)
        assert len(waits) <= 3


def test_stages_are_timed_without_waiting_for_them():
    device = torch.device("cuda", torch.cuda.current_device())
    clock = StageClock(device)
    matrix = torch.rand(4096, 4096, device=device)
    for _ in range(2):  # the first to warm up
        torch.cuda.synchronize(device)
        clock.clear()
        began = time.perf_counter()
        clock.start()
        for _ in range(100):
            matrix @ matrix
        clock.stop("busy")
        clock.stop("idle")
        enqueued = time.perf_counter() - began
    seconds = clock.seconds()
    assert 2 * enqueued < seconds["busy"][0] < time.perf_counter() - began
    assert seconds["idle"][0] < seconds["busy"][0] / 10


def test_matching_and_ap_are_those_of_the_cpu_and_wait_for_nothing():
    """NMS waits a few times for a batch, whatever its images hold; matching does not wait at all."""
    boxes, labels, found = torch.Generator().manual_seed(1), [], []
    for image in range(12):
        corner = torch.rand(image, 2, generator=boxes) * 200
        truth = torch.cat([torch.randint(0, 3, (image, 1), generator=boxes), corner, corner + 40], 1)
        near = truth.repeat(3, 1)
        near[:, 1:] += torch.randn(len(near), 4, generator=boxes) * 4
        score = torch.rand(len(near), 1, generator=boxes).sort(0, descending=True).values
        labels.append(truth)
        found.append(torch.cat([near[:, 1:], score, near[:, :1]], 1))
    raw = torch.rand(12, 14, 1500, device="cuda") ** 4 * 300
    paths, on_cpu = list(map(str, range(12))), (RaggedBatch.of(found), RaggedBatch.of(labels))
    on_gpu = [rows.to("cuda") for rows in on_cpu]
    for mode in ("default", "warn"):  # the first to warm up
        by_cpu, by_gpu, waits = EvalStatistics(), EvalStatistics(), []
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                by_gpu.add(*on_gpu, paths)
                waits.append(len(caught))
                non_max_suppression(Prediction(raw), 0.5, 0.7)
                waits.append(len(caught) - waits[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert waits[0] == 0, [str(one.message) for one in caught]
    assert 1 <= waits[1] <= 7  # two of them ask whether suppression still changes anything
    by_cpu.add(*on_cpu, paths)
    one, other = by_cpu.class_scores(), by_gpu.class_scores()
    assert vars(one.mean()) == pytest.approx(vars(other.mean()), abs=1e-6)
    assert 0.1 < one.mean().ap < 0.9


def test_rounding_is_what_torch_rounds_and_waits_for_nothing():
    x, weight = torch.randn(4, 8, 50, 50, device="cuda") * 3, torch.randn(64, 8, 3, 3, device="cuda")
    amax = torch.tensor(4.0, device="cuda"), weight.abs().amax((1, 2, 3), keepdim=True) * 0.8
    scales = [float16_scale(one / 127) for one in amax]
    ranges = [scale * 127 for scale in scales]
    with torch.inference_mode():
        fake_quantize(x, ranges[0]), fake_quantize(weight, ranges[1])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = fake_quantize(x, ranges[0]), fake_quantize(weight, ranges[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    zeros = torch.zeros(64, dtype=torch.int32, device="cuda")
    by_torch = (
        torch.fake_quantize_per_tensor_affine(x, float(scales[0]), 0, -128, 127),
        torch.fake_quantize_per_channel_affine(weight, scales[1].reshape(-1), zeros, 0, -128, 127),
    )
    for one, same in zip(found, by_torch, strict=True):
        assert torch.equal(one, same)
        assert len(one.unique()) > 100


def test_outputs_of_several_types(tmp_path):
    path, engine = write_onnx(tmp_path / "a.onnx", (2, 3, 8, 8)), tmp_path / "a.engine"
    model = onnx.load(path)
    for name, kind in (("half", TensorProto.FLOAT16), ("whole", TensorProto.INT32)):
        model.graph.node.append(helper.make_node("Cast", ["output0"], [name], to=kind))
        model.graph.output.append(helper.make_tensor_value_info(name, kind, [2, 6, 64]))
    onnx.save(model, path)
    build(path, engine, BuildConfig(precision="fp32", progress=False))
    feed = torch.rand(2, 3, 8, 8)
    with open_runner(engine, "cuda:0") as runner:
        for _ in range(3):
            found = {name: tensor.cpu().numpy() for name, tensor in runner.infer({"images": feed}).items()}
    for name, dtype, tolerance in (("output0", "float32", 1e-5), ("half", "float16", 1e-2), ("whole", "int32", 1.0)):
        assert str(found[name].dtype) == dtype
        np.testing.assert_allclose(found[name], reference(feed.numpy()), atol=tolerance)


def test_the_timing_cache_is_filled_and_read(tmp_path):
    path = write_onnx(tmp_path / "a.onnx", (2, 3, 64, 64))
    cache = tmp_path / "cache"
    config = BuildConfig(timing_cache=cache, progress=False)
    build(path, tmp_path / "a.engine", config)
    first = cache.stat().st_size
    assert first > 0
    build(path, tmp_path / "b.engine", config)
    assert cache.stat().st_size == pytest.approx(first, rel=0.1)


def masks_and_labels(counts, device):
    """Masks of whole numbers, whose sums are exact in any order; detections of two classes, and labels of one."""
    random = torch.Generator().manual_seed(0)
    corners = [torch.rand(count, 2, generator=random) * 400 for count in counts]
    boxes = [torch.cat([one, one + torch.rand(len(one), 2, generator=random) * 200 + 20], 1) for one in corners]
    prototypes = torch.randint(-3, 4, (len(counts), 32, 160, 160), generator=random).half()
    coefficients = [torch.randint(-3, 4, (count, 32), generator=random).float() for count in counts]
    found = [torch.cat([one, torch.rand(len(one), 1), torch.arange(len(one))[:, None] % 2], 1) for one in boxes]
    labels = [torch.cat([torch.zeros(min(7, len(one)), 1), one[:7]], 1) for one in boxes]
    truth = torch.rand(sum(map(len, labels)), 160, 160, generator=random) < 0.3
    masks = Masks(
        prototypes.to(device), tuple(one.to(device) for one in coefficients), tuple(one.to(device) for one in boxes),
        (640, 640),
    )  # fmt: skip
    return masks, truth, *([one.to(device) for one in rows] for rows in (found, labels))


def test_overlaps_are_those_of_the_cpu(monkeypatch):
    monkeypatch.setitem(masks_module.LARGEST, "cuda", 50 * 4 * 160 * 160)
    counts, results = (30, 0, 120, 3, 14), []
    for device in ("cpu", "cuda:0"):
        masks, truth, found, labels = masks_and_labels(counts, device)
        results.append([one.cpu() for one in mask_overlaps(masks, truth, found, labels)])
    for expected, one in zip(*results, strict=True):
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=0)
    assert max(float(one.max()) for one in results[0] if one.numel()) > 0.05
