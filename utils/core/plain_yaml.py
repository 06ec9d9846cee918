"""YAML for settings that people write: mappings, lists, texts, numbers, true and false; nothing that surprises.

Unlike PyYAML's safe reader, it refuses a key that stands twice instead of taking the last; `1e-6` is a number, as it is
in YAML 1.2 and in Python; `010` and `1:30` are texts, not the numbers 8 and 90. Aliases, tags and deep nesting, with
which a small file can fill the memory, are refused.

    parse(Path("recipe.yaml"))
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

LARGEST = 256 * 1024  # bytes of a file; PyYAML reads some 100 kB a second
DEEPEST = 8  # levels of mappings and lists


class PlainYamlError(ValueError):
    """The text is no YAML of this kind; the message is one line and says where."""


def parse(path: Path) -> Any:
    """Read a file.

    Raises:
        OSError: it cannot be opened.
        PlainYamlError: it is no regular file, too large, no text, or not plain YAML.
    """
    if path.exists() and not path.is_file():
        raise PlainYamlError("it is a folder" if path.is_dir() else "it is no regular file")
    with path.open("rb") as stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise PlainYamlError(f"it is larger than {LARGEST // 1024} KiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlainYamlError(f"it is not a text file: {error}") from error
    return parse_text(text)


def parse_text(text: str) -> Any:
    """The content of a text.

    Raises:
        PlainYamlError: it is not plain YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise PlainYamlError(f"it is not valid YAML: {' '.join(str(error).split())}") from error
    except PlainYamlError:
        raise
    except ValueError as error:  # a number of more digits than Python reads
        raise PlainYamlError(f"it is not valid YAML: {' '.join(str(error).split())}") from error


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  PyYAML's way to say how plain words are understood

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        where = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise PlainYamlError(f"{where}: the alias *{event.anchor} is not understood; write out what it stands for")
        if event.tag is not None:
            raise PlainYamlError(f"{where}: the tag {event.tag} is not understood; leave it out")
        if self._depth == DEEPEST:
            raise PlainYamlError(f"{where}: more than {DEEPEST} levels of lists and mappings")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            where = f"line {key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise PlainYamlError(f"{where}: a key is a list or a mapping; expected a text or a number")
            key = self.construct_object(key_node)
            if key in seen:
                raise PlainYamlError(f"{where}: the key {key_node.value[:80]!r} stands twice; leave one out")
            seen.add(key)
        return dict(super().construct_mapping(node, deep))


_TAG = "tag:yaml.org,2002:"
_WORDS = {
    "bool": (r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    "float": (
        r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
for _name, (_pattern, _first) in _WORDS.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), list(_first))
