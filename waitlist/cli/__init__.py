"""The owner's commands, all under `flask`. Each parses, calls one use case and prints.

Exit codes: 0 done, 1 fault, 2 bad use.
"""

from __future__ import annotations

from flask import Flask

from waitlist.cli import clients, data, lists, mail, people, system

COMMANDS = (
    system.up,
    system.upgrade_db,
    system.doctor,
    system.purge,
    mail.drain_outbox,
    mail.outbox_status,
    mail.test_mail,
    mail.resend,
    lists.create_list,
    lists.open_list,
    lists.close_list,
    lists.set_consent,
    lists.lists,
    clients.create_api_client,
    clients.revoke_api_client,
    clients.api_clients,
    people.explain,
    people.suppress,
    people.unsuppress,
    people.stats,
    data.export_subscribers,
    data.erase_subscriber,
    data.backup,
    data.check_integrity,
)


def init_app(app: Flask) -> None:
    for command in COMMANDS:
        app.cli.add_command(command)
