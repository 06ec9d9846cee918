"""Counts of a split of a dataset, which reports store and one line of the log shows."""

from __future__ import annotations

from utils.core.strict_model import StrictModel

ALWAYS_SHOWN = 5  # counts at the beginning of the line
MANY_WITHOUT_LABELS = 0.1  # share of images without a label file that deserves a warning; COCO's is 0.01


class SplitCounts(StrictModel, extra="ignore"):  # reports of earlier versions count more
    """Counts of a split of a dataset, as it was read.

    Attributes:
        name: of the split, and how much of it was read if not all.
        backgrounds: images without objects, with a label file or without.
        boxes_among_polygons: boxes that upstream takes for polygons of two points.
        boxes_without_area: objects that no detection can match, which are counted as upstream counts them.
        also_in_train: images that are training images, too, by file or by content.
        first: field → the first image, label file or line that it counts, and why.
    """

    name: str
    images: int
    objects: int
    backgrounds: int
    without_a_label_file: int
    left_out: int
    bad_label_lines: int
    clipped_labels: int
    boxes_among_polygons: int
    also_in_train: int = 0
    boxes_without_area: int = 0
    first: dict[str, str]

    @property
    def left_out_share(self) -> float:
        """Share of the split's images that are left out, 0..1."""
        return self.left_out / max(self.images + self.left_out, 1)

    @property
    def is_all_in_train(self) -> bool:
        """True if every image of this split is a training image, too: AP then does not measure new images."""
        return 0 < self.images <= self.also_in_train

    @property
    def lacks_labels(self) -> bool:
        """True if many images have no label file, beside others that have one, so that files may be missing."""
        return self.images > self.without_a_label_file >= MANY_WITHOUT_LABELS * self.images

    def __str__(self) -> str:
        """One line: the first five counts always, the others where they are not 0."""
        counts = [(name, value) for name, value in self if isinstance(value, int)]
        parts = []
        for index, (name, value) in enumerate(counts):
            if index >= ALWAYS_SHOWN and not value:
                continue
            part = f"{name.replace('_', ' ')} {value}"
            if name in self.first:
                part += f" (first: {self.first[name]})"
            parts.append(part)
        return f"{self.name}: {', '.join(parts)}"
