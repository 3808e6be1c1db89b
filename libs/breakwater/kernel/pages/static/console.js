// All pages work without this script. With it, live parts refresh themselves, jobs can be watched, and dead letters are
// replayed with a progress bar.
"use strict";

const root = document.documentElement;
root.classList.add("scripts");
try {
  const theme = localStorage.getItem("theme");
  if (theme) root.dataset.theme = theme;
} catch { /* storage is disabled: the system's colours stay */ }

document.addEventListener("DOMContentLoaded", () => {
  themeButton();
  shortcuts();
  refreshing();
  labelling(document);
  addEventListener("renewed", (event) => labelling(event.target));
  watching();
  replaying();
  planning();
  choosing();
  ageing();
});

function themeButton() {
  const button = document.querySelector("[data-theme-button]");
  if (!button) return;
  button.hidden = false;
  button.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* it is kept for this page only */ }
  });
}

// Keyboard shortcuts outside of fields. The dialog lists them; a link of the navigation names the key that follows a g.
function shortcuts() {
  const dialog = document.getElementById("keys"), button = document.querySelector("[data-keys-button]");
  if (!dialog || !button) return;
  button.hidden = false;
  button.addEventListener("click", () => dialog.showModal());
  let goes = -Infinity;
  document.addEventListener("keydown", (event) => {
    const field = event.target.closest("input:not([type=checkbox]), select, textarea");
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.key === "Escape") {
      const unfolded = event.target.closest("details:is(.act, .pick)[open]") ?? document.querySelector("details.pick[open]");
      if (unfolded) { unfolded.open = false; unfolded.querySelector("summary").focus(); } else field?.blur();
    }
    if (field) return;
    const link = event.timeStamp - goes < 1500 && document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
    goes = event.key === "g" ? event.timeStamp : -Infinity;
    if (link) link.click();
    else if (event.key === "?") dialog.showModal();
    else if (event.key === "/") {
      const search = [...document.querySelectorAll("main input[type=search]")].find((input) => input.checkVisibility());
      if (search) search.select(); else location.assign("/executions#f-text");
    } else return;
    event.preventDefault();
  });
}

// On a phone, a row has two lines and unfolds, or is a card that shows the headings next to the values. The roles are still
// those of a table.
function labelling(part) {
  for (const table of part.querySelectorAll("table.cards")) {
    const headings = [...table.tHead.rows[0].cells];
    const names = headings.map((cell) => cell.textContent.replace(/[▾▴]/g, "").trim());
    const places = headings.map((cell) => cell.dataset.brief);
    table.setAttribute("role", "table");
    for (const group of [table.tHead, ...table.tBodies]) group.setAttribute("role", "rowgroup");
    for (const row of table.rows) {
      row.setAttribute("role", "row");
      [...row.cells].forEach((cell, number) => {
        const heading = cell.scope === "col" ? "columnheader" : cell.scope === "row" ? "rowheader" : "cell";
        cell.setAttribute("role", heading);
        if (cell.scope === "col" || cell.colSpan > 1) return;
        cell.dataset.label = names[number] ?? "";
        if (places[number]) cell.classList.add("brief", `brief-${places[number]}`);
      });
      if (row.querySelector(".brief")) {
        row.classList.add("unfolds");
        const named = row.querySelector(".brief-1").textContent.trim().replace(/\s+/g, " ").slice(0, 80);
        row.insertAdjacentHTML("beforeend", '<td class="unfold" role="cell"><details><summary></summary></details></td>');
        row.querySelector(".unfold summary").setAttribute("aria-label", `Details of ${named}`);
      }
    }
  }
}

// Replaces every element that has data-live and an id by its newer version, unless it is being used. Additions of scripts,
// such as charts, do not count as a change.
function refreshing() {
  const mark = document.querySelector("[data-refresh-s]");
  if (!mark) return;
  const everyMs = Number(mark.dataset.refreshS) * 1000;
  mark.hidden = !everyMs;
  let busy = false;
  const served = new Map([...document.querySelectorAll("[data-live][id]")].map((part) => [part.id, part.outerHTML]));
  const atWork = (part) =>
    part.querySelector("canvas:hover, canvas:focus") !== null ||
    part.contains(document.activeElement) && document.activeElement.matches("input:not([type=checkbox]), select, textarea") ||
    part.querySelector("details[open]") !== null ||
    !getSelection().isCollapsed && part.contains(getSelection().anchorNode);
  let since = new Date();
  const show = (paused) => {
    const away = document.querySelector("[data-away]")?.dataset.away;
    mark.className = away ? "live stale" : paused ? "live paused" : "live";
    mark.textContent = away ? `not live: ${away} does not respond` : paused ? "paused while you work" : "live";
  };
  show(false);
  const refresh = async () => {
    if (busy || document.hidden) return;
    busy = true;
    try {
      const limit = AbortSignal.timeout(Math.max(everyMs, 10000));
      const response = await fetch(location.href, { headers: { "X-Refresh": "1" }, redirect: "manual", signal: limit });
      if (response.type === "opaqueredirect") {
        if (![...document.querySelectorAll("main form, main [data-live]")].some(atWork)) { location.reload(); return; }
        mark.className = "live stale";
        mark.textContent = "signed out: sign in in another tab; your input stays here";
        return;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      let paused = false;
      for (const part of document.querySelectorAll("[data-live][id]")) {
        const newer = page.getElementById(part.id);
        if (!newer || newer.outerHTML === served.get(part.id)) continue;
        if (atWork(part)) { paused = true; continue; }
        const focused = part.contains(document.activeElement) ? selectorOf(document.activeElement) : null;
        const ticked = new Set([...part.querySelectorAll("input[type=checkbox]:checked")].map((box) => box.value));
        served.set(part.id, newer.outerHTML);
        if (part.matches("details")) newer.open = part.open;
        part.replaceWith(document.adoptNode(newer));
        for (const box of newer.querySelectorAll("input[type=checkbox]:enabled")) box.checked = ticked.has(box.value);
        newer.dispatchEvent(new Event("renewed", { bubbles: true }));
        if (focused) newer.querySelector(focused)?.focus();
      }
      since = new Date();
      show(paused);
    } catch (error) {
      mark.hidden = false;
      mark.className = "live stale";
      mark.textContent = `no response since ${since.toLocaleTimeString()}, ${everyMs ? "retrying" : "reload the page"}`;
    } finally {
      busy = false;
    }
  };
  if (document.querySelector("[data-pending]")) refresh();
  if (!everyMs) return;
  setInterval(refresh, everyMs);
  document.addEventListener("visibilitychange", refresh);
}

// Finds an element again in a newer version of its part: a link by its address, a checkbox by its value.
function selectorOf(element) {
  if (element.matches("input[type=checkbox]")) return `input[value="${CSS.escape(element.value)}"]`;
  return element.hasAttribute("href") ? `[href="${CSS.escape(element.getAttribute("href"))}"]` : null;
}

// Adds the steps of a running job to the page as they arrive, and reloads the page once the job is recorded.
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
  source.addEventListener("stopped", (event) => { source.close(); if (state) state.textContent = event.data; });
  addEventListener("pagehide", () => source.close());
}

// Replays dead letters in batches, until all are replayed.
function replaying() {
  const form = document.querySelector("form[data-replay]");
  if (!form) return;
  const boxes = [...form.querySelectorAll("input[name=dead_letter_id]")];
  const all = form.querySelector("[data-all]");
  const buttons = [...form.querySelectorAll("[data-chosen]")];
  const show = () => {
    const chosen = boxes.filter((box) => box.checked).length;
    for (const button of buttons) {
      button.disabled = chosen === 0;
      button.textContent = `${button.dataset.chosen} ${chosen || ""} selected`.replace("  ", " ");
    }
  };
  if (all) {
    all.closest("[data-all-label]").hidden = false;
    all.addEventListener("change", () => { for (const box of boxes) box.checked = all.checked && !box.disabled; show(); });
  }
  form.addEventListener("change", show);
  show();
  form.addEventListener("submit", async (event) => {
    if (event.submitter?.hasAttribute("formaction")) return;  // a dismissal, which is one request
    event.preventDefault();
    const bar = form.querySelector("progress");
    const result = form.querySelector("[data-replay-result]");
    const fields = new URLSearchParams(new FormData(form, event.submitter));
    for (const other of form.querySelectorAll("button")) other.disabled = true;
    bar.hidden = result.hidden = false;
    let after = 0, done = 0, skipped = 0, already = 0;
    const total = Number(event.submitter?.dataset.total || fields.getAll("dead_letter_id").length) || 1;
    bar.max = total;
    try {
      do {
        fields.set("after", String(after));
        const response = await fetch(form.action, { method: "POST", body: fields, headers: { Accept: "application/json" } });
        if (response.redirected) throw new Error("you are signed out; reload this page");
        const batch = await response.json();
        if (!response.ok) throw new Error(batch.message);
        done += batch.replayed; already += batch.already; skipped += batch.skipped;
        after = batch.continue_after;
        bar.value = Math.min(done + already + skipped, total);
        result.textContent = `${done} replayed` + (already ? `, ${already} before` : "") + (skipped ? `, ${skipped} can't be replayed` : "");
      } while (after);
      bar.value = total;
      result.textContent += ". ";
      const again = document.createElement("a");
      again.href = location.href;
      again.textContent = "Reload the list";
      result.append(again);
    } catch (error) {
      result.className = "bad-text";
      result.textContent = `Stopped: ${error.message}. ${done} were replayed, and are left out if you replay again.`;
      for (const other of form.querySelectorAll("button")) other.disabled = false;
    }
  });
}

// Tries a config, with a progress bar. Leaving the page stops it.
function planning() {
  const form = document.querySelector("form[data-plan]");
  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const bar = form.querySelector("progress"), state = form.querySelector("[data-plan-state]");
    const button = form.querySelector("button"), result = document.getElementById("result");
    button.disabled = true;
    bar.hidden = state.hidden = false;
    bar.removeAttribute("value");
    state.className = "small faint";
    state.textContent = "Starting…";
    result.replaceChildren();
    try {
      const body = new URLSearchParams(new FormData(form));
      const response = await fetch("/config", { method: "POST", body, headers: { Accept: "application/json" } });
      if (response.redirected) throw new Error("you are signed out; sign in in another tab");
      if (!response.ok) throw new Error((await response.json()).message);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "", html = null;
      for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
        const lines = (text + value).split("\n");
        text = lines.pop();
        for (const line of lines.map((json) => JSON.parse(json))) {
          html = line.html ?? html;
          if (!line.jobs) continue;
          bar.value = line.progress;
          state.textContent = `${line.jobs.toLocaleString("en")} jobs so far; leaving this page stops it`;
        }
      }
      if (html === null) throw new Error("the response ended too early");
      result.innerHTML = html;
      state.hidden = true;
      result.dispatchEvent(new Event("renewed", { bubbles: true }));
      result.focus();
    } catch (error) {
      state.className = "small bad-text";
      state.textContent = `Stopped: ${error.message}.`;
    } finally {
      bar.hidden = true;
      button.disabled = false;
    }
  });
}

// Says how many rows of a form are selected, in texts such as `Cancel # jobs|Cancel 1 job`. A refresh keeps the selection.
function choosing() {
  const form = document.querySelector("form[data-chooses]");
  const all = form?.querySelector("[data-all]");
  if (!all) return;
  const texts = [...form.querySelectorAll("[data-chosen]")].map((part) => [part, part.textContent]);
  const boxes = () => [...form.querySelectorAll("td input[type=checkbox]:enabled")];
  const show = () => {
    const listed = boxes(), chosen = listed.filter((box) => box.checked).length;
    for (const [part, unscripted] of texts) {
      const [plural, singular] = part.dataset.chosen.split("|");
      part.textContent = chosen ? (chosen === 1 && singular || plural).replace("#", chosen) : unscripted;
      if (part.matches("button")) part.disabled = chosen === 0;
    }
    all.checked = chosen > 0 && chosen === listed.length;
    all.indeterminate = chosen > 0 && chosen < listed.length;
    all.closest("[data-all-label]").hidden = listed.length === 0;
  };
  all.addEventListener("change", () => { for (const box of boxes()) box.checked = all.checked; show(); });
  form.addEventListener("change", show);
  addEventListener("renewed", show);
  show();
}

// Counts up the ages of what goes on.
function ageing() {
  const since = new WeakMap();
  const pad = (number) => String(number).padStart(2, "0");
  const elapsed = (seconds) => {
    const minutes = Math.floor(seconds / 60), hours = Math.floor(seconds / 3600);
    if (minutes < 1) return `${seconds} s`;
    if (hours < 1) return `${minutes} min ${pad(seconds % 60)} s`;
    return hours < 24 ? `${hours} h ${pad(minutes % 60)} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  };
  const show = () => {
    for (const part of document.querySelectorAll("[data-age-s]")) {
      if (!since.has(part)) since.set(part, performance.now());
      part.textContent = elapsed(Number(part.dataset.ageS) + Math.floor((performance.now() - since.get(part)) / 1000));
    }
  };
  if (!document.querySelector("form[data-chooses]")) return;
  show();
  setInterval(show, 1000);
}
