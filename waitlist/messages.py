"""Every sentence a visitor can read on a page. Knows no template and no HTTP; braces are filled in by whoever shows it."""

from __future__ import annotations

from typing import Final

# The neutral message: the same words whatever the address is to us (promise 6).
CHECK_INBOX: Final = (
    "If this address still has to be confirmed, a mail with a link is on its way to it. "
    "Open the link and press the button there: then you are on the list."
)
CHECK_INBOX_HEADING: Final = "Check your inbox"
CHECK_INBOX_NOTHING_CAME: Final = (
    "Nothing there after a few minutes? Look in the spam folder. Still nothing? Ask again in {cooldown}; "
    "to keep inboxes quiet, one address gets only a few of these mails a day."
)
CHECK_INBOX_ALREADY_ON: Final = (
    "If you are on the list already, you stay on it: nothing changes, and no further mail comes."
)
CHECK_INBOX_START_AGAIN: Final = "Use another address"

# The form.
EMAIL_LABEL: Final = "Email address"
HONEYPOT_LABEL: Final = "Leave this field empty"
JOIN_BUTTON: Final = "Join the waitlist"
NEXT_STEP: Final = "We send one mail to make sure that the address is yours. You are on the list once you confirm it."
ADDRESS_MISSING: Final = "Enter your email address."
ADDRESS_TOO_LONG: Final = "This address is too long to be an email address."
ADDRESS_INVISIBLE: Final = "The address holds an invisible character. Please type it anew."
# The reason is a sentence of email-validator's, in English like everything here.
ADDRESS_UNSOUND: Final = "Enter an email address like name@example.com. {reason}"
ADDRESS_UNFIT: Final = "This address cannot be used in a mail header."
CONSENT_MISSING: Final = "Tick the box to join: without your consent we may not write to you."
CONSENT_CHANGED: Final = "This text has changed since you opened the page. Please read it and tick the box again."
FORM_EXPIRED: Final = (
    "This form was open for too long, or your browser kept no cookie from us. Nothing is lost: please press the button "
    "again. If this message comes back, allow cookies for this site."
)
TOO_SOON: Final = "That was faster than we expected of a person. Nothing is lost: please press the button once more."
UNREACHABLE: Final = (
    "We could not reach the waitlist. Nothing you typed is lost: check your connection and press the button again. "
    "Pressing it twice does no harm."
)
TRY_AGAIN_BUTTON: Final = "Try again"
CONSENT_KEPT: Final = "Your consent is kept as you gave it."

# Before any page: plain text, for a form that does not arrive as a whole.
BODIES_BUSY: Final = "Many forms are arriving just now. Nothing is lost: please go back and try again in a moment."
BODY_TOO_SLOW: Final = "Your form took too long to reach us. Please check your connection, go back and send it again."
BODY_CUT_OFF: Final = "Your form did not reach us as a whole. Please go back and send it again."

# Around every page.
CONTACT: Final = "Questions?"
PRIVACY: Final = "How your data is treated"
FRONT_PAGE: Final = "Go to the front page"

NO_LIST_HEADING: Final = "Nothing to join just now"
NO_LIST: Final = "There is no open waitlist at the moment. Please come back another day."

# The pages behind a confirmation link.
CONFIRM_HEADING: Final = "One last step"
CONFIRM: Final = "Press the button to confirm that you want to be on the list."
CONFIRM_BUTTON: Final = "Confirm my place"
CONFIRM_NOT_YOU: Final = "You did not ask for this? Then close this page: without the button nothing happens."
CONFIRMED_HEADING: Final = "You are on the list"
CONFIRMED_NOW: Final = "Thank you, your address is confirmed. There is nothing left to do: we write when there is news."
ALREADY_CONFIRMED: Final = (
    "Your address was confirmed before. There is nothing left to do: we write when there is news."
)
CONFIRMED_LEAVE: Final = "Changed your mind later? The mail that brought you here holds a link to leave."
EXPIRED_HEADING: Final = "This link has expired"
EXPIRED: Final = "Links work for {lifetime}. Press the button, and a fresh one comes to the same address."
EXPIRED_BUTTON: Final = "Send me a fresh link"
LEFT_HEADING: Final = "You have left this list"
LEFT: Final = "This link belongs to a place on the list that was given up since. You are welcome to join anew."
LEFT_LINK: Final = "Join again"
NOT_OURS_HEADING: Final = "This link does not work"
NOT_OURS: Final = (
    "It is not one of ours, or no longer. Mail programs sometimes cut a link in two: try to copy it from the mail "
    "as a whole. Otherwise simply join again."
)

# Leaving.
UNSUBSCRIBE_HEADING: Final = "Leave the list?"
UNSUBSCRIBE: Final = "Press the button, and you are off the list."
UNSUBSCRIBE_BUTTON: Final = "Leave the list"
UNSUBSCRIBED_HEADING: Final = "Done"
UNSUBSCRIBED: Final = "If this link belonged to a place on the list, it is given up: no more mail comes from this list."
UNSUBSCRIBED_NEXT: Final = "It was a slip? You can join again at any time."
NOT_ME_HEADING: Final = "You did not ask for this?"
NOT_ME: Final = (
    "We are sorry: somebody typed in your address. Press the button, and no list here writes to it again, whoever asks."
)
NOT_ME_BUTTON: Final = "This was not me"
NOT_ME_DONE_HEADING: Final = "Done, and sorry for the trouble"
NOT_ME_DONE: Final = "If this link was one of ours, the address behind it gets no more mail from any list here."

# Heading and words of each error page; what is not named here is told as 500 (from 500 on) or as 400.
ERRORS: Final = {
    400: (
        "We could not read that",
        "Something about this request was not as it should be. Please go back and try again.",
    ),
    403: (
        "This did not come from our page",
        "For your safety the form works only from this site. Please open it here.",
    ),
    404: ("There is no such page", "The address may be mistyped, or the page is gone."),
    405: ("That does not work here", "This page cannot be used that way. Please open it as a link."),
    410: ("This waitlist is closed", "It takes no more people. Whoever is on it already stays on it."),
    413: ("That was too much", "So much text does not fit into this form. Please go back and send less."),
    429: (
        "One moment, please",
        "Too many forms came from your network just now. Nothing you typed is lost: wait {wait}, then try again.",
    ),
    500: ("Something went wrong here", "That is our fault, not yours, and it has been noted. Please try again later."),
    503: ("Busy just now", "Nothing you typed is lost, and nothing was stored. Please try again in a moment."),
}
