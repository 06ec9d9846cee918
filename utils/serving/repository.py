"""A model repository on disk (https://docs.nvidia.com/deeplearning/triton-inference-server/: "Model Repository").

    REPOSITORY/NAME/config.pbtxt
    REPOSITORY/NAME/labels.txt       names of the classes
    REPOSITORY/NAME/1/model.onnx     or model.plan, or `nms_model.py` as its model; of an ensemble the folder is empty

All models are written into a folder beside the repository, checked there, and renamed into it: a server that polls the
repository never sees a half of one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import interrupts
from utils.core.errors import InputError
from utils.core.files import named_when_full
from utils.serving import pbtxt
from utils.serving.config import LABELS, PYTHON, Config
from utils.serving.served_file import FILE_NAMES, ServedFile

CONFIG, VERSION = "config.pbtxt", "1"
HEAD = "# Written by scripts/make_triton.py, which checks it with --check.\n"
PYTHON_MODEL = Path(__file__).with_name("nms_model.py")


def labels_text(names: Sequence[str]) -> str:
    """One class a line.

    Raises:
        InputError: a name has several lines, or no character that can be written.
    """
    for number, name in enumerate(names):
        if len(f"{name}.".splitlines()) > 1 or not _can_be_written(name):
            raise InputError(f"class {number} is named {name!r:.60}; {LABELS} takes one line of text a class")
    return "".join(f"{name}\n" for name in names)


def _can_be_written(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_free(repository: Path, names: Sequence[str]) -> None:
    """Raise `InputError` if something lies where these models are to be written."""
    if repository.exists() and not repository.is_dir():
        raise InputError(f"--output {repository} is not a folder; give the folder of a model repository, or a new one")
    for name in names:
        if os.path.lexists(repository / name):
            raise InputError(f"{repository / name} exists; remove it, or choose another --name or --output")


def write(
    repository: Path, file: ServedFile, models: Mapping[str, Config], note: str, check: Callable[[Path], None]
) -> list[Path]:
    """Write the models, or nothing.

    Args:
        file: is copied into the model that runs it, if it is there: an engine may be built later.
        note: what is written beside it as FILE.json, the note of an engine; '' for nothing.
        check: gets the folder before it counts, and may refuse it.

    Returns:
        The folders of the models.

    Raises:
        InputError: something is in the way, or cannot be written.
    """
    check_free(repository, list(models))
    with _beside(repository) as temporary:
        for name, config in models.items():
            _write_model(temporary / name, config, file, note)
        check(temporary)
        repository.mkdir(parents=True, exist_ok=True)
        done: list[Path] = []
        try:
            with interrupts.held():
                for name in models:
                    (temporary / name).rename(repository / name)
                    done.append(repository / name)
        except OSError as error:
            for folder in done:
                shutil.rmtree(folder, ignore_errors=True)
            raise InputError(f"cannot write into {repository}: {error.strerror}") from error
    return done


@contextmanager
def _beside(repository: Path) -> Iterator[Path]:
    """A folder beside `repository`, or in it where that is a disk of its own, that is removed at the end."""
    whole = Path(os.path.abspath(repository))
    place = whole if os.path.ismount(whole) else whole.parent
    folder = place / f".{whole.name}-{os.urandom(4).hex()}.part"
    interrupts.temporaries.add(str(folder))
    try:
        with named_when_full(repository, folder):
            folder.mkdir(parents=True)
            yield folder
    except PermissionError as error:
        raise InputError(f"cannot write {error.filename}: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        interrupts.temporaries.discard(str(folder))


def _write_model(folder: Path, config: Config, file: ServedFile, note: str) -> None:
    version = folder / VERSION
    version.mkdir(parents=True)
    (folder / CONFIG).write_text(HEAD + pbtxt.dumps(config), encoding="utf-8")
    if any("label_filename" in output for output in config["output"]):
        (folder / LABELS).write_text(labels_text(file.names), encoding="utf-8")
    if config.get("backend") == PYTHON:
        shutil.copyfile(PYTHON_MODEL, version / "model.py")
    elif config.get("platform") in FILE_NAMES:
        target = version / FILE_NAMES[config["platform"]]
        if not file.pending:
            shutil.copyfile(file.path, target)
        if note:
            target.with_name(f"{target.name}.json").write_text(note, encoding="utf-8")
