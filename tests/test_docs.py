"""The documents say what is true: every command and setting is in them, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from waitlist.cli import COMMANDS
from waitlist.settings import PREFIX, SECRET_FIELDS, Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = {PREFIX + field.upper() for field in Settings.model_fields}


def test_readme_lists_every_command_and_no_other() -> None:
    table = README.split("| command | does |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    # "./run suppress ADDRESS", then "unsuppress ADDRESS" in the same cell
    listed = {re.sub(r"^\./run ", "", code).split()[0] for cell in cells for code in re.findall(r"`([^`]+)`", cell)}

    assert listed == {command.name for command in COMMANDS}


def test_every_command_says_what_it_does() -> None:
    assert [command.name for command in COMMANDS if not command.help] == []


def test_readme_and_example_list_every_setting_with_its_default() -> None:
    example = (ROOT / ".env.example").read_text()
    for field, info in Settings.model_fields.items():
        name = PREFIX + field.upper()
        default = info.default
        text = default.get_secret_value() if hasattr(default, "get_secret_value") else default
        assert f"`{name}`" in README
        assert re.search(rf"^#{name}=", example, re.MULTILINE), name
        if text is not None:
            assert f"#{name}={text}" in example.splitlines()
            assert f"`{text}`" in README, name


def test_documents_name_no_setting_that_does_not_exist() -> None:
    known = SETTINGS | {PREFIX + field.upper() + "_FILE" for field in SECRET_FIELDS} | {"WAITLIST_TEST_DATABASE_URL"}
    for document in DOCUMENTS:
        named = set(re.findall(r"\bWAITLIST_[A-Z0-9_]+", document.read_text()))
        assert named <= known, document


def test_promises_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "promises.md").read_text()
    for file, name in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text):
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not name or f"def {name}(" in path.read_text(), name


def test_links_between_documents_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
