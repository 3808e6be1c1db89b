// All pages work without this file. With it, what is live renews itself, a job can be watched, and many dead letters
// are replayed with a progress bar.
"use strict";

const root = document.documentElement;
try {
  const theme = localStorage.getItem("theme");
  if (theme) root.dataset.theme = theme;
} catch { /* storage is switched off: the system's colours stay */ }

document.addEventListener("DOMContentLoaded", () => {
  themeButton();
  renewal();
  watching();
  replaying();
});

function themeButton() {
  const button = document.querySelector("[data-theme-button]");
  if (!button) return;
  button.hidden = false;
  button.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* it holds for this page only */ }
  });
}

// Every element with data-live and an id is replaced by its newer self, unless somebody is at work in it.
function renewal() {
  const mark = document.querySelector("[data-renew-s]");
  if (!mark) return;
  const everyMs = Number(mark.dataset.renewS) * 1000;
  mark.hidden = false;
  let busy = false;
  const atWork = (part) =>
    part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea") ||
    part.querySelector("details[open]") !== null ||
    !getSelection().isCollapsed && part.contains(getSelection().anchorNode);
  let since = new Date();
  const renew = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try {
      const limit = AbortSignal.timeout(Math.max(everyMs, 10000));
      const answer = await fetch(location.href, { headers: { "X-Renewal": "1" }, redirect: "manual", signal: limit });
      if (answer.type === "opaqueredirect") {
        if (![...document.querySelectorAll("main form, main [data-live]")].some(atWork)) { location.reload(); return; }
        mark.className = "live stale";
        mark.textContent = "signed out: sign in in another tab, what you typed stays here";
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      let paused = false;
      for (const part of document.querySelectorAll("[data-live][id]")) {
        const newer = page.getElementById(part.id);
        if (!newer || newer.outerHTML === part.outerHTML) continue;
        if (atWork(part)) { paused = true; continue; }
        const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        part.replaceWith(document.adoptNode(newer));
        if (focused) document.querySelector(`#${CSS.escape(newer.id)} [href="${CSS.escape(focused)}"]`)?.focus();
      }
      since = new Date();
      mark.className = paused ? "live paused" : "live";
      mark.textContent = paused ? "waits until you are done" : "live";
    } catch (error) {
      mark.className = "live stale";
      mark.textContent = `no answer since ${since.toLocaleTimeString()}, trying again`;
    } finally {
      busy = false;
    }
  };
  setInterval(renew, everyMs);
  document.addEventListener("visibilitychange", renew);
}

// A job that is not over: its steps are put on the page as they come, and the page is loaded again when it is recorded.
function watching() {
  const steps = document.querySelector("[data-watch]");
  if (!steps) return;
  const state = document.querySelector("[data-watch-state]");
  const source = new EventSource(steps.dataset.watch);
  source.addEventListener("step", (event) => {
    const { html, state: now } = JSON.parse(event.data);
    steps.insertAdjacentHTML("beforeend", html);
    if (state && now) state.textContent = now;
  });
  source.addEventListener("restart", () => steps.replaceChildren());
  source.addEventListener("recorded", () => { source.close(); location.reload(); });
  source.addEventListener("gone", (event) => { source.close(); if (state) state.textContent = event.data; });
  addEventListener("pagehide", () => source.close());
}

// Many dead letters: some at a time, until there are no more.
function replaying() {
  const form = document.querySelector("form[data-replay]");
  if (!form) return;
  const boxes = [...form.querySelectorAll("input[name=dead_letter_id]")];
  const all = form.querySelector("[data-all]");
  const button = form.querySelector("[data-replay-chosen]");
  const show = () => {
    const chosen = boxes.filter((box) => box.checked).length;
    if (button) { button.disabled = chosen === 0; button.textContent = chosen ? `Replay ${chosen} chosen` : "Replay chosen"; }
  };
  if (all) {
    all.hidden = false;
    all.addEventListener("change", () => { for (const box of boxes) box.checked = all.checked && !box.disabled; show(); });
  }
  form.addEventListener("change", show);
  show();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const bar = form.querySelector("progress");
    const told = form.querySelector("[data-replay-told]");
    const fields = new URLSearchParams(new FormData(form, event.submitter));
    for (const other of form.querySelectorAll("button")) other.disabled = true;
    bar.hidden = told.hidden = false;
    let after = 0, done = 0, skipped = 0, already = 0;
    const total = Number(event.submitter?.dataset.total || fields.getAll("dead_letter_id").length) || 1;
    bar.max = total;
    try {
      do {
        fields.set("after", String(after));
        const answer = await fetch(form.action, { method: "POST", body: fields, headers: { Accept: "application/json" } });
        if (answer.redirected) throw new Error("you are signed out; load this page again");
        const said = await answer.json();
        if (!answer.ok) throw new Error(said.message);
        done += said.replayed; already += said.already; skipped += said.skipped;
        after = said.continue_after;
        bar.value = Math.min(done + already + skipped, total);
        told.textContent = `${done} replayed` + (already ? `, ${already} before` : "") + (skipped ? `, ${skipped} can't be` : "");
      } while (after);
      bar.value = total;
      told.textContent += ". ";
      const again = document.createElement("a");
      again.href = location.href;
      again.textContent = "Show the list again";
      told.append(again);
    } catch (error) {
      told.className = "bad-text";
      told.textContent = `Stopped: ${error.message}. ${done} were replayed; replaying again leaves them out.`;
      for (const other of form.querySelectorAll("button")) other.disabled = false;
    }
  });
}
