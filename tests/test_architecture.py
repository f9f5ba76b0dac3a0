"""The laws of the house, read off the source with `ast`: who imports whom, who opens a transaction, what runs inside one.

Each law is a function from sources (module name -> text) to faults. It is shown to find a fault in a broken sample,
then to find none in waitlist/.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Sources = Mapping[str, str]

GROUND, LEAVES, SERVICES, USE_CASES, EDGES, ROOF = range(1, 7)
# A package stands for all of its modules. Leaves do not know one another; elsewhere neighbours may.
STOREY = {
    "waitlist": ROOF,
    "waitlist.model": GROUND,
    "waitlist.addresses": GROUND,
    "waitlist.tokens": GROUND,
    "waitlist.errors": GROUND,
    "waitlist.messages": GROUND,
    "waitlist.settings": GROUND,
    "waitlist.version": GROUND,
    "waitlist.words": GROUND,
    "waitlist.files": GROUND,
    "waitlist.logs": GROUND,
    "waitlist.policy": LEAVES,
    "waitlist.store": LEAVES,
    "waitlist.mail": LEAVES,
    "waitlist.services": SERVICES,
    "waitlist.clients": USE_CASES,
    "waitlist.doctor": USE_CASES,
    "waitlist.backups": USE_CASES,
    "waitlist.erasure": USE_CASES,
    "waitlist.exports": USE_CASES,
    "waitlist.integrity": USE_CASES,
    "waitlist.people": USE_CASES,
    "waitlist.purge": USE_CASES,
    "waitlist.signup": USE_CASES,
    "waitlist.confirmation": USE_CASES,
    "waitlist.dispatch": USE_CASES,
    "waitlist.outbox": USE_CASES,
    "waitlist.deliveries": USE_CASES,
    "waitlist.delivery_events": USE_CASES,
    "waitlist.idempotency": USE_CASES,
    "waitlist.ledger": USE_CASES,
    "waitlist.waitlists": USE_CASES,
    "waitlist.web": EDGES,
    "waitlist.api": EDGES,
    "waitlist.webhooks": EDGES,
    "waitlist.cli": EDGES,
    "waitlist.metrics": EDGES,
}
DATABASE = {"sqlalchemy", "alembic", "sqlite3", "pysqlite3", "psycopg"}
WEB = {"flask", "flask_wtf", "flask_limiter", "htmx_flask", "werkzeug", "wtforms", "click", "granian", "honcho"}
NETWORK = {
    "smtplib",
    "socket",
    "ssl",
    "http.client",
    "urllib.request",
    "urllib3",
    "requests",
    "httpx",
    "aiohttp",
    "resend",
}
# The machinery of the store; every other module of it is verbs on an open transaction.
ENGINE_ROOM = ("waitlist.store.engine", "waitlist.store.migrate", "waitlist.store.migrations", "waitlist.store.schema")
OPENERS = {"run_transaction", "run_query"}
ENDERS = {"begin", "begin_nested", "commit", "rollback", "connect"}
# Words that have no place in a transaction body, wherever in a dotted call they stand.
UNFIT_IN_A_BODY = {
    *("sleep", "time", "clock"),
    *("log", "logger", "logging", "structlog", "print", "echo"),
    *("mail", "send", "sender", "make_sender", "smtplib"),
    *("composer", "compose", "render", "render_template"),
}
WALL_CLOCKS = {"time.time", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


def read_sources() -> dict[str, str]:
    sources = {}
    for path in sorted((ROOT / "waitlist").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text()
    return sources


def arrows_point_down(sources: Sources) -> Iterator[str]:
    for name, text in sources.items():
        if _home(name) is None:
            yield f"{name}: has no storey; give it one in {Path(__file__).name}"
            continue
        for target in _imports(name, text, sources):
            home, goal = _home(name), _home(target)
            if goal is None or goal == home:
                continue
            here, there = STOREY[str(home)], STOREY[goal]
            if there > here or (there == here == LEAVES):
                yield f"{name}: imports {target}"


def policy_knows_only_the_model(sources: Sources) -> Iterator[str]:
    for target in _imports("waitlist.policy", sources.get("waitlist.policy", ""), sources):
        if target != "waitlist.model" and target.partition(".")[0] not in sys.stdlib_module_names:
            yield f"waitlist.policy: imports {target}"


def the_database_is_known_to_the_store_alone(sources: Sources) -> Iterator[str]:
    yield from _strangers(sources, DATABASE, lambda name: _is_in(name, "waitlist.store"))


def the_web_is_known_to_the_edges_and_the_roof_alone(sources: Sources) -> Iterator[str]:
    yield from _strangers(sources, WEB, lambda name: STOREY.get(_home(name) or "", 0) >= EDGES)


def the_network_is_known_to_mail_alone(sources: Sources) -> Iterator[str]:
    # cli.system only asks whether a port is free.
    yield from _strangers(
        sources, NETWORK, lambda name: _is_in(name, "waitlist.mail") or _is_in(name, "waitlist.cli.system")
    )


def use_cases_alone_open_transactions(sources: Sources) -> Iterator[str]:
    for name, text in sources.items():
        if STOREY.get(_home(name) or "") == USE_CASES:
            continue
        for call in _calls(ast.parse(text)):
            if OPENERS & set(call.split(".")):
                yield f"{name}: calls {call}()"


def store_functions_live_in_an_open_transaction(sources: Sources) -> Iterator[str]:
    """Every public one takes it first; none begins or ends one."""
    for name, text in sources.items():
        if not _is_in(name, "waitlist.store") or any(_is_in(name, room) for room in ENGINE_ROOM):
            continue
        tree = ast.parse(text)
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and not function.name.startswith("_") and not _is_body(function):
                yield f"{name}: {function.name}() does not take the transaction first"
        for call in _calls(tree):
            if call.rpartition(".")[2] in ENDERS:
                yield f"{name}: calls {call}()"


def bodies_touch_nothing_but_their_transaction(sources: Sources) -> Iterator[str]:
    """Nor do the functions of the same module that a body calls."""
    for name, text in sources.items():
        tree = ast.parse(text)
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        mail = _names_from(tree, "waitlist.mail")
        for body in filter(_is_body, ast.walk(tree)):
            for call in _calls_from(body, functions, seen=set()):
                if (UNFIT_IN_A_BODY | mail) & set(call.split(".")):
                    yield f"{name}: a transaction body calls {call}()"


def the_wall_clock_is_asked_at_the_edges_alone(sources: Sources) -> Iterator[str]:
    """Below, `now` is a parameter. The engine asks it, once for each transaction."""
    for name, text in sources.items():
        if name == "waitlist.store.engine" or STOREY.get(_home(name) or "", ROOF) >= EDGES:
            continue
        for call in _calls(ast.parse(text)):
            if ".".join(call.split(".")[-2:]) in WALL_CLOCKS:
                yield f"{name}: calls {call}()"


LAWS: list[Callable[[Sources], Iterator[str]]] = [
    arrows_point_down,
    policy_knows_only_the_model,
    the_database_is_known_to_the_store_alone,
    the_web_is_known_to_the_edges_and_the_roof_alone,
    the_network_is_known_to_mail_alone,
    use_cases_alone_open_transactions,
    store_functions_live_in_an_open_transaction,
    bodies_touch_nothing_but_their_transaction,
    the_wall_clock_is_asked_at_the_edges_alone,
]

# law, module, source that breaks it, what the fault names
BROKEN = [
    (arrows_point_down, "waitlist.model", "from waitlist import signup", "waitlist.signup"),
    (arrows_point_down, "waitlist.model", "from waitlist import create_app", "imports waitlist"),
    (arrows_point_down, "waitlist.signup", "def f():\n    import waitlist.web.views", "waitlist.web.views"),
    (arrows_point_down, "waitlist.services", "from waitlist.outbox import drain", "waitlist.outbox"),
    (arrows_point_down, "waitlist.store.deliveries", "from waitlist.policy import is_retryable", "waitlist.policy"),
    (arrows_point_down, "waitlist.mail.smtp", "import waitlist.store.engine", "waitlist.store"),
    (arrows_point_down, "waitlist.policy", "from waitlist.mail.base import Mail", "waitlist.mail"),
    (arrows_point_down, "waitlist.store.deliveries", "from ..signup import submit", "waitlist.signup"),
    (arrows_point_down, "waitlist.attic", "", "has no storey"),
    (policy_knows_only_the_model, "waitlist.policy", "from waitlist.settings import Settings", "waitlist.settings"),
    (policy_knows_only_the_model, "waitlist.policy", "import sqlalchemy as sa", "sqlalchemy"),
    (the_database_is_known_to_the_store_alone, "waitlist.ledger", "from sqlalchemy import text", "sqlalchemy"),
    (the_database_is_known_to_the_store_alone, "waitlist.cli", "def f():\n    import sqlite3", "sqlite3"),
    (the_web_is_known_to_the_edges_and_the_roof_alone, "waitlist.outbox", "import click", "click"),
    (the_web_is_known_to_the_edges_and_the_roof_alone, "waitlist.mail.compose", "from flask import url_for", "flask"),
    (the_network_is_known_to_mail_alone, "waitlist.outbox", "from smtplib import SMTP", "smtplib"),
    (the_network_is_known_to_mail_alone, "waitlist.web.views", "import urllib.request", "urllib.request"),
    (use_cases_alone_open_transactions, "waitlist.web.views", "run_transaction(store, f)", "run_transaction"),
    (use_cases_alone_open_transactions, "waitlist.store.outbox", "engine.run_query(store, f)", "engine.run_query"),
    (store_functions_live_in_an_open_transaction, "waitlist.store.outbox", "def mark(connection): ...", "mark()"),
    (
        store_functions_live_in_an_open_transaction,
        "waitlist.store.outbox",
        "def mark(tx):\n    tx.connection.commit()",
        "commit()",
    ),
    (
        store_functions_live_in_an_open_transaction,
        "waitlist.store.outbox",
        "def mark(tx):\n    with tx.connection.begin_nested(): ...",
        "begin_nested()",
    ),
    (bodies_touch_nothing_but_their_transaction, "waitlist.signup", "def _f(tx):\n    time.sleep(1)", "time.sleep"),
    (bodies_touch_nothing_but_their_transaction, "waitlist.signup", "def _f(tx):\n    log.info('x')", "log.info"),
    (
        bodies_touch_nothing_but_their_transaction,
        "waitlist.signup",
        "def _f(tx, services):\n    services.composer.confirmation()",
        "services.composer",
    ),
    (
        bodies_touch_nothing_but_their_transaction,
        "waitlist.signup",
        "from waitlist.mail.base import Mail as M\ndef _f(tx):\n    M('x')",
        "M()",
    ),
    (
        bodies_touch_nothing_but_their_transaction,
        "waitlist.signup",
        "def _f(tx):\n    _g()\ndef _g():\n    _h()\ndef _h():\n    sleep(1)",
        "sleep",
    ),
    (
        bodies_touch_nothing_but_their_transaction,
        "waitlist.signup",
        "run_transaction(store, lambda tx: print(tx.now))",
        "print",
    ),
    (the_wall_clock_is_asked_at_the_edges_alone, "waitlist.policy", "time.time()", "time.time"),
    (the_wall_clock_is_asked_at_the_edges_alone, "waitlist.mail.compose", "datetime.datetime.now(UTC)", "datetime.now"),
]

ALLOWED = [
    (
        arrows_point_down,
        "waitlist.signup",
        "from waitlist import confirmation\nfrom waitlist.policy import is_retryable",
    ),
    (arrows_point_down, "waitlist", "from waitlist.web import views"),
    (arrows_point_down, "waitlist.store.outbox", "from waitlist.store.engine import Transaction"),
    (policy_knows_only_the_model, "waitlist.policy", "import math\nfrom waitlist.model import Decision"),
    (the_network_is_known_to_mail_alone, "waitlist.mail.smtp", "import smtplib"),
    (use_cases_alone_open_transactions, "waitlist.ledger", "run_query(store, f)"),
    (store_functions_live_in_an_open_transaction, "waitlist.store.outbox", "def mark(tx): ...\ndef _row(row): ..."),
    (bodies_touch_nothing_but_their_transaction, "waitlist.outbox", "def drain(services):\n    sender.send(mail)"),
    (bodies_touch_nothing_but_their_transaction, "waitlist.outbox", "def _f(tx):\n    mark(tx, sent_at=tx.now)"),
    (the_wall_clock_is_asked_at_the_edges_alone, "waitlist.cli", "time.time()"),
]


@pytest.mark.parametrize(("law", "module", "source", "named"), BROKEN)
def test_law_finds_what_breaks_it(
    law: Callable[[Sources], Iterator[str]], module: str, source: str, named: str
) -> None:
    faults = list(law({module: source}))

    assert len(faults) == 1
    assert module in faults[0]
    assert named in faults[0]


@pytest.mark.parametrize(("law", "module", "source"), ALLOWED)
def test_law_allows_what_is_meant(law: Callable[[Sources], Iterator[str]], module: str, source: str) -> None:
    assert list(law({module: source})) == []


@pytest.mark.parametrize("law", LAWS)
def test_house_keeps_its_law(law: Callable[[Sources], Iterator[str]]) -> None:
    sources = read_sources()

    assert "waitlist.store.engine" in sources
    assert list(law(sources)) == []


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _home(name: str) -> str | None:
    """The entry of STOREY that `name` belongs to: itself or the nearest package, but never the roof for a stranger."""
    while name not in STOREY and "." in name:
        name = name.rpartition(".")[0]
        if name == "waitlist":
            return None
    return name if name in STOREY else None


def _imports(name: str, text: str, sources: Sources) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = name.split(".")[: -node.level]
                module = ".".join([*package, *filter(None, [module])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in STOREY or inner in sources else module


def _strangers(sources: Sources, packages: set[str], may: Callable[[str], bool]) -> Iterator[str]:
    for name, text in sources.items():
        if may(name):
            continue
        for target in _imports(name, text, sources):
            if any(_is_in(target, package) for package in packages):
                yield f"{name}: imports {target}"


def _calls(tree: ast.AST) -> Iterator[str]:
    """The dotted name of everything called; what is called through something unnamed keeps its last names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _dotted(node.func)):
            yield name


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}".lstrip(".")
    return ""


def _is_body(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return False
    arguments = [*node.args.posonlyargs, *node.args.args]
    return bool(arguments) and arguments[0].arg == "tx"


def _calls_from(body: ast.AST, functions: Mapping[str, ast.FunctionDef], seen: set[str]) -> Iterator[str]:
    for call in _calls(body):
        yield call
        # One that takes `tx` is a body, looked at on its own.
        if call in functions and call not in seen and not _is_body(functions[call]):
            seen.add(call)
            yield from _calls_from(functions[call], functions, seen)


def _names_from(tree: ast.AST, package: str) -> set[str]:
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and _is_in(node.module or "", package)
        for alias in node.names
    }
