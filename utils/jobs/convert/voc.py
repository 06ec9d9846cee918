"""Pascal VOC's XML files."""

from __future__ import annotations

import codecs
import math
import re
from pathlib import Path, PureWindowsPath
from xml.etree import ElementTree

import numpy as np

from utils.core.text import short_repr
from utils.jobs.convert.outlines import ring_of
from utils.jobs.convert.records import (
    UNREADABLE_OUTLINES,
    AnnotatedImage,
    AnnotatedObject,
    Annotations,
    Tally,
    stated_size,
)

DECLARED = re.compile(rb"""\s*<\?xml[^>]*?\sencoding\s*=\s*["']([\w.:-]+)["']""")
COORDINATE = re.compile("([xy])([0-9]{1,6})")
SIDES = (("xmin", "ymin"), ("xmax", "ymax"))


def read_voc(folder: Path, tally: Tally) -> Annotations:
    """Read each XML file of a folder and its subfolders, but for hidden ones; difficult objects are left out.

    A file that cannot be read gives a `broken` image.
    """
    images: list[AnnotatedImage] = []
    for path in visible_files(folder):
        if path.suffix.lower() != ".xml":
            continue
        try:
            root = parse_xml(path.read_bytes())
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            tally.left_out["broken annotation files"].append(f"{path}: {error}")
            images.append(AnnotatedImage(str(path), (path.stem,), broken=True))
            continue
        objects = _objects(root, path, tally)
        size = stated_size(root.findtext("size/width"), root.findtext("size/height"))
        stems = (path.stem, PureWindowsPath(root.findtext("filename", "").strip()).stem)
        images.append(AnnotatedImage(str(path), stems, size, tuple(objects)))
    tally.warn("broken annotation files")
    tally.warn("broken annotations")
    return Annotations(images, [])


def visible_files(folder: Path) -> list[Path]:
    """Files of a folder and its subfolders, sorted, without hidden ones such as the `._a.xml` of macOS."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def parse_xml(data: bytes) -> ElementTree.Element:
    """Return the root of an XML file, read as UTF-8 if that is possible, else in the encoding that it declares.

    Raises:
        ElementTree.ParseError, ValueError, LookupError: it is not XML, does not fit its encoding, or that is unknown.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    declared = DECLARED.match(data)
    if declared is None:  # as in UTF-16, which the parser knows by itself
        return ElementTree.fromstring(data)
    encoding = declared[1].decode("ascii")
    if encoding.lower() in ("gb2312", "gbk"):
        encoding = "gb18030"  # which holds both
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode(encoding)
    return ElementTree.fromstring(text)  # a text is parsed whatever it declares


def _objects(root: ElementTree.Element, path: Path, tally: Tally) -> list[AnnotatedObject]:
    """The objects of a file; broken and difficult ones are left out and go to the tally."""
    objects: list[AnnotatedObject] = []
    for number, item in enumerate(root.iter("object"), 1):
        source = f"{path}, object {number}"
        name = item.findtext("name", "").strip()
        corners = [[item.findtext(f"bndbox/{side}", "missing").strip() for side in corner] for corner in SIDES]
        try:
            numbers = np.array(corners).astype(np.float64)
        except ValueError:
            numbers = np.full((2, 2), math.nan)
        if not name or not np.isfinite(numbers).all():
            expected = "expected a name, and xmin, ymin, xmax and ymax in 'bndbox'"
            tally.left_out["broken annotations"].append(
                f"{source}: {expected}, found {name!r} and {short_repr(corners)}"
            )
        elif "1" in item.findtext("difficult", ""):
            tally.left_out["difficult objects"].append(source)
        else:
            try:
                outline = _outline(item)
            except ValueError as error:
                outline = ()
                tally.changed[UNREADABLE_OUTLINES].append(f"{source}: {error}")
            objects.append(AnnotatedObject(source, name, numbers, outline))
    return objects


def _outline(item: ElementTree.Element) -> tuple[np.ndarray, ...]:
    """The rings of an object's `<polygon>` elements, whose children are x1, y1, x2, y2 and so on, in any order.

    Raises:
        ValueError: the children have other names, or do not make a polygon.
    """
    rings: list[np.ndarray] = []
    for polygon in item.findall("polygon"):
        values: dict[tuple[int, str], str] = {}  # (2, "x") → the text of x2
        for child in polygon:
            tag = COORDINATE.fullmatch(child.tag)
            if tag is None or (int(tag[2]), tag[1]) in values:
                raise ValueError(f"expected x1, y1, x2, y2 ... once each in 'polygon', found {short_repr(child.tag)}")
            values[int(tag[2]), tag[1]] = (child.text or "").strip()
        numbers = sorted({number for number, _ in values})
        if numbers:
            rings.append(ring_of([values.get((number, axis), "missing") for number in numbers for axis in "xy"]))
    return tuple(rings)
