#!/usr/bin/env python3
"""Write reference pages and pictures from their source, so that they cannot differ: docs/reference/, docs/pictures/.

    python docs/build.py                    # write what has changed
    python docs/build.py --check            # name files that are not up to date: exit code 1

Each page is a function in PAGES, which yields the lines of the page; each picture is one in `docs/pictures.py`. Edit
the source that it reads, not the file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # where utils/ and docs/ lie

import yaml
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from docs import claims, measured, messages, pictures, programs
from models.quantize import rules
from models.quantize.recipe import Recipe
from utils import cli
from utils.core.errors import HABITS, InputError
from utils.core.options import Options, fields_by_group, option
from utils.core.strict_model import StrictModel
from utils.core.text import aligned, markdown_table
from utils.jobs.options import QuantizeOptions

if TYPE_CHECKING:
    from onnx import ModelProto

FOLDER = ROOT / "docs/reference"
PICTURES = ROOT / "docs/pictures"
SUPPORT = ROOT / "docs/support.yaml"
NOTE = "<!-- Written by docs/build.py. Change its source, then run it. -->"
MANY = 4  # programs; a message of more is one of "most programs"


def table(titles: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table, all columns at the left, and an empty line."""
    return [*markdown_table(titles, rows, titles), ""]


def code(text: str) -> list[str]:
    """Return the lines of a block of text, and an empty line."""
    return ["```text", *text.strip("\n").splitlines(), "```", ""]


def heading(title: str, introduction: str) -> list[str]:
    """Return a page's first lines."""
    return [f"# {title}", "", introduction, ""]


def in_quotes(text: object) -> str:
    """Return a value as code; nothing for no value."""
    return f"`{text}`" if str(text) else ""


# What a field may hold


def values_of(field: FieldInfo) -> str:
    """Return what a pydantic field takes, in words: its choices, or its type and bounds."""
    annotation: Any = field.annotation
    for bound in field.metadata:
        annotation = Annotated[annotation, bound]
    schema = TypeAdapter(annotation).json_schema()
    return described(schema)


def described(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(described(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema or "const" in schema:
        return ", ".join(str(choice) for choice in schema.get("enum", [schema.get("const")]) if choice != "")
    if schema.get("type") == "array":
        items = schema.get("items") or {"anyOf": schema.get("prefixItems", [])}
        return f"several: {described(items)}"
    kind = {"integer": "whole number", "number": "number", "boolean": "switch"}.get(schema.get("type", ""), "text")
    bounds = [words.format(schema[key]) for key, words in BOUNDS.items() if key in schema]
    return " ".join([kind, *bounds])


BOUNDS = {
    "minimum": "from {}", "exclusiveMinimum": "above {}", "gt": "above {}", "ge": "from {}",
    "maximum": "to {}", "exclusiveMaximum": "below {}", "lt": "below {}", "le": "to {}",
}  # fmt: skip


def default_of(field: FieldInfo) -> str:
    """Return a field's default as text; nothing for none."""
    if field.is_required():
        return "required"
    value = field.default
    if value is None or value is False or value in ("", [], ()):
        return ""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# Pages


def cli_page() -> Iterator[str]:
    """Yield the options of every program, in the groups and the order of `-h`."""
    introduction = "What `-h` of each program lists. Programs without a folder run in a patched checkout."
    yield from heading("Command line", introduction)
    for path in programs.PYTHON_PROGRAMS:
        program = programs.recorded(path)
        yield from (f"## {path}", "")
        for command, kind in program.options().items():
            leaf = cli.parsers(program.name, program.commands, program.about)[1][command][0]
            if command:
                yield from (f"### {path} {command}", "")
            yield from code(f"{leaf.description or ''}\n\n{leaf.epilog or ''}".strip())
            yield from options_table(kind)
    yield from ("## Shell scripts", "")
    for path in programs.SHELL_PROGRAMS:
        yield from (f"### {path}", "", *code(programs.shell_help(path)))


def options_table(kind: type[Options]) -> list[str]:
    """Return one table with the options of a class: those that `-h` shows first come first."""
    rows = []
    for title, names in fields_by_group(kind).items():
        for name in names:
            if name in kind.HIDDEN:
                continue
            field, argument = kind.model_fields[name], kind.argument(name)
            if argument["flags"] is None:
                flags = argument["keywords"].get("metavar", name.upper())
            else:
                flags = ", ".join(kind.flags(name))
            if field.annotation is bool and field.default is True:
                flags += f", --no-{flags.removeprefix('--')}"
            default, meaning = in_quotes(default_of(field)), field.description or ""
            rows.append([in_quotes(flags), values_of(field), default, meaning, title.partition(":")[0]])
    return table(["option", "takes", "default", "meaning", "group"], rows)


def recipe_page() -> Iterator[str]:
    """Yield the keys of a recipe, with their bounds and defaults."""
    introduction = "Keys of the YAML that `qat.py quantize --recipe` takes. [Recipe](../recipe.md) explains them."
    yield from heading("Recipe", introduction)
    flags = {}
    for name in QuantizeOptions.model_fields:
        if key := QuantizeOptions.argument(name)["recipe"]:
            flags[key] = QuantizeOptions.flag(name)
    rows = []
    for key, field in recipe_fields(Recipe):
        default = in_quotes(default_of(field)) or "none"
        rows.append([in_quotes(key), values_of(field), default, field.description or "", in_quotes(flags.get(key, ""))])
    yield from table(["key", "takes", "default", "meaning", "option"], rows)


def recipe_fields(model: type[StrictModel], section: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the fields of a model by their keys, those of sections as `section.key`."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, StrictModel):
            yield from recipe_fields(field.annotation, f"{name}.")
        else:
            yield f"{section}{name}", field


def rules_page() -> Iterator[str]:
    """Yield where quantizers are placed, and why: the table that the placement is made by."""
    introduction = "What is quantized in each module class of YOLOv9, and why."
    yield from heading("Placement rules", f"{introduction} [Placement](../placement.md) has what each choice brought.")
    rows = []
    for rule in rules.RULES:
        flow = in_quotes(rule.flow) if isinstance(rule.flow, str) else "depends on the module"
        rows.append([in_quotes(rule.name), rule.kind, rule.why, flow])
    yield from table(["class", "kind", "why", "how its tensors flow"], rows)
    yield from ("## Operations", "", "What an operation in a flow is to the placement:", "")
    yield from table(["operation", "kind"], [[in_quotes(name), kind] for name, kind in rules.OPS.items()])
    kinds = (rules.__doc__ or "").partition("developer guide):\n")[2].partition("The image is a tensor")[0]
    yield from ("## Kinds", "", *code(kinds))


def verifier_page() -> Iterator[str]:
    """Yield the properties that `export_qat.py --verify` checks."""
    from utils.onnx_graph import verify

    introduction = (
        "Properties that `python export_qat.py --verify FILE.onnx` checks, and each export of a quantized model."
    )
    yield from heading("Verifier", introduction)
    rows = []
    for name, check in verify.PROPERTIES.items():
        first, _, rest = (check.__doc__ or "").partition("\n\n")
        rows.append([name, " ".join(first.split()).rstrip("."), " ".join(rest.split())])
    yield from table(["property", "what holds, and why", "more"], rows)


def formats_page() -> Iterator[str]:
    """Yield the outputs of each format, read from graphs that the format's own pass was run on."""
    from utils.onnx_graph import output_formats

    introduction = "Outputs of a model with 80 classes at 640×640; B is the batch size."
    yield from heading("Output formats", f"{introduction} [Export](../formats.md) has the commands.")
    settings = output_formats.NmsSettings()
    known = [
        ("plain", output_formats.plain()),
        ("NMS inside", output_formats.end2end(settings)),
        ("NMS inside, masks on the grid", output_formats.end2end(settings, 0)),
        ("DeepStream", output_formats.deepstream()),
    ]
    rows = []
    for task in ("detection", "segmentation"):
        for name, form in known:
            if "masks" in name and task == "detection":
                continue
            outputs = form.attach(plain_graph(task)).graph.output
            rows.append([task, name, in_quotes(f"NAME{form.suffix}.onnx"), "; ".join(map(output_text, outputs))])
    yield from table(["task", "format", "file of an FP32 model", "outputs"], rows)
    defaults = [[in_quotes(field.name), str(field.default)] for field in fields(output_formats.NmsSettings)]
    yield from ("Defaults of NMS in a file:", "")
    yield from table(["setting", "default"], defaults)


def plain_graph(task: str) -> ModelProto:
    """Return a graph with a plain model's outputs at 640×640 and 80 classes, and nothing in it."""
    from onnx import TensorProto, helper

    masks = 32 if task == "segmentation" else 0
    shapes: dict[str, list[Any]] = {"output0": ["B", 4 + 80 + masks, 8400]}
    if masks:
        shapes["output1"] = ["B", masks, 160, 160]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([], "plain", [], outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def output_text(value: Any) -> str:
    """Return an output's name, shape and type."""
    from onnx import TensorProto

    tensor = value.type.tensor_type
    shape = ", ".join(str(dim.dim_param or dim.dim_value) for dim in tensor.shape.dim)
    return f"{value.name} [{shape}] {TensorProto.DataType.Name(tensor.elem_type)}"


def results_page() -> Iterator[str]:
    """Yield all tables and sentences of docs/claims.py, from benchmarks/results/."""
    introduction = "Computed from the files in `benchmarks/results/` by `docs/claims.py`, section by section."
    yield from heading("Results", introduction)
    results = measured.read_results()
    for name, section in claims.SECTIONS.items():
        yield from (f"## {name}", "", (section.__doc__ or "").partition("\n")[0], "", *section(results), "")


def samples_page() -> Iterator[str]:
    """Yield what programs print, for results that are kept in benchmarks/results/."""
    introduction = "What the programs print, for results that are kept in `benchmarks/results/`."
    yield from heading("Sample outputs", introduction)
    yield from evaluation_sample()
    yield from benchmark_sample()


def evaluation_sample() -> Iterator[str]:
    """Yield the table that `qat.py quantize`, `val_trt.py` and `make_report.py` print."""
    from utils.reports.schema import Report, Row
    from utils.reports.tables import terminal_table

    steps = measured.load(measured.FOLDER / "cards-h200.json")["yolov9-s"]["steps"]
    names = ("float", "PTQ auto, seed 57", "QAT, seed 57", "float engine", "QAT engine")
    rows = [Row(**steps[name]["result"]) for name in names]
    yield from ("## An evaluation", "", "yolov9-s on playing cards, 67 validation images.", "")
    yield from code(terminal_table(Report(command="", rows=rows)))


def benchmark_sample() -> Iterator[str]:
    """Yield the table that `benchmark_trt.py` prints."""
    from utils.jobs.benchmark import benchmark_table
    from utils.trt.benchmark import BenchmarkRow
    from utils.trt.timing import Figures, TimeStatistics

    content = measured.load(measured.FOLDER / f"{measured.LATENCY}.json")
    rows = []
    for entry in content["yolov9-s"]["rows"]:
        parts = {name: TimeStatistics(**part) for name, part in entry["figures"].items() if name != "qps"}
        known = {field.name: entry[field.name] for field in fields(BenchmarkRow) if field.name in entry}
        rows.append(BenchmarkRow(**{**known, "figures": Figures(entry["figures"]["qps"], parts)}))
    yield from ("## A benchmark", "", f"yolov9-s with random weights, {content['measured_on']}.", "")
    yield from code(f"{content['yolov9-s']['command']}\n\n" + "\n".join(aligned(*benchmark_table(rows))))


def errors_page() -> Iterator[str]:
    """Yield the error messages of the source from A to Z."""
    yield from heading(
        "Error messages",
        f"From A to Z; `{messages.VALUE}` stands for a file, a value or a number. Exit code 2: the input can be "
        "mended; 1: the work failed. `--debug` shows the traceback.",
    )
    rows = []
    for message in messages.messages():
        names = ", ".join(message.programs) if len(message.programs) <= MANY else "most programs"
        rows.append([message.text, message.subject, str(message.exit_code), names])
    yield from table(["message", "about", "exit code", "programs"], rows)
    yield from ("## Options of other projects", "")
    yield from table(["option", "message"], [[in_quotes(name), HABITS[name]] for name in HABITS])


def support_page() -> Iterator[str]:
    """Yield the versions of other software, each with its source and the day that it was looked at."""
    yield from heading("Versions", "From `docs/support.yaml`. `-` is not known or does not apply.")
    for section in yaml.safe_load(SUPPORT.read_text(encoding="utf-8")):
        yield from (f"## {section['title']}", "", section["about"], "")
        titles = [*section["columns"], "source", "checked"]
        yield f"| {' | '.join(titles)} |"
        yield f"|{' --- |' * len(titles)}"
        for row in section["rows"]:
            missing = [title for title in titles if not row.get(title)]
            if missing:
                raise InputError(f"{SUPPORT}: {row} has no {missing[0]}")
            yield f"| {' | '.join(str(row[title]) for title in titles)} |"
        yield ""


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "cli.md": cli_page,
    "recipe.md": recipe_page,
    "placement-rules.md": rules_page,
    "verifier.md": verifier_page,
    "output-formats.md": formats_page,
    "sample-outputs.md": samples_page,
    "errors.md": errors_page,
    "versions.md": support_page,
    "results.md": results_page,
}


def index_page() -> Iterator[str]:
    """Yield the list of the pages."""
    introduction = "Written from the source by `docs/build.py`; a test fails where a page is not up to date."
    yield from heading("Reference", introduction)
    for name, page in PAGES.items():
        title = next(page()).removeprefix("# ")
        summary = (page.__doc__ or "").removeprefix("Yield ").partition("\n")[0]
        yield f"- [{title}]({name}): {summary}"


def built(name: str) -> str:
    """Return the text of a page."""
    page = index_page if name == "README.md" else PAGES[name]
    return "\n".join([NOTE, "", *page()]).rstrip() + "\n"


class BuildOptions(Options):
    """What is done with the files."""

    check: bool = option(False, "write nothing; name the files that are not up to date")


def files() -> dict[Path, str]:
    """Return the text of every file that is written, by its path."""
    pages = {FOLDER / name: built(name) for name in ("README.md", *PAGES)}
    return pages | {PICTURES / f"{name}.svg": draw() for name, draw in pictures.PICTURES.items()}


def run(options: BuildOptions) -> int:
    """Write the files that have changed, or name them."""
    wanted = files()
    stale = [path for path, text in wanted.items() if not_up_to_date(path, text)]
    left_over = sorted({*FOLDER.glob("*.md"), *PICTURES.glob("*.svg")} - wanted.keys())
    for path in [*stale, *left_over]:
        print(path.relative_to(ROOT))
    if options.check:
        return 1 if stale or left_over else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    for path in left_over:
        path.unlink()
    return 0


def not_up_to_date(path: Path, text: str) -> bool:
    """Tell whether a file is missing or differs from what it should be."""
    return not path.exists() or path.read_text(encoding="utf-8") != text


if __name__ == "__main__":
    sys.exit(cli.run_program("build.py", (BuildOptions, run), about=__doc__))
