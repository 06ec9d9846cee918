"""What a bug report needs to know: versions, GPU, driver, and what a file says of itself; nothing about its author.

It works where nothing is installed: what is missing is said as such, and what cannot be imported with its reason.
Folders are left out of every path, and the names of the user and of the machine out of what files say.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib
import importlib.util
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from models.quantize import __version__
from utils.core.errors import InputError, QatError
from utils.core.input_files import check_file
from utils.core.shown import shown
from utils.jobs.dependencies import ENGINES
from utils.reports.machine import gpus, hardware, output_of, versions
from utils.runners.base import literal

ROOT = Path(__file__).resolve().parents[2]
WHEEL_STAMP = "UPSTREAM.md"  # in a checkout that scripts/yolov9_from_wheel.py made
TEGRA = Path("/etc/nv_tegra_release")  # on a Jetson: the release of Jetson Linux
IMPORTED = ("torch", "onnxruntime")  # and TensorRT, whichever of its modules there is
BROKEN = (ImportError, OSError, RuntimeError, AttributeError, ValueError)  # what importing a damaged library raises
# a path from a root on, as far as its last name
_PATH = re.compile(r"(?<![\w.:/~\\])(?:~|[A-Za-z]:)?(?:[/\\][^/\\\s\"':,;]+)*[/\\](?=[^/\\\s\"':,;]+)")
_ROOTED = re.compile(r"(?:~|[A-Za-z]:)?[/\\]")  # what begins with a root is a path as a whole

Lines = Iterable[tuple[str, str]]


def describe(files: Iterable[str | Path] = ()) -> str:
    """Lines of text for a bug report, files last.

    Raises:
        InputError: a file is missing, or is no `.onnx`, `.engine`, `.plan` or `.pt`.
    """
    parts = [[*_project(), *_machine(), *_libraries(), *_gpu()]]
    for file in files:
        path = check_file(file, "expected a .onnx, .engine, .plan or .pt")
        parts.append([("file", path.name), *((name, _anonymous(text)) for name, text in _file(path))])
    return "\n\n".join(_aligned(part) for part in parts)


def _aligned(lines: Lines) -> str:
    lines = list(lines)
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name + ':':{width}}{' '.join(without_folders(text).split())}" for name, text in lines)


def without_folders(text: str) -> str:
    """The text with absolute paths cut to their last name: `/home/ann/a/b.onnx` → `.../b.onnx`."""
    text = text.replace(str(Path.home()), "~") if len(str(Path.home())) > 1 else text
    return _PATH.sub(".../", text)


def _anonymous(text: str) -> str:
    """The text without the names of the user and of the machine, where they stand as words."""
    for name, instead in ((_user(), "USER"), (platform.node(), "HOST")):
        if len(name) > 2:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a number without a name, as in containers
        return ""


def _project() -> Iterator[tuple[str, str]]:
    """Versions of this overlay and of upstream, as far as the folder tells."""
    commit = _commit()
    in_clone = (ROOT / "scripts/overlay_manifest.txt").is_file()
    yield "overlay", __version__ + (f", commit {commit}" if in_clone and commit else "")
    stamp = ROOT / WHEEL_STAMP
    if in_clone:
        yield "upstream", "not here: this is the overlay's clone, and no patched checkout"
    elif stamp.is_file():
        yield "upstream", stamp.read_text(encoding="utf-8", errors="replace").split("\n\n")[1].split("(")[0]
    else:
        yield "upstream", f"commit {commit}" if commit else "commit unknown: git does not say"


def _commit() -> str:
    """What git calls the commit of the folder in which this lies, and whether tracked files differ from it."""
    if not (ROOT / ".git").exists():  # else git would look for one in the folders above
        return ""
    head = output_of("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()
    changed = output_of("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no").strip()
    return f"{head} (with changes)" if head and changed else head


def _machine() -> Iterator[tuple[str, str]]:
    found = hardware()
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not Linux, or one that says nothing
        name = platform.system()
    yield "system", f"{name}, {platform.system()} {platform.release()}, {platform.machine()}"
    yield "CPU", ", ".join([found["cpu"], f"{found['cores']} cores", *([found["memory"]] if "memory" in found else [])])
    if TEGRA.is_file():
        yield "Jetson Linux", TEGRA.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip("# ")


def _libraries() -> Iterator[tuple[str, str]]:
    """Versions by package metadata, and what importing the libraries gives that hold a GPU."""
    found = versions()
    yield "Python", found.pop("python")
    imported = {name: _imported(name) for name in IMPORTED}
    for name in {**dict.fromkeys(imported), **found}:
        yield name, " ".join(filter(None, (found.get(name, ""), imported.get(name, "")))) or "not installed"
    if "tensorrt" not in found:
        yield "tensorrt", "not installed"
    yield from _tensorrt()


def _tensorrt() -> Iterator[tuple[str, str]]:
    from utils.trt import tensorrt_api

    module = tensorrt_api.installed()
    if module is not None:
        try:
            yield "TensorRT runs", tensorrt_api.load(module).name
        except QatError as error:
            yield "TensorRT runs", f"no: {error}"


def _imported(name: str) -> str:
    """What a library says of its build once it is imported, or why it cannot be."""
    if importlib.util.find_spec(name) is None:
        return ""
    try:
        module = importlib.import_module(name)
        if name == "torch":
            return f"(CUDA {module.version.cuda or 'none'}, sees {module.cuda.device_count()} GPUs)"
        return f"({', '.join(module.get_available_providers())})"
    except BROKEN as error:
        return f"(cannot be imported: {type(error).__name__}: {str(error)[:200]})"


def _gpu() -> Iterator[tuple[str, str]]:
    """GPUs and driver as nvidia-smi has them, else as torch does (a Jetson may have no nvidia-smi)."""
    listed = gpus("name", "compute_cap", "memory.total", "driver_version")
    for *fields, driver in listed:
        yield "GPU", f"{', '.join(fields)}, driver {driver}"
    if listed:
        cuda = re.search(r"CUDA Version\s*:\s*([\d.]+)", output_of("nvidia-smi"))
        yield "CUDA of the driver", cuda[1] if cuda else "nvidia-smi does not say"
        return
    try:
        from utils.trt import tensorrt_api

        seen = tensorrt_api.gpu()
    except (QatError, *BROKEN):  # torch is not installed, or cannot be imported; its line says so
        seen = None
    yield "GPU", f"{seen.name}, {seen.architecture}, driver unknown: nvidia-smi is not there" if seen else "none found"


def _file(path: Path) -> Iterator[tuple[str, str]]:
    """What a file says of itself."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
    yield "size", f"{path.stat().st_size:,} bytes, SHA-256 {digest.hexdigest()}"
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        yield from _onnx(path)
    elif suffix in ENGINES:
        yield from _engine(path)
    elif suffix == ".pt":
        yield from _checkpoint(path)
    else:
        raise InputError(f"{path}: cannot tell what it is by its name; expected .onnx, .engine, .plan or .pt")


def _digest(file: Any) -> Any:
    """As `hashlib.file_digest`, which Python 3.10 does not have."""
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def _onnx(path: Path) -> Iterator[tuple[str, str]]:
    from utils.trt import onnx_summary

    try:
        file = onnx_summary.read(path)
    except QatError as error:
        yield "cannot be read", str(error)
        return
    yield "operators", f"opset {file.opset}" + ", Q/DQ nodes" * file.quantized + ", TensorRT's plugins" * file.plugins
    for kind, tensors in (("input", file.inputs), ("output", file.outputs)):
        for name, shape in tensors.items():
            yield kind, f"{name} {['?' if size is None else size for size in shape]}"
    yield from _entries(file.metadata)


def _engine(path: Path) -> Iterator[tuple[str, str]]:
    from utils.trt.engine_file import EngineNote, note_path

    if not note_path(path).is_file():
        yield "note", "there is none beside it: it was not built by build_engine.py"
        return
    try:
        note = EngineNote.load(path)
    except QatError as error:
        yield "cannot be read", str(error)
        return
    yield from _entries({name: value for name, value in vars(note).items() if name not in ("metadata", "tuning")})
    yield from _entries(note.metadata)


def _checkpoint(path: Path) -> Iterator[tuple[str, str]]:
    """A quantized checkpoint's entries that are no tensors; nothing of a float one, whose network is upstream's."""
    try:
        from models.quantize import checkpoint

        content = checkpoint.summary(path)
    except QatError as error:
        yield "cannot be read", str(error)
    except ImportError as error:
        yield "cannot be read", f"{error}: reading a .pt needs torch"
    else:
        yield "kind", "quantized by qat.py" if content else "a float checkpoint, or another file of PyTorch's"
        yield from _entries(content)


def _entries(entries: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Entries as lines; of class names, which are nobody's business, their number."""
    for name, value in entries.items():
        if name == "names":
            found = literal(value) if isinstance(value, str) else value
            yield name, f"{len(found)} classes" if isinstance(found, Sized) else "no list of classes"
        elif isinstance(value, str) and _ROOTED.match(value):
            yield name, ".../" + re.split(r"[/\\]", value)[-1]  # folders may have spaces in their names
        elif value not in ("", None, {}, ()):
            yield name, value if isinstance(value, str) else shown(value)
