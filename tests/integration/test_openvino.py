"""INT8 that is not our simulation: OpenVINO's integer arithmetic beside the exported graph as ONNX Runtime computes it.

Every quantized tensor is compared, as the largest relative error of one (L2 norm of the difference by that of the
tensor). A rounding that falls to the other side moves what follows, so the errors grow with the depth of a network.

Largest error in a good file, on AVX2 without VNNI (weights of 7 bits) with OpenVINO 2026.4.1: demo 0.195, with masks
0.252, gelan-t 0.013, gelan-s 0.014. Least error of a demo file with one scale times 1.5, of 20 scales by lot: 0.387.
"""

import json
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest
import torch
from exported_files import export_onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper
from qdq_graph import results
from random_networks import random_network

from models.quantize import calibration, placement
from models.quantize.recipe import Recipe
from utils import upstream
from utils.core.tasks import task_of_head
from utils.evaluation.config import EvalConfig
from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images
from utils.evaluation.loop import evaluate
from utils.jobs.open import open_openvino, open_runner, openvino_form
from utils.onnx_graph.export_config import ExportConfig
from utils.onnx_graph.view import DEQUANTIZE, QUANTIZE, GraphView
from utils.runners.openvino import OpenVinoRunner

MOST = 0.33  # of a good file; a wrong scale is above it
SMALL = 0.02  # difference of AP on so few images
IMAGES = 60


NETWORKS = ("gelan-digits", "gelan-digits-seg", "gelan-t", "gelan-s")


@pytest.fixture(scope="module")
def photographs(demo_data):
    """`[4, 3, 320, 320]` RGB in 0..1, of the demo set."""
    files = find_images(load_data(str(demo_data)).paths("val"))[:4]
    images = [cv2.resize(cv2.imread(file), (320, 320))[..., ::-1].transpose(2, 0, 1) for file in files]
    return torch.from_numpy(np.stack(images).astype(np.float32) / 255)


@pytest.fixture(scope="module")
def written(tmp_path_factory, checkout, photographs):
    """A function that gives the weakly typed INT8 file of a network, calibrated on photographs."""
    folder = tmp_path_factory.mktemp("openvino")

    def file_of(name: str) -> Path:
        file = folder / f"{name}.onnx"
        if file.exists():
            return file
        weights = checkout / f"data/demo/{name}.pt"
        if weights.exists():
            network = upstream.load_float(weights).model
        else:
            network = random_network(checkout / f"models/detect/{name}.yaml")
        model = upstream.call_fused(upstream.fuse(network))
        placement.apply(model, placement.plan(model, Recipe()))
        calibration.calibrate(model, [photographs], Recipe().replace(calibration_method="percentile").calibration)
        names = {int(key): value for key, value in dict(model.names).items()}
        about = {"stride": "32", "names": json.dumps(names), "task": task_of_head(model.model[-1]).name}
        export_onnx(model, ExportConfig((320, 320), dynamic="batch"), file, about)
        return file

    return file_of


def with_every_tensor(model: ModelProto) -> ModelProto:
    """The graph with each dequantized activation as a further output."""
    view, result = GraphView(model), ModelProto()
    result.CopyFrom(model)
    for node in view.of_type(DEQUANTIZE):
        quantizer = view.producer(node.input[0])
        if quantizer is not None and quantizer.op_type == QUANTIZE and not view.is_constant(quantizer.input[0]):
            result.graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None))
    return result


def largest_error(model: ModelProto, images: torch.Tensor, expected: list[np.ndarray]) -> float:
    """The largest relative error of a tensor in OpenVINO."""
    import openvino

    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(core.read_model(model.SerializeToString()), "CPU", settings).create_infer_request()
    request.infer({"images": images.numpy()})
    tensors = [request.get_output_tensor(index).data for index in range(len(expected))]
    errors = [np.linalg.norm(tensor - truth) / np.linalg.norm(truth)
              for tensor, truth in zip(tensors, expected, strict=True) if np.any(truth)]  # fmt: skip
    return float(max(errors))


def in_onnx_runtime(model: ModelProto, images: torch.Tensor) -> list[np.ndarray]:
    """All outputs, computed as the graph is written."""
    return [*results(model, check=False, images=images.numpy()).values()]


def with_wrong_scale(model: ModelProto, number: int) -> ModelProto:
    """The graph with the scale of one DequantizeLinear times 1.5."""
    view, result = GraphView(model), ModelProto()
    result.CopyFrom(model)
    places = [index for index, node in enumerate(model.graph.node) if node.op_type == DEQUANTIZE]
    node = result.graph.node[places[number % len(places)]]
    scale = view.constant(node.input[1])
    result.graph.initializer.append(numpy_helper.from_array(scale * scale.dtype.type(1.5), "wrong"))
    node.input[1] = "wrong"
    return result


@pytest.mark.parametrize("name", NETWORKS)
def test_every_tensor_is_that_of_the_graph(written, photographs, name):
    model = with_every_tensor(openvino_form(onnx.load(written(name)), "CPU")[0])
    images = photographs[:2]
    assert largest_error(model, images, in_onnx_runtime(model, images)) < MOST


@pytest.mark.parametrize("number", np.random.default_rng(60).integers(0, 330, 3).tolist())
def test_a_wrong_scale_is_found(written, photographs, number):
    model = with_every_tensor(openvino_form(onnx.load(written("gelan-digits")), "CPU")[0])
    images = photographs[:2]
    expected = in_onnx_runtime(model, images)
    assert largest_error(with_wrong_scale(model, number), images, expected) > MOST


@pytest.fixture(scope="module")
def outlined(run, tmp_path_factory):
    """`data.yaml` of a demo set with outlines."""
    folder = tmp_path_factory.mktemp("outlined") / "set"
    run("data/demo/make_digits.py", "--segments", folder, "--train", 20, "--val", 24)
    return folder / "data.yaml"


@pytest.mark.parametrize(("name", "dataset"), [("gelan-digits", "demo_data"), ("gelan-digits-seg", "outlined")])
def test_ap_is_that_of_the_graph(written, request, tmp_path, name, dataset):
    """OpenVINO's INT8 beside the same graph in ONNX Runtime, on images of the demo set."""
    form, _ = openvino_form(onnx.load(written(name)), "CPU")
    onnx.save(form, tmp_path / "form.onnx")
    config = EvalConfig(imgsz=320, batch_size=8, workers=0, limit=IMAGES)
    data = load_data(str(request.getfixturevalue(dataset)))
    with open_runner(tmp_path / "form.onnx") as simulated, open_openvino(written(name), "CPU") as int8:
        expected = evaluate(simulated, data, config, name="simulated", as_reference=True)
        result = evaluate(int8, data, config, name="int8", reference=expected.reference)
    assert expected.ap > 0.5
    assert abs(result.ap - expected.ap) < SMALL
    assert result.agreement > 0.95
    if expected.masks and result.masks:
        assert abs(result.masks.ap - expected.masks.ap) < SMALL


def test_int8_is_computed_in_int8(written, photographs):
    """OpenVINO names the type of each kernel: nearly all convolutions have that of integers."""
    runner = open_openvino(written("gelan-digits"), "CPU", profile=True)
    with runner:
        runner.infer({"images": photographs[:1]})
        kernels = [entry.exec_type for entry in runner.layer_times() if entry.node_type == "Convolution"]
    assert sum(kernel.endswith("I8") for kernel in kernels) > 0.95 * len(kernels)


def test_batch_sizes_come_and_go(written, photographs):
    """Each shape is compiled by itself up to a limit, and further ones share a network; results are the same."""
    with open_openvino(written("gelan-digits"), "CPU") as runner:
        assert isinstance(runner, OpenVinoRunner)
        alone = runner.infer({"images": photographs[:1]})["output0"]
        for count in (2, 3, 4, 5, 6, 1):
            images = photographs[[0, 1, 2, 3, 0, 1][:count]]
            together = runner.infer({"images": images})["output0"]
            assert together.shape[0] == count
            torch.testing.assert_close(together[:1], alone, atol=1e-3, rtol=1e-3)
