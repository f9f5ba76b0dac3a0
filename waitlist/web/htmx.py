"""htmx-flask, cured: it sets no `Vary`, takes a history restore for htmx, drops a custom request class, has no types.

Also the settings of the htmx in the page. What a browser gets in place of a page is decided here and nowhere else.
"""

from __future__ import annotations

import json
from typing import Any, Final

from flask import Flask, Request, Response, after_this_request, render_template, request
from htmx_flask import Htmx

# Tells static/app.js that an answer is ours, not a proxy's error page or a hotel's login page.
FRAGMENT_HEADER: Final = "Waitlist-Fragment"

# The defaults break a strict CSP, keep pages with typed text in storage, and show nothing on an error.
HTMX_CONFIG: Final = json.dumps(
    {
        "includeIndicatorStyles": False,
        "allowEval": False,
        "allowScriptTags": False,
        "selfRequestsOnly": True,
        "historyCacheSize": 0,
        "historyRestoreAsHxRequest": False,
        "responseHandling": [
            {"code": "204", "swap": False},
            {"code": "[23]..", "swap": True},
            {"code": "400|410|422|429|503", "swap": True},
            {"code": "...", "swap": True, "error": True, "target": "#page-error", "swapOverride": "innerHTML"},
        ],
    }
)


def init_app(app: Flask) -> None:
    custom = app.request_class
    Htmx(app)
    if custom is not Request:
        app.request_class = type("HtmxRequest", (app.request_class, custom), {})


def wants_fragment() -> bool:
    """Whether htmx swaps the answer into a page. Whoever asks makes the answer depend on it, hence the `Vary`."""
    headers: Any = getattr(request, "htmx", None)
    is_fragment = bool(headers) and not headers.history_restore_request and not headers.boosted

    @after_this_request
    def _mark(response: Response) -> Response:
        response.vary.add("HX-Request")
        if is_fragment:
            response.headers[FRAGMENT_HEADER] = "true"
        return response

    return is_fragment


def render(page: str, fragment: str, /, **context: Any) -> str:
    """The fragment for htmx, else the page that includes it; both are names of templates."""
    return render_template(fragment if wants_fragment() else page, **context)
