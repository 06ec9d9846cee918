"""TensorRT's real Python API, of several versions, on a machine without TensorRT.

NVIDIA's bindings are plain wheels on PyPI; only the libraries behind them are not. With stubs of these libraries the
extension can be imported, and says which classes, values and signatures it has. Each wheel is downloaded once.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tensorrt-bindings"
BINDINGS = {
    "8.6": "tensorrt-bindings==8.6.1", "10.0": "tensorrt-cu12-bindings==10.0.1",
    "10.3": "tensorrt-cu12-bindings==10.3.0", "10.9": "tensorrt-cu12-bindings==10.9.0.34",
    "10.12": "tensorrt-cu12-bindings==10.12.0.36", "10.16": "tensorrt-cu12-bindings==10.16.1.11",
    "11.0": "tensorrt-cu12-bindings==11.0.0.114", "11.4": "tensorrt-cu12-bindings==11.4.0.106",
}  # fmt: skip
DUMP = """
import importlib.machinery, importlib.util, json, pathlib, sys
name = pathlib.Path(sys.argv[1]).stem
loader = importlib.machinery.ExtensionFileLoader(name, sys.argv[1])
module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
loader.exec_module(module)
classes = {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}
print(json.dumps({name: {member: int(getattr(kind, member)) if member in getattr(kind, "__members__", {})
    else getattr(kind, member).__doc__ or "" for member in dir(kind) if member == "__init__" or member[0] != "_"}
    for name, kind in classes.items()}))
"""


def surface(version: str, name: str = "tensorrt") -> dict[str, dict[str, Any]]:
    """Of `tensorrt` or `tensorrt_lean`: class → member → the value of an enum's, or the documentation of another.

    Raises:
        OSError: the wheel cannot be had, the stubs cannot be compiled, or the extension is for another Python.
    """
    prefix, requirement = "" if name == "tensorrt" else "lean-", BINDINGS[version]
    if prefix:
        requirement = requirement.replace("bindings==", "lean-bindings==").replace("cu12-lean", "lean-cu12")
    known = FOLDER / f"{prefix}{version}-py{sys.version_info[0]}{sys.version_info[1]}.json"
    if not known.exists():
        folder = FOLDER / known.stem
        folder.mkdir(parents=True, exist_ok=True)
        ran("pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extension = Path(archive.extract(f"{name}_bindings/{name}.so", folder))
        known.write_text(dump(extension, folder))
        wheel.unlink()
    found: dict[str, dict[str, Any]] = json.loads(known.read_text())
    return found


def record(known: dict[str, dict[str, Any]], kinds: Iterable[str]) -> dict[str, Any]:
    """What the stand-in is made from: those of these classes that are there, with the values of an enum.

    Of another class it is what its constructor takes; of IBuilderConfig, which has none, the names of all members.
    """
    found = {kind: members for kind, members in sorted(known.items()) if kind in kinds}
    values = {kind: {key: one for key, one in of.items() if isinstance(one, int)} for kind, of in found.items()}
    takes = {kind: re.findall(r", (\w+): ", str(of["__init__"]).partition(" ->")[0]) for kind, of in found.items()}
    takes["IBuilderConfig"] = sorted(set(found.get("IBuilderConfig", ())) - {"__init__"})
    return {kind: values[kind] or takes[kind] for kind in found}


def dump(extension: Path, folder: Path) -> str:
    """What the extension has, with stubs for the functions that no library of the system has."""
    undefined = ran("nm", "-D", "--undefined-only", str(extension)).split()
    names = [name for name in undefined if re.fullmatch(r"(?!Py|_Py)[A-Za-z_]\w+", name) and name not in "Uw"]
    (folder / "stubs.c").write_text("".join(f"void* {name}(void) {{ return 0; }}\n" for name in names))
    for library in re.findall(r"\[(libnv\S+)\]", ran("readelf", "-d", str(extension))):
        ran("cc", "-w", "-shared", f"-Wl,-soname,{library}", "-o", str(folder / library), str(folder / "stubs.c"))
    return ran(sys.executable, "-c", DUMP, str(extension), LD_LIBRARY_PATH=str(folder))


def ran(*words: str, **environment: str) -> str:
    """What a program prints."""
    words = (sys.executable, "-m", *words) if words[0] == "pip" else words
    run = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)
    if run.returncode:
        raise OSError(f"{words[0]} {words[1]}: {(run.stderr.strip().splitlines() or ['no message'])[-1]}")
    return run.stdout


def signatures(documentation: str) -> list[tuple[int, int]]:
    """How many arguments each overload needs, and takes at most, without self; [] for what is no function."""
    found = re.findall(r"^(?:\d+\. )?\w+\((self: .*)\) ->", documentation, re.MULTILINE)
    arguments = [re.findall(r", \w+: ([^=]*?)( = .*?)?(?=, \w+: |$)", parameters) for parameters in found]
    return [(sum(not default for _, default in one), len(one)) for one in arguments]
