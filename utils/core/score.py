"""How good a network is: AP of its boxes and, of a segmentation network, of its masks.

This module imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """AP over IoU 0.50:0.95, fractions; `mask` is None for detection."""

    box: float
    mask: float | None = None

    @property
    def decides(self) -> float:
        """The one number that networks are compared by: the mean of both, which upstream's training weights equally."""
        return self.box if self.mask is None else (self.box + self.mask) / 2

    @property
    def what(self) -> str:
        """What `decides` is, in words."""
        return "AP" if self.mask is None else "the mean of box and mask AP"

    def __str__(self) -> str:
        """In words: 'AP 0.5201', 'AP 0.5201, mask AP 0.4213'."""
        return f"AP {self.box:.4f}" + ("" if self.mask is None else f", mask AP {self.mask:.4f}")

    @property
    def in_name(self) -> str:
        """As part of a file's name: 'ap_0.5201', 'ap_0.5201_mask_0.4213'."""
        return f"ap_{self.box:.4f}" + ("" if self.mask is None else f"_mask_{self.mask:.4f}")

    def to_dict(self) -> dict[str, float]:
        """As files hold it: `ap`, and `mask_ap` where there is one."""
        return {"ap": self.box} | ({} if self.mask is None else {"mask_ap": self.mask})

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Score | None:
        """The inverse of `to_dict`, also of more entries; None where AP is not known."""
        return None if entries.get("ap") is None else cls(entries["ap"], entries.get("mask_ap"))
