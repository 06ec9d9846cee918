"""A pickle machine that knows data and names, and calls nothing that it was not given.

Python's unpickler imports what a file names and calls it. This one runs the few opcodes that `torch.save` writes. What
a name, a call, an instance or a storage means is decided by the `Meanings` that it is given; an opcode or a name that
is not known ends the reading.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

MOST_DIGITS = 16  # bytes of an integer
MOST_OPCODES = 2_000_000  # each may make an object; a training state of yolov9-e has 490,000
_MARK = object()


class NotAllowed(pickle.UnpicklingError):
    """A file names something, or does something, that only code could need."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not allowed in this file")
        self.name = name


class Damaged(RuntimeError):
    """A file is no pickle that `torch.save` wrote."""


class Meanings(Protocol):
    """What the names of a pickle mean."""

    def find(self, name: str) -> Any:
        """The value or the stand-in for a dotted name; raises `NotAllowed`."""

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """The value that a stand-in makes."""

    def create(self, kind: Any) -> Any:
        """An empty instance."""

    def fill(self, instance: Any, state: Any) -> None:
        """Gives an instance its state."""

    def storage(self, identity: Any) -> Any:
        """The storage that a persistent id names."""


def run(data: bytes, meanings: Meanings) -> Any:
    """What a pickle holds.

    Raises:
        NotAllowed: it names something else than data, or holds an opcode that `torch.save` does not write.
        Damaged: it is no whole pickle, or a longer one than a checkpoint has.
    """
    machine = _Machine(data, meanings)
    try:
        return machine.run()
    except (Damaged, NotAllowed):
        raise
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError, struct.error) as error:
        raise Damaged(f"{type(error).__name__} at byte {machine.position} of the pickle") from error


class _Machine:
    def __init__(self, data: bytes, meanings: Meanings) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.meanings = meanings

    def run(self) -> Any:
        for _ in range(MOST_OPCODES):
            code = self.data[self.position]
            self.position += 1
            if code == _STOP:
                return self.stack.pop()
            operation = OPERATIONS.get(code)
            if operation is None:
                raise NotAllowed(f"pickle opcode {bytes([code])!r}")
            operation(self)
        raise Damaged(f"its pickle has more than {MOST_OPCODES} opcodes")

    # --- bytes ------------------------------------------------------------------------------------------------------
    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise Damaged("the pickle ends early")
        found = self.data[self.position : end]
        self.position = end
        return found

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> str:
        end = self.data.index(b"\n", self.position) if b"\n" in self.data[self.position : self.position + 500] else -1
        if end < 0:
            raise Damaged("a name has no end")
        found = self.data[self.position : end].decode("utf-8")
        self.position = end + 1
        return found

    # --- stack ------------------------------------------------------------------------------------------------------
    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise Damaged("a mark stands where a value was expected")
        return value

    def top(self) -> Any:
        value = self.stack[-1]
        if value is _MARK:
            raise Damaged("a mark stands where a value was expected")
        return value

    def pop_to_mark(self) -> list[Any]:
        found: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            found.append(value)
        return found[::-1]

    def push_tuple(self, count: int) -> None:
        self.push(tuple([self.pop() for _ in range(count)][::-1]))

    # --- containers -------------------------------------------------------------------------------------------------
    def append(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not list:
            raise NotAllowed(f"appending to {type(target).__name__}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) not in (dict, OrderedDict) or len(values) % 2:
            raise NotAllowed(f"setting items of {type(target).__name__}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            target[checked_key(key)] = value

    # --- names ------------------------------------------------------------------------------------------------------
    def push_global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise Damaged("a name is no text")
        self.push(self.meanings.find(f"{module}.{name}"))

    def reduce(self) -> None:
        arguments = self.pop()
        function = self.pop()
        if type(arguments) is not tuple:
            raise Damaged("a call without arguments")
        self.push(self.meanings.call(function, arguments))

    def new_object(self) -> None:
        arguments = self.pop()
        kind = self.pop()
        if arguments != ():
            raise NotAllowed(f"an instance of {name_of(kind)} with arguments")
        self.push(self.meanings.create(kind))

    def stack_global(self) -> None:
        name = self.pop()
        self.push_global(self.pop(), name)

    def build(self) -> None:
        state = self.pop()
        self.meanings.fill(self.top(), state)


def name_of(value: Any) -> str:
    """What a message calls a value of a file: text, a name or a type, never a content that may be without end."""
    name = value if type(value) is str else getattr(value, "name", None)
    return name[:80] if type(name) is str else type(value).__name__


def checked_key(key: Any) -> Any:
    """A dictionary's key or a set's item: text or a small number, so that no file can make all hashes equal."""
    if type(key) in (str, bool, float) or key is None or (type(key) is int and -(2**63) <= key < 2**63):
        return key
    raise NotAllowed(f"a key of type {type(key).__name__}")


def _long(machine: _Machine, count: int) -> None:
    if not 0 <= count <= MOST_DIGITS:
        raise Damaged(f"an integer of {count} bytes")
    machine.push(int.from_bytes(machine.take(count), "little", signed=True))


def _text(form: str) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.number(form)).decode("utf-8", "surrogatepass"))


def _bytes(form: str) -> Callable[[_Machine], None]:
    return lambda m: m.push(m.take(m.number(form)))


def _remember(index: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    return lambda m: m.memo.__setitem__(index(m), m.top())


_STOP = pickle.STOP[0]
_BY_NAME: dict[bytes, Callable[[_Machine], Any]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: lambda m: m.push(_MARK),
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.BININT: lambda m: m.push(m.number("<i")),
    pickle.BININT1: lambda m: m.push(m.number("<B")),
    pickle.BININT2: lambda m: m.push(m.number("<H")),
    pickle.LONG1: lambda m: _long(m, m.number("<B")),
    pickle.LONG4: lambda m: _long(m, m.number("<i")),
    pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    pickle.BINUNICODE: _text("<I"),
    pickle.SHORT_BINUNICODE: _text("<B"),
    pickle.BINUNICODE8: _text("<Q"),
    pickle.BINBYTES: _bytes("<I"),
    pickle.SHORT_BINBYTES: _bytes("<B"),
    pickle.BINBYTES8: _bytes("<Q"),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.EMPTY_SET: lambda m: m.push(set()),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_to_mark())),
    pickle.TUPLE1: lambda m: m.push_tuple(1),
    pickle.TUPLE2: lambda m: m.push_tuple(2),
    pickle.TUPLE3: lambda m: m.push_tuple(3),
    pickle.APPEND: lambda m: m.append([m.pop()]),
    pickle.APPENDS: lambda m: m.append(m.pop_to_mark()),
    pickle.SETITEM: lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    pickle.SETITEMS: lambda m: m.set_items(m.pop_to_mark()),
    pickle.ADDITEMS: lambda m: _add_items(m, m.pop_to_mark()),
    pickle.BINPUT: _remember(lambda m: m.number("<B")),
    pickle.LONG_BINPUT: _remember(lambda m: m.number("<I")),
    pickle.MEMOIZE: _remember(lambda m: len(m.memo)),
    pickle.BINGET: lambda m: m.push(m.memo[m.number("<B")]),
    pickle.LONG_BINGET: lambda m: m.push(m.memo[m.number("<I")]),
    pickle.GLOBAL: lambda m: m.push_global(m.line(), m.line()),
    pickle.STACK_GLOBAL: _Machine.stack_global,
    pickle.REDUCE: _Machine.reduce,
    pickle.NEWOBJ: _Machine.new_object,
    pickle.BUILD: _Machine.build,
    pickle.BINPERSID: lambda m: m.push(m.meanings.storage(m.pop())),
}
OPERATIONS = {code[0]: operation for code, operation in _BY_NAME.items()}


def _add_items(machine: _Machine, values: list[Any]) -> None:
    target = machine.top()
    if type(target) is not set:
        raise NotAllowed(f"adding to {type(target).__name__}")
    target.update(checked_key(value) for value in values)
