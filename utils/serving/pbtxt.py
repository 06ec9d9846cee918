"""config.pbtxt: protobuf's text format (https://protobuf.dev/reference/protobuf/textformat-spec/), along `schema.py`.

A message is a dict by the names of its fields, a repeated field a list, a map a dict. Numbers and truth values are
Python's, an enum's value is its name. protobuf itself is not needed; the tests read what is written with it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from utils.core.errors import InputError
from utils.serving.schema import ENUMS, MESSAGES, ONE_OF, ROOT, Field

INDENT = "  "
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\f\v]+|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>-?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?))
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<mark>[-{}<>\[\]:,;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "?": "?", "\\": "\\", "'": "'",
          '"': '"'}  # fmt: skip
_CLOSE = {"{": "}", "<": ">"}
_TRUE, _FALSE = ("true", "True", "t", "1"), ("false", "False", "f", "0")


def dumps(message: Mapping[str, Any], kind: str = ROOT) -> str:
    """A message as text, one field a line.

    Raises:
        ValueError: the schema has no such field.
    """
    return "".join(f"{line}\n" for line in _lines(message, kind))


def quoted(text: str) -> str:
    """A text as protobuf quotes it: whoever chose it, it stays one string on one line.

    Args:
        text: any; half a surrogate pair, which is no character, becomes a question mark.
    """
    return '"' + "".join(map(_quoted_character, text)) + '"'


def _quoted_character(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "replace"))


def _lines(message: Mapping[str, Any], kind: str) -> Iterator[str]:
    for name, value in message.items():
        field = MESSAGES[kind].get(name)
        if field is None:
            raise ValueError(f"{kind} has no field {name}")
        if field.keys:
            for key, item in value.items():
                yield f"{name} {{"
                yield f"{INDENT}key: {quoted(key) if field.keys == 'str' else key}"
                yield from (INDENT + line for line in _value_lines("value", item, field.kind))
                yield "}"
        elif field.repeated and field.kind not in MESSAGES:
            yield f"{name}: [ {', '.join(_scalar(item, field.kind) for item in value)} ]" if value else f"{name}: []"
        else:
            for item in value if field.repeated else (value,):
                yield from _value_lines(name, item, field.kind)


def _value_lines(name: str, value: Any, kind: str) -> Iterator[str]:
    if kind not in MESSAGES:
        yield f"{name}: {_scalar(value, kind)}"
        return
    inner = list(_lines(value, kind))
    if not inner:
        yield f"{name} {{ }}"
        return
    yield f"{name} {{"
    yield from (INDENT + line for line in inner)
    yield "}"


def _scalar(value: Any, kind: str) -> str:
    if kind == "str":
        return quoted(value)
    return str(value).lower() if kind == "bool" else str(value)


def loads(text: str, where: str) -> dict[str, Any]:
    """A ModelConfig's fields, those that the text sets.

    Args:
        where: the file, for messages.

    Raises:
        InputError: the text is not in the format, or sets a field that Triton does not know, or to what it cannot be.
    """
    return _Reader(text, where).whole()


class _Reader:
    """Reads tokens from left to right, each known by what it is, its text and its line."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._line = 1
        self._tokens = list(self._split(text))
        self._place = 0

    def whole(self) -> dict[str, Any]:
        return self._message(ROOT, "")

    def _split(self, text: str) -> Iterator[tuple[str, str, int]]:
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                self._refuse(f"{text[place : place + 20].split(chr(10))[0]!r} is not protobuf's text format")
            if found.lastgroup != "space":
                yield str(found.lastgroup), found[0], self._line
            self._line += found[0].count("\n")
            place = found.end()
        yield "end", "the end of the file", self._line

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(f"{self._where}, line {self._line}: {problem}")

    def _next(self) -> tuple[str, str]:
        kind, text, self._line = self._tokens[self._place]
        if kind != "end":
            self._place += 1
        return kind, text

    def _has(self, *marks: str) -> str:
        """The next token if it is one of these marks, '' otherwise."""
        kind, text, _ = self._tokens[self._place]
        if kind == "mark" and text in marks:
            self._next()
            return text
        return ""

    def _message(self, kind: str, close: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not (close and self._has(close)):
            what, name = self._next()
            if what == "end" and not close:
                break
            if what != "word":
                self._refuse(f"found {name[:40]}; expected a field of {kind}{f' or {close}' if close else ''}")
            field = MESSAGES[kind].get(name)
            if field is None:
                self._refuse(f"{kind} has no field {name[:60]}; Triton refuses the file")
            self._field(found, kind, name, field)
            self._has(",", ";")
        return found

    def _field(self, found: dict[str, Any], kind: str, name: str, field: Field) -> None:
        nested = field.keys or field.kind in MESSAGES
        if not self._has(":") and not nested:
            self._refuse(f"expected a colon behind {name}")
        if not field.repeated:
            choices = ONE_OF.get(kind, ())
            other = next((one for one in found if one == name or {one, name} <= set(choices)), None)
            if other is not None:
                self._refuse(f"{kind} sets {name} twice" if other == name else f"{kind} sets both {other} and {name}")
            found[name] = self._value(name, field.kind)
            return
        values = self._list(name, field) if self._has("[") else [self._element(name, field)]
        if field.keys:
            found.setdefault(name, {}).update(values)
        else:
            found.setdefault(name, []).extend(values)

    def _list(self, name: str, field: Field) -> list[Any]:
        values: list[Any] = []
        while not self._has("]"):
            if values and not self._has(","):
                self._refuse(f"expected a comma or ] in {name}")
            values.append(self._element(name, field))
        return values

    def _element(self, name: str, field: Field) -> Any:
        if not field.keys:
            return self._value(name, field.kind)
        close = _CLOSE.get(self._has("{", "<"))
        if close is None:
            self._refuse(f"{name} is a map; expected {{ key: ... value: ... }}")
        entry: dict[str, Any] = {}
        while not self._has(close):
            part = self._next()[1]
            if part not in ("key", "value") or part in entry:
                self._refuse(f"found {part[:40]} in an entry of {name}; expected one key and one value")
            kind = field.keys if part == "key" else field.kind
            if not self._has(":") and kind not in MESSAGES:
                self._refuse(f"expected a colon behind {part}")
            entry[part] = self._value(part, kind)
            self._has(",", ";")
        empty: Any = {} if field.kind in MESSAGES else ""
        return entry.get("key", 0 if field.keys == "int" else ""), entry.get("value", empty)

    def _value(self, name: str, kind: str) -> Any:
        if kind in MESSAGES:
            close = _CLOSE.get(self._has("{", "<"))
            if close is None:
                self._refuse(f"{name} is a message; expected {{")
            return self._message(kind, close)
        what, text = self._next()
        value: Any = None
        if kind == "str" and what == "string":
            value = self._text(text)
        elif text in ENUMS.get(kind, ()):
            value = text
        elif kind == "bool" and text in (*_TRUE, *_FALSE):
            value = text in _TRUE
        elif kind in ("int", "float") and what == "number":
            with contextlib.suppress(ValueError):
                value = int(text, 0) if kind == "int" else float(text.rstrip("fF"))
            value = None if kind == "int" and value is not None and abs(value) >= 1 << 63 else value
        if value is None:
            self._refuse_value(name, text, kind)
        return value

    def _refuse_value(self, name: str, text: str, kind: str) -> NoReturn:
        expected = {"str": "a text in quotes", "int": "an integer", "float": "a number", "bool": "true or false"}
        self._refuse(f"{name} is {text[:60]}; expected {expected.get(kind) or 'one of ' + ', '.join(ENUMS[kind])}")

    def _text(self, first: str) -> str:
        """A text in quotes; those that follow each other are one."""
        parts = [first]
        while self._tokens[self._place][0] == "string":
            parts.append(self._next()[1])
        try:
            return b"".join(_ESCAPE.sub(_unescaped, part[1:-1].encode()) for part in parts).decode()
        except (ValueError, KeyError, OverflowError):
            self._refuse(f"{first[:60]} is no text: an escape is unknown, or the bytes are no UTF-8")


def _unescaped(found: re.Match[bytes]) -> bytes:
    octal, byte, short, long, plain = found.groups()
    if octal or byte:
        return bytes([int(octal, 8) if octal else int(byte, 16)])
    if short or long:
        return chr(int(short or long, 16)).encode()
    return _PLAIN[plain.decode()].encode()
