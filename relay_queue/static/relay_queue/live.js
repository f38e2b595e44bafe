/*
 * Refreshes the figures of the dashboard in place.
 *
 * The server draws everything; this file asks for the same part again and changes what differs,
 * element by element, so that focus, scrolling and opened tables stay as they are. It waits while
 * the tab is hidden or the reader has paused, and backs off while the server does not answer.
 */
"use strict";

{
    const LONGEST_WAIT = 60_000;
    const PATIENCE = 15_000;
    const SLOW = 1_000;
    const PAUSED = "relay-dashboard-paused";

    const root = () => document.getElementById("relay-live");

    /* Make `old` equal to `fresh`, keeping every element that still has its place. */
    function morph(old, fresh) {
        copyAttributes(old, fresh);
        const keyed = new Map();
        for (const child of old.children) {
            if (child.dataset.key) keyed.set(child.dataset.key, child);
        }
        let at = old.firstChild;
        for (const wanted of [...fresh.childNodes]) {
            const key = wanted.dataset?.key;
            let found = key ? keyed.get(key) : at;
            if (found && !isAlike(found, wanted)) found = undefined;
            if (!found) {
                old.insertBefore(wanted, at);
                continue;
            }
            if (found === at) at = at.nextSibling;
            else old.insertBefore(found, at);
            if (found.nodeType === Node.ELEMENT_NODE) morph(found, wanted);
            else if (found.data !== wanted.data) found.data = wanted.data;
        }
        while (at) {
            const next = at.nextSibling;
            at.remove();
            at = next;
        }
    }

    function isAlike(one, other) {
        return one.nodeName === other.nodeName
            && one.nodeType === other.nodeType
            && one.dataset?.key === other.dataset?.key;
    }

    function copyAttributes(old, fresh) {
        // Whether a table is unfolded is for the reader to say.
        const isKept = (name) => name === "open" && old.nodeName === "DETAILS";
        for (const { name, value } of [...fresh.attributes]) {
            if (old.getAttribute(name) !== value) old.setAttribute(name, value);
        }
        for (const { name } of [...old.attributes]) {
            if (!fresh.hasAttribute(name) && !isKept(name)) old.removeAttribute(name);
        }
    }

    class Live {
        constructor(element) {
            this.element = element;
            this.figures = element.querySelector("#relay-figures");
            this.status = element.querySelector("#relay-status-text");
            this.button = element.querySelector("#relay-pause");
            this.interval = Number(element.dataset.interval);
            this.failures = 0;
            this.timer = 0;
            this.request = null;
            this.paused = sessionStorage.getItem(PAUSED) === "yes";
        }

        start() {
            this.button.hidden = false;
            this.button.addEventListener("click", () => this.toggle());
            document.addEventListener("visibilitychange", () => {
                this.resume();
                if (!this.paused && !document.hidden) this.refresh();
            });
            this.resume();
        }

        toggle() {
            this.paused = !this.paused;
            sessionStorage.setItem(PAUSED, this.paused ? "yes" : "no");
            this.resume();
            if (!this.paused) this.refresh();
        }

        /* Go on or stop, whatever the tab and the reader want now. */
        resume() {
            clearTimeout(this.timer);
            this.timer = 0;
            this.button.textContent = this.text(this.paused ? "resume" : "pause");
            if (this.paused || document.hidden) {
                this.request?.abort();
                this.request = null;
                if (this.paused) this.show("paused", this.text("paused"));
                return;
            }
            if (!this.failures) this.show("live", this.text("live"));
            this.timer = setTimeout(() => this.refresh(), this.failures ? 0 : this.interval);
        }

        async refresh() {
            clearTimeout(this.timer);
            this.timer = 0;
            this.request?.abort();
            const request = (this.request = new AbortController());
            const patience = setTimeout(() => request.abort("slow"), PATIENCE);
            const slow = setTimeout(() => this.show("loading", this.text("loading")), SLOW);
            this.figures.setAttribute("aria-busy", "true");
            try {
                await this.load(request.signal);
                if (this.request === request) this.succeeded();
            } catch (error) {
                // Aborted by a pause or a hidden tab: nothing is wrong.
                if (this.request === request) this.failed(error);
            } finally {
                clearTimeout(patience);
                clearTimeout(slow);
                if (this.request === request) {
                    this.request = null;
                    this.figures.setAttribute("aria-busy", "false");
                }
            }
        }

        async load(signal) {
            const answer = await fetch(this.element.dataset.url, {
                signal,
                cache: "no-store",
                credentials: "same-origin",
                redirect: "manual",
            });
            if (answer.type === "opaqueredirect" || answer.status === 403) throw new Denied();
            const isShown = answer.ok || answer.status === 503;
            if (!isShown) throw new Error(`HTTP ${answer.status}`);
            const page = new DOMParser().parseFromString(await answer.text(), "text/html");
            const fresh = this.figures.cloneNode(false);
            fresh.append(...page.body.childNodes);
            morph(this.figures, fresh);
            if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
        }

        succeeded() {
            this.failures = 0;
            this.show("live", this.text("live"));
            this.timer = setTimeout(() => this.refresh(), this.interval);
        }

        failed(error) {
            if (error instanceof Denied) {
                this.show("failed", this.text("denied"));
                this.button.hidden = true;
                return;
            }
            this.failures += 1;
            const wait = Math.min(this.interval * 2 ** this.failures, LONGEST_WAIT);
            const seconds = String(Math.round(wait / 1000));
            this.show("failed", this.text("failed").replace("SECONDS", seconds));
            this.timer = setTimeout(() => this.refresh(), wait);
        }

        /* Announced by screen readers, so written only when it changes. */
        show(state, text) {
            if (this.element.dataset.state !== state) this.element.dataset.state = state;
            if (this.status.textContent !== text) this.status.textContent = text;
        }

        text(name) {
            return this.element.dataset[`text${name[0].toUpperCase()}${name.slice(1)}`];
        }
    }

    class Denied extends Error {}

    const begin = () => {
        const element = root();
        if (element) new Live(element).start();
    };
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
    else begin();
}
