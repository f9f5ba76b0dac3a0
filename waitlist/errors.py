"""Typed errors of every storey; no HTTP here. The docstring of a class is its default message, so it is a sentence for a person."""

from __future__ import annotations


class WaitlistError(Exception):
    """Something went wrong in the waitlist."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class SettingsError(WaitlistError):
    """The settings are not usable."""


class InvalidAddress(WaitlistError):
    """Enter an email address like name@example.com."""


class InvalidInput(WaitlistError):
    """The value is not usable."""


class UnknownList(WaitlistError):
    """There is no list by that name; `flask lists` shows them all."""


class UnknownConsent(WaitlistError):
    """The consent text has changed; please read it and tick the box again."""


class UnknownClient(WaitlistError):
    """There is no API client by that name; `flask api-clients` shows them all."""


class KeyReused(WaitlistError):
    """This Idempotency-Key belongs to another request. Use a new key for a new request."""

    def __init__(self, operation_id: str) -> None:
        super().__init__()
        # The stored operation of that other request.
        self.operation_id = operation_id


class OperationInProgress(WaitlistError):
    """A request with this Idempotency-Key is being worked on. Try again with the same key."""


class StorageBusy(WaitlistError):
    """The waitlist is busy just now. Nothing was lost; please try again in a moment."""


class StorageUnavailable(StorageBusy):
    """The waitlist cannot write to its database just now (disk full, read-only or gone). Please try again later."""


class SchemaMismatch(WaitlistError):
    """The database schema is not the one this version needs; run `flask upgrade-db`."""


class Restart(Exception):
    """Another process changed what this transaction had read; run its body again from the start."""
