"""The site: every page is in its navigation, and what pages link to is copied beside them."""

import ast
import json
import re

import pytest
import yaml
from documentation import PYTHON_PROGRAMS, ROOT, refusal

from docs import stage


def pages_of(entry) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry if isinstance(entry, list) else entry.values()
    return [page for part in parts for page in pages_of(part)]


def test_every_page_is_in_the_navigation_once(tmp_path):
    pages = [path.relative_to(tmp_path).as_posix() for path in stage.stage(tmp_path)]
    listed = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(listed) == sorted(pages)


def test_links_between_pages_and_to_files_lead_to_the_same_in_the_staged_folder(tmp_path):
    links = 0
    for page in stage.stage(tmp_path):
        for target in stage.LINK.finditer(stage.FENCE.sub("", page.read_text("utf-8"))):
            path = target[1] or target[2]
            if "://" not in path and not path.startswith("mailto:"):
                assert (page.parent / path).is_file(), f"{page.relative_to(tmp_path)}: {path}"
                links += 1
    assert links > 100


def test_a_page_is_staged_as_python_markdown_reads_it():
    page = "Text:\n- one\n  more\n- two\n\n1. first\n\n   ```bash\n   ls\n   ```\n\nEnd\n\n```yaml\nkey:\n- a\n```\n"
    expected = "Text:\n\n- one\n    more\n- two\n\n1. first\n\n    ```bash\n    ls\n    ```\n\nEnd\n\n"
    expected += "```yaml\nkey:\n- a\n```\n"
    assert stage.for_mkdocs(page) == expected


def test_a_block_of_code_behind_a_list_keeps_its_indents():
    code = "```yaml\na:\n  b:\n    c: 1\n```\n"
    assert stage.for_mkdocs("- item\n\n" + code) == "- item\n\n" + code


NOTEBOOK = json.loads((ROOT / "examples/quantize.ipynb").read_text("utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs():
    stored = [cell for cell in NOTEBOOK["cells"] if cell.get("outputs") or cell.get("execution_count")]
    assert (stored, len(CELLS) > 4) == ([], True)


@pytest.mark.parametrize("program", ["qat.py", "export_qat.py", "val_trt.py", "scripts/make_report.py"])
def test_a_command_of_the_notebook_is_one_that_its_program_takes(program):
    """What is no literal, such as a path, stands for one word; lists of words are taken from the first cells."""
    lists = {}
    for node in ast.walk(ast.parse("\n".join(CELLS))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            lists[node.targets[0].id] = ast.literal_eval(node.value) if node.targets[0].id.isupper() else []
    calls = [node for node in ast.walk(ast.parse("\n".join(CELLS))) if isinstance(node, ast.Call)]
    for call in calls:
        words = []
        for part in call.args:
            if isinstance(part, ast.Starred):
                words += lists.get(part.value.id, [])
            else:
                words.append(part.value if isinstance(part, ast.Constant) else "word")
        if program in words:
            assert program in PYTHON_PROGRAMS
            assert refusal(program, words[words.index(program) + 1 :]) == ""
            return
    pytest.fail(f"the notebook does not call {program}")


def test_links_of_the_notebook_lead_to_files():
    text = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
    links = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    assert links
    assert [target for target in links if not (ROOT / "examples" / target).exists()] == []
