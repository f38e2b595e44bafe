"use strict";

/*
 * Sends a form once. Its buttons rest after the first press, until the page is shown again: whoever
 * goes back in the browser finds them as they were.
 */
(() => {
    const buttons = (form) => form.querySelectorAll("button");

    document.addEventListener("submit", (event) => {
        if (!event.target.closest(".relay-acts, .relay-confirm")) {
            return;
        }
        if (event.target.dataset.sent) {
            event.preventDefault();
            return;
        }
        event.target.dataset.sent = "yes";
        for (const button of buttons(event.target)) {
            button.setAttribute("aria-disabled", "true");
        }
    });

    window.addEventListener("pageshow", () => {
        for (const form of document.querySelectorAll("form[data-sent]")) {
            delete form.dataset.sent;
            for (const button of buttons(form)) {
                button.removeAttribute("aria-disabled");
            }
        }
    });
})();
