"""What the tests of qat.py share: a few images of the demo set, and running the program in this process."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import qat
from utils.evaluation.data_yaml import load_data
from utils.evaluation.image_files import find_images

SMALL_RUN = (  # --force, since networks of these tests need not find anything
    *("--imgsz", "96", "--batch-size", "2", "--workers", "0", "--device", "cpu", "--force"),
    *("--calib-images", "4", "--iters", "2"),
)
# Half of the demo network's layers, which a recipe has in float where a run need not look at all of them.
SETTLED = tuple(f"model.{layer}" for layer in (5, 6, 7, 8, 11, 14, 17, 18))


def write_small_set(folder: Path, demo_data: Path, train: int = 6, val: int = 6, *, spread: bool = False) -> Path:
    """A data.yaml for the first few images of the demo set, or for some that are evenly spread."""
    demo = load_data(demo_data)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("val", val)):
        images = find_images(demo.paths(split))
        images = images[:: len(images) // count][:count] if spread else images[:count]
        (folder / f"{split}.txt").write_text("\n".join(images) + "\n")
    lists = {split: str(folder / f"{split}.txt") for split in ("train", "val")}
    (folder / "data.yaml").write_text(yaml.safe_dump({"path": str(demo.root), **lists, "names": dict(demo.names)}))
    return folder / "data.yaml"


def quantize(weights: Path, data: Path, project: Path, *words: str) -> int:
    """Run `qat.py quantize` on few images; returns its exit code."""
    paths = ["--weights", str(weights), "--data", str(data), "--project", str(project)]
    return qat.main(["quantize", *paths, *SMALL_RUN, *words])


def half_of_layers(folder: Path) -> tuple[str, str]:
    """The option of a recipe that has `SETTLED` in float."""
    path = folder / "half.yaml"
    path.write_text(yaml.safe_dump({"float": list(SETTLED)}))
    return "--recipe", str(path)


def report_of(run: Path) -> dict[str, Any]:
    """The content of a run's report.json."""
    return json.loads((run / "report.json").read_text())


def checkpoints(run: Path) -> list[str]:
    """Names of the files in a run's weights folder, hidden ones too."""
    return sorted(os.listdir(run / "weights"))


class Killed(BaseException):
    """Ends the program as abruptly as this process allows."""


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, last: int | None = None) -> list[int]:
    """Count calls of `owner.name`, and die at the `last`."""
    original, calls = getattr(owner, name), list[int]()

    def call(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == last:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


def killed(run: Callable[[], object], owner: object, name: str, last: int = 1) -> None:
    """Run something that dies at the `last` call of `owner.name`."""
    with pytest.MonkeyPatch.context() as patch:
        counted(patch, owner, name, last)
        with pytest.raises(Killed):
            run()
