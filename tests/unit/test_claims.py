"""docs/claims.py: what it computes from benchmarks/results by docs/measured.py, and that README and docs/ quote it."""

import itertools
import json
import math
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
from documentation import ROOT

from docs import claims, claims_cpu, claims_engines, claims_steps, measured
from utils.core.errors import InputError
from utils.reports.schema import Report, Row
from utils.reports.tables import cells, stage_name, terminal_table

RESULTS = measured.read_results()
FIRST = RESULTS[0]
PAGES = [
    ("engines", "docs/accuracy.md"),
    ("trainings", "docs/trainings.md"),
    ("unseen", "docs/unseen-sets.md"),
    ("photographs", "docs/accuracy.md"),
    ("thresholds", "docs/threshold-results.md"),
    ("methods", "docs/methods-and-steps.md"),
    ("rates", "docs/methods-and-steps.md"),
    ("long", "docs/methods-and-steps.md"),
    ("stop", "docs/methods-and-steps.md"),
    ("last-convolutions", "docs/last-convolutions.md"),
    ("latency", "docs/benchmarks.md"),
    ("transfers", "docs/benchmarks.md"),
    ("streams", "docs/auxiliary-streams.md"),
    ("forms", "docs/last-convolutions.md"),
    ("cpu", "docs/cpu-results.md"),
    ("simulation", "docs/cpu-results.md"),
    ("cpu-peers", "docs/cpu-peers.md"),
]


@pytest.mark.parametrize(("section", "page"), PAGES)
def test_a_table_of_the_documents_is_what_the_files_give(section, page):
    lines = [line for line in claims.SECTIONS[section](RESULTS) if line.startswith("|")]
    assert len(lines) > 3
    assert "\n".join(lines) in (ROOT / page).read_text(encoding="utf-8")


# Section → text that it prints → the page that says it in prose.
PROSE = [
    ("engines", r"Mean of 16 detectors of all files: (-\S+ ± \S+), ", "docs/accuracy.md"),
    ("engines", r"Mean of 16 .* it loses at most (\S+) ", "docs/accuracy.md"),
    ("engines", r"Mean of 16 .* it loses at most (\S+) ", "README.md"),
    ("trainings", r"PTQ − FP32 (\S+ ± \S+), from", "docs/trainings.md"),
    ("trainings", r"PTQ − FP32 .*, (from \S+ to \S+), above", "docs/trainings.md"),
    ("trainings", r"QAT − PTQ (\S+ ± \S+), from", "docs/trainings.md"),
    ("trainings", r"QAT − PTQ .*, (from \S+ to \S+), above", "docs/trainings.md"),
    ("trainings", r"PTQ minus FP32 (\S+ ± \S+), from", "docs/trainings.md"),
    ("unseen", r"Mean of 6 .* after PTQ: (\S+ ± \S+), ", "docs/unseen-sets.md"),
    ("unseen", r"Mean of 6 .* after PTQ: .* at most (\S+) ", "docs/unseen-sets.md"),
    ("unseen", r"Mean of 6 .* after QAT: (\S+ ± \S+), ", "docs/unseen-sets.md"),
    ("unseen", r"Mean of 6 .* after QAT: (\S+ ± \S+), ", "docs/accuracy.md"),
    ("unseen", r"Mean of 6 .* after QAT: .* at most (\S+) ", "docs/unseen-sets.md"),
    ("unseen", r"Mean of 6 .* after QAT: .* at most (\S+) ", "docs/accuracy.md"),
    ("unseen", r"Mean of 4 .* after PTQ, .*: (\S+ ± \S+), ", "docs/unseen-sets.md"),
    ("unseen", r"Mean of 4 .* after PTQ, .* at most (\S+) ", "docs/unseen-sets.md"),
    ("unseen", r"Mean of 4 .* after QAT, .*: (\S+ ± \S+), ", "docs/unseen-sets.md"),
    ("unseen", r"Mean of 4 .* after QAT, .* at most (\S+) ", "docs/unseen-sets.md"),
    ("last-convolutions", r"agreement, PTQ, 10 detectors: (\S+ ± \S+), ", "docs/last-convolutions.md"),
    ("last-convolutions", r"agreement, PTQ, 6 sets: (\S+ ± \S+), ", "docs/last-convolutions.md"),
    ("last-convolutions", r"agreement, QAT, 10 detectors: (\S+ ± \S+), ", "docs/last-convolutions.md"),
    ("last-convolutions", r"agreement, QAT, 6 sets: (\S+ ± \S+), ", "docs/last-convolutions.md"),
    ("last-convolutions", r"AP, PTQ, 10 detectors: (\S+ ± \S+), ", "docs/last-convolutions.md"),
    ("last-convolutions", r"AP, PTQ, 6 sets: (\S+ ± \S+), ", "docs/last-convolutions.md"),
    ("last-convolutions", r"AP, QAT, 10 detectors: (\S+ ± \S+), ", "docs/last-convolutions.md"),
    ("last-convolutions", r"AP, QAT, 6 sets: (\S+ ± \S+), ", "docs/last-convolutions.md"),
    (
        "cpu-peers",
        r"(?s)gelan-t, cells 640.*?- ours, minus NNCF MIXED, decoding in FP32, FP32 elsewhere: -(\S+ ± \S+)",
        "docs/cpu-peers.md",
    ),
    ("streams", r"CUDA graphs: (14 .*) less time", "docs/auxiliary-streams.md"),
    ("streams", r"take (.*) less time", "CHANGELOG.md"),
    ("streams", r"take (.*) less time", "docs/benchmarks.md"),
    ("streams", r"(\d+ of \d+) slower by the median", "docs/auxiliary-streams.md"),
    ("streams", r"(\d+ of \d+) slower by the mean", "docs/auxiliary-streams.md"),
    ("streams", r"activations: (.*) times", "docs/auxiliary-streams.md"),
    ("streams", r"yolov9-c, 8: (.*)", "docs/auxiliary-streams.md"),
    ("streams", r"yolov9-t, 1: (.*)", "docs/auxiliary-streams.md"),
    ("all-cells", r"minus for TensorRT: \+(\S+ ± \S+)", "docs/cpu-peers.md"),
    ("all-cells", r"minus for OpenVINO, with zero points: \+(\S+ ± \S+)", "docs/cpu-peers.md"),
    ("long", r"litter, box term times 3 minus times 1: AP (\S+ ± \S+), ", "docs/methods-and-steps.md"),
    ("rates", r"(\d+) differences of agreement", "docs/qat.md"),
    ("rates", r"of agreement to the default, (\d+) of them", "docs/qat.md"),
    ("rates", r"detector's AP .* from (\S+ to \S+),", "docs/qat.md"),
    ("rates", r"detector's AP .* from (\S+ to \S+),", "docs/methods-and-steps.md"),
    ("rates", r"gelan-c-seg.*450 steps at 3e-4: (\S+ ± \S+) over", "docs/methods-and-steps.md"),
    ("durations", r"--qat never: (\d+ to \d+ s), ", "docs/qat.md"),
    ("durations", r"of QAT: (\d+ to \d+ s), ", "docs/qat.md"),
]


@pytest.mark.parametrize(("section", "pattern", "page"), PROSE)
def test_a_sentence_of_the_documents_has_the_number_of_the_files(section, pattern, page):
    printed = "\n".join(claims.SECTIONS[section](RESULTS))
    number = re.search(pattern, printed)[1]
    assert number in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_the_table_of_readme_is_what_the_files_give():
    """AP of photographs-h200.json, milliseconds of docs/benchmarks.md and, of the same blocks, of cpu-litter-*.json."""
    content = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in measured.FOLDER.glob("*.json")}
    states = {(row["network"], row["state"]): row for row in content["photographs-h200"]["rows"]}
    gains = claims_engines.gains()
    lines = []
    for size in "tsmc":
        fp32, int8 = (states[f"yolov9-{size}, litter, 416", state]["ap"] for state in ("float", "INT8 engine"))
        cells = [f"yolov9-{size}", f"{fp32:.4f} → {int8:.4f}"]
        cells += [str(gains.get((f"yolov9-{size}", batch), "–")) for batch in (1, 8)]
        on_cpu = content.get(f"cpu-litter-{size}", {"rows": []})["rows"]
        times = {
            row["file"]: row["times"]["1"]["median"]
            for row in on_cpu
            if row["runtime"] == "OpenVINO" and row["rest"] == "FP32"
        }
        cells.append(from_to(times, "FP32", "ours", ".1f"))
        lines.append(f"| {' | '.join(cells)} |")
    assert "\n".join(lines) in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("losses", "epochs"),
    [
        ([5, 4, 3, 2, 1], 5),  # better by one error each time
        ([5, 4, 3.9, 3.8, 3.7], 4),  # by a tenth of it, twice
        ([5, 4, 3.5, 2.9, 2.8, 2.7, 1], 6),  # by more than one in two epochs, then by a tenth of it, twice
        ([5, 6, 7, 1], 3),
    ],
)
def test_a_rule_ends_qat_after_two_epochs_without_a_better_loss(losses, epochs):
    assert claims_steps.epochs_until_stop(losses, [0.5] * len(losses), patience=2) == epochs


def test_gains_of_int8_are_those_of_default_engines_or_else_of_an_earlier_day():
    gains = claims_engines.gains()
    content = json.loads((measured.FOLDER / "engines-h200.json").read_text(encoding="utf-8"))
    sittings = [one for one in content["sittings"] if (one["network"], one["batch"]) == ("yolov9-m", 8)]
    times = {"FP16": [], "INT8": []}
    for row in (row for sitting in sittings for row in sitting["rows"] if row["streams"] == 2):
        times[row["form"]].append(row["ms"]["median"])
    assert len(times["FP16"]) == len(times["INT8"]) == 2
    before, after = (sum(medians) / 2 for medians in times.values())
    assert str(gains["yolov9-m", 8]) == f"{before:.2f} → {after:.2f} ({before / after:.2f}×)"
    rows = json.loads((measured.FOLDER / "latency-h200.json").read_text(encoding="utf-8"))["yolov9-c"]["rows"]
    fp16, int8 = (row["figures"]["latency"]["median"] for row in rows if row["batch"] == 1)
    assert str(gains["yolov9-c", 1]) == f"{fp16:.2f} → {int8:.2f} ({fp16 / int8:.2f}×) †"
    assert ("yolov9-m", 1) not in gains  # whose FP16 engine was not built


def test_tables_of_the_demo_are_what_the_programs_print_for_its_rows():
    """In docs/demo.md whole, in README and on the page about a lower mAP without some columns."""
    content = json.loads((measured.FOLDER / "demo-cpu.json").read_text(encoding="utf-8"))
    report = Report(command="", rows=[Row(**row) for row in content["rows"][:4]])
    assert terminal_table(report) in (ROOT / "docs/demo.md").read_text(encoding="utf-8")
    for page, columns in (("README.md", 4), ("docs/troubleshoot-accuracy.md", 6)):
        text = (ROOT / page).read_text(encoding="utf-8")
        shown = re.findall(r"^(?:FP32|PTQ|QAT|ONNX) .*[0-9]$", text, re.MULTILINE)
        assert len(shown) >= 3
        for line in shown:
            (row,) = (row for row in report.rows if stage_name(row.stage) == line.split()[0])
            assert line.split() == " ".join([line.split()[0], *cells(report, row)[1:columns]]).split()


def ratios_on_a_cpu(network, slow, fast):
    """Times of a network's FP32 or INT8 file (file, type of the other layers) over those of another one, all runs."""
    ratios = []
    for path in measured.FOLDER.glob("cpu-*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = {(row["file"], row["rest"]): row for row in content["rows"] if row["runtime"] == "OpenVINO"}
        if content["settings"]["network"].startswith(network) and {slow, fast} <= rows.keys():
            times = [rows[key]["times"] for key in (slow, fast)]
            ratios += [times[0][threads]["median"] / times[1][threads]["median"] for threads in times[0]]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def claims_of_readme():
    """The sentences of README's prose that hold measured numbers, as the files give them."""
    fp32, int8, bf16 = ("FP32", "FP32"), ("ours", "FP32"), ("FP32", "BF16")
    gains = [float(gain) for gain in re.findall(r"\((\d\.\d+)×\)", "\n".join(claims.SECTIONS["latency"](RESULTS)))]
    yield f"On a GPU, INT8 is {min(gains):.1f} to {max(gains):.1f} times as fast as FP16."
    of_both = [ratios_on_a_cpu(f"gelan-{size},", fp32, int8) for size in "st"]
    yield "On a CPU, size s is {} times as fast as FP32; size t is {} times as fast".format(*of_both)
    litter = [json.loads((measured.FOLDER / f"cpu-litter-{size}.json").read_text(encoding="utf-8")) for size in "ts"]
    times = [
        row["times"]["1"]["median"] for file in litter for row in file["rows"] if (row["file"], row["rest"]) == bf16
    ]
    yield f"where BF16 is faster: {times[0]:.1f} and {times[1]:.1f} ms."
    yield f"BF16 was {ratios_on_a_cpu('gelan-', int8, bf16)} times as fast as INT8"
    engines = measured.detectors(measured.deployed_engines(RESULTS))
    sets = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}[len({engine.images for engine in engines})]
    loss = re.search(r"it loses at most (\S+) ", "\n".join(claims.SECTIONS["engines"](RESULTS)))[1]
    yield f"The mean loss of {len(engines)} INT8 engines on {sets} sets is at most {loss} (95 %)"
    worst = min((engine for engine in engines if engine.error), key=lambda engine: engine.value)
    yield f"the worst of them lost {-worst.value:.4f} ± {worst.error:.4f}"
    unseen = "\n".join(claims.SECTIONS["unseen"](RESULTS))
    loss = re.search(r"Mean of 6 .* after QAT: .* at most (\S+) ", unseen)[1]
    yield f"six detectors lost at most {loss} in the mean after QAT (95 % over images, simulated)"
    errors = [engine.error for engine in engines if engine.file == "photographs-h200" and engine.images == "litter"]
    more = [engine.value for engine in engines if engine.file == "qat-steps-h200" and engine.images == "litter"]
    number = {3: "three", 4: "four", 5: "five"}[len(more)]
    yield f"The standard error of a difference is at most {max(errors):.4f}; "
    yield f"{number} more engines differ by {min(more):+.4f} to {max(more):+.4f}."
    minutes, gigabytes = set_up()
    yield f"{minutes['all']} minutes on two busy cores, {gigabytes['all']}"


def set_up():
    """Minutes that the demo took, and gigabytes that it needs on disk, by their names in setup.json."""
    content = json.loads((measured.FOLDER / "setup.json").read_text(encoding="utf-8"))
    minutes = {name: round(value / 60) for name, value in content["seconds"].items() if name != "method"}
    gigabytes = {name: f"{value / 1e9:.1f} GB" for name, value in content["bytes"].items() if name != "method"}
    return minutes, gigabytes


# What README's prose has digits in, and is no result: names, versions, inputs, and what its picture shows
NAMES = r"""YOLOv?\d+|yolov9[\w-]*|INT[48]|F?FP\d+|BF16|mAP50-95|AP50|CC BY 4\.0|RTX 4090|H[12]00|v8, 11|
(GPL|Apache)-\d\.\d|3\.10 to 3\.13|TensorRT 8\.6\.0|416×416|640×640|1,800 photographs|11 epochs|0\.01 at most"""


def test_every_number_in_readmes_prose_is_that_of_a_file():
    """Those in tables and in blocks are compared with files above."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"^\|[^\n]*|```text\n.*?```|\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
    prose = " ".join(prose.split())
    for claim in claims_of_readme():
        assert claim in prose
        prose = prose.replace(claim, "")
    assert re.findall(r"\S*\d\S*", re.sub(NAMES.replace("\n", ""), "", prose)) == []


def test_what_the_set_up_needs_is_the_same_everywhere():
    minutes, gigabytes = set_up()
    for page, sentence in (
        ("demo", f"took {minutes['set_up']} minutes to set up and {minutes['run']} minutes to run"),
        ("dependencies", f"everything that is needed ({gigabytes['environment']})"),
        ("troubleshoot-install", f"the environment takes {gigabytes['environment']}"),
    ):
        assert sentence in " ".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split())


def from_to(times, before, after, form):
    """A cell of README: milliseconds before and after, and their ratio."""
    if before not in times:
        return "–"
    return f"{times[before]:{form}} → {times[after]:{form}} ({times[before] / times[after]:.2f}×)"


def test_what_the_documents_say_of_ptq_and_qat_in_words():
    """27 of 37 detectors lose less than 0.004 by PTQ; QAT regains at least half of a large loss in six runs of six."""
    trainings = measured.by_training(measured.detectors(RESULTS))
    trainings = [results for results in trainings if results[0].file != measured.FAILS_IN_FP32]
    losses = []
    pairs = []
    for results in trainings:
        ptq, qat = measured.select(results, "PTQ"), measured.default_qat(results)
        losses.append(statistics.mean(run.value for run in ptq))
        if losses[-1] < -0.009 and qat:
            assert [run.seed for run in ptq] == [run.seed for run in qat] == [57, 58, 59]
            pairs += zip(ptq, qat, strict=True)
    assert (len(losses), sum(1 for loss in losses if loss > -0.004)) == (37, 27)
    assert len(pairs) == 6
    assert all(after.value > before.value / 2 for before, after in pairs)
    assert {f"{min(after.value for _, after in pairs):.4f}", f"{max(after.value for _, after in pairs):.4f}"} == {
        "-0.0031",
        "-0.0012",
    }


def test_every_file_and_every_row_is_read_once():
    others = (
        "busy",
        "demo-cpu",
        "engines-h200",
        "latency-h200",
        "openvino-layers",
        "openvino-nncf-cells",
        "openvino-repeated-quantizers",
        "openvino-rewrites-t",
        "openvino-simulation",
        "openvino-zero-points",
        "pruned-digits",
        "pruned-t",
        "qat-stop-h200",
        "setup",
        "streams-h200",
        "thresholds-h200",
        "video-cpu",
        "video-h200",
    )
    files = {path.stem for path in measured.FOLDER.glob("*.json")}
    files = {name for name in files if name not in others and not name.startswith("cpu-")}
    assert {result.file for result in RESULTS} == files
    counts = dict.fromkeys(files, 0)
    for name in files:
        content = json.loads((measured.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        if "rows" in content:
            rows = [*content["rows"], *content.get("seeds", [])]
            counts[name] = sum(1 for row in rows if "to_float" in row and row["state"] != "PTQ-auto")
        else:
            steps = itertools.chain.from_iterable(network["steps"].items() for network in content.values())
            counts[name] = sum(1 for step, entry in steps if entry["result"] and step != "float")
    assert {name: sum(1 for result in RESULTS if result.file == name) for name in files} == counts


def test_models_that_are_doubtful_in_fp32_are_those_with_such_boxes():
    content = json.loads((measured.FOLDER / f"{measured.TEN_DETECTORS}.json").read_text(encoding="utf-8"))
    boxes = "fp32_boxes_near_1_without_area_or_as_large_as_the_image"
    assert [name for name, network in content.items() if network[boxes]] == list(measured.DOUBTFUL)


def test_settings_are_compared_seed_by_seed_with_the_error_of_images_and_seeds():
    """Of two seeds +0.02 and +0.04: mean 0.03, over seeds ± 0.01; over images 0.0071 each (0.01 and 0.02 apart)."""
    images = "a" * 32
    runs = []
    for score, resampled in (
        (0.50, "0.5000000 0.6000000"),
        (0.52, "0.5100000 0.6200000"),
        (0.54, "0.5100000 0.6200000"),
    ):
        row = {"ap": score, "ap_resampled": f"{images} {resampled}"}
        runs.append(replace(FIRST, row=row, seed=57))
    base, first, second = runs
    of_58 = replace(base, seed=58)
    pairs = measured.paired_runs([first, replace(second, seed=58), replace(first, seed=59)], [base, of_58])
    assert [run.seed for run, _ in pairs] == [57, 58]
    value, error = measured.difference_of_runs(pairs, "ap")
    assert (value, error) == pytest.approx((0.03, math.hypot(math.sqrt(0.00005), 0.01)))
    assert measured.difference_of_runs(pairs[:1], "ap") == pytest.approx((0.02, math.sqrt(0.00005)))


def test_agreement_is_scaled_and_errors_are_paired():
    agreements = [result.agreement for result in RESULTS if not math.isnan(result.agreement)]
    assert 0.999 < max(agreements) <= 1
    content = json.loads((measured.FOLDER / "robots-h200.json").read_text(encoding="utf-8"))["yolov9-s"]["steps"]
    scores = [
        np.array(content[step]["result"]["ap_resampled"].split()[1:], float) for step in ("PTQ, seed 57", "float")
    ]
    (ptq,) = (result for result in measured.select(RESULTS, "PTQ") if result.file == "robots-h200")
    assert ptq.error == pytest.approx(np.std(scores[0] - scores[1], ddof=1))
    assert ptq.value == content["PTQ, seed 57"]["result"]["ap"] - content["float"]["result"]["ap"]


def test_half_of_a_95_percent_interval():
    """2.179 is Student's t of 12 degrees of freedom in any table."""
    assert measured.interval_width(13) == pytest.approx(2.179 * math.sqrt(13 / 12), abs=5e-4)
    assert [measured.interval_width(groups) for groups in (None, 30, 800)] == [2, 2, 2]
    on_robots = replace(FIRST, images="robots", row={"recall_to_float": 0.0022, "recall_error": 0.001})
    assert [replace(on_robots, images=images).is_changed("recall") for images in ("robots", "litter")] == [False, True]


def test_networks_on_the_same_images_err_together():
    alike = [replace(FIRST, images="litter", value=0.01, error=0.003), replace(FIRST, images="litter", error=0.001)]
    assert measured.mean_with_error(alike)[1] == pytest.approx(0.002)
    apart = [alike[0], replace(alike[1], images="cards")]
    assert measured.mean_with_error(apart)[1] == pytest.approx(math.sqrt(0.003**2 + 0.001**2) / 2)
    assert measured.mean_with_error(apart)[0] == pytest.approx((0.01 + FIRST.value) / 2)


def test_nothing_is_chosen_by_its_value():
    """A worse result in place of a better one changes what is printed, not which result is taken."""
    changed = [
        replace(result, value=result.value - 0.05) if result.file == "cards-h200" else result for result in RESULTS
    ]
    for choose in (measured.deployed_engines, measured.default_qat, measured.detectors):
        chosen = [[result.row for result in choose(results)] for results in (RESULTS, changed)]
        assert chosen[0] == chosen[1]
    lines = [claims.SECTIONS["engines"](results) for results in (RESULTS, changed)]
    assert lines[0] != lines[1]


def test_an_unknown_section_is_refused():
    with pytest.raises(InputError, match="speed is not a section; expected one of engines, "):
        claims.run(claims.ClaimsOptions(sections=["engines", "speed"]))


def test_int8_on_a_cpu_is_compared_with_fp32_and_with_peers(tmp_path, monkeypatch):
    """0.02 and 0.04 less than FP32 on two resamplings: their standard deviation is 0.0141; 0.01 and 0.02: 0.0071."""
    images = "a" * 32
    ap = {
        "FP32": (0.5, "0.5000000 0.6000000"),
        "ours": (0.47, "0.4800000 0.5600000"),
        "NNCF": (0.46, "0.4700000 0.5400000"),
    }
    rows = []
    for number, (name, (score, text)) in enumerate(ap.items(), 1):
        row = {"file": name, "runtime": "OpenVINO", "rest": "FP32", "ap": score, "ap_resampled": f"{images} {text}"}
        row |= {"agreement": None if name == "FP32" else 0.96, "times": {"1": {"median": 12.0 / number}}}
        rows.append(row)
    rows[-1]["agreement"] = 0.0
    rows.append({"file": "FP32", "runtime": "ONNX Runtime", "rest": "FP32", "times": {}})
    rows.append({"file": "theirs", "runtime": "ONNX Runtime", "rest": "FP32", "times": {}})
    content = {
        "settings": {"network": "a net", "imgsz": [320, 416]}, "rows": rows, "date": "2026-11-28", "images": 7,
        "machine": {"openvino": "a Xeon", "instructions": ["avx2"]}, "software": {"openvino": "1.2"},
    }  # fmt: skip
    (tmp_path / "cpu-a.json").write_text(json.dumps(content))
    monkeypatch.setattr(claims_cpu, "FOLDER", tmp_path)
    assert claims.SECTIONS["cpu-peers"](RESULTS) == [
        "| model | FP32, BF16, or INT8 by | AP − FP32 | agreement | ms, 1 thread |",
        "| --- | --- | ---: | ---: | ---: |",
        "| a net | FP32 | AP 0.5000 | – | 12.0 (1.00×) |",
        "| a net | ours | -0.0300 ± 0.0141 | 0.9600 | 6.0 (2.00×) |",
        "| a net | NNCF | -0.0400 ± 0.0212 | 0.0000 | 4.0 (3.00×) |",
        "| a net | theirs (ONNX Runtime) | not measured | – | not measured |",
        "",
        "a net, 320×416: 7 images, a Xeon (avx2), openvino 1.2, 2026-11-28; medians, batch size 1, all in turns.",
        "- ours, minus NNCF, FP32 elsewhere: +0.0100 ± 0.0071",
    ]
