"""The networks that are trained, and how: one row each."""

from __future__ import annotations

from dataclasses import dataclass

from utils.core.errors import InputError


@dataclass(frozen=True)
class Network:
    """How one of upstream's networks is trained on the larger demo set.

    Attributes:
        name: of its YAML in models/detect, without the ending.
        images: that are seen in training, with repetitions; epochs are counted from them.
        batch_size: of all GPUs together.
        lr0: highest learning rate, for AdamW.
    """

    name: str
    images: int
    batch_size: int
    lr0: float

    @property
    def description(self) -> str:
        """Upstream's YAML, from the root of the checkout."""
        return f"models/detect/{self.name}.yaml"


NETWORKS = {
    network.name: network
    for network in (
        Network("yolov9-t", 130_000, 64, 0.0015),
        Network("yolov9-s", 110_000, 64, 0.0015),
        Network("yolov9-m", 110_000, 48, 0.001),
        Network("yolov9-c", 110_000, 48, 0.001),
    )
}


def network(name: str) -> Network:
    """The network of this name.

    Raises:
        InputError: there is none.
    """
    if name not in NETWORKS:
        raise InputError(f"--networks {name}: there is no such network; expected some of {', '.join(NETWORKS)}")
    return NETWORKS[name]
