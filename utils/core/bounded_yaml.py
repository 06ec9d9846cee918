"""PyYAML's safe reader without the two constructs that take it minutes and gigabytes for a small file.

Merge keys (`<<: [*a, *a]`) copy what they name, and copies of copies grow without end; numbers to the base 60
(`1:30:00`) take the square of their length.

    yaml.load(text, BoundedLoader)
"""

from __future__ import annotations

from typing import Any

import yaml

LONGEST_NUMBER = 100  # characters
_TAG = "tag:yaml.org,2002:"


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe reader, which refuses merge keys and very long numbers with a `yaml.YAMLError`."""

    def flatten_mapping(self, node: Any) -> None:
        """Refuse a mapping that has a merge key; PyYAML would put in what it names."""
        for key, _ in node.value:
            if key.tag == f"{_TAG}merge":
                raise _refused("the merge key << is not understood; write out what it stands for", key)
        super().flatten_mapping(node)

    def construct_scalar(self, node: Any) -> Any:
        """Refuse a number that is longer than any; texts may be as long as they like."""
        if node.tag in (f"{_TAG}int", f"{_TAG}float") and len(node.value) > LONGEST_NUMBER:
            raise _refused(f"a number of {len(node.value):,} characters; expected at most {LONGEST_NUMBER}", node)
        return super().construct_scalar(node)


def _refused(what: str, node: Any) -> yaml.YAMLError:
    return yaml.YAMLError(f"line {node.start_mark.line + 1}: {what}")
