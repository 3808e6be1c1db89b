// Draws each table of a chart with Chart.js. Tooltips show the cells of the table, and clicks follow its links.
"use strict";

const SECOND = 1000, MINUTE = 60 * SECOND, HOUR = 60 * MINUTE, DAY = 24 * HOUR;
// Round durations for the ticks of an axis.
const SPANS = [
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500],
  ...[1, 2, 5, 10, 15, 30].map((n) => n * SECOND), ...[1, 2, 5, 10, 15, 30].map((n) => n * MINUTE),
  ...[1, 2, 3, 6, 12].map((n) => n * HOUR), ...[1, 2, 5, 10, 30, 60, 120].map((n) => n * DAY),
];
const spanOf = (length, parts) => SPANS.find((span) => length / span <= parts) ?? SPANS.at(-1);
const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
const short = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });
// Writes the ticks of an axis by its unit, from a value and the distance of two ticks.
const UNITS = {
  count: (value, step) => short(value, step < 1 ? 2 : 0),
  money: (nano, step) => {
    const digits = Math.max(0, Math.ceil(-Math.log10(step / 1e9) - 1e-9));
    return "$" + (nano / 1e9).toLocaleString("en", { minimumFractionDigits: digits && Math.max(digits, 2), maximumFractionDigits: Math.max(digits, 2) });
  },
  duration: (ms) =>
    ms < SECOND ? `${short(ms, 1)} ms` : ms < MINUTE ? `${short(ms / SECOND, 1)} s` :
    ms < HOUR ? `${short(ms / MINUTE, 1)} min` : ms < 2 * DAY ? `${short(ms / HOUR, 1)} h` : `${short(ms / DAY, 1)} d`,
};
// The least maximum of an axis; that of money applies only if nothing was spent.
const LEAST = { count: 1, money: 1e7, duration: SECOND };
// The least width of a bar, in pixels.
const BAR = 4;
const LOG = new Set(new URL(location).searchParams.get("log")?.split(","));
const drawn = new Map();

document.addEventListener("DOMContentLoaded", () => {
  if (!globalThis.Chart) { root.classList.remove("scripts"); return; }
  Object.assign(Chart.defaults, { animation: false, maintainAspectRatio: false });
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  drawAll(document);
  document.addEventListener("renewed", (event) => drawAll(event.target));
  const recolour = () => { for (const chart of drawn.values()) chart.update("none"); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  new MutationObserver(recolour).observe(root, { attributeFilter: ["data-theme"] });
});

function drawAll(part) {
  for (const [canvas, chart] of drawn) if (!canvas.isConnected) { chart.destroy(); drawn.delete(canvas); }
  for (const figure of part.querySelectorAll(".chart:not(.drawn)")) {
    const canvas = figure.querySelector("canvas"), rows = [...figure.querySelectorAll("tbody tr")];
    const log = LOG.has(figure.id);
    const chart = new Chart(canvas, configOf(figure, rows, log));
    drawn.set(canvas, chart);
    pointing(figure, chart, rows);
    const button = figure.querySelector("[data-log]");
    button.setAttribute("aria-pressed", String(log));
    // The URL contains the complete state of a page, also for links that the server writes.
    button.addEventListener("click", () => {
      if (!LOG.delete(figure.id)) LOG.add(figure.id);
      go({ log: [...LOG].join(",") }, figure.id);
    });
    figure.querySelector("details").open = false;
    figure.classList.add("drawn");
  }
}

function configOf(figure, rows, log) {
  const { unit, start, end } = figure.dataset;
  const datasets = [...figure.querySelectorAll("thead th")].slice(1).map((head, index) => {
    const of = head.dataset, data = rows.map((row) => {
      const { value } = row.cells[index + 1].dataset;
      // A zero has no bar, which would take up room in a stack.
      return { x: Number(row.dataset.at), y: value === undefined || of.style === "bars" && !Number(value) ? null : Number(value) };
    });
    const lone = ({ dataIndex: at }) => data[at - 1]?.y == null && data[at + 1]?.y == null;
    const its = () => colour(of.colour);
    return of.style === "bars" ?
      // Small bars stay visible next to large ones.
      { type: "bar", label: head.textContent, data, minBarLength: 2,
        barThickness: ({ chart }) => Math.max(BAR, 0.9 * (chart.chartArea?.width ?? 0) / rows.length),
        backgroundColor: its } :
      { type: "line", label: head.textContent, data, borderWidth: of.style === "thin" ? 1 : 2, borderColor: its, backgroundColor: () => its() + "26",
        pointBackgroundColor: its, pointRadius: (point) => of.style !== "thin" && lone(point) ? 3 : 0, pointHoverRadius: 4,
        fill: of.style === "between" ? difference() : of.style === "area", borderDash: of.style === "dashed" ? [6, 4] : [], spanGaps: false };
  });
  // A line is not stacked on bars.
  const stacked = datasets.some((one) => one.type === "bar") && !log;
  const tops = rows.map((_, at) => Math.max(...datasets.map((one) => one.data[at].y ?? 0)));
  const least = unit === "money" && tops.some((top) => top > 0) ? 0 : LEAST[unit];
  const highest = Math.max(least, ...tops);
  const marks = [...figure.querySelectorAll("[data-mark]")].map(({ dataset }) => ({ at: Number(dataset.mark), label: dataset.label }));
  const faint = () => colour("faint"), line = () => colour("line");
  const write = UNITS[unit];
  return {
    data: { datasets },
    options: {
      interaction: { mode: "index", intersect: false },
      scales: {
        x: {
          type: "linear", offset: false, min: Number(start), max: Number(end), stacked,
          grid: { display: false }, border: { color: line },
          afterBuildTicks: (axis) => { axis.ticks = clockTicks(axis.min, axis.max, Math.max(2, Math.floor(axis.width / 85))); },
          ticks: { color: faint, maxRotation: 0, autoSkip: false, callback: (at, _, ticks) => timeOf(at, ticks) },
        },
        y: {
          type: log ? "logarithmic" : "linear", stacked, beginAtZero: true, suggestedMax: least,
          grid: { color: line }, border: { display: false },
          afterBuildTicks: (axis) => { if (log) axis.ticks = powersOfTen(axis.min, axis.max); },
          ticks: {
            color: faint, maxTicksLimit: 6, precision: unit === "count" ? 0 : undefined,
            stepSize: unit === "duration" && !log ? spanOf(highest, 4) : undefined,
            callback: (value, at, ticks) =>
              write(value, log ? value : ticks.length > 1 ? ticks[1].value - ticks[0].value : value || 1),
          },
        },
      },
      plugins: {
        legend: { display: false },
        tooltip: {
          callbacks: {
            title: ([first]) => first ? rows[first.dataIndex].cells[0].textContent + " UTC" : "",
            label: (item) => {
              const cell = rows[item.dataIndex].cells[item.datasetIndex + 1];
              return ` ${item.dataset.label}: ${cell.title || cell.textContent}`;
            },
            labelColor: ({ datasetIndex: index }) => {
              const its = colour(figure.querySelectorAll("thead th")[index + 1].dataset.colour);
              return { borderColor: its, backgroundColor: its };
            },
          },
        },
      },
    },
    plugins: [{ id: "chosen", afterDraw: drawChosen }, { id: "marks", afterDatasetsDraw: (chart) => drawMarks(chart, marks) }],
  };
}

// The area between a line and the one before it.
function difference() {
  return { target: "-1", get above() { return colour("bad") + "40"; }, get below() { return colour("good") + "40"; } };
}

function clockTicks(from, to, most) {
  const span = spanOf(to - from, most), ticks = [];
  for (let at = Math.ceil(from / span) * span; at <= to; at += span) ticks.push({ value: at });
  return ticks;
}

function powersOfTen(from, to) {
  const ticks = [], close = to / from < 100;
  for (let power = 10 ** Math.floor(Math.log10(from)); power <= to; power *= 10)
    for (const times of close ? [1, 2, 5] : [1]) ticks.push({ value: power * times });
  return ticks.filter(({ value }) => value >= from && value <= to);
}

function timeOf(at, ticks) {
  const step = ticks.length > 1 ? ticks[1].value - ticks[0].value : MINUTE;
  if (at % DAY === 0) return new Date(at).toLocaleDateString("en", { month: "short", day: "numeric", timeZone: "UTC" });
  return new Date(at).toISOString().slice(11, step < MINUTE ? 19 : 16);
}

// Draws a vertical line at each event, with its label where it covers no other one.
function drawMarks(chart, marks) {
  const { ctx, chartArea: { top, bottom, left, right }, scales: { x } } = chart;
  let free = left;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = colour("front");
  ctx.font = `11px ${Chart.defaults.font.family}`;
  ctx.textBaseline = "top";
  for (const { at, label } of marks) {
    const at_x = x.getPixelForValue(at), width = ctx.measureText(label).width;
    ctx.setLineDash([2, 3]);
    ctx.beginPath(); ctx.moveTo(at_x, top); ctx.lineTo(at_x, bottom); ctx.stroke();
    ctx.beginPath(); ctx.moveTo(at_x - 4, top - 5); ctx.lineTo(at_x + 4, top - 5); ctx.lineTo(at_x, top); ctx.fill();
    const from = Math.min(at_x + 4, right - width);
    if (from < free) continue;
    ctx.globalAlpha = 0.85;
    ctx.fillStyle = colour("card"); ctx.fillRect(from - 1, top, width + 2, 12);
    ctx.globalAlpha = 1;
    ctx.fillStyle = colour("front"); ctx.fillText(label, from, top);
    free = from + width + 8;
  }
  ctx.restore();
}

// Draws the time range that the pointer is selecting.
function drawChosen(chart) {
  if (!chart.chosen) return;
  const { ctx, chartArea: { top, bottom } } = chart, [left, right] = chart.chosen;
  ctx.save();
  ctx.fillStyle = colour("accent") + "40";
  ctx.fillRect(left, top, right - left, bottom - top);
  ctx.restore();
}

// A drag selects a time range for the whole page; a click leads to the executions of a moment and a series. On the
// keyboard, arrows move and Enter leads there; the time range has fields of its own.
function pointing(figure, chart, rows) {
  const canvas = chart.canvas, zooms = "zooms" in figure.dataset, DRAG = 6;
  let began = null, tapped = null;
  const follow = (at, series) => {
    const link = rows[at]?.querySelector("a");
    if (!link) return;
    const to = new URL(link.href), head = figure.querySelectorAll("thead th")[series + 1];
    for (const [name, value] of new URLSearchParams(head?.dataset.filters)) to.searchParams.set(name, value);
    location.assign(to);
  };
  const within = (x) => Math.min(Math.max(x, chart.chartArea.left), chart.chartArea.right);
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    began = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (began === null || !zooms || Math.abs(event.offsetX - began) < DRAG) return;
    chart.chosen = [within(began), within(event.offsetX)].sort((a, b) => a - b);
    chart.draw();
  });
  const cancel = () => { began = null; chart.chosen = null; chart.draw(); };
  canvas.addEventListener("pointercancel", cancel);
  canvas.addEventListener("pointerup", (event) => {
    if (began === null) return;
    const chosen = chart.chosen;
    cancel();
    if (chosen) { zoom(chart, chosen, rows); return; }
    const found = chart.getElementsAtEventForMode(event, "nearest", { axis: "xy", intersect: chart.options.scales.x.stacked }, true);
    const [at] = chart.getElementsAtEventForMode(event, "index", { intersect: false }, true);
    if (!at) return;
    // On a touch screen, the first touch shows the tooltip and the second follows the link.
    const again = event.pointerType === "mouse" || tapped === at.index;
    tapped = at.index;
    if (again) follow(at.index, found[0]?.datasetIndex ?? -1);
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { cancel(); return; }
    const active = chart.getActiveElements()[0]?.index;
    if (event.key === "Enter") { follow(active, -1); return; }
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const to = active === undefined ? rows.length - 1 : active + (event.key === "ArrowLeft" ? -1 : 1);
    const at = Math.min(Math.max(to, 0), rows.length - 1);
    const elements = chart.data.datasets.map((_, datasetIndex) => ({ datasetIndex, index: at }));
    chart.setActiveElements(elements);
    chart.tooltip.setActiveElements(elements, { x: 0, y: 0 });
    chart.update("none");
  });
}

// Selects whole steps, so that the page shows the same columns, larger.
function zoom(chart, chosen, rows) {
  const { min, max } = chart.scales.x, step = (max - min) / rows.length;
  const [first, last] = chosen.map((x) => Math.floor((chart.scales.x.getValueForPixel(x) - min) / step));
  const time = (index) => new Date(min + index * step).toISOString().slice(0, 19) + "Z";
  go({ from: time(first), to: time(Math.min(last + 1, rows.length)), window: "" });
}

// Opens the same page with changed parameters; empty ones are omitted.
function go(values, id = "") {
  const to = new URL(location);
  for (const name of ["after", "before"]) to.searchParams.delete(name);
  for (const [name, value] of Object.entries(values)) if (value) to.searchParams.set(name, value); else to.searchParams.delete(name);
  to.hash = id;
  location.assign(to);
}
