"""Model repositories from files: configurations that mean what 1.0's meant, and what is refused."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from boxes_graph import NAMES, boxes_graph, write_boxes, write_engine
from golden import GOLDEN
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from utils.core.errors import InputError
from utils.core.input_spec import InputSpec
from utils.core.options import image_size
from utils.jobs.model_repository import check_repository, make
from utils.onnx_graph.output_formats import NmsSettings, deepstream, end2end
from utils.serving import nms_model
from utils.serving.config import PLAN
from utils.serving.options import ServingOptions
from utils.trt.engine_file import EngineNote

ROOT = Path(__file__).resolve().parents[3]
NMS, PLUGIN = end2end(NmsSettings("onnx", 100)), end2end(NmsSettings("efficient", 100))


def made(file: Path, folder: Path, **options) -> dict[str, ModelConfig]:
    """The configurations by name, as protobuf reads them, in the order in which they were written."""
    written = make(ServingOptions.of({"file": file, "output": folder / "repo", "name": "m", **options}))
    assert {path.name for path in (folder / "repo").iterdir()} == {path.name for path in written}
    return {path.name: text_format.Parse((path / "config.pbtxt").read_text("utf-8"), ModelConfig()) for path in written}


def engine(folder: Path, form=None, **note) -> Path:
    return write_engine(folder / "a.engine", write_boxes(folder / "a.onnx", form), **note)


def engine_of_a_dynamic_size(folder: Path) -> Path:
    path = engine(folder, PLUGIN, shapes={"images": ((1, 3, 32, 96), (8, 3, 64, 96), (8, 3, 96, 96))})
    note = EngineNote.load(path)
    replace(note, tensors={**note.tensors, "images": ["float32", [None, 3, None, None]]}).save(path)
    return path


CASES = {
    "raw": (
        lambda folder: write_boxes(folder / "a.onnx"),
        {"conf_thres": 0.3, "iou_thres": 0.6, "max_det": 50, "class_agnostic": True, "instances": 2,
         "queue_delay": 500},
    ),
    "end2end": (lambda folder: write_boxes(folder / "a.onnx", NMS), {"max_batch_size": 4}),
    "alone": (lambda folder: write_boxes(folder / "a.onnx"), {"no_nms": True}),
    "end2end masks": (
        lambda folder: write_boxes(folder / "a.onnx", end2end(NmsSettings("onnx", 100), 28), masks=True), {},
    ),
    "bytes": (lambda folder: write_boxes(folder / "a.onnx", takes=InputSpec("uint8", "nhwc")), {}),
    "static": (lambda folder: write_boxes(folder / "a.onnx", batch=2), {}),
    "engine": (engine, {}),
    "engine of a dynamic size": (engine_of_a_dynamic_size, {}),
    "engine built later": (
        lambda folder: write_boxes(folder / "a.onnx", PLUGIN), {"platform": PLAN, "batch_size": [1, 4, 8]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_configurations_mean_what_those_of_version_1_0_meant(case, tmp_path):
    file, options = CASES[case]
    expected = json.loads((GOLDEN / "triton-configs.json").read_text("utf-8"))[case]
    found = made(file(tmp_path), tmp_path, **options)
    assert found == {name: json_format.ParseDict(config, ModelConfig()) for name, config in expected.items()}
    assert list(found) == list(expected)


def test_an_ensemble_is_three_folders(tmp_path):
    file = write_boxes(tmp_path / "a.onnx")
    assert list(made(file, tmp_path)) == ["m_network", "m_nms", "m"]
    files = {path.relative_to(tmp_path / "repo").as_posix() for path in (tmp_path / "repo").rglob("*")}
    assert files == {
        "m", "m/config.pbtxt", "m/labels.txt", "m/1", "m_network", "m_network/config.pbtxt", "m_network/1",
        "m_network/1/model.onnx", "m_nms", "m_nms/config.pbtxt", "m_nms/labels.txt", "m_nms/1", "m_nms/1/model.py",
    }  # fmt: skip
    assert (tmp_path / "repo/m_nms/1/model.py").read_bytes() == Path(nms_model.__file__).read_bytes()
    assert (tmp_path / "repo/m_network/1/model.onnx").read_bytes() == file.read_bytes()
    for name in ("m", "m_nms"):
        assert (tmp_path / "repo" / name / "labels.txt").read_text("utf-8") == "".join(f"{one}\n" for one in NAMES)


def test_torch_is_not_needed(tmp_path):
    program, file = ROOT / "scripts/make_triton.py", write_boxes(tmp_path / "a.onnx")
    code = "import runpy, sys; sys.modules['torch'] = None; "
    code += "del sys.argv[0]; runpy.run_path(sys.argv[0], {}, '__main__')"
    subprocess.run([sys.executable, "-c", code, program, file, "--output", tmp_path / "repo"], check=True)


def test_an_engine_takes_its_note_along(tmp_path):
    path = engine(tmp_path)
    made(path, tmp_path)
    plan = tmp_path / "repo/m_network/1/model.plan"
    assert plan.read_bytes() == path.read_bytes()
    assert EngineNote.load(plan) == EngineNote.load(path)


@pytest.mark.parametrize("given", ["96 64", "96x64"])
def test_an_engine_of_a_rectangle_that_is_built_later(given, tmp_path, caplog):
    model = onnx.load(write_boxes(tmp_path / "a.onnx"))
    for axis, name in zip(model.graph.input[0].type.tensor_type.shape.dim[2:], "hw", strict=True):
        axis.dim_param = name
    onnx.save(model, tmp_path / "a.onnx")
    with caplog.at_level("INFO"):
        network = made(tmp_path / "a.onnx", tmp_path, platform=PLAN, imgsz=list(map(image_size, given.split())))
    assert list(network["m_network"].input[0].dims) == [3, 96, 64]
    words = f"{tmp_path}/a.onnx --output {tmp_path}/repo/m_network/1/model.plan --batch-size 1 8 16 --imgsz {given}"
    assert caplog.messages[-1].endswith(f": python scripts/build_engine.py {words}")


@pytest.mark.parametrize(
    ("form", "about", "options", "named"),
    [
        (PLUGIN, {}, {}, "--nms onnx"),
        (deepstream(), {}, {}, "output0"),
        (None, {"masks": True}, {}, "--no-nms"),
        (None, {"names": '{"0": "a", "2": "b", "7": "c"}'}, {}, "names its classes"),
        (None, {"names": "cat"}, {}, "names its classes"),
        (None, {"names": '["a", "b\\nc", "d"]'}, {}, "names its classes"),
        (None, {}, {"max_batch_size": 4, "platform": PLAN, "batch_size": [1, 2, 2]}, "--max-batch-size"),
        (None, {"batch": 2}, {"max_batch_size": 4}, "--max-batch-size"),
        (None, {}, {"platform": PLAN, "batch_size": [2]}, "--batch-size 1 2 2"),
        (None, {}, {"platform": PLAN, "batch_size": [1, 2]}, "--batch-size"),
        (None, {"batch": 2}, {"queue_delay": 100}, "--queue-delay"),
        (None, {}, {"batch_size": [1]}, "--batch-size"),
        (None, {}, {"no_nms": True, "conf_thres": 0.0}, "--conf-thres"),
        (NMS, {}, {"max_det": 3}, "--max-det"),
        ("engine", {"api": "TensorRT-RTX 1.7.1"}, {}, "TensorRT-RTX"),
        ("engine", {"options": {"strip_weights": True}}, {}, "--strip-weights"),
        ("engine", {"tensors": {}}, {}, "no note"),
        ("engine", {}, {"batch_size": [1]}, "--batch-size"),
        ("engine", {}, {"platform": "onnxruntime_onnx"}, PLAN),
        *((None, {}, {"name": name}, "--name") for name in ("", "a/b", "..", "a b", "é", "-a", "a\n")),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_and_nothing_is_written(form, about, options, named, tmp_path):
    file = engine(tmp_path, **about) if form == "engine" else write_boxes(tmp_path / "a.onnx", form, **about)
    before = {*tmp_path.iterdir()}
    with pytest.raises(InputError, match=named) as caught:
        made(file, tmp_path, **options)
    assert len(str(caught.value).splitlines()) == 1
    assert {*tmp_path.iterdir()} == before


def test_strongly_typed_files_are_for_engines(tmp_path):
    model = boxes_graph(3, "batch", quantized=True)
    for tensor in model.graph.initializer:
        if tensor.name == "scale":
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.float16(1 / 127), "scale"))
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(InputError, match="--typing weak"):
        made(tmp_path / "a.onnx", tmp_path)
    assert made(tmp_path / "a.onnx", tmp_path, platform=PLAN)["m_network"].platform == PLAN


def test_what_lies_there_already_stays(tmp_path):
    file = write_boxes(tmp_path / "a.onnx")
    made(file, tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "repo").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="m_network, m_nms, m already"):
        make(ServingOptions(file=file, output=tmp_path / "repo", name="m"))
    make(ServingOptions(file=file, output=tmp_path / "repo", name="other"))
    assert len(list((tmp_path / "repo").iterdir())) == 6
    assert {path: path.read_bytes() for path in before} == before


def test_a_repository_that_is_a_disk_of_its_own_is_written_within(tmp_path, monkeypatch):
    """Such as a volume of a container: nothing can be renamed into it from beside it."""
    file = write_boxes(tmp_path / "a.onnx")
    (tmp_path / "repo").mkdir()
    sources, rename = set(), Path.rename
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "repo")
    monkeypatch.setattr(Path, "rename", lambda path, target: sources.add(path.parents[1]) or rename(path, target))
    assert set(made(file, tmp_path)) == {"m", "m_nms", "m_network"}
    assert sources == {tmp_path / "repo"}


@pytest.mark.parametrize(
    ("stem", "name"), [("yolov9-c.v2", "yolov9-c.v2"), ("a b é", "a_b__"), ("..a", "a"), ("é", "model")]
)
def test_the_default_name_is_the_files(stem, name):
    assert ServingOptions(file=Path(f"{stem}.onnx")).model_name == name


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One with an ensemble `m`, one with a file with NMS, one of a static batch, one with a Python model only."""
    folder = tmp_path_factory.mktemp("repositories")
    files = {"raw": {}, "nms": {"form": end2end(NmsSettings("onnx"))}, "static": {"batch": 2}}
    for name, form in files.items():
        make(ServingOptions(file=write_boxes(folder / f"{name}.onnx", **form), output=folder / name, name="m"))
    shutil.copytree(folder / "raw/m_nms", folder / "python/m_nms")
    return {name: folder / name for name in ("raw", "nms", "static", "python")}


@pytest.fixture
def copied(repositories, tmp_path):
    return lambda name: Path(shutil.copytree(repositories[name], tmp_path / name))


def refusal(repository: Path) -> str:
    with pytest.raises(InputError) as caught:
        check_repository(repository)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value).replace(f"{repository}/", "")


def test_what_is_written_passes(repositories, caplog):
    with caplog.at_level("INFO"):
        for repository in repositories.values():
            check_repository(repository)
    assert "m_network: onnxruntime_onnx, max_batch_size 16, images [3, 64, 96] -> output0 [7, 96]" in caplog.messages


CONFIGS = [  # repository, model, what is replaced by what, what the line names
    ("nms", "m", "max_batch_size: 16", "max_batch_size: 0", "images"),
    ("nms", "m", "TYPE_INT32\n  dims: [100]", "TYPE_INT64\n  dims: [100]", "TYPE_INT64"),
    # names and shapes
    ("nms", "m", 'name: "images"', 'name: "image"', "image"),
    ("nms", "m", "det_boxes", "boxes", "boxes"),
    ("nms", "m", "[3, 64, 96]", "[3, 96, 64]", "[3, 96, 64]"),
    ("nms", "m", "det_boxes", "num_dets", "name"),
    ("nms", "m", 'input {\n  name: "images"\n  data_type: TYPE_FP32\n  dims: [3, 64, 96]\n}\n', "", "input"),
    # what runs the file
    ("nms", "m", '"m"', '"other"', "'other'"),
    ("nms", "m", 'platform: "onnxruntime_onnx"', "", "platform"),
    ("nms", "m", "onnxruntime_onnx", "tensorrt_plan", "m/1/model.plan"),
    ("nms", "m", '"m"', '"m"\ndefault_model_filename: "net.onnx"', "m/1/net.onnx"),
    # batches
    ("nms", "m", "max_batch_size: 16", "max_batch_size: -1", "max_batch_size"),
    ("static", "m_network", '"m_network"', '"m_network"\nmax_batch_size: 2', "max_batch_size"),
    # labels
    ("nms", "m", "labels.txt", "names.txt", "m/names.txt"),
]


@pytest.mark.parametrize(("kind", "model", "right", "wrong", "named"), CONFIGS, ids=range(len(CONFIGS)))
def test_a_wrong_configuration_is_refused(kind, model, right, wrong, named, copied):
    repository = copied(kind)
    path = repository / model / "config.pbtxt"
    text = path.read_text("utf-8")
    assert right in text
    path.write_text(text.replace(right, wrong, 1), "utf-8")
    assert named in refusal(repository)


@pytest.mark.parametrize(
    "gone", ["m_network/1/model.onnx", "m_nms/1/model.py", "m/1", "m/labels.txt", "m/config.pbtxt"]
)
def test_what_is_missing_is_named(gone, copied):
    path = copied("raw") / gone
    path.rmdir() if path.is_dir() else path.unlink()
    assert gone in refusal(path.parents[len(Path(gone).parts) - 1])


def test_what_is_no_repository_is_refused(copied, tmp_path):
    repository = copied("raw")
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "gone", tmp_path / "empty", repository / "m_network"):
        refusal(folder)
    (repository / "m_network/1/model.onnx").write_bytes(b"no")
    assert "m_network/1/model.onnx" in refusal(repository)
