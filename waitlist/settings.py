"""Every setting once, typed, checked together: all faults come in one message. Knows the environment, nothing else.

A secret can come from a file: the same name with `_FILE`. Secrets are never printed (`SecretStr`).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parseaddr
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from dotenv import dotenv_values
from limits import parse_many
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from waitlist.addresses import canonical_address
from waitlist.errors import InvalidAddress, SettingsError
from waitlist.files import new_text_file
from waitlist.model import DAY_SECONDS, ENCODED_WORD

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "WAITLIST_"
# Of hexadecimal digits, 128 bits.
LEAST_KEY_CHARACTERS = 32
# A year: a longer time is a slip of the keyboard.
LONGEST_SECONDS = 366 * DAY_SECONDS
# As in a link: a name in ASCII (an international one as its A-label) or an IP address.
_HOST = re.compile(r"[a-z0-9.-]+|[0-9a-f:.]+")
# As Svix makes them: base64, and in front of it a word that may be left out.
_WEBHOOK_SECRET = re.compile(r"(whsec_)?([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}(==)?|[A-Za-z0-9+/]{3}=?|[A-Za-z0-9+/]{4})")


def is_loopback(host: str | None) -> bool:
    if host is None:
        return False
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _one_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("must be one line without control characters")
    return value


def _web_address(value: str | None) -> str | None:
    if value is not None and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname):
        raise ValueError("must be a web address beginning with https:// or http://")
    return value


def _rate(value: str) -> str:
    try:
        parse_many(value)
    except ValueError as error:
        raise ValueError("must be limits like 20/minute;200/day") from error
    return value


Line = Annotated[str, AfterValidator(_one_line)]
Rate = Annotated[str, AfterValidator(_rate)]
Seconds = Annotated[int, Field(gt=0, le=LONGEST_SECONDS)]


class Settings(BaseModel):
    """Every setting with its default. Build with `load_settings()`; a fault there is a SettingsError naming every fault."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    # The order matters: a validator sees the fields above its own.
    base_url: Line = "http://127.0.0.1:8000"
    bind: Line = "127.0.0.1:8000"
    web_workers: int = Field(default=1, ge=1, le=64)
    web_threads: int = Field(default=16, ge=1, le=256)
    database_url: SecretStr = SecretStr("sqlite:///instance/waitlist.sqlite3")
    secret_key: SecretStr | None = None
    secret_key_fallbacks: SecretStr | None = None
    data_key: SecretStr | None = None
    mail_url: SecretStr = SecretStr("file:instance/mail")
    mail_from: Line = "Waitlist <waitlist@example.com>"
    contact: Line | None = None
    privacy_url: Annotated[Line | None, AfterValidator(_web_address)] = None
    cooldown_seconds: Seconds = 600
    token_ttl_seconds: Seconds = DAY_SECONDS
    mails_per_address_per_day: int = Field(default=3, ge=1, le=1000)
    mails_per_address_per_30_days: int = Field(default=5, ge=1, le=10_000)
    # Half of it is the deadline of one send attempt, so a shorter lease could not hold one slow server.
    lease_seconds: int = Field(default=60, ge=2, le=3600)
    key_retention_seconds: int = Field(default=3 * DAY_SECONDS, ge=DAY_SECONDS, le=LONGEST_SECONDS)
    retention_days: int = Field(default=90, ge=31, le=36_500)
    pending_days: int = Field(default=30, ge=30, le=36_500)
    rate_limit: Rate = "20/minute;200/day"
    rate_limit_storage: SecretStr = SecretStr("memory://")
    api_rate_limit: Rate = "600/minute"
    mail_budget_per_hour: int = Field(default=1000, ge=1)
    min_form_seconds: int = Field(default=2, ge=0, le=60)
    trusted_proxies: int = Field(default=0, ge=0, le=10)
    resend_webhook_secret: SecretStr | None = None
    metrics_token: SecretStr | None = None

    @field_validator("base_url")
    @classmethod
    def _is_an_origin(cls, value: str) -> str:
        parts = _split(value)
        if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.hostname or ""):
            raise ValueError("must be an origin like https://waitlist.example.com")
        if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError("must be an origin only: no path, query, fragment or user name")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError("must begin with https:// unless the host is this machine (127.0.0.1)")
        return f"{parts.scheme}://{parts.netloc}"

    @field_validator("bind")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        parts = _split(f"//{value}")
        if not parts.hostname or not parts.port:
            raise ValueError("must be host:port, like 127.0.0.1:8000")
        return value

    @field_validator("database_url")
    @classmethod
    def _is_a_database(cls, value: SecretStr) -> SecretStr:
        parts = _split(value.get_secret_value())
        if parts.scheme == "sqlite" and parts.netloc == "" and len(parts.path) > 1 and ":memory:" not in parts.path:
            return value
        if parts.scheme == "postgresql" and len(parts.path) > 1:
            _need_package("psycopg")
            return value
        raise ValueError("must be sqlite:///path/to/file or postgresql://user:password@host/database")

    @field_validator("secret_key", "data_key")
    @classmethod
    def _is_a_key(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        url = info.data.get("database_url")
        if value is None and url is not None and url.get_secret_value().startswith("postgresql"):
            raise ValueError("must be set when the database is PostgreSQL: several machines share it")
        if value is not None and len(value.get_secret_value()) < LEAST_KEY_CHARACTERS:
            raise ValueError(f"must hold at least {LEAST_KEY_CHARACTERS} characters; `openssl rand -hex 32` makes one")
        return value

    @field_validator("secret_key_fallbacks")
    @classmethod
    def _are_keys(cls, value: SecretStr | None) -> SecretStr | None:
        if any(len(key) < LEAST_KEY_CHARACTERS for key in _listed(value)):
            raise ValueError(f"must be keys of at least {LEAST_KEY_CHARACTERS} characters with commas between")
        return value

    @field_validator("mail_url")
    @classmethod
    def _is_a_mail_url(cls, value: SecretStr, info: ValidationInfo) -> SecretStr:
        text = value.get_secret_value()
        parts = _split(text)
        base_url = info.data.get("base_url")
        if parts.scheme not in _CHECK_MAIL_URL or not text.isprintable():
            raise ValueError("must be file:DIR, console:, smtp://user:pw@host:587, smtps://… or resend://API_KEY")
        _CHECK_MAIL_URL[parts.scheme](parts)
        if parts.scheme in ("file", "console") and base_url and not is_loopback(urlsplit(base_url).hostname):
            raise ValueError(f"{parts.scheme}: reaches nobody; set an smtp:// or resend:// provider for {base_url}")
        return value

    @field_validator("mail_from")
    @classmethod
    def _is_one_mailbox(cls, value: str) -> str:
        name, address = parseaddr(value)
        if ENCODED_WORD in value or not address or "," in name:
            raise ValueError("must be one address, like Waitlist <waitlist@example.com>, without an encoded word")
        try:
            canonical_address(address)
        except InvalidAddress as error:
            raise ValueError(f"must be one address: {error}") from error
        if not value.isascii() or value.strip() not in (address, f"{name} <{address}>", f'"{name}" <{address}>'):
            raise ValueError("must be one address in plain ASCII, like Waitlist <waitlist@example.com>")
        return value.strip()

    @field_validator("token_ttl_seconds")
    @classmethod
    def _outlives_two_cooldowns(cls, value: int, info: ValidationInfo) -> int:
        cooldown = info.data.get("cooldown_seconds")
        if cooldown is not None and value < 2 * cooldown:
            raise ValueError(f"must be at least twice {PREFIX}COOLDOWN_SECONDS ({2 * cooldown})")
        return value

    @field_validator("mails_per_address_per_30_days")
    @classmethod
    def _holds_a_day(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("mails_per_address_per_day", value):
            raise ValueError(f"must be at least {PREFIX}MAILS_PER_ADDRESS_PER_DAY")
        return value

    @field_validator("retention_days")
    @classmethod
    def _outlives_the_keys(cls, value: int, info: ValidationInfo) -> int:
        if value * DAY_SECONDS <= info.data.get("key_retention_seconds", 0):
            raise ValueError(f"must be longer than {PREFIX}KEY_RETENTION_SECONDS")
        return value

    @field_validator("rate_limit_storage")
    @classmethod
    def _counts_over_all_processes(cls, value: SecretStr, info: ValidationInfo) -> SecretStr:
        scheme = _split(value.get_secret_value()).scheme
        if scheme not in ("memory", "redis", "rediss"):
            raise ValueError("must be memory:// or redis://host:port")
        if scheme == "memory" and info.data.get("web_workers", 1) > 1:
            raise ValueError(f"memory:// counts in one process; {PREFIX}WEB_WORKERS above 1 needs redis://host:port")
        if scheme != "memory":
            _need_package("redis")
        return value

    @field_validator("resend_webhook_secret")
    @classmethod
    def _can_sign(cls, value: SecretStr | None) -> SecretStr | None:
        if not all(_WEBHOOK_SECRET.fullmatch(secret) for secret in _listed(value)):
            raise ValueError("must be base64 like whsec_MfKQ9r8G, or several of them with commas between")
        return value

    @property
    def is_production(self) -> bool:
        return not is_loopback(urlsplit(self.base_url).hostname)

    @property
    def is_embedded(self) -> bool:
        """The database is SQLite: one machine, which looks after itself."""
        return self.database_url.get_secret_value().startswith("sqlite")

    @property
    def database_path(self) -> Path:
        """Where the embedded database lies; relative paths count from the project's folder."""
        return ROOT / unquote(_split(self.database_url.get_secret_value()).path.removeprefix("/"))

    @property
    def store_url(self) -> str:
        """The database URL with its path made absolute. Holds a password: for the store alone."""
        return f"sqlite:///{self.database_path}" if self.is_embedded else self.database_url.get_secret_value()

    @property
    def mail_address(self) -> str:
        return parseaddr(self.mail_from)[1]

    @property
    def secret_keys(self) -> list[str]:
        """The signing key first, then those that are still accepted."""
        assert self.secret_key is not None, "load_settings() makes it"
        return [self.secret_key.get_secret_value(), *_listed(self.secret_key_fallbacks)]

    @property
    def resend_webhook_secrets(self) -> tuple[str, ...]:
        return _listed(self.resend_webhook_secret)

    @property
    def data_key_text(self) -> str:
        assert self.data_key is not None, "load_settings() makes it"
        return self.data_key.get_secret_value()


SECRET_FIELDS = tuple(name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation))


def load_settings(environ: Mapping[str, str] | None = None, *, dotenv: Path | None = ROOT / ".env") -> Settings:
    """Read environment, `.env` and `_FILE` files; on the embedded database make the keys that are missing.

    Raises SettingsError with every fault, one a line.
    """
    variables: dict[str, str] = {}
    # Flask's own switch, so that one variable keeps every part of the program away from the file.
    if dotenv is not None and dotenv.is_file() and not os.environ.get("FLASK_SKIP_DOTENV"):
        variables |= {name: value for name, value in dotenv_values(dotenv).items() if value is not None}
    variables |= os.environ if environ is None else environ
    values, faults = _read_variables(variables)
    settings = _collect(lambda: Settings.model_validate(values), faults)
    if settings is None or faults:
        raise SettingsError("These settings cannot be used:\n" + "\n".join(f"  {fault}" for fault in faults))
    return _with_keys(settings)


def _read_variables(variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    values: dict[str, str] = {}
    faults: list[str] = []
    for field in Settings.model_fields:
        name = PREFIX + field.upper()
        if variables.get(name):
            values[field] = variables[name]
        if field in SECRET_FIELDS and (file := variables.get(name + "_FILE")):
            if field in values:
                faults.append(f"{name} and {name}_FILE are both set; keep one")
            try:
                values[field] = _trim_newline(Path(file).read_text())
            except (OSError, UnicodeError) as error:
                faults.append(f"{name}_FILE cannot be read: {type(error).__name__}")
    return values, faults


def _trim_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _collect(build: Callable[[], Settings], faults: list[str]) -> Settings | None:
    try:
        return build()
    except ValidationError as error:
        for fault in error.errors(include_input=False, include_url=False):
            name = PREFIX + str(fault["loc"][0]).upper()
            faults.append(f"{name} {fault['msg'].removeprefix('Value error, ')}")
        return None


def _with_keys(settings: Settings) -> Settings:
    if not settings.is_embedded:
        return settings
    folder = settings.database_path.parent
    has_data = settings.database_path.is_file() and settings.database_path.stat().st_size > 0
    if settings.data_key is None and has_data and not (folder / "data_key").exists():
        raise SettingsError(
            f"The key file {folder / 'data_key'} is missing, and the database is not new: with another key, suppressed"
            f" addresses would be forgotten. Restore it from a backup, or set {PREFIX}DATA_KEY"
        )
    made = {
        name: SecretStr(_key_file(folder / name)) for name in ("secret_key", "data_key") if not getattr(settings, name)
    }
    return settings.model_copy(update=made)


def _key_file(path: Path) -> str:
    """Read the key at `path`, making it first if needed; two processes that start at once end with the same key."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError), new_text_file(path) as file:  # another process may be first
                file.write(secrets.token_hex(32) + "\n")
        key = path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"The key file {path} cannot be read or made: {error.strerror}") from error
    except UnicodeError:
        key = ""
    if len(key) < LEAST_KEY_CHARACTERS:
        raise SettingsError(
            f"The key file {path} is damaged: restore it from a backup, or remove it if the list is new"
        )
    return key


def _split(url: str) -> SplitResult:
    """urlsplit with the port checked; its errors would repeat the URL, and with it a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError("is not a well-formed URL (is the port a number from 1 to 65535?)") from error
    return parts


def _need_package(name: str) -> None:
    """`./run` installs what a setting asks for; who types `flask` alone may not have it."""
    if find_spec(name) is None:
        raise ValueError(f"needs the package {name}: start with ./run, or install requirements/extras.txt")


def _listed(value: SecretStr | None) -> tuple[str, ...]:
    listed = value.get_secret_value() if value else ""
    return tuple(filter(None, (secret.strip() for secret in listed.split(","))))


def _check_file(parts: SplitResult) -> None:
    if parts.netloc or not parts.path:
        raise ValueError("file: needs a folder, like file:instance/mail")


def _check_smtp(parts: SplitResult) -> None:
    if not parts.hostname:
        raise ValueError(f"{parts.scheme}:// needs a host, like {parts.scheme}://user:pw@mail.example.com:587")
    if parts.port == 0:
        raise ValueError("the port must be from 1 to 65535")
    if not unquote(parts.netloc.rpartition("@")[0]).isascii():
        raise ValueError("user name and password must be plain ASCII: SMTP cannot carry anything else")


def _check_resend(parts: SplitResult) -> None:
    if not re.fullmatch(r"[!-~]+", unquote(parts.netloc)):
        raise ValueError("resend:// needs the API key, like resend://re_123, in plain ASCII without a space")
    for url in parse_qs(parts.query).get("endpoint", ()):
        endpoint = _split(url)
        is_safe = endpoint.scheme == "https" or (endpoint.scheme == "http" and is_loopback(endpoint.hostname))
        if not (is_safe and endpoint.hostname and "@" not in endpoint.netloc and url.isascii() and url.isprintable()):
            raise ValueError("the endpoint must begin with https:// (http:// on loopback alone), without a user name")


# Each scheme that waitlist/mail/registry.py has a sender for, and what its URL must hold.
_CHECK_MAIL_URL: dict[str, Callable[[SplitResult], None]] = {
    "file": _check_file,
    "console": lambda _parts: None,
    "smtp": _check_smtp,
    "smtps": _check_smtp,
    "resend": _check_resend,
}
