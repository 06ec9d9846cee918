"""The check of a repository: what is written passes, and each mistake is refused in one line before a server would."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from boxes_graph import write_boxes
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from utils.core.errors import InputError
from utils.jobs.model_repository import check_repository as check_models
from utils.jobs.model_repository import make
from utils.onnx_graph.output_formats import NmsSettings, end2end
from utils.serving.options import ServingOptions

Change = Callable[[dict], None]


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
def copied(repositories, tmp_path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(repositories[name], tmp_path / name))


def change(repository: Path, model: str, how: Change) -> None:
    path = repository / model / "config.pbtxt"
    config = text_format.Parse(path.read_text("utf-8"), ModelConfig())
    fields = json_format.MessageToDict(config, preserving_proto_field_name=True)
    how(fields)
    path.write_text(text_format.MessageToString(json_format.ParseDict(fields, ModelConfig())), "utf-8")


def refusal(repository: Path) -> str:
    with pytest.raises(InputError) as caught:
        check_models(repository)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value).replace(f"{repository}/", "")


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


def test_what_is_written_passes(repositories, caplog):
    with caplog.at_level("INFO"):
        for repository in repositories.values():
            check_models(repository)
    assert "m_network: onnxruntime_onnx, max_batch_size 16, images [3, 64, 96] -> output0 [7, 96]" in caplog.messages


CONFIGS = [  # repository, model, the mistake, what the line names
    ("nms", "m", put(max_batch_size=0), "images"),
    ("nms", "m", tensor("output", 3, data_type="TYPE_INT64"), "TYPE_INT64"),
    # names and shapes
    ("nms", "m", tensor("input", 0, name="image"), "image"),
    ("nms", "m", tensor("output", 1, name="boxes"), "boxes"),
    ("nms", "m", tensor("input", 0, dims=[3, 96, 64]), "[3, 96, 64]"),
    ("nms", "m", tensor("output", 1, name="num_dets"), "name"),
    ("nms", "m", without("input"), "input"),
    # what runs the file
    ("nms", "m", put(name="other"), "'other'"),
    ("nms", "m", without("platform"), "platform"),
    ("nms", "m", put(platform="tensorrt_plan", instance_group=[]), "m/1/model.plan"),
    ("nms", "m", put(default_model_filename="net.onnx"), "m/1/net.onnx"),
    # batches
    ("nms", "m", put(max_batch_size=-1), "max_batch_size"),
    ("static", "m_network", put(max_batch_size=2), "max_batch_size"),
    # labels
    ("nms", "m", tensor("output", 3, label_filename="names.txt"), "m/names.txt"),
]


@pytest.mark.parametrize(("kind", "model", "mistake", "named"), CONFIGS, ids=range(len(CONFIGS)))
def test_a_wrong_configuration_is_refused(kind, model, mistake, named, copied):
    repository = copied(kind)
    change(repository, model, mistake)
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
