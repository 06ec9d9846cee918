"""Model repositories from files: what is written, as protobuf reads it; what is refused; nothing is half written."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import onnx
import pytest
from boxes_graph import NAMES, write_boxes
from engine_notes import write_engine
from triton_stand_in import parse

from utils.core.errors import InputError
from utils.core.input_form import InputForm
from utils.jobs import model_repository
from utils.jobs.model_repository import make
from utils.onnx_graph.output_formats import NmsSettings, deepstream, end2end
from utils.serving import nms_model, repository
from utils.serving.config import Wishes
from utils.serving.served_file import PLAN
from utils.trt.engine_file import EngineNote


def io(config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Inputs and outputs of a configuration."""
    from tritonclient.grpc.model_config_pb2 import DataType

    return {one.name: (DataType.Name(one.data_type), tuple(one.dims)) for one in (*config.input, *config.output)}


def parameters(config) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def made(file: Path, folder: Path, **more) -> dict:
    """The repository's configurations by name, read by protobuf."""
    names = {key: more.pop(key) for key in ("platform", "onnx", "batch", "sides") if key in more}
    written = make(file, folder / "repo", Wishes(**{"name": "m", **more}), **names)
    assert {path.name for path in (folder / "repo").iterdir()} == {path.name for path in written}
    assert [path.name for path in folder.iterdir() if path.name.endswith(".part")] == []
    return {path.name: parse(path / "config.pbtxt") for path in written}


DETECTED = {"num_dets": ("TYPE_INT32", (1,)), "det_boxes": ("TYPE_FP32", (100, 4)), "det_scores": ("TYPE_FP32", (100,)),
            "det_classes": ("TYPE_INT32", (100,))}  # fmt: skip
IMAGES = {"images": ("TYPE_FP32", (3, 64, 96))}


def test_raw_predictions_get_an_ensemble_with_nms(tmp_path):
    file = write_boxes(tmp_path / "a.onnx")
    found = made(file, tmp_path, conf_thres=0.3, max_det=50, instances=2, nms_instances=3, queue_delay=500)
    assert list(found) == ["m_network", "m_nms", "m"]
    network, nms, whole = found.values()
    detected = {**DETECTED, "det_boxes": ("TYPE_FP32", (50, 4))} | {
        name: (DETECTED[name][0], (50,)) for name in ("det_scores", "det_classes")
    }
    assert (network.platform, network.max_batch_size) == ("onnxruntime_onnx", 16)
    assert io(network) == {**IMAGES, "output0": ("TYPE_FP32", (7, 96))}
    assert [(one.kind, one.count) for one in network.instance_group] == [(0, 2)]  # KIND_AUTO
    assert network.dynamic_batching.max_queue_delay_microseconds == 500
    assert not network.dynamic_batching.preferred_batch_size
    warmup = {one.name: (one.batch_size, list(one.inputs["images"].dims)) for one in network.model_warmup}
    assert warmup == {"batch_1": (1, [3, 64, 96]), "batch_16": (16, [3, 64, 96])}
    assert (nms.backend, nms.max_batch_size) == ("python", 16)
    assert io(nms) == {"output0": ("TYPE_FP32", (7, 96)), **detected}
    assert [(one.kind, one.count) for one in nms.instance_group] == [(2, 3)]  # KIND_CPU
    said = {"conf_thres": "0.3", "iou_thres": "0.45", "max_det": "50", "class_agnostic": "false"}
    assert parameters(nms) == said
    assert (whole.platform, whole.max_batch_size) == ("ensemble", 16)
    assert io(whole) == {**IMAGES, **detected}
    steps = [(one.model_name, dict(one.input_map), dict(one.output_map)) for one in whole.ensemble_scheduling.step]
    assert steps == [
        ("m_network", {"images": "images"}, {"output0": "raw_output0"}),
        ("m_nms", {"output0": "raw_output0"}, {name: name for name in detected}),
    ]
    about = parameters(whole)
    assert json.loads(about["names"]) == {str(number): name for number, name in enumerate(NAMES)}
    assert json.loads(about["nms"])["conf_thres"] == 0.3
    for name in ("m", "m_nms"):
        assert (tmp_path / "repo" / name / "labels.txt").read_text("utf-8") == "".join(f"{one}\n" for one in NAMES)
    assert [one.label_filename for one in whole.output] == ["", "", "", "labels.txt"]
    shipped = tmp_path / "repo/m_nms/1/model.py"
    assert shipped.read_bytes() == Path(nms_model.__file__).read_bytes()
    assert (tmp_path / "repo/m_network/1/model.onnx").read_bytes() == file.read_bytes()
    assert (tmp_path / "repo/m/1").is_dir()


def test_a_file_with_nms_is_one_model(tmp_path):
    file = write_boxes(tmp_path / "a.onnx", end2end(NmsSettings("onnx", 100)))
    (config,) = made(file, tmp_path, max_batch=4).values()
    assert (config.platform, config.max_batch_size) == ("onnxruntime_onnx", 4)
    assert io(config) == {**IMAGES, **DETECTED}
    assert parameters(config)["names"]
    assert {path.name for path in (tmp_path / "repo/m").iterdir()} == {"config.pbtxt", "labels.txt", "1"}


def test_raw_predictions_alone(tmp_path):
    (config,) = made(write_boxes(tmp_path / "a.onnx"), tmp_path, nms=False, warmup=False).values()
    assert io(config) == {**IMAGES, "output0": ("TYPE_FP32", (7, 96))}
    assert not config.model_warmup
    assert not (tmp_path / "repo/m/labels.txt").exists()
    assert parameters(config)["task"] == "detect"


@pytest.mark.parametrize(("resolution", "shape"), [(None, (-1, 16, 24)), (28, (100, 784)), (0, (100, 16, 24))])
def test_segmentation_has_masks(resolution, shape, tmp_path):
    form = None if resolution is None else end2end(NmsSettings("onnx", 100), resolution)
    found = made(write_boxes(tmp_path / "a.onnx", form, masks=True), tmp_path)
    assert io(found["m"]) == {**IMAGES, **DETECTED, "det_masks": ("TYPE_FP32", shape)}
    if form is None:
        raw = {"output0": ("TYPE_FP32", (11, 96)), "output1": ("TYPE_FP32", (4, 16, 24))}
        assert raw.items() <= io(found["m_network"]).items()
        assert raw.items() <= io(found["m_nms"]).items()


@pytest.mark.parametrize(
    ("takes", "kind", "dims"),
    [
        (InputForm("uint8"), "TYPE_UINT8", (3, 64, 96)), (InputForm("uint8", "nhwc"), "TYPE_UINT8", (64, 96, 3)),
    ],
    ids=["uint8", "nhwc"],
)  # fmt: skip
def test_inputs_are_as_the_file_takes_them(takes, kind, dims, tmp_path):
    found = made(write_boxes(tmp_path / "a.onnx", takes=takes), tmp_path)
    for name in ("m", "m_network"):
        assert io(found[name])["images"] == (kind, dims)
    sample = found["m_network"].model_warmup[0].inputs["images"]
    assert (sample.data_type, tuple(sample.dims)) == (found["m"].input[0].data_type, dims)
    about = parameters(found["m"])
    assert (about["input_form"], about["input_layout"]) == (takes.kind, takes.layout)


def test_a_static_batch_is_a_part_of_the_shapes(tmp_path):
    found = made(write_boxes(tmp_path / "a.onnx", batch=2), tmp_path)
    assert {config.max_batch_size for config in found.values()} == {0}
    assert io(found["m"])["images"] == ("TYPE_FP32", (2, 3, 64, 96))
    assert io(found["m"])["det_boxes"] == ("TYPE_FP32", (2, 100, 4))
    assert not found["m_network"].HasField("dynamic_batching")
    (sample,) = found["m_network"].model_warmup
    assert (sample.batch_size, list(sample.inputs["images"].dims)) == (1, [2, 3, 64, 96])  # 0 would be skipped


def test_an_engine_is_served_within_its_profile(tmp_path):
    engine = write_engine(tmp_path / "a.engine", write_boxes(tmp_path / "a.onnx"))
    found = made(engine, tmp_path, cuda_graphs=True)
    network = found["m_network"]
    assert (network.platform, network.max_batch_size) == ("tensorrt_plan", 16)
    assert [(one.kind, one.count) for one in network.instance_group] == [(1, 1)]  # KIND_GPU
    assert network.optimization.cuda.graphs
    assert (tmp_path / "repo/m_network/1/model.plan").read_bytes() == b"a plan"
    assert EngineNote.load(tmp_path / "repo/m_network/1/model.plan").tensors == EngineNote.load(engine).tensors
    assert json.loads(parameters(found["m"])["limits"]) == [[1, 3, 64, 96], [16, 3, 64, 96]]
    model_repository.check(tmp_path / "repo")


def test_an_engine_with_nms_and_of_a_dynamic_size(tmp_path):
    source = write_boxes(tmp_path / "a.onnx", end2end(NmsSettings("efficient", 100)))
    note = EngineNote.load(write_engine(tmp_path / "a.engine", source))
    wide = {"images": [[1, 3, 32, 96], [8, 3, 64, 96], [8, 3, 96, 96]]}
    tensors = {**note.tensors, "images": ["float32", [None, 3, None, None]]}
    replace(note, profile=wide, tensors=tensors).save(tmp_path / "a.engine")
    (config,) = made(tmp_path / "a.engine", tmp_path).values()
    assert config.max_batch_size == 8
    assert io(config)["images"] == ("TYPE_FP32", (3, -1, 96))
    assert not config.model_warmup  # of no size of its own
    assert [one.label_filename for one in config.output if one.label_filename] == ["labels.txt"]


def test_an_engine_that_is_built_later(tmp_path, caplog):
    file = write_boxes(tmp_path / "a.onnx", end2end(NmsSettings("efficient", 100)))
    with caplog.at_level("INFO"):
        (config,) = made(file, tmp_path, platform=PLAN, batch=(1, 4, 8)).values()
    assert (config.platform, config.max_batch_size) == ("tensorrt_plan", 8)
    plan = tmp_path / "repo/m/1/model.plan"
    command = f"python scripts/build_engine.py {file} --output {plan} --batch-size 1 4 8"
    assert caplog.messages[-1] == f"the engine is still to be built: {command}"
    with pytest.raises(InputError, match=r"model.plan does not exist; .*config.pbtxt \(tensorrt_plan\) needs it"):
        model_repository.check(tmp_path / "repo")
    write_engine(plan, file)
    model_repository.check(tmp_path / "repo")
    note = asdict(EngineNote.load(plan)) | {"profile": {"images": [[1, 3, 64, 96], [2, 3, 64, 96], [4, 3, 64, 96]]}}
    plan.with_name("model.plan.json").write_text(json.dumps(note))
    with pytest.raises(InputError, match="max_batch_size is 8, and the engine's profile ends at 4 images"):
        model_repository.check(tmp_path / "repo")


def test_an_engine_of_others_takes_what_its_file_says(tmp_path):
    source = write_boxes(tmp_path / "a.onnx")
    (tmp_path / "b.plan").write_bytes(b"a plan")
    with pytest.raises(InputError, match=r"nothing beside .*b.plan says what it takes and gives; .* --onnx"):
        made(tmp_path / "b.plan", tmp_path)
    found = made(tmp_path / "b.plan", tmp_path, onnx=source, batch=(1, 2, 4))
    assert found["m_network"].max_batch_size == 4
    assert EngineNote.load(tmp_path / "repo/m_network/1/model.plan").profile["images"][2] == [4, 3, 64, 96]
    noted = write_engine(tmp_path / "c.engine", source)
    with pytest.raises(InputError, match=r"--onnx does nothing: the note of .*c.engine says what it takes and gives"):
        made(noted, tmp_path, onnx=source)


def test_an_older_note_leads_to_the_file_that_it_names(tmp_path):
    engine = write_engine(tmp_path / "a.engine", write_boxes(tmp_path / "a.onnx"), tensors={})
    assert made(engine, tmp_path)["m_network"].max_batch_size == 16


@pytest.mark.parametrize(
    ("form", "about", "more", "message"),
    [
        (end2end(NmsSettings("efficient")), {}, {}, "it has a plugin of TensorRT's, which ONNX Runtime lacks; export "
                                                    "it with --nms onnx"),
        (deepstream(), {}, {}, "has DeepStream's form of output; give a file of export_qat.py's"),
        (None, {"names": '{"0": "a"}'}, {}, "has 3 classes and names 1 of them"),
        (None, {"names": '{"0": "a", "2": "b", "7": "c"}'}, {}, r"names the classes \[0, 2, 7\]...; expected 0 to 2"),
        (None, {"names": "cat"}, {}, "says that its classes are 'cat'; expected a name for each"),
        (None, {"names": '["a", "b\\nc", "d"]'}, {}, r"class 1 is named 'b\\nc'; labels.txt takes one line"),
        (None, {"names": '["a", "b\\ud800", "d"]'}, {}, "class 1 is named .*; labels.txt takes one line"),
        (None, {}, {"max_batch": 4, "platform": PLAN, "batch": (1, 2, 2)}, "--max-batch-size is 4, .* takes up to 2"),
        (None, {}, {"platform": PLAN, "batch": (2, 2, 2)}, "takes 2 images at least, .* --batch-size 1 2 2"),
        (None, {}, {"cuda_graphs": True}, "--cuda-graphs is for TensorRT engines"),
        (None, {"batch": 2}, {"queue_delay": 100}, "--queue-delay does nothing where a batch holds one request only"),
        (None, {}, {"batch": (1, 1, 1)}, "--batch-size and --imgsz are those of an engine's"),
        (None, {}, {"nms": False, "given": ("conf_thres",)}, "--conf-thres is of NMS .* --no-nms leaves NMS out"),
        (end2end(NmsSettings("onnx")), {}, {"given": ("max_det",)}, "--max-det is of NMS .*NMS is inside the file"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_and_nothing_is_written(form, about, more, message, tmp_path):
    file = write_boxes(tmp_path / "a.onnx", form, **about)
    with pytest.raises(InputError, match=message) as caught:
        made(file, tmp_path, **more)
    assert len(str(caught.value).splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"api": "TensorRT-RTX 1.7.1"}, "TensorRT-RTX 1.7.1 built it, and Triton's backend loads engines of TensorRT"),
        ({"profile": {"pictures": [[1], [1], [1]]}}, "the note beside .*a.engine is damaged"),
        ({"tensors": {"images": "float32"}}, "the note beside .*a.engine is damaged"),
    ],
)
def test_engines_that_no_server_of_tritons_runs(more, message, tmp_path):
    engine = write_engine(tmp_path / "a.engine", write_boxes(tmp_path / "a.onnx"), **more)
    with pytest.raises(InputError, match=message):
        made(engine, tmp_path)
    assert not (tmp_path / "repo").exists()


def test_strongly_typed_files_are_for_engines(tmp_path):
    file = write_boxes(tmp_path / "a.onnx", quantized=True)
    model = onnx.load(file)
    for tensor in model.graph.initializer:
        if tensor.name == "scale":
            half = onnx.numpy_helper.to_array(tensor).astype("float16")
            tensor.CopyFrom(onnx.numpy_helper.from_array(half, "scale"))
    onnx.save(model, file)
    with pytest.raises(
        InputError, match="it is strongly typed, which ONNX Runtime refuses; export it with --typing weak"
    ):
        made(file, tmp_path)
    assert made(file, tmp_path, platform=PLAN)["m_network"].platform == "tensorrt_plan"


def test_what_is_no_file_of_a_network(tmp_path):
    (tmp_path / "a.txt").write_text("")
    for name, message in (
        ("a.txt", "cannot tell what it is by its name"),
        ("b.onnx", "does not exist"),
        ("", "folder"),
    ):
        with pytest.raises(InputError, match=message):
            made(tmp_path / name, tmp_path)
    engine = write_engine(tmp_path / "a.engine", write_boxes(tmp_path / "a.onnx"))
    with pytest.raises(InputError, match="is an engine, which runs as tensorrt_plan only"):
        made(engine, tmp_path, platform="onnxruntime_onnx")


def test_what_lies_there_already_stays(tmp_path):
    file = write_boxes(tmp_path / "a.onnx")
    made(file, tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "repo").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"repo/m_network exists; remove it, or choose another --name or --output"):
        make(file, tmp_path / "repo", Wishes("m"))
    make(file, tmp_path / "repo", Wishes("other"))
    assert len(list((tmp_path / "repo").iterdir())) == 6
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(InputError, match=r"--output .*a.onnx is not a folder"):
        make(file, file, Wishes("m"))


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    file = write_boxes(tmp_path / "a.onnx")

    def broken(folder: Path) -> list:
        assert {path.name for path in folder.iterdir()} == {"m", "m_nms", "m_network"}
        raise InputError("no")

    monkeypatch.setattr(model_repository.checks, "check_repository", lambda folder, *_, **__: broken(folder))
    with pytest.raises(InputError, match="no"):
        make(file, tmp_path / "repo", Wishes("m"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


def test_a_rename_that_fails_takes_the_others_back(tmp_path, monkeypatch):
    file = write_boxes(tmp_path / "a.onnx")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if target.name == "m":
            raise OSError(18, "Invalid cross-device link")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match=r"cannot write into .*repo: Invalid cross-device link"):
        make(file, tmp_path / "repo", Wishes("m"))
    assert list((tmp_path / "repo").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"a.onnx", "repo"}


def test_a_repository_that_is_a_disk_of_its_own_is_written_within(tmp_path, monkeypatch):
    """Such as a volume of a container: nothing can be renamed into it from beside it."""
    file = write_boxes(tmp_path / "a.onnx")
    (tmp_path / "repo").mkdir()
    monkeypatch.setattr(repository.os.path, "ismount", lambda path: Path(path).name == "repo")
    seen = []
    rename = Path.rename

    def noted(self: Path, target: Path) -> Path:
        seen.append(self.parent.parent)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", noted)
    assert set(made(file, tmp_path)) == {"m", "m_nms", "m_network"}
    assert set(seen) == {tmp_path / "repo"}


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a b", 'a"', "é", "-a", "a\n"])
def test_a_name_is_a_part_of_an_address(name):
    with pytest.raises(InputError, match="is no name of a model"):
        Wishes(name)


@pytest.mark.parametrize(
    ("stem", "name"), [("yolov9-c.v2", "yolov9-c.v2"), ("a b é", "a_b__"), ("..a", "a"), ("é", "model")]
)
def test_the_default_name_is_the_files(stem, name):
    assert model_repository.default_name(Path(f"{stem}.onnx")) == name


def test_labels_are_lines():
    assert repository.labels_text(["a", "é", " "]) == "a\né\n \n"
    for name in ("a\nb", "a\x85", "a\u2028b", "\x0c", "\ud800"):
        with pytest.raises(InputError, match="takes one line of text a class"):
            repository.labels_text([name])


def test_the_note_of_a_build_says_what_the_engine_takes(tmp_path, monkeypatch):
    from tensorrt_stand_in import stand_in

    from utils.trt.build_config import BuildConfig
    from utils.trt.builder import build

    file = write_boxes(tmp_path / "a.onnx")
    built = build(file, tmp_path / "a.engine", BuildConfig(batch=(1, 2, 4), progress=False), stand_in(monkeypatch))
    note = EngineNote.load(built.path)
    assert note.tensors == {"images": ["float32", [None, 3, 64, 96]], "output0": ["float32", [None, 7, 96]]}
    file.unlink()
    assert made(built.path, tmp_path)["m_network"].max_batch_size == 4
    shutil.rmtree(tmp_path / "repo")
