"""The one door to upstream YOLOv9: models, checkpoints, augmented images.

Nothing else in this project imports upstream's modules. They are imported when they are first needed, from the checkout
that this folder was copied into.

checkout.py      imports upstream from the checkout, with what it needs on a current stack; its dataset of known images
deferred.py      libraries that upstream imports for its plots, imported when something of them is asked for
description.py   its model descriptions (YAML), checked before upstream evaluates their strings
network.py       its networks and checkpoints: load, build, fuse
renamed.py       checkpoints of MultimediaTechLab's and LibreYOLO's YOLOv9, as upstream's networks
structure.py     a network as data: classes, attributes and shapes of its modules, and the network made of it again
ultralytics.py   checkpoints of Ultralytics' YOLOv9, as upstream's networks
"""

from utils.upstream.checkout import make_dataset
from utils.upstream.network import (
    FloatCheckpoint,
    build_model,
    call_fused,
    check_class_names,
    check_finite,
    fuse,
    hash_of_weights,
    load_float,
    module_classes,
    network_stride,
    read_checkpoint,
    read_description,
    resize,
    unfused,
)

__all__ = [
    "FloatCheckpoint",
    "build_model",
    "call_fused",
    "check_class_names",
    "check_finite",
    "fuse",
    "hash_of_weights",
    "load_float",
    "make_dataset",
    "module_classes",
    "network_stride",
    "read_checkpoint",
    "read_description",
    "resize",
    "unfused",
]
