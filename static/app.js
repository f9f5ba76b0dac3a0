// Says on the page what htmx alone would keep to itself: that nobody answered, or somebody else did.
"use strict";

(() => {
  const box = document.getElementById("page-error");

  const tellUnreachable = () => {
    box.textContent = box.dataset.unreachable;
    // The button was disabled meanwhile and lost the focus; the next press should be one key away.
    document.querySelector("#signup button")?.focus();
  };

  document.addEventListener("htmx:beforeRequest", () => box.replaceChildren());
  document.addEventListener("htmx:sendError", tellUnreachable);
  document.addEventListener("htmx:timeout", tellUnreachable);
  document.addEventListener("htmx:beforeSwap", (event) => {
    // A proxy's error page or a hotel's login page must not take the place of the form.
    if (!event.detail.xhr.getResponseHeader("Waitlist-Fragment")) {
      event.detail.shouldSwap = false;
      tellUnreachable();
    }
  });
})();
