"""The check of a repository: what is written passes, and each mistake is refused in one line before a server would."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from boxes_graph import write_boxes

from utils.core.errors import InputError
from utils.jobs.model_repository import look, make
from utils.onnx_graph.output_formats import NmsSettings, end2end
from utils.serving import pbtxt
from utils.serving.checks import check_repository
from utils.serving.config import Wishes

Change = Callable[[dict], None]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One with an ensemble `m`, one with a file with NMS, one of a static batch."""
    folder = tmp_path_factory.mktemp("repositories")
    make(write_boxes(folder / "raw.onnx"), folder / "raw", Wishes("m"))
    make(write_boxes(folder / "nms.onnx", end2end(NmsSettings("onnx"))), folder / "nms", Wishes("m"))
    make(write_boxes(folder / "static.onnx", batch=2), folder / "static", Wishes("m"))
    return {name: folder / name for name in ("raw", "nms", "static")}


@pytest.fixture
def copied(repositories, tmp_path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(repositories[name], tmp_path / name))


def change(repository: Path, model: str, how: Change) -> None:
    path = repository / model / "config.pbtxt"
    config = pbtxt.loads(path.read_text("utf-8"), str(path))
    how(config)
    path.write_text(pbtxt.dumps(config), "utf-8")


def refusal(repository: Path) -> str:
    with pytest.raises(InputError) as caught:
        check_repository(repository, look)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text.replace(f"{repository}/", "")


def put(**fields) -> Change:
    return lambda config: config.update(fields)


def tensor(side: str, place: int, **fields) -> Change:
    return lambda config: config[side][place].update(fields)


def without(*keys) -> Change:
    def how(config: dict) -> None:
        for key in keys[:-1]:
            config = config[key]
        del config[keys[-1]]

    return how


def test_what_is_written_passes(repositories):
    found = {model.name: str(model) for model in check_repository(repositories["raw"], look)}
    assert list(found) == ["m", "m_network", "m_nms"]
    assert found["m_network"] == (
        "m_network: onnxruntime_onnx, batches of up to 16, images FP32[3, 64, 96] -> output0 FP32[7, 96]"
    )
    assert str(check_repository(repositories["static"], look)[0]).startswith("m: ensemble, no batches of its own, ")
    assert len(check_repository(repositories["nms"], look)) == 1


CONFIGS = [
    # the three of the acceptance
    ("nms", "m", put(max_batch_size=0), "input images is [3, 64, 96], and [-1, 3, 64, 96] in the file"),
    ("nms", "m", tensor("input", 0, data_type="TYPE_UINT8"), "input images is TYPE_UINT8, and TYPE_FP32 in the file"),
    ("nms", "m", tensor("output", 3, data_type="TYPE_INT64"), "output det_classes is TYPE_INT64, and TYPE_INT32 in th"),
    # names and shapes
    ("nms", "m", tensor("input", 0, name="image"), "the file has no input 'image'; it has images"),
    ("nms", "m", tensor("output", 1, name="boxes"), "the file has no output 'boxes'; it has num_dets, det_boxes"),
    ("nms", "m", tensor("input", 0, dims=[3, 96, 64]), "[-1, 3, 96, 64], the batch included, and [-1, 3, 64, 96] in t"),
    ("nms", "m", tensor("input", 0, dims=[3, -1, -1]), "[-1, 3, -1, -1], the batch included, and [-1, 3, 64, 96] in t"),
    ("nms", "m", tensor("output", 1, dims=[100, 4, 1]), "output det_boxes is [-1, 100, 4, 1], the batch included"),
    ("nms", "m", tensor("output", 1, dims=[0]), "output det_boxes has dims [0]; expected sizes of 1 or more, or -1"),
    ("nms", "m", tensor("output", 1, dims=[]), "output det_boxes has dims []"),
    ("nms", "m", tensor("output", 1, name="num_dets"), "an output has no name of its own ('num_dets')"),
    ("nms", "m", without("output", 0, "data_type"), "output num_dets has no data_type"),
    ("nms", "m", tensor("input", 0, format="FORMAT_NCHW", dims=[3, 64]), "input images has a format, which needs thre"),
    ("nms", "m", without("input"), "has no input"),
    ("nms", "m", put(output=[]), "has no output"),
    # what runs it
    ("nms", "m", put(name="other"), "config.pbtxt is named 'other'; expected m, as its folder is"),
    ("nms", "m", put(platform="onnxruntime"), "platform 'onnxruntime'; expected platform tensorrt_plan, onnxruntime_o"),
    ("nms", "m", put(backend="tensorrt"), "platform 'onnxruntime_onnx', backend 'tensorrt'; expected"),
    ("nms", "m", without("platform"), "neither platform nor backend is given"),
    ("nms", "m", put(platform="tensorrt_plan", instance_group=[]), "m/1/model.plan does not exist"),
    ("nms", "m", put(platform="tensorrt_plan", instance_group=[{"kind": "KIND_CPU"}]), "runs on a GPU: KIND_GPU"),
    ("nms", "m", put(instance_group=[{"kind": "KIND_CPU", "gpus": [0]}]), "is KIND_CPU and names gpus"),
    ("nms", "m", put(instance_group=[{"count": -1}]), "instance_group has a count of -1"),
    # batches
    ("nms", "m", put(max_batch_size=-1), "max_batch_size is -1; expected 0 or more"),
    ("nms", "m", put(max_batch_size=2**31), "max_batch_size is 2147483648; expected 0 or more, as 32 bits hold it"),
    ("static", "m_network", put(max_batch_size=2), "input images is [-1, 2, 3, 64, 96], the batch included"),
    ("nms", "m", put(dynamic_batching={"preferred_batch_size": [4, 32]}), "preferred_batch_size 32 is not within 1 an"),
    # warm-up
    ("nms", "m", put(model_warmup=[{"name": "w", "batch_size": 17}]), "'w' has a batch_size of 17, and the model take"),
    ("nms", "m", put(model_warmup=[{"name": "w", "batch_size": 1}]), "'w' has no input images"),
    *(
        ("nms", "m", put(model_warmup=[{"name": "w", "batch_size": 1, "inputs": {name: value}}]), message)
        for name, value, message in (
            ("image", {}, "'w' has input 'image'; the model takes images"),
            ("images", {"data_type": "TYPE_INT8"}, "'w' gives TYPE_INT8 to images, which takes TYPE_FP32"),
            ("images", {"data_type": "TYPE_FP32", "dims": [3, 8, 8]}, "'w' gives [3, 8, 8] to images, which takes"),
            ("images", {"data_type": "TYPE_FP32", "dims": [3, 64, 96]}, "'w' says no data for images"),
        )
    ),
    # labels
    ("nms", "m", tensor("output", 3, label_filename="names.txt"), "m/names.txt does not exist; output det_classes tak"),
    ("nms", "m", tensor("output", 3, label_filename="../m.txt"), "label_filename '../m.txt' lies outside of"),
    ("nms", "m", without("output", 3, "label_filename"), "det_classes has no label_filename, and parameters names the"),
    # versions
    ("nms", "m", put(version_policy={"specific": {"versions": [2]}}), "asks for version 2, and there is no m/2/"),
    ("nms", "m", put(default_model_filename="net.onnx"), "m/1/net.onnx does not exist"),
    # the ensemble
    ("raw", "m", without("ensemble_scheduling"), "an ensemble needs ensemble_scheduling with its steps"),
    ("raw", "m", put(instance_group=[{"count": 1}]), "an ensemble has no instance_group"),
    ("raw", "m", put(optimization={}), "an ensemble has no optimization"),
    ("raw", "m", put(max_batch_size=32), "max_batch_size is 32, and m_network takes up to 16"),
    ("raw", "m", tensor("input", 0, data_type="TYPE_UINT8"), "tensor 'images' is TYPE_UINT8 in the ensemble and TYPE_"),
    ("raw", "m", tensor("output", 1, dims=[7, 4]), "tensor 'det_boxes' is [-1, 7, 4] in the ensemble and [-1, 100, 4]"),
    ("raw", "m_nms", tensor("input", 0, dims=[8, 96]), "tensor 'raw_output0' is [-1, 7, 96] in m_network and [-1, 8,"),
    ("raw", "m_nms", tensor("input", 0, data_type="TYPE_FP16"), "is TYPE_FP32 in m_network and TYPE_FP16 in m_nms"),
    ("raw", "m_nms", tensor("output", 0, name="count"), "m_nms has no output 'num_dets'; it has count"),
    ("raw", "m_nms", lambda config: config["input"].append({"name": "x", "data_type": "TYPE_BOOL", "dims": [1]}),
     "input x of m_nms is given by nothing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "model", "how", "message"), CONFIGS, ids=[f"{number}" for number in range(len(CONFIGS))]
)
def test_a_wrong_configuration_is_refused(kind, model, how, message, copied):
    repository = copied(kind)
    change(repository, model, how)
    text = refusal(repository)
    assert message in text
    assert f"{model}/" in text or f"{repository / 'm'}" in text or text.startswith("m/config.pbtxt")


def step(place: int, **fields) -> Change:
    return lambda config: config["ensemble_scheduling"]["step"][place].update(fields)


def back(config: dict) -> None:
    """The second step's result goes into the first one, too."""
    first, second = config["ensemble_scheduling"]["step"]
    first["input_map"] = {"images": "num_dets"}
    second["output_map"].pop("num_dets")
    second["output_map"] = {"num_dets": "num_dets", **second["output_map"]}
    config["input"] = [dict(config["input"][0], name="unused")]
    second["input_map"]["output0"] = "raw_output0"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            step(0, model_name="gone"),
            "a step runs 'gone', which is not in the repository; there is m, m_network, m_nms",
        ),
        (step(0, input_map={}), "the step of m_network has no input_map"),
        (step(0, output_map={"output1": "raw_output0"}), "m_network has no output 'output1'; it has output0"),
        (step(0, output_map={"output0": "raw"}), "tensor 'raw_output0' is written by no step"),
        (step(1, input_map={"output0": "images"}), "tensor 'raw_output0' is read by no step"),
        (step(0, output_map={"output0": "images"}), "tensor 'images' is written twice"),
        (back, "tensor 'unused' is read by no step"),
    ],
)
def test_steps_that_do_not_fit_together_are_refused(how, message, copied):
    repository = copied("raw")
    change(repository, "m", how)
    assert message in refusal(repository)


def test_steps_that_wait_for_each_other_are_refused(copied):
    repository = copied("raw")

    def how(config: dict) -> None:
        config["ensemble_scheduling"]["step"][0]["input_map"] = {"images": "det_boxes"}
        config["ensemble_scheduling"]["step"].append(
            {"model_name": "m_network", "input_map": {"images": "images"}, "output_map": {"output0": "more"}}
        )
        config["output"].append({"name": "more", "data_type": "TYPE_FP32", "dims": [7, 96]})

    change(repository, "m", how)
    assert "the steps wait for each other: m_network, m_nms" in refusal(repository)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "m/labels.txt does not exist; output det_classes takes its labels from it"),
        ("cat\n", "m/labels.txt has 1 labels; expected the 3 of parameters' names"),
        ("cat\ndog\nowl\n", "m/labels.txt has 3 labels; expected the 3 of parameters' names"),
        ("", "m/labels.txt has 0 labels"),
    ],
)
def test_wrong_labels_are_refused(labels, message, copied):
    repository = copied("nms")
    (repository / "m/labels.txt").unlink()
    if labels is not None:
        (repository / "m/labels.txt").write_text(labels)
    assert message in refusal(repository)


def test_missing_folders_and_files_are_refused(copied, tmp_path):
    repository = copied("raw")
    (repository / "m_nms/1/model.py").write_text("class Model: pass")
    assert "model.py has no class TritonPythonModel" in refusal(repository)
    (repository / "m_nms/1/model.py").write_text("class TritonPythonModel\n")
    assert "model.py is no Python: " in refusal(repository)
    (repository / "m_network/1/model.onnx").write_bytes(b"no")
    assert "model.onnx is not an ONNX file" in refusal(repository)
    (repository / "m_network/1/model.onnx").unlink()
    assert "m_network/1/model.onnx does not exist; " in refusal(repository)
    (repository / "m/1").rmdir()
    assert "m has no folder of a version; expected" in refusal(repository)
    (repository / "m/config.pbtxt").unlink()
    assert "m/config.pbtxt does not exist; each folder of a repository is a model" in refusal(repository)
    assert "does not exist; expected a model repository" in refusal(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    assert "holds no models" in refusal(tmp_path / "empty")


def test_a_model_is_not_its_repository(repositories):
    assert refusal(repositories["nms"] / "m").startswith(
        f"{repositories['nms'] / 'm'} is one model, and its repository is"
    )


def test_every_version_is_looked_into(copied):
    repository = copied("nms")
    (repository / "m/2").mkdir()
    assert "m/2/model.onnx does not exist" in refusal(repository)
    write_boxes(repository / "m/2/model.onnx", end2end(NmsSettings("onnx", 50)))
    assert "output det_boxes is [-1, 100, 4], the batch included, and [-1, 50, 4] in the file" in refusal(repository)
    for name in ("notes", "0", "02"):  # of no version
        (repository / "m" / name).mkdir()
    write_boxes(repository / "m/2/model.onnx", end2end(NmsSettings("onnx", 100)))
    check_repository(repository, look)


def test_a_backend_says_as_much_as_a_platform(copied):
    repository = copied("nms")
    change(repository, "m", lambda config: config.update(platform="", backend="onnxruntime"))
    assert check_repository(repository, look)[0].platform == "onnxruntime_onnx"


def test_a_file_of_another_platform_is_refused(copied):
    repository = copied("nms")
    write_boxes(repository / "m/1/model.onnx", end2end(NmsSettings("efficient")))
    assert "model.onnx: it has a plugin of TensorRT's" in refusal(repository)


def test_an_engine_without_a_note_is_said(copied):
    repository = copied("nms")
    change(repository, "m", put(platform="tensorrt_plan", instance_group=[{"count": 1, "kind": "KIND_GPU"}]))
    (repository / "m/1/model.onnx").rename(repository / "m/1/model.plan")
    (model,) = check_repository(repository, look)
    assert str(model).endswith("; the engine has no note beside it and was not looked into")
