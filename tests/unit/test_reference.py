"""docs/reference: up to date, and made of what the source declares."""

import ast
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import yaml
from documentation import PYTHON_PROGRAMS, ROOT, commands, recorded, refusal

from docs import build, claims_engines, measured, messages, pictures
from models.quantize import rules
from models.quantize.recipe import Finetune
from utils import cli
from utils.onnx_graph import verify


def test_every_page_is_up_to_date(capsys):
    """If it fails: python docs/build.py."""
    assert build.run(build.BuildOptions(check=True)) == 0, capsys.readouterr().out


def test_no_page_holds_a_path_of_this_machine():
    for page in build.FOLDER.rglob("*.md"):
        assert str(ROOT) not in page.read_text("utf-8"), page


def test_a_page_that_differs_and_one_that_is_left_over_are_named_and_mended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "PAGES", {"recipe.md": build.recipe_page})
    assert build.run(build.BuildOptions()) == 0
    (tmp_path / "recipe.md").write_text("edited")
    (tmp_path / "gone.md").write_text("of an earlier source")
    capsys.readouterr()
    assert build.run(build.BuildOptions(check=True)) == 1
    assert capsys.readouterr().out.split() == ["recipe.md", "gone.md"]
    assert (tmp_path / "recipe.md").read_text() == "edited"
    build.run(build.BuildOptions())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "recipe.md"]
    assert build.run(build.BuildOptions(check=True)) == 0


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_has_its_text_inside_its_panel(name):
    """A letter of 14 pixels takes 7.5 of them in the mean."""
    tree = ElementTree.fromstring(pictures.PICTURES[name]())
    width, height = (float(tree.get(side)) for side in ("width", "height"))
    texts = tree.findall("{*}text")
    assert texts
    for text in texts:
        length = 7.5 * len(text.text)
        start = float(text.get("x")) - {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
        assert start >= 4, text.text
        assert start + length <= width - 4, text.text
        assert 14 <= float(text.get("y")) <= height - 4, text.text


def test_a_changed_result_changes_the_picture(monkeypatch):
    before = pictures.speed()
    assert "yolov9-c: 1.68×" in before
    content = measured.load(measured.FOLDER / f"{measured.LATENCY}.json")
    content["yolov9-c"]["rows"][-1]["figures"]["latency"]["median"] = 2.0  # INT8, batch size 8
    real = measured.load
    monkeypatch.setattr(claims_engines, "load", lambda path: content if measured.LATENCY in path.name else real(path))
    assert "yolov9-c: 2.06×" in pictures.speed()


def test_a_changed_default_changes_the_page_of_recipes(monkeypatch):
    before = build.built("recipe.md")
    assert "`finetune.iters` | whole number from 1 to 1000000 | `45` |" in before
    monkeypatch.setattr(Finetune.model_fields["iters"], "default", 46)
    changed = set(build.built("recipe.md").splitlines()) - set(before.splitlines())
    assert [re.findall(r"`[^`]*`", line)[:2] for line in changed] == [["`finetune.iters`", "`46`"]]


def test_a_changed_rule_and_a_changed_property_change_their_pages(monkeypatch):
    monkeypatch.setattr(rules, "RULES", (replace(rules.RULES[0], why="another reason"), *rules.RULES[1:]))
    assert "| another reason |" in build.built("placement-rules.md")
    monkeypatch.setattr(verify, "PROPERTIES", {"a new one": verify.scales})
    assert "| a new one |" in build.built("verifier.md")


def test_the_command_line_has_each_option_of_each_program():
    text = build.built("cli.md")
    for program in PYTHON_PROGRAMS:
        call = recorded(program)
        leaves = cli.parsers(call.name, call.commands, call.about)[1]
        for command, (leaf, (kind, _)) in leaves.items():
            section = text.partition(f"\n{'###' if command else '##'} {f'{program} {command}'.strip()}\n")[2]
            section = re.split(r"\n##", section)[0]
            fields = [action for action in leaf._actions if action.dest in kind.model_fields]
            flags = {flag for action in fields for flag in action.option_strings}
            hidden = {flag for name in kind.HIDDEN for flag in kind.flags(name)}
            assert {flag for flag in flags - hidden if not re.search(rf"`[^`|]*{flag}\b[^`|]*` \|", section)} == set()


@pytest.mark.parametrize("program", PYTHON_PROGRAMS)
def test_help_of_each_program_ends_with_examples_that_its_parser_takes(program):
    call = recorded(program)
    for command, (leaf, _) in cli.parsers(call.name, call.commands, call.about)[1].items():
        _, found, examples = leaf.format_help().partition("example")
        assert found, f"{program} {command} has no example"
        for words in commands(f"```bash\n{examples.partition(':')[2].strip()}\n```\n"):
            assert words[:2] == ["python", program]
            arguments = [word for word in words[2:] if word != "..."]
            arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
            if "..." not in words:
                assert refusal(program, arguments) == ""


def test_messages_are_found_whatever_they_are_built_of():
    source = """
def work(path, flag):
    where = f"in {path}"
    if flag:
        raise InputError(f"{path} has {'no' if flag else 'two'} classes; " + "give one")
    raise QatError(where + ", which is wrong")
    raise ValueError("not a message of ours")
    raise InputError(str(path))
"""
    assert sorted(messages.raised(ast.parse(source))) == [
        ("InputError", "… has no classes; give one"),
        ("InputError", "… has two classes; give one"),
        ("QatError", "in …, which is wrong"),
    ]


def test_the_index_of_messages_is_nearly_complete():
    """Raised errors whose text is known only at run time, such as another library's, are few."""
    raised = [path.read_text("utf-8") for pattern in messages.SOURCE for path in ROOT.glob(pattern)]
    places = sum(len(re.findall(rf"raise ({'|'.join(messages.ERRORS)})\(", text)) for text in raised)
    assert len(messages.messages()) > 0.9 * places
    of_recipes = [message for message in messages.messages() if "--percentile does nothing" in message.text]
    assert [message.programs for message in of_recipes if message.exit_code == 2]


def test_every_row_of_foreign_versions_has_a_source_and_a_date(tmp_path, monkeypatch):
    content = yaml.safe_load(build.SUPPORT.read_text("utf-8"))
    for row in [row for section in content for row in section["rows"]]:
        assert row["checked"].year >= 2026
        assert row["source"] == "own tests" or "](https://" in row["source"]
    del content[0]["rows"][0]["source"]
    monkeypatch.setattr(build, "SUPPORT", tmp_path / "support.yaml")
    build.SUPPORT.write_text(yaml.safe_dump(content))
    with pytest.raises(build.InputError, match="has no source"):
        build.built("versions.md")
