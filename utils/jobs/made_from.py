"""What the results in a folder were made from: those that are there are not made again, and must not be another's.

made_from.yaml in the folder says it by digests, which hold on other machines too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.core.errors import InputError
from utils.core.files import atomic_path
from utils.core.input_files import read_yaml
from utils.evaluation.data_yaml import DataConfig
from utils.evaluation.find_images import find_images

FILE = "made_from.yaml"


def keep_to(folder: Path, options: Mapping[str, str | int]) -> None:
    """Write down what the results in `folder` are made from, or compare it with what is written there.

    Args:
        options: option → its value, or a digest of what it names.

    Raises:
        InputError: the results that are there were made with another value of an option.
    """
    import yaml

    path = folder / FILE
    if not path.exists():
        with atomic_path(path) as temporary:
            temporary.write_text(yaml.safe_dump(dict(options)), encoding="utf-8")
        return
    before: Any = read_yaml(path, "remove it if the results beside it are to be kept")
    different = [option for option in options if not isinstance(before, dict) or before.get(option) != options[option]]
    if different:
        raise InputError(
            f"the results in {folder} were made with other {' and '.join(different)}, and what is there is not made "
            "again; choose another --output, or remove that folder"
        )


def dataset_digest(data: DataConfig) -> str:
    """A digest of the names of the classes, and of the names and sizes of the training and validation images."""
    digest = hashlib.sha256(repr(sorted(data.names.items())).encode())
    for split in ("train", "val"):
        for file in find_images(data.paths(split)) if split in data.splits else ():
            size = os.stat(file).st_size if os.path.exists(file) else -1
            digest.update(repr((os.path.relpath(file, data.root), size)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
