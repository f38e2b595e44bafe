"use strict";

/*
 * Refreshes the progress of a bulk act in place until it is over. Rests while the tab is hidden,
 * and waits longer after each failure, so that a page left open costs next to nothing.
 */
(() => {
    const USUAL = 1500;
    const LONGEST = 30000;
    const box = document.getElementById("relay-progress");
    const stale = document.getElementById("relay-progress-stale");
    let pause = USUAL;
    let timer = 0;

    const finished = () => box.querySelector("[data-finished]") !== null;

    const refresh = async () => {
        try {
            const answer = await fetch(box.dataset.url, { credentials: "same-origin", redirect: "error" });
            if (!answer.ok) {
                throw new Error(String(answer.status));
            }
            const text = await answer.text();
            // Untouched if nothing has moved: a screen reader would read it all again.
            if (text.trim() !== box.innerHTML.trim()) {
                box.innerHTML = text;
            }
            pause = USUAL;
            stale.hidden = true;
        } catch {
            pause = Math.min(pause * 2, LONGEST);
            stale.hidden = false;
        }
        plan();
    };

    const plan = () => {
        clearTimeout(timer);
        if (finished()) {
            document.getElementById("relay-progress-end")?.remove();
        } else if (!document.hidden) {
            timer = setTimeout(refresh, pause);
        }
    };

    document.addEventListener("visibilitychange", plan);
    plan();
})();
