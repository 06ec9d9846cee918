"""Pictures of the documents as SVG, drawn from data of the repository; `docs/build.py` writes them to docs/pictures/.

Each is drawn on a white panel, so that it reads the same on a light and on a dark page, and stands beside the text that
says the same: `PICTURES` lists them. The page of a run is photographed by `docs/photograph.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from docs.claims_engines import gains
from docs.measured import (
    FAILS_IN_FP32,
    FOLDER,
    PHOTOGRAPHS,
    by_training,
    default_qat,
    detectors,
    load,
    mean,
    read_results,
    select,
)

ROOT = Path(__file__).resolve().parents[1]
INK, SOFT, PALE, GRID = "#1f2933", "#52606d", "#f5f7fa", "#cbd2d9"
BLUE, GREEN, ORANGE = "#0072b2", "#007a5a", "#b84a00"
FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
LINE = 18  # pixels from one line of text to the next


class Drawing:
    """An SVG of `width` × `height` pixels on a white panel; coordinates are pixels from its upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="{FONT}" font-size="14" fill="{INK}">'
        )
        self._parts = [
            f"<title>{escape(title)}</title>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" fill="white" stroke="{GRID}"/>',
        ]

    def text(self, x: float, y: float, text: str, colour: str = INK, anchor: str = "start", bold: bool = False) -> None:
        """Write a line of text whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str],
        colour: str = BLUE, fill: str = PALE, radius: float = 4,
    ) -> None:  # fmt: skip
        """Draw a rectangle with lines of text in its middle."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{colour}" stroke-width="1.5"/>'
        )
        first = y + height / 2 - (len(lines) - 1) * LINE / 2 + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + number * LINE, line, anchor="middle")

    def line(self, points: Sequence[tuple[float, float]], colour: str = SOFT, width: float = 1.5) -> None:
        """Draw a line through points."""
        corners = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>')

    def arrow(self, points: Sequence[tuple[float, float]], colour: str = SOFT, width: float = 1.5) -> None:
        """Draw a line through points of horizontal and vertical steps, with a head at its end."""
        (x0, y0), (x1, y1) = points[-2:]
        length = max(abs(x1 - x0), abs(y1 - y0))
        dx = (x1 - x0) / length
        dy = (y1 - y0) / length
        self.line([*points[:-1], (x1 - 6 * dx, y1 - 6 * dy)], colour, width)
        back = (x1 - 9 * dx, y1 - 9 * dy)
        sides = [(back[0] - 5 * dy, back[1] - 5 * dx), (back[0] + 5 * dy, back[1] + 5 * dx)]
        corners = " ".join(f"{x:g},{y:g}" for x, y in [(x1, y1), *sides])
        self._parts.append(f'<polygon points="{corners}" fill="{colour}"/>')

    def dot(self, x: float, y: float, colour: str, filled: bool = True) -> None:
        """Draw a dot."""
        fill = colour if filled else "white"
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2"/>')

    def __str__(self) -> str:
        return "\n".join([self._head, *self._parts, "</svg>", ""])


# Flow charts


def pipeline() -> str:
    """From `best.pt` to an engine: the commands, the files, and AP of the demo (the table of docs/demo.md)."""
    ap = demo_ap()
    steps = [
        ("best.pt", "trained by upstream", f"AP {ap['FP32']}"),
        ("ptq_ap_*.pt", "calibrated (PTQ)", f"AP {ap['PTQ']}"),
        ("qat_best_*.pt", "trained in INT8 (QAT)", f"AP {ap['QAT']}"),
        ("*-int8.onnx", "exported", f"AP {ap['ONNX']}"),
        ("*.engine", "built by TensorRT", "needs a GPU"),
    ]
    width, gap = 172, 28
    drawing = Drawing(len(steps) * (width + gap) - gap + 40, 196, "The files from best.pt to an engine")
    middle = 92
    for number, (file, what, result) in enumerate(steps):
        x = 20 + number * (width + gap)
        drawing.box(x, middle - 32, width, 64, [file, what], GREEN if number == 0 else BLUE)
        drawing.text(x + width / 2, middle + 58, result, SOFT, "middle")
        if number:
            drawing.arrow([(x - gap, middle), (x, middle)])
    for first, last, command in ((1, 2, "qat.py quantize"), (3, 3, "export_qat.py"), (4, 4, "generate_trt_engine.sh")):
        left = 20 + first * (width + gap)
        right = 20 + last * (width + gap) + width
        drawing.line([(left, 46), (left, 38), (right, 38), (right, 46)], BLUE)
        drawing.text((left + right) / 2, 28, command, BLUE, "middle", bold=True)
    drawing.text(20, 182, "AP: the demo model, 500 images. val_trt.py --reference best.pt measures every file.", SOFT)
    return str(drawing)


def demo_ap() -> dict[str, str]:
    """AP of the stages in the first table of docs/demo.md."""
    page = (ROOT / "docs/demo.md").read_text(encoding="utf-8")
    table = page.partition("stage ")[2].partition("[1] ")[0]
    return dict(re.findall(r"^(\w+) +(0\.\d{4}) ", table, re.MULTILINE))


def map_dropped() -> str:
    """Questions in the order of docs/troubleshoot-accuracy.md, and the section that each answer leads to."""
    drawing = Drawing(720, 436, "Which step lost mAP")
    questions = [
        ("Is the FP32 row lower than", "upstream's val.py?"),
        ("Is the PTQ row lower", "than FP32?"),
        ("Is the ONNX row lower", "than PTQ or QAT?"),
        ("Is the engine's row lower", "than ONNX?"),
    ]
    answers = {
        0: [("yes", "1: data, size, rectangles")],
        1: [("by 0.05 or more", "2: calibration images"), ("by less", "3: method, layers, QAT")],
        2: [("yes", "4: the export")],
        3: [("yes", "5: the engine")],
    }
    top, width, height, step = 20, 230, 56, 92
    for number, question in enumerate(questions):
        y = top + number * step
        drawing.box(24, y, width, height, question, SOFT, "white", radius=20)
        middle = y + height / 2
        offsets = [0.0] if len(answers[number]) == 1 else [-22.0, 22.0]
        for offset, (answer, section) in zip(offsets, answers[number], strict=True):
            end = middle + offset
            points = [(24.0 + width, middle), (470.0, middle)]
            if offset:
                points = [(24.0 + width, middle), (280.0, middle), (280.0, end), (470.0, end)]
            drawing.arrow(points)
            drawing.text(380 if offset else 362, end - 6, answer, SOFT, "middle")
            drawing.box(470, end - 18, 226, 36, [section])
        below = y + step
        drawing.arrow([(24 + width / 2, y + height), (24 + width / 2, below)])
        drawing.text(24 + width / 2 + 8, y + height + 22, "no", SOFT)
    drawing.box(24, top + 4 * step, width, 36, ["6: your program"])
    return str(drawing)


# Placement


def elan_block() -> str:
    """An ELAN block, shortened, before and after quantizers are placed: one colour is one scale."""
    drawing = Drawing(780, 330, "An ELAN block with quantizers")
    for top, title, placed in ((34, "before", False), (184, "after placement", True)):
        _elan(drawing, top, title, placed)
    drawing.text(
        24, 312, "Q: a quantizer. All Q with one number share a scale, so that Concat only moves values.", SOFT
    )
    return str(drawing)


def _elan(drawing: Drawing, top: int, title: str, placed: bool) -> None:
    """Draw the block once; with `placed` its quantizers, too."""
    drawing.text(24, top - 6, title, bold=True)
    upper, lower = top + 30.0, top + 86.0
    places = {"x": 30, "cv1": 110, "SiLU": 180, "Concat": 460, "cv4": 560, "SiLU ": 630}
    drawing.text(places["x"], upper + 5, "x")
    drawing.line([(44, upper), (700, upper)])
    drawing.arrow([(700, upper), (740, upper)])
    branch = 290
    drawing.line([(branch, upper), (branch, lower), (490, lower)])
    drawing.arrow([(490, lower), (490, upper + 16)])
    for name, x in places.items():
        if name != "x":
            drawing.box(x, upper - 16, 66 if name == "Concat" else 54, 32, [name.strip()], SOFT, "white")
    for name, x in (("cv2", 320), ("SiLU", 390)):
        drawing.box(x, lower - 16, 54, 32, [name], SOFT, "white")
    if placed:
        for x, y, number, colour in (
            (78, upper, 1, ORANGE), (258, upper, 2, BLUE), (466, lower, 2, BLUE), (704, upper, 3, GREEN),
        ):  # fmt: skip
            drawing.box(x - 15, y - 12, 30, 24, [f"Q{number}"], colour, "white", radius=12)


# Results


def speed() -> str:
    """AP against milliseconds: an arrow from FP16 to INT8 for each model, with no lines between models."""
    rows = load(FOLDER / f"{PHOTOGRAPHS}.json")["rows"]
    rows = [row for row in rows if "engine" in row["state"] and "litter, 416" in row["network"]]
    ap = {(row["network"].partition(",")[0], row["state"]): row["ap"] for row in rows}
    arrows = []
    for (name, batch), engines in gains().items():
        if batch == 8:
            points = [(engines.fp16, ap[name, "FP16 engine"]), (engines.int8, ap[name, "INT8 engine"])]
            arrows.append((f"{name}: {engines.times}", points))
    drawing = Drawing(720, 384, "AP against milliseconds, FP16 to INT8")
    drawing.text(20, 28, "AP and time of engines, FP16 → INT8, batch size 8", bold=True)
    left, right, top, bottom = 70.0, 690.0, 50.0, 306.0

    def at(ms: float, score: float) -> tuple[float, float]:
        """Pixels of a point: 1 to 4.5 ms, AP 0.54 to 0.60."""
        return left + (ms - 1) / 3.5 * (right - left), bottom - (score - 0.54) / 0.06 * (bottom - top)

    for number in range(8):
        x, _ = at(1 + number / 2, 0.54)
        drawing.line([(x, top), (x, bottom)], "#e4e7eb", 1)
        drawing.text(x, bottom + 20, f"{1 + number / 2:g}", SOFT, "middle")
    for number in range(7):
        score = 0.54 + number / 100
        _, y = at(1, score)
        drawing.line([(left, y), (right, y)], "#e4e7eb", 1)
        drawing.text(left - 8, y + 5, f"{score:.2f}", SOFT, "end")
    for gain, points in arrows:
        (x0, y0), (x1, y1) = (at(*point) for point in points)
        middle = (y0 + y1) / 2  # FP16 and INT8 differ by less than the height of the arrow's head
        drawing.arrow([(x0 - 6, middle), (x1 + 6, middle)], BLUE, 2)
        drawing.dot(x0, y0, SOFT, filled=False)
        drawing.dot(x1, y1, BLUE)
        drawing.text((x0 + x1) / 2, middle - 14, gain, INK, "middle", bold=True)
    drawing.text((left + right) / 2, bottom + 42, "ms for 8 images (H200, TensorRT 8.6.0, 640×640)", SOFT, "middle")
    drawing.dot(500, 24, SOFT, filled=False)
    drawing.text(512, 29, "FP16")
    drawing.dot(572, 24, BLUE)
    drawing.text(584, 29, "INT8")
    drawing.text(
        20, 372, "AP: litter, 416×416. Times: random weights; yolov9-c without auxiliary streams, 28 November.", SOFT
    )
    return str(drawing)


def qat_gain() -> str:
    """AP minus FP32's of each training of a detector: a line from PTQ to QAT, the largest loss by PTQ at the top."""
    trainings = []
    for results in by_training(detectors(read_results())):
        states = select(results, "PTQ"), default_qat(results)
        if all(states) and results[0].file != FAILS_IN_FP32:
            ptq, qat = (mean(result.value for result in runs) for runs in states)
            trainings.append((ptq, qat, f"{results[0].name} (AP {results[0].fp32:.2f})"))
    left, right, top, row = 276.0, 690.0, 56.0, 20.0
    bottom = top + row * len(trainings)
    drawing = Drawing(720, int(bottom) + 76, "AP minus FP32's by PTQ and by QAT, each training")
    drawing.text(20, 28, "AP minus FP32's, each detector", bold=True)

    def across(difference: float) -> float:
        """The pixel of a difference: -0.014 to +0.016."""
        return left + (difference + 0.014) / 0.030 * (right - left)

    for step in range(-14, 17, 2):
        x = across(step / 1000)
        drawing.line([(x, top), (x, bottom)], SOFT if step == 0 else "#e4e7eb", 1)
        if step % 4 == 0:
            drawing.text(x, bottom + 20, f"{step / 1000:+.3f}" if step else "0", SOFT, "middle")
    for number, (ptq, qat, name) in enumerate(sorted(trainings)):
        y = top + row * (number + 0.5)
        drawing.text(left - 12, y + 5, name, INK, "end")
        drawing.line([(across(ptq), y), (across(qat), y)], BLUE, 2)
        drawing.dot(across(ptq), y, ORANGE, filled=False)
        drawing.dot(across(qat), y, BLUE)
    drawing.dot(490, 24, ORANGE, filled=False)
    drawing.text(502, 29, "PTQ")
    drawing.dot(572, 24, BLUE)
    drawing.text(584, 29, "QAT")
    drawing.text((left + right) / 2, bottom + 42, "left of 0: INT8 loses", SOFT, "middle")
    drawing.text(20, bottom + 64, "Simulated in PyTorch, means over seeds. In brackets: AP of the FP32 model.", SOFT)
    return str(drawing)


PICTURES: dict[str, Callable[[], str]] = {
    "pipeline": pipeline,
    "map-dropped": map_dropped,
    "elan-block": elan_block,
    "speed": speed,
    "qat-gain": qat_gain,
}
