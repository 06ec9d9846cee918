"""A model repository on disk ("Model Repository" in Triton's user guide); each model is written whole or not at all.

REPOSITORY/NAME/config.pbtxt
REPOSITORY/NAME/labels.txt       names of the classes
REPOSITORY/NAME/1/model.onnx     or model.plan, or `nms_model.py` as model.py; of an ensemble the folder is empty
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from utils.core.errors import InputError
from utils.core.input_files import read_text
from utils.serving.config import LABELS, PYTHON
from utils.serving.served_file import ONNX, PLAN, ServedFile, class_names

CONFIG = "config.pbtxt"
MODEL_FILES = {PLAN: "model.plan", ONNX: "model.onnx", PYTHON: "model.py"}  # the names that Triton looks for
HEAD = "# Written by scripts/make_triton.py, which checks it with --check.\n"


def write(
    repository: Path, file: ServedFile, configs: Sequence[ModelConfig], note: str, check: Callable[[Path], object]
) -> list[Path]:
    """Write the models of a file, and return their folders.

    The models are written into a folder beside the repository, checked there and renamed into it, so that a server that
    polls the repository never sees half of a model.

    Args:
        note: the JSON to write beside an engine; '' for none.
        check: gets the folder before its models become the repository's, and may raise.

    Raises:
        InputError: something is in the way.
    """
    if repository.exists() and not repository.is_dir():
        raise InputError(f"--output {repository} is not a folder; give the folder of a model repository, or a new one")
    targets = [repository / config.name for config in configs]
    for target in filter(os.path.lexists, targets):
        raise InputError(f"{target} exists; remove it, or choose another --name or --output")
    place = repository if repository.is_mount() else repository.absolute().parent  # a rename stays on one disk
    place.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{repository.name}-", suffix=".part", dir=place))
    try:
        for config in configs:
            _write_model(temporary / config.name, config, file, note)
        check(temporary)
        repository.mkdir(exist_ok=True)
        for target in targets:
            (temporary / target.name).rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return targets


def _write_model(folder: Path, config: ModelConfig, file: ServedFile, note: str) -> None:
    version = folder / "1"
    version.mkdir(parents=True)
    text = text_format.MessageToString(config, as_utf8=True, use_short_repeated_primitives=True)
    (folder / CONFIG).write_text(HEAD + text, encoding="utf-8")
    if any(output.label_filename for output in config.output):
        labels = "".join(f"{name}\n" for name in class_names(file.metadata, file.path))
        (folder / LABELS).write_text(labels, encoding="utf-8")
    if config.backend == PYTHON:
        shutil.copyfile(Path(__file__).with_name("nms_model.py"), version / MODEL_FILES[PYTHON])
    elif config.platform == file.platform:
        if not file.pending:
            shutil.copyfile(file.path, version / MODEL_FILES[file.platform])
        if note:
            (version / f"{MODEL_FILES[file.platform]}.json").write_text(note, encoding="utf-8")


def read_config(path: Path) -> ModelConfig:
    """A config.pbtxt; raises `InputError` if protobuf cannot read it."""
    text = read_text(path, "each folder of a repository is a model and needs it")
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise InputError(f"{path}, line {' '.join(str(error).split())}") from error
