"""Every setting: its default, its faults, its secrets. Rows of inputs.csv are named by their id."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from dotenv import dotenv_values

from tests.processes import run_at_once
from waitlist import create_app
from waitlist import settings as module
from waitlist.errors import SettingsError
from waitlist.settings import PREFIX, ROOT, SECRET_FIELDS, Settings, load_settings

DEFAULTS = {
    "WAITLIST_BASE_URL": "http://127.0.0.1:8000",
    "WAITLIST_BIND": "127.0.0.1:8000",
    "WAITLIST_WEB_WORKERS": "1",
    "WAITLIST_WEB_THREADS": "16",
    "WAITLIST_DATABASE_URL": "sqlite:///instance/waitlist.sqlite3",
    "WAITLIST_SECRET_KEY": "",
    "WAITLIST_SECRET_KEY_FALLBACKS": "",
    "WAITLIST_DATA_KEY": "",
    "WAITLIST_MAIL_URL": "file:instance/mail",
    "WAITLIST_MAIL_FROM": "Waitlist <waitlist@example.com>",
    "WAITLIST_CONTACT": "",
    "WAITLIST_PRIVACY_URL": "",
    "WAITLIST_COOLDOWN_SECONDS": "600",
    "WAITLIST_TOKEN_TTL_SECONDS": "86400",
    "WAITLIST_MAILS_PER_ADDRESS_PER_DAY": "3",
    "WAITLIST_MAILS_PER_ADDRESS_PER_30_DAYS": "5",
    "WAITLIST_LEASE_SECONDS": "60",
    "WAITLIST_KEY_RETENTION_SECONDS": "259200",
    "WAITLIST_RETENTION_DAYS": "90",
    "WAITLIST_PENDING_DAYS": "30",
    "WAITLIST_RATE_LIMIT": "20/minute;200/day",
    "WAITLIST_RATE_LIMIT_STORAGE": "memory://",
    "WAITLIST_API_RATE_LIMIT": "600/minute",
    "WAITLIST_MAIL_BUDGET_PER_HOUR": "1000",
    "WAITLIST_MIN_FORM_SECONDS": "2",
    "WAITLIST_TRUSTED_PROXIES": "0",
    "WAITLIST_RESEND_WEBHOOK_SECRET": "",
    "WAITLIST_METRICS_TOKEN": "",
}
# Base64, as a webhook secret has to be.
SECRET = "hunter2+hunter2+hunter2+hunter2+"
HTTPS = {"WAITLIST_BASE_URL": "https://waitlist.example.com", "WAITLIST_MAIL_URL": "smtps://mail.example.com"}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose database and keys lie in a folder of the test's own."""
    return {"WAITLIST_DATABASE_URL": f"sqlite:///{tmp_path}/instance/waitlist.sqlite3"}


def load(environ: dict[str, str], **more: str) -> Settings:
    return load_settings(environ | more, dotenv=None)


def faults_of(environ: dict[str, str], **more: str) -> list[str]:
    with pytest.raises(SettingsError) as error:
        load(environ, **more)
    first, *faults = str(error.value).splitlines()
    assert first == "These settings cannot be used:"
    return [fault.strip() for fault in faults]


def shown(value: Any) -> str:
    return "" if value is None else str(getattr(value, "get_secret_value", lambda: value)())


def test_every_setting_of_the_contract_has_its_default() -> None:
    settings = Settings()

    assert {PREFIX + name.upper(): shown(value) for name, value in settings} == DEFAULTS


def test_example_file_shows_every_setting_with_its_default(tmp_path: Path) -> None:
    lines = re.findall(r"^#(WAITLIST_\w+=.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    (tmp_path / "all.env").write_text("\n".join(lines))

    assert dotenv_values(tmp_path / "all.env") == DEFAULTS
    assert len(lines) == len(DEFAULTS)


def test_nothing_set_is_the_default(home: dict[str, str]) -> None:
    settings = load(home)

    assert settings.cooldown_seconds == 600
    assert settings.is_production is False


def test_empty_variable_counts_as_unset(home: dict[str, str]) -> None:
    settings = load(home, WAITLIST_COOLDOWN_SECONDS="", WAITLIST_CONTACT="", WAITLIST_METRICS_TOKEN="")

    assert (settings.cooldown_seconds, settings.contact, settings.metrics_token) == (600, None, None)


def test_environment_goes_before_the_file(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASK_SKIP_DOTENV")
    dotenv = tmp_path / ".env"
    dotenv.write_text("WAITLIST_COOLDOWN_SECONDS=700\nWAITLIST_PENDING_DAYS=40\n")

    settings = load_settings(home | {"WAITLIST_COOLDOWN_SECONDS": "800"}, dotenv=dotenv)

    assert (settings.cooldown_seconds, settings.pending_days) == (800, 40)


def test_tests_are_kept_away_from_the_developers_file(home: dict[str, str], tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("WAITLIST_COOLDOWN_SECONDS=700\n")

    assert load_settings(home, dotenv=dotenv).cooldown_seconds == 600
    assert not [name for name in os.environ if name.startswith(PREFIX)]


def test_all_faults_come_in_one_message(home: dict[str, str]) -> None:
    faults = faults_of(
        home,
        WAITLIST_COOLDOWN_SECONDS="-1",
        WAITLIST_MAIL_FROM="nobody",
        WAITLIST_RATE_LIMIT="often",
        WAITLIST_SECRET_KEY="short",
        WAITLIST_MAIL_URL="resend://re_1?endpoint=nowhere",
        WAITLIST_RESEND_WEBHOOK_SECRET="whsec_",
        WAITLIST_METRICS_TOKEN="given",
        WAITLIST_METRICS_TOKEN_FILE="/given/too",
    )

    named = {fault.split()[0] for fault in faults}
    assert named >= {
        "WAITLIST_COOLDOWN_SECONDS",
        "WAITLIST_MAIL_FROM",
        "WAITLIST_RATE_LIMIT",
        "WAITLIST_SECRET_KEY",
        "WAITLIST_MAIL_URL",
        "WAITLIST_RESEND_WEBHOOK_SECRET",
        "WAITLIST_METRICS_TOKEN",
    }


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WAITLIST_MAIL_URL", "resend://re_1?endpoint=nowhere"),
        ("WAITLIST_MAIL_URL", "smtp://me:p%C3%A4ss@mail.example.com"),
        ("WAITLIST_RESEND_WEBHOOK_SECRET", "whsec_x"),
    ],
)
def test_mail_setting_that_no_worker_could_use_ends_every_process_at_start(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    for name, setting in (home | {"FLASK_SKIP_DOTENV": "1", variable: value}).items():
        monkeypatch.setenv(name, setting)

    with pytest.raises(SystemExit) as ended:
        create_app()

    assert ended.value.code == 2
    assert variable in capsys.readouterr().err


FAULTS = [
    # id of the corpus, variable, value, word of the message
    ("B265", "WAITLIST_BASE_URL", "http://192.168.1.5:8000", "https"),
    ("B265", "WAITLIST_BASE_URL", "http://127.0.0.1.example.com", "https"),
    ("B266", "WAITLIST_BASE_URL", "http://waitlist.example.com", "https"),
    ("B266", "WAITLIST_BASE_URL", "waitlist.example.com", "origin"),
    ("B267", "WAITLIST_BASE_URL", "https://x.example/path", "path"),
    ("B267", "WAITLIST_BASE_URL", "https://x.example?y", "query"),
    ("B267", "WAITLIST_BASE_URL", "https://x.example/path?y#z", "path"),
    ("B267", "WAITLIST_BASE_URL", "https://x.example#z", "fragment"),
    ("B267", "WAITLIST_BASE_URL", "https://x.example\r\nBcc: a@b.example", "one line"),
    ("B267", "WAITLIST_BASE_URL", "https://user:pass@x.example", "user name"),
    ("B267", "WAITLIST_BASE_URL", "https://x.example:99999", "port"),
    ("B267", "WAITLIST_BASE_URL", "https://x example", "origin"),
    ("B267", "WAITLIST_BASE_URL", 'https://x"><b>.example', "origin"),
    ("B270", "WAITLIST_DATABASE_URL", f"mysql://root:{SECRET}@host/db", "postgresql://"),
    ("B270", "WAITLIST_DATABASE_URL", f"postgresql://root:{SECRET}@host", "postgresql://"),
    ("B270", "WAITLIST_DATABASE_URL", f"postgresql://root:{SECRET}@host:port/db", "port"),
    ("B270", "WAITLIST_DATABASE_URL", "sqlite:///:memory:", "path/to/file"),
    ("B270", "WAITLIST_DATABASE_URL", "sqlite://", "path/to/file"),
    ("B271", "WAITLIST_MAIL_URL", "smtp://host:abc", "port"),
    ("B271", "WAITLIST_MAIL_URL", "smtp://host:0", "port"),
    ("B271", "WAITLIST_MAIL_URL", f"smtp://user:{SECRET}@host:70000", "port"),
    ("B271", "WAITLIST_MAIL_URL", "smtp://", "host"),
    ("B271", "WAITLIST_MAIL_URL", "sendmail:/usr/sbin/sendmail", "smtp://"),
    ("B271", "WAITLIST_MAIL_URL", "resend://", "API key"),
    ("B271", "WAITLIST_MAIL_URL", "file:", "folder"),
    ("B271", "WAITLIST_MAIL_URL", f"smtp://me:{SECRET}%C3%A4@mail.example.com", "ASCII"),
    ("B271", "WAITLIST_MAIL_URL", "smtp://j%C3%BCrgen@mail.example.com", "ASCII"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}%20", "API key"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}%C3%A4", "API key"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}?endpoint=http://api.resend.com", "endpoint"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}?endpoint=http://192.0.2.1", "endpoint"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}?endpoint=ftp://127.0.0.1", "endpoint"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}?endpoint=nowhere", "endpoint"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}?endpoint=https://user@api.resend.com", "endpoint"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}?endpoint=https://api.resend.com:99999", "port"),
    ("B271", "WAITLIST_MAIL_URL", f"resend://{SECRET}?endpoint=https://api.resend.com/%0D%0A", "endpoint"),
    ("B273", "WAITLIST_MAIL_FROM", "A\r\nBcc: x@y", "one line"),
    ("B273", "WAITLIST_MAIL_FROM", "A <a>", "one address"),
    ("B273", "WAITLIST_MAIL_FROM", "a@b.co, c@d.co", "one address"),
    ("B273", "WAITLIST_MAIL_FROM", "A, B <a@b.co>", "one address"),
    ("B273", "WAITLIST_MAIL_FROM", "Ünï <a@b.co>", "ASCII"),
    ("B274", "WAITLIST_MAIL_FROM", "=?UTF-8?Q?=0ABcc:_x@y.zz?= <a@b.co>", "encoded word"),
    ("B275", "WAITLIST_COOLDOWN_SECONDS", "-1", "greater than 0"),
    ("B275", "WAITLIST_COOLDOWN_SECONDS", "0", "greater than 0"),
    ("B275", "WAITLIST_COOLDOWN_SECONDS", "1e9", "integer"),
    ("B275", "WAITLIST_COOLDOWN_SECONDS", "1000000000", "less than or equal"),
    ("B275", "WAITLIST_COOLDOWN_SECONDS", "600s", "integer"),
    ("B277", "WAITLIST_TRUSTED_PROXIES", "-1", "greater than or equal to 0"),
    ("B277", "WAITLIST_TRUSTED_PROXIES", "*", "integer"),
    ("B277", "WAITLIST_TRUSTED_PROXIES", "1000", "less than or equal"),
    ("", "WAITLIST_BIND", "8000", "host:port"),
    ("", "WAITLIST_BIND", "127.0.0.1", "host:port"),
    ("", "WAITLIST_TOKEN_TTL_SECONDS", "1199", "twice"),
    ("", "WAITLIST_KEY_RETENTION_SECONDS", "86399", "86400"),
    ("", "WAITLIST_RETENTION_DAYS", "30", "31"),
    ("", "WAITLIST_PENDING_DAYS", "29", "30"),
    ("", "WAITLIST_MAILS_PER_ADDRESS_PER_30_DAYS", "2", "at least"),
    ("", "WAITLIST_LEASE_SECONDS", "0", "greater than or equal"),
    ("", "WAITLIST_RATE_LIMIT", "20 per fortnight", "20/minute"),
    ("", "WAITLIST_RATE_LIMIT_STORAGE", "memcached://host", "redis://"),
    ("", "WAITLIST_PRIVACY_URL", "javascript:alert(1)", "https://"),
    ("", "WAITLIST_PRIVACY_URL", "https://x.example/\r\nBcc: a@b.example", "one line"),
    ("", "WAITLIST_CONTACT", "a@b.example\nBcc: c@d.example", "one line"),
    ("", "WAITLIST_SECRET_KEY", "hunter2", "32"),
    ("", "WAITLIST_DATA_KEY", "hunter2", "32"),
    ("", "WAITLIST_SECRET_KEY_FALLBACKS", f"{'o' * 32}, hunter2", "32"),
    ("", "WAITLIST_RESEND_WEBHOOK_SECRET", "whsec_", "base64"),
    ("", "WAITLIST_RESEND_WEBHOOK_SECRET", "hunter2hunter2-", "base64"),
    ("", "WAITLIST_RESEND_WEBHOOK_SECRET", f"whsec_{SECRET}é", "base64"),
    ("", "WAITLIST_RESEND_WEBHOOK_SECRET", f"{SECRET}, whsec_x", "base64"),
]


@pytest.mark.parametrize(("variable", "value", "word"), [row[1:] for row in FAULTS])
def test_fault_is_one_line_that_names_the_variable_and_no_secret(
    home: dict[str, str], variable: str, value: str, word: str
) -> None:
    faults = faults_of(home, **{variable: value})

    assert len(faults) == 1
    assert faults[0].startswith(variable + " ")
    assert word in faults[0]
    assert "hunter2" not in faults[0]


@pytest.mark.parametrize("url", ["http://localhost:5000", "http://127.0.0.1", "http://[::1]:8000", "http://127.0.0.2/"])
def test_loopback_needs_no_https(home: dict[str, str], url: str) -> None:
    settings = load(home, WAITLIST_BASE_URL=url)

    assert settings.is_production is False
    assert settings.base_url == url.rstrip("/")


def test_any_other_host_is_production(home: dict[str, str]) -> None:
    assert load(home, **HTTPS).is_production is True


@pytest.mark.parametrize("mail_url", ["file:instance/mail", "console:"])
def test_production_refuses_mail_that_reaches_nobody(home: dict[str, str], mail_url: str) -> None:
    faults = faults_of(home, **HTTPS | {"WAITLIST_MAIL_URL": mail_url})

    assert len(faults) == 1
    assert "reaches nobody" in faults[0]


def test_production_refuses_debug_mode(home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """B278."""
    monkeypatch.setenv("FLASK_DEBUG", "1")

    with pytest.raises(SettingsError, match="FLASK_DEBUG"):
        create_app(load(home, **HTTPS))


def test_memory_counts_in_one_process_only(home: dict[str, str]) -> None:
    """B282."""
    assert "redis://" in faults_of(home, WAITLIST_WEB_WORKERS="2")[0]
    assert load(home, WAITLIST_WEB_WORKERS="2", WAITLIST_RATE_LIMIT_STORAGE="redis://host").web_workers == 2


@pytest.mark.parametrize(
    ("package", "variable", "value"),
    [
        ("redis", "WAITLIST_RATE_LIMIT_STORAGE", "redis://host"),
        ("psycopg", "WAITLIST_DATABASE_URL", "postgresql://user:pw@host/db"),
    ],
)
def test_package_that_is_not_installed_is_a_fault_in_words(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, package: str, variable: str, value: str
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else name)

    fault = faults_of(home, **{variable: value})[0]

    assert fault.startswith(f"{variable} needs the package {package}: start with ./run")


def test_both_keys_must_be_set_on_postgresql(home: dict[str, str]) -> None:
    home["WAITLIST_DATABASE_URL"] = "postgresql://user:pw@host/db"

    faults = faults_of(home)

    assert [fault.split()[0] for fault in faults] == ["WAITLIST_SECRET_KEY", "WAITLIST_DATA_KEY"]


@pytest.mark.parametrize("field", SECRET_FIELDS)
def test_secret_comes_from_a_file_less_one_line_end(field: str, tmp_path: Path) -> None:
    """B283."""
    values = {
        "database_url": f"sqlite:///{tmp_path}/{SECRET}.sqlite3",
        "mail_url": f"resend://{SECRET}",
        "rate_limit_storage": f"redis://:{SECRET}@host",
    }
    value = values.get(field, SECRET)
    file = tmp_path / "secret"
    environ = {"WAITLIST_DATABASE_URL": f"sqlite:///{tmp_path}/w.sqlite3"} if field != "database_url" else {}

    for line_end in ("", "\n", "\r\n"):
        file.write_bytes((value + line_end).encode())
        settings = load(environ, **{f"{PREFIX}{field.upper()}_FILE": str(file)})
        assert shown(getattr(settings, field)) == value

    file.write_text(value + "\n\n")
    try:
        settings = load(environ, **{f"{PREFIX}{field.upper()}_FILE": str(file)})
    except SettingsError:
        return
    assert shown(getattr(settings, field)) == value + "\n"


def test_settings_that_hold_secrets_are_those() -> None:
    assert set(SECRET_FIELDS) == {
        "database_url",
        "secret_key",
        "secret_key_fallbacks",
        "data_key",
        "mail_url",
        "rate_limit_storage",
        "resend_webhook_secret",
        "metrics_token",
    }


def test_value_and_file_at_once_is_a_fault(home: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(SECRET)

    faults = faults_of(home, WAITLIST_METRICS_TOKEN=SECRET, WAITLIST_METRICS_TOKEN_FILE=str(file))

    assert faults == ["WAITLIST_METRICS_TOKEN and WAITLIST_METRICS_TOKEN_FILE are both set; keep one"]


def test_unreadable_secret_file_is_a_fault(home: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")

    missing = faults_of(home, WAITLIST_METRICS_TOKEN_FILE="/does/not/exist")
    binary = faults_of(home, WAITLIST_METRICS_TOKEN_FILE=str(tmp_path / "binary"))

    assert missing == ["WAITLIST_METRICS_TOKEN_FILE cannot be read: FileNotFoundError"]
    assert binary == ["WAITLIST_METRICS_TOKEN_FILE cannot be read: UnicodeDecodeError"]


def test_no_secret_is_ever_printed(tmp_path: Path) -> None:
    settings = Settings(
        database_url=f"postgresql://user:{SECRET}@host/db",
        secret_key=SECRET,
        secret_key_fallbacks=SECRET,
        data_key=SECRET,
        mail_url=f"smtp://user:{SECRET}@host:587",
        rate_limit_storage=f"redis://:{SECRET}@host",
        resend_webhook_secret=SECRET,
        metrics_token=SECRET,
    )

    for text in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert SECRET not in text


def test_fallbacks_are_accepted_after_the_key(home: dict[str, str]) -> None:
    new, old, older = "n" * 32, "o" * 32, "p" * 32

    settings = load(home, WAITLIST_SECRET_KEY=new, WAITLIST_SECRET_KEY_FALLBACKS=f"{old}, {older},")

    assert settings.secret_keys == [new, old, older]


def test_keys_are_made_once_and_private(home: dict[str, str], tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        first = load(home)
    finally:
        os.umask(umask)

    assert load(home).secret_keys == first.secret_keys
    assert load(home).data_key_text == first.data_key_text
    assert first.data_key_text not in first.secret_keys
    folder = tmp_path / "instance"
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "secret_key": 0o600,
        "data_key": 0o600,
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def _load_keys(wait: Any, number: int, environ: dict[str, str]) -> tuple[str, str]:
    wait()
    settings = load_settings(environ, dotenv=None)
    return settings.secret_keys[0], settings.data_key_text


def test_eight_processes_that_start_at_once_share_one_pair_of_keys(home: dict[str, str], tmp_path: Path) -> None:
    pairs = run_at_once(8, _load_keys, home)

    assert len(set(pairs)) == 1
    assert sorted(path.name for path in (tmp_path / "instance").iterdir()) == ["data_key", "secret_key"]


def test_damaged_key_file_is_never_replaced(home: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "instance").mkdir()
    (tmp_path / "instance" / "data_key").write_text("cut\n")

    with pytest.raises(SettingsError, match="data_key is damaged"):
        load(home)

    assert (tmp_path / "instance" / "data_key").read_text() == "cut\n"


def test_folder_that_cannot_hold_keys_is_a_settings_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(SettingsError, match="cannot be read or made"):
        load({"WAITLIST_DATABASE_URL": f"sqlite:///{tmp_path}/file/waitlist.sqlite3"})


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///instance/waitlist.sqlite3", ROOT / "instance/waitlist.sqlite3"),
        ("sqlite:////var/lib/waitlist.sqlite3", Path("/var/lib/waitlist.sqlite3")),
        ("sqlite:////with%20space/w.sqlite3", Path("/with space/w.sqlite3")),
    ],
)
def test_relative_database_path_counts_from_the_project(url: str, path: Path) -> None:
    assert Settings(database_url=url).database_path == path


def test_settings_do_not_change_after_the_start() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().cooldown_seconds = 1  # type: ignore[misc]  # that is the point


def test_unknown_setting_is_refused_in_code() -> None:
    with pytest.raises(ValueError, match="cooldwon_seconds"):
        Settings(cooldwon_seconds=1)  # type: ignore[call-arg]  # that is the point
