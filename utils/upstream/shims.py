"""What upstream YOLOv9 needs on a current stack, without editing its files.

Upstream was written for torch 1.x, NumPy 1.x and an old setuptools. `install()` supplies what has been removed since,
before the first upstream import; `after_import()` replaces what would reach for the network, or unpickle the label
caches of a dataset.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from utils.core.device import import_torchvision


def install() -> None:
    """Supply removed functions and optional modules. Call before importing anything of upstream's."""
    import numpy as np
    from PIL.ImageFont import FreeTypeFont

    os.environ.setdefault("YOLOv5_AUTOINSTALL", "false")  # upstream would run pip by itself
    os.environ.setdefault("WANDB_MODE", "disabled")
    os.environ.setdefault("MPLBACKEND", "agg")
    if not hasattr(np, "trapz"):  # removed in NumPy 2.4; upstream's AP integrates with it
        np.trapz = np.trapezoid  # type: ignore[attr-defined]
    if not hasattr(FreeTypeFont, "getsize"):  # removed in Pillow 10
        FreeTypeFont.getsize = lambda font, text: font.getbbox(text)[2:]  # type: ignore[attr-defined]
    if "pkg_resources" not in sys.modules:  # where it still exists, importing it warns and takes a second
        sys.modules["pkg_resources"] = _pkg_resources()
    if "IPython" not in sys.modules and importlib.util.find_spec("IPython") is None:
        _ipython()
    import_torchvision()  # before upstream imports it


def after_import() -> None:
    """Make the font check of upstream's dataset reader ignore a missing network: fonts only serve plot labels."""
    import utils.dataloaders as dataloaders
    import utils.general as general

    check = general.check_font

    def check_font(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(OSError):  # URLError is one; matplotlib's own font serves
            return check(*args, **kwargs)

    general.check_font = check_font
    without_label_caches(dataloaders)


def without_label_caches(module: types.ModuleType) -> None:
    """Keep one of upstream's dataset modules from reading or writing `labels/*.cache`, which are pickles.

    Upstream takes a cache that cannot be loaded for a missing one, and reads the labels themselves.
    """
    if not isinstance(module.np, _NumPyWithoutPickles):
        module.np = _NumPyWithoutPickles(module.np)  # type: ignore[attr-defined]


class _NumPyWithoutPickles(types.ModuleType):
    """NumPy, but for objects in files."""

    def __init__(self, numpy: types.ModuleType) -> None:
        super().__init__("numpy")
        self._numpy = numpy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numpy, name)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("allow_pickle") or len(args) > 2:
            raise ValueError("label caches are not read: they are pickles, and could hold code")
        return self._numpy.load(*args, **kwargs)

    def save(self, file: Any, array: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(array, self._numpy.ndarray):
            raise ValueError("label caches are switched off")
        self._numpy.save(file, array, *args, **kwargs)


def load_safely_by_default(read: Callable[[Any, Any], Any]) -> None:
    """Make `torch.load` without `weights_only` read upstream's checkpoints, and run nothing of them.

    Upstream calls `torch.load(path)`, whose default since torch 2.6 refuses its own checkpoints and which would run
    code before.

    Args:
        read: gives what a file holds, its tensors on a device.
    """
    import functools

    import torch

    original = torch.load

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("weights_only") is not None:
            return original(f, map_location, *args, **kwargs)
        return read(f, map_location if isinstance(map_location, (str, torch.device)) else "cpu")

    torch.load = load


def prefer_speed() -> None:
    """Let upstream's training use the fastest algorithms: it asks torch for deterministic ones, on images in planes.

    Images come in channels-last, which all maps follow, and cuDNN measures its algorithms. Weights stay in planes:
    upstream's fusing needs them so.
    """
    import functools

    import torch

    import models.yolo as yolo
    import utils.general as general

    init_seeds, forward = general.init_seeds, yolo.DetectionModel.forward

    @functools.wraps(init_seeds)
    def seeds_alone(seed: int = 0, deterministic: bool = False) -> None:
        init_seeds(seed)
        torch.backends.cudnn.benchmark = True

    @functools.wraps(forward)
    def channels_last(self: torch.nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(self, x.contiguous(memory_format=torch.channels_last), *args, **kwargs)

    general.init_seeds = seeds_alone
    yolo.DetectionModel.forward = channels_last


def _pkg_resources() -> types.ModuleType:
    """The three functions of pkg_resources (gone in setuptools 82) that upstream calls."""
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.version import parse

    class DistributionNotFound(Exception):
        pass

    class VersionConflict(Exception):
        pass

    def parse_requirements(lines: Any) -> Iterator[Requirement]:
        for line in lines.splitlines() if isinstance(lines, str) else lines:
            text = line.split("#")[0].strip()
            if text:
                yield Requirement(text)

    def require(text: str) -> None:
        wanted = Requirement(text)
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError as error:
            raise DistributionNotFound(text) from error
        if not wanted.specifier.contains(found, prereleases=True):
            raise VersionConflict(f"{wanted.name} {found} is installed, {text} is needed")

    module = types.ModuleType("pkg_resources")
    vars(module).update(
        parse_version=parse,
        parse_requirements=parse_requirements,
        require=require,
        DistributionNotFound=DistributionNotFound,
        VersionConflict=VersionConflict,
    )
    return module


def _ipython() -> None:
    """Upstream imports IPython at start only to ask whether it runs in a notebook.

    Who finds a module of that name reads its version too: matplotlib does.
    """
    package, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    vars(display).update(display=lambda *a, **k: None, clear_output=lambda *a, **k: None)
    vars(package).update(get_ipython=lambda: None, display=display, version_info=(9, 0, 0, ""), __version__="9.0.0")
    sys.modules.update({"IPython": package, "IPython.display": display})
