"""What came out of a checkpoint is checked whole: data and modules in a tree, and nothing that a network would call.

A module may only have plain data, tensors and children as attributes, and no hooks; a segment head also has the forward
of the class below, as each instance of its class. The tree is bounded, so that nothing that walks over it (moving it to
a device, copying, showing) goes on without end.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import PurePosixPath
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.untrusted.allowed_names import KEPT_AS, KEPT_FORWARDS
from utils.untrusted.pickle_machine import Damaged, NotAllowed

DEEPEST = 64
MOST_VALUES = 20_000_000  # each counted as often as it is reached
MOST_SHARING = 2  # times that a network's tensors may show a stored byte; those of upstream's show it once

_ATOMS = frozenset({type(None), bool, int, float, str, bytes, torch.Tensor, nn.Parameter, torch.Size, torch.dtype,
                    torch.device, PurePosixPath, np.ndarray})  # fmt: skip
_CONTAINERS = frozenset({list, tuple, dict, OrderedDict, set})
_PARTS = ("_parameters", "_buffers", "_modules")
_PRIVATE = ("_non_persistent_buffers_set", "_reversed_padding_repeated_twice")
_NAME = re.compile(r"[A-Za-z_]\w{0,99}|\d{1,5}")


def check(content: Any, modules: frozenset[type[nn.Module]] = frozenset()) -> None:
    """Look at everything that a file held.

    Args:
        modules: the classes that it may hold.

    Raises:
        NotAllowed: a value of another kind, a hook, or a module where data is expected.
        Damaged: a container within itself, a module in two places, nesting without end, or tensors over one storage.
    """
    walk = _Walk(modules)
    walk.check(content)
    walk.check_storages()


class _Walk:
    def __init__(self, modules: frozenset[type[nn.Module]]) -> None:
        self._modules = modules
        self._forwards = {cls.__name__: vars(cls).get("forward") for cls in modules}
        self._sizes: dict[int, int] = {}  # container → values below it; 0 while it is being visited
        self._depths: dict[int, int] = {}
        self._plain: set[int] = set()  # containers in which no module lies
        self._children: set[int] = set()  # modules that another module holds
        self._shown = 0  # bytes of the modules' tensors
        self._stored: dict[int, int] = {}  # storages that these lie in → bytes

    def check(self, content: Any) -> None:
        """From the leaves up, without recursion: a file may be nested deeper than Python's stack."""
        if not self._is_container(content):
            return
        stack: list[tuple[Any, list[Any], Iterator[Any]]] = []
        self._enter(content, stack)
        while stack:
            value, children, remaining = stack[-1]
            for child in remaining:
                if not self._is_container(child):
                    continue
                if self._sizes.get(id(child)) == 0:
                    raise Damaged("it holds a container that contains itself")
                if id(child) not in self._sizes:
                    self._enter(child, stack)
                    break
            else:
                self._leave(value, children)
                stack.pop()

    def check_storages(self) -> None:
        """Converting a network to another type copies each tensor, so a storage may not serve for thousands of them."""
        if self._shown > MOST_SHARING * sum(self._stored.values()):
            raise Damaged(f"its network's tensors of {self._shown} bytes share a storage")

    def _enter(self, value: Any, stack: list[tuple[Any, list[Any], Iterator[Any]]]) -> None:
        if len(stack) > DEEPEST:
            raise Damaged("what it holds is nested without end")
        self._sizes[id(value)] = 0
        if isinstance(value, nn.Module):
            self._check_module(value)
            children = [one for key, one in vars(value).items() if not self._is_kept_forward(value, key)]
        else:
            children = list(value.values()) if isinstance(value, dict) else list(value)
        stack.append((value, children, iter(children)))

    def _leave(self, value: Any, children: list[Any]) -> None:
        size = 1 + len(children) + sum(self._sizes.get(id(child), 0) for child in children)
        depth = 1 + max((self._depths.get(id(child), 0) for child in children), default=0)
        if size > MOST_VALUES or depth > DEEPEST:
            raise Damaged("what it holds is nested without end")
        self._sizes[id(value)], self._depths[id(value)] = size, depth

    def _is_container(self, value: Any) -> bool:
        kind = type(value)
        if kind in _CONTAINERS or kind in self._modules:
            return True
        if kind in _ATOMS or isinstance(value, (np.number, np.bool_, np.dtype)):
            return False
        if kind is FunctionType:
            raise NotAllowed(f"{value.__qualname__} where no segment head keeps it")
        raise NotAllowed(getattr(value, "name", None) or f"{kind.__module__}.{kind.__qualname__}")

    def _is_kept_forward(self, module: nn.Module, key: str) -> bool:
        """Whether an attribute is the very function that the module's class gives each of its instances."""
        below = KEPT_FORWARDS.get(type(module).__name__)
        return key == KEPT_AS and below is not None and vars(module)[key] is self._forwards.get(below)

    def _check_module(self, module: nn.Module) -> None:
        name, state = type(module).__name__, vars(module)
        if any(type(state.get(key)) not in (dict, OrderedDict) for key in _PARTS):
            raise Damaged(f"{name} has no parameters, buffers or children")
        if type(state.get("_non_persistent_buffers_set")) is not set or type(state.get("training")) is not bool:
            raise Damaged(f"{name} has no whole state")
        kinds = {"_parameters": {nn.Parameter}, "_buffers": {torch.Tensor}, "_modules": self._modules}
        for key in _PARTS:
            for own, value in state[key].items():
                if type(own) is not str or not _NAME.fullmatch(own) or hasattr(nn.Module, own):
                    raise NotAllowed(f"the name {own!s:.80} in {name}")
                if value is not None and type(value) not in kinds[key]:
                    raise NotAllowed(f"{type(value).__name__} under {name}.{own}")
                if isinstance(value, torch.Tensor):
                    self._shown += value.nbytes
                    self._stored[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        for child in state["_modules"].values():
            if child is not None and vars(child).get("_modules"):  # one activation serves the whole network
                if id(child) in self._children:
                    raise Damaged(f"{type(child).__name__} is part of the network twice")
                self._children.add(id(child))
        for key, value in state.items():
            if key not in _PARTS:
                self._check_attribute(name, key, value)

    def _check_attribute(self, name: str, key: str, value: Any) -> None:
        if key.startswith("_") and "_hook" in key:
            if not (value is None or type(value) is bool or (type(value) in (dict, OrderedDict) and not value)):
                raise NotAllowed(f"a hook of {name} ({key:.80})")
        elif key.startswith("_") and key not in _PRIVATE:
            raise NotAllowed(f"attribute {key:.80} of {name}")
        stack = [value]
        while stack:
            one = stack.pop()
            if isinstance(one, nn.Module):
                raise NotAllowed(f"{type(one).__name__} as {name}.{key:.80}")
            if type(one) in _CONTAINERS and id(one) not in self._plain:
                self._plain.add(id(one))
                stack += one.values() if isinstance(one, dict) else one
