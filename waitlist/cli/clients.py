"""Commands about API clients."""

from __future__ import annotations

import click

from waitlist import clients
from waitlist.cli.base import as_json_option, command, echo_json
from waitlist.web.current import services
from waitlist.words import moment_in_words


@command("create-api-client")
@click.argument("name")
def create_api_client(name: str) -> None:
    """Let a program use the API; prints its token, this once."""
    token = clients.create(services(), name)
    click.echo(f"The token of {name}; it is shown only now and cannot be read back:", err=True)
    click.echo(token)


@command("revoke-api-client")
@click.argument("name")
def revoke_api_client(name: str) -> None:
    """End a program's access at once."""
    clients.revoke(services(), name)
    click.echo(f"The token of {name} works no more.")


@command("api-clients")
@as_json_option
def api_clients(as_json: bool) -> None:
    """Show the programs that may use the API, with their last use."""
    found = clients.find_all(services())
    if as_json:
        echo_json(found)
        return
    for client in found:
        used = f"last used {moment_in_words(client.last_used_at)}" if client.last_used_at else "never used"
        click.echo(f"{client.name}  {'revoked' if client.revoked_at else used}")
    if not found:
        click.echo("There is no API client yet: `flask create-api-client NAME` makes one.")
