"""Commands about people and figures."""

from __future__ import annotations

from collections.abc import Iterator

import click

from waitlist import ledger, people
from waitlist.addresses import canonical_address
from waitlist.cli.base import as_json_option, command, echo_json
from waitlist.web.current import services
from waitlist.words import moment_in_words


@command("explain")
@click.argument("address")
@as_json_option
def explain(address: str, as_json: bool) -> None:
    """Tell everything that happened to ADDRESS, and why."""
    explanation = ledger.explain(services(), canonical_address(address))
    if as_json:
        echo_json(explanation)
        return
    for line in _explanation_lines(explanation):
        click.echo(line)


@command("suppress")
@click.argument("address")
def suppress(address: str) -> None:
    """Never write to ADDRESS again: take it off every list and cancel its mails."""
    email = canonical_address(address)
    is_new = people.suppress(services(), email)
    click.echo(f"{email} is suppressed." if is_new else f"{email} was suppressed before; `flask explain` says why.")


@command("unsuppress")
@click.argument("address")
def unsuppress(address: str) -> None:
    """Let ADDRESS be written to again. It is on no list until somebody submits it."""
    email = canonical_address(address)
    was_suppressed = people.unsuppress(services(), email)
    click.echo(f"{email} is not suppressed any more." if was_suppressed else f"{email} was not suppressed.")


@command("stats")
@as_json_option
def stats(as_json: bool) -> None:
    """Count subscribers, mails and decisions."""
    figures = ledger.stats(services())
    if as_json:
        subscribers = [
            {"list": name, "status": status, "count": n} for (name, status), n in figures.subscribers.items()
        ]
        echo_json({"subscribers": subscribers, "deliveries": figures.deliveries, "decisions": figures.decisions})
        return
    for line in _stats_lines(figures):
        click.echo(line)


def _explanation_lines(explanation: ledger.Explanation) -> Iterator[str]:
    yield explanation.email
    if explanation.suppression:
        yield f"  suppressed on every list: {ledger.SUPPRESSION_WORDS[explanation.suppression]}"
    if not explanation.standings:
        yield "  is on no list"
    for standing in explanation.standings:
        since = f" (first confirmed {moment_in_words(standing.confirmed_at)})" if standing.confirmed_at else ""
        yield f"  {standing.list_id}: {standing.status}{since}; {standing.next_mail}"
    if explanation.entries:
        yield ""
    for entry in explanation.entries:
        thing = f"{entry.kind} {entry.id}".rstrip()
        yield f"  {moment_in_words(entry.at)}  {entry.list_id or 'every list'}  {thing}  {entry.words}"


def _stats_lines(figures: ledger.Stats) -> Iterator[str]:
    yield "subscribers"
    for (list_id, status), count in sorted(figures.subscribers.items()):
        yield f"  {count:>9}  {list_id} {status}"
    yield "mails"
    for status, count in sorted(figures.deliveries.items()):
        yield f"  {count:>9}  {status}"
    yield "submissions"
    for row in sorted(figures.decisions, key=lambda row: (row.channel, row.decision)):
        replays = f", replayed {row.replays} times" if row.replays else ""
        yield f"  {row.submissions:>9}  {row.channel}: {ledger.DECISION_WORDS[row.decision]}{replays}"
