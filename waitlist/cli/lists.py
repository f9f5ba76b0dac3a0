"""Commands about lists and their consent texts."""

from __future__ import annotations

import click

from waitlist import waitlists
from waitlist.cli.base import as_json_option, command, echo_json
from waitlist.model import ListState
from waitlist.web.current import services


@command("create-list")
@click.argument("list_id", metavar="NAME")
@click.option("--title", required=True, help="One line; also the mail's subject.")
@click.option("--description", default="", help="A few sentences under the title.")
@click.option("--consent", default=waitlists.DEFAULT_CONSENT, show_default=True, help="What a person agrees to.")
def create_list(list_id: str, title: str, description: str, consent: str) -> None:
    """Make a new open list, shown at /join/NAME."""
    waitlists.create(services(), list_id, title=title, description=description, consent=consent)
    click.echo(f"Made the list {list_id}: {services().settings.base_url}/join/{list_id}")


@command("open-list")
@click.argument("list_id", metavar="NAME")
def open_list(list_id: str) -> None:
    """Let people join the list (again)."""
    waitlists.set_state(services(), list_id, ListState.OPEN)
    click.echo(f"The list {list_id} is open.")


@command("close-list")
@click.argument("list_id", metavar="NAME")
def close_list(list_id: str) -> None:
    """Let nobody new join; links that were sent still work."""
    waitlists.set_state(services(), list_id, ListState.CLOSED)
    click.echo(f"The list {list_id} is closed.")


@command("set-consent")
@click.argument("list_id", metavar="NAME")
@click.argument("text")
def set_consent(list_id: str, text: str) -> None:
    """Publish a new consent text; who agreed to an older one stays under that."""
    version = waitlists.publish_consent(services(), list_id, text)
    click.echo(f"The list {list_id} asks for consent version {version} from now on.")


@command("lists")
@as_json_option
def lists(as_json: bool) -> None:
    """Show every list with its state and consent version."""
    pages = waitlists.find_all(services())
    if as_json:
        echo_json(pages)
        return
    for page in pages:
        click.echo(f"{page.waitlist.id}  {page.waitlist.state}  consent {page.consent.version}  {page.waitlist.title}")
    if not pages:
        click.echo("There is no list yet: `flask create-list NAME --title TITLE` makes one.")
