#!/usr/bin/env python3
"""The functions of this project that the image size passes through, from a command line to a place in the library.

    cd CHECKOUT; python TESTS/walk.py Finetuner._step 160 qat.py quantize --imgsz 160 ...   # and ends there

A stop is a function that gets the size: as a number, as height and width, or in an object with an attribute of it.
`tests/integration/test_programs.py` holds the limits.
"""

import json
import os
import runpy
import sys
from types import FrameType
from typing import Any

HOLDERS = ("options", "inputs", "config")  # attributes that hold an object with the size


def carries(value: Any, size: int, depth: int = 2) -> bool:
    """Whether a value is the size, holds it, or is an object with an attribute of it."""
    if isinstance(value, int):
        return value == size and not isinstance(value, bool)
    if isinstance(value, (tuple, list)):
        return 0 < len(value) <= 2 and all(isinstance(one, int) for one in value) and size in value
    if depth == 0 or not type(value).__module__.startswith(("models.", "utils.", "argparse", "__main__")):
        return False
    attributes = [(name.strip("_"), one) for name, one in getattr(value, "__dict__", {}).items()]
    return any(name in ("imgsz", "size") and carries(one, size, 0) for name, one in attributes) or any(
        name in HOLDERS and carries(one, size, depth - 1) for name, one in attributes
    )


def main(goal: str, size: int, root: str, ours: set[str]) -> None:
    """Run the program of `sys.argv` until a function named `goal` is called; print the stops before it, each once."""
    stops: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(root) or code.co_name.startswith("<"):
            return  # at once: imports call millions of functions
        path = os.path.relpath(code.co_filename, root)
        if path not in ours:
            return
        owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
        kind = owner if isinstance(owner, type) else type(owner)
        name = code.co_name if owner is None else f"{kind.__name__}.{code.co_name}"
        if name == goal:
            print(*stops, sep="\n", flush=True)
            os._exit(0)  # no handler of the program's own answers
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(carries(frame.f_locals.get(argument), size) for argument in arguments):
            stops.setdefault(f"{path}: {name}")

    sys.setprofile(look)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    goal, size, *sys.argv = sys.argv[1:]
    sys.path.insert(0, os.getcwd())
    with open(".yolov9_overlay/manifest.json", encoding="utf-8") as manifest:
        ours = set(json.load(manifest)["files"])
    from utils.upstream.checkout import import_upstream

    import_upstream()  # imports call millions of functions, which `look` need not see
    main(goal, int(size), os.getcwd(), ours)
    sys.exit(f"the program ended without a call of {goal}")
