// What pages need a script for: times in the reader's zone, charts, questions before what cannot be undone, and choices.
"use strict";

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
const pad = (number, length = 2) => String(number).padStart(length, "0");

function shownTime(at, seconds = true) {
  if (inUtc()) return at.toISOString().replace("T", " ").slice(0, seconds ? 23 : 16);
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}`;
  return seconds ? `${day} ${time}:${pad(at.getSeconds())}.${pad(at.getMilliseconds(), 3)}` : `${day} ${time}`;
}

function shownZone() {
  return inUtc() ? "UTC" : zone;
}

function inUtc() {
  return localStorage.getItem("timeline-utc") === "yes";
}

function settle(part) {
  for (const time of part.querySelectorAll("time[datetime]")) time.textContent = shownTime(new Date(time.dateTime));
  for (const field of part.querySelectorAll("[data-own-zone]")) {
    if (field.dataset.ownZone && field.value !== field.dataset.ownZone) continue; // somebody typed another one
    field.value = field.dataset.ownZone = shownZone();
  }
  for (const word of part.querySelectorAll("[data-zone]")) word.textContent = shownZone();
  for (const chart of part.querySelectorAll("[data-chart]:not([data-drawn])")) drawn(chart);
}

const charts = new Map();
const CHART_MS = 60000;

function drawn(figure) {
  figure.dataset.drawn = "";
  for (const button of figure.querySelectorAll("[data-window]")) {
    button.addEventListener("click", () => load(figure, button.dataset.window));
  }
  load(figure, figure.querySelector("[data-window]").dataset.window);
  setInterval(() => {
    if (!document.hidden) load(figure, figure.querySelector("[aria-pressed=true]").dataset.window);
  }, CHART_MS);
}

async function load(figure, span) {
  for (const button of figure.querySelectorAll("[data-window]")) {
    button.setAttribute("aria-pressed", String(button.dataset.window === span));
  }
  const caption = figure.querySelector("figcaption");
  const query = new URLSearchParams({ window: span, topic: figure.dataset.topic });
  const before = charts.get(figure) || {};
  if (before.asked) before.asked.abort();
  const asked = new AbortController();
  charts.set(figure, { ...before, asked });
  try {
    const answer = await fetch(`${figure.dataset.chart}?${query}`, {
      headers: { "HX-Request": "true" }, signal: asked.signal,
    });
    const login = answer.headers.get("HX-Redirect");
    if (login) return window.location.assign(login);
    if (!answer.ok) throw new Error(wordsOf(await answer.text()));
    draw(figure, span, await answer.json());
  } catch (error) {
    if (error.name === "AbortError") return;
    figure.querySelector(".plot").classList.remove("skeleton");
    caption.textContent = `The load is not known. ${error.message}`;
  }
}

function draw(figure, span, told) {
  const place = figure.querySelector(".plot");
  const style = getComputedStyle(document.documentElement);
  const [ink, line, fill] = ["--soft", "--line", "--chart"].map((name) => style.getPropertyValue(name).trim());
  const total = told.counts.reduce((sum, count) => sum + count, 0);
  const most = Math.max(0, ...told.counts);
  const at = told.counts.indexOf(most);
  const about = told.exact ? "" : "about ";
  const of = told.largest ? ` of the ${told.largest} largest topics` : "";
  const due = told.overdue ? ` ${told.overdue.toLocaleString("en")} are due now.` : "";
  figure.querySelector("figcaption").textContent = total
    ? `${about}${total.toLocaleString("en")}${of} come due within ${span}, most from `
      + `${shownTime(new Date(told.starts[at] * 1000), false)} on (${most.toLocaleString("en")}).${due}`
    : `Nothing${of} comes due within ${span}.${due}`;
  const before = charts.get(figure);
  if (before.chart) before.chart.destroy();
  if (before.watched) before.watched.disconnect();
  place.classList.remove("skeleton");
  place.replaceChildren();
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
  const size = () => ({ width: Math.max(240, place.clientWidth), height: 200 });
  const chart = new uPlot({
    ...size(),
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    tzDate: (at) => inUtc() ? uPlot.tzDate(new Date(at * 1000), "Etc/UTC") : new Date(at * 1000),
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
    axes: [
      { ...axis, values: (_, ticks, column, space, step) => ticks.map((at, place) => tick(at, place, step)) },
      { ...axis, size: 70, values: (_, ticks) => ticks.map((at) => Number.isInteger(at) ? at.toLocaleString("en") : "") },
    ],
    series: [{}, {
      stroke: fill, fill: `${fill}66`, width: 1, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.9, 60], align: 1 }),
    }],
  }, [told.starts, told.counts], place);
  const watched = new ResizeObserver(() => { if (place.clientWidth) chart.setSize(size()); });
  watched.observe(place);
  charts.set(figure, { ...before, chart, watched });
}

function tick(at, place, step_s) {
  const [day, time] = shownTime(new Date(at * 1000), false).split(" ");
  if (step_s >= 86400) return day.slice(5);
  return place === 0 || time === "00:00" ? `${time}\n${day}` : time;
}

function counted(form) {
  const chosen = form.querySelectorAll("input[name=id]:checked").length;
  for (const word of form.querySelectorAll("[data-chosen]")) word.textContent = chosen.toLocaleString("en");
  for (const button of form.querySelectorAll("[data-needs-choice]")) button.disabled = !chosen;
}

// A browser has few connections to a site. A page that nobody sees needs none: it gets its values when it is seen again.
const sources = new Map();

function connect(url) {
  const source = new EventSource(url);
  source.addEventListener("login", () => {
    source.close();
    window.location.assign(`/login?${new URLSearchParams({ next: window.location.pathname + window.location.search })}`);
  });
  sources.set(url, source);
  return source;
}

function rest() {
  for (const live of document.querySelectorAll("[data-live]")) {
    if (document.hidden) {
      sources.get(live.getAttribute("sse-connect"))?.close();
    } else {
      const again = live.cloneNode(true);
      live.replaceWith(again);
      htmx.process(again);
    }
  }
}

// What a reader does in a live part stays: the place to which it is scrolled, the link that keys have reached, a choice.
const kept = new Map();

function keep(event) {
  const part = event.target;
  const chosen = window.getSelection();
  if (!chosen.isCollapsed && part.contains(chosen.anchorNode)) {
    event.preventDefault();
    return;
  }
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const index = focused ? [...part.querySelectorAll("a, [tabindex]")].indexOf(focused) : -1;
  kept.set(part, { left: [...part.querySelectorAll(".scroll")].map((one) => one.scrollLeft), href: focused?.href, index });
}

function restore(part) {
  const before = kept.get(part);
  if (!before) return;
  [...part.querySelectorAll(".scroll")].forEach((one, at) => { one.scrollLeft = before.left[at] || 0; });
  if (before.index < 0) return;
  const reachable = [...part.querySelectorAll("a, [tabindex]")];
  (reachable.find((one) => before.href && one.href === before.href) || reachable[before.index])?.focus();
}

function connection(lost) {
  document.getElementById("connection").hidden = !lost;
}

// What asks for the next part of a list or of some work. If that fails, it stays, and says why.
function asking(event) {
  return event.detail.requestConfig.elt.closest("#work form, #tagged form, tr.loading, tr.more");
}

function failed(event) {
  const part = asking(event);
  if (event.type === "htmx:sendError") connection(true);
  if (!part) return;
  part.querySelector("[data-why]")?.remove();
  const why = document.createElement("span");
  why.dataset.why = "";
  why.setAttribute("role", "alert");
  why.textContent = event.type === "htmx:responseError" ? wordsOf(event.detail.xhr.responseText) : "";
  (part.querySelector("td") || part).append(" ", why);
  if (part.matches("form.step, tr.loading")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Go on from here";
    button.addEventListener("click", () => { why.remove(); htmx.trigger(part, "again"); });
    why.append(" ", button);
  }
}

function wordsOf(html) {
  return new DOMParser().parseFromString(html, "text/html").body.textContent.trim();
}

// Keys go on in what takes the place of a button that asked for more.
let goesOn = false;

// Any other error takes the place of what was asked for.
function refused(event) {
  goesOn = event.detail.requestConfig.elt.matches("td > button");
  if (event.detail.xhr.status < 400) return;
  event.detail.shouldSwap = !asking(event);
}

// While steps run, nothing else is begun.
function guard() {
  const letters = document.getElementById("letters");
  if (letters) letters.inert = Boolean(document.querySelector("#work [data-running]"));
}

function stop(form) {
  htmx.trigger(form, "htmx:abort");
  const said = document.createElement("p");
  said.textContent = form.querySelector("p").textContent.replace(/…[^…]*$/, ". It was stopped. The last step may still have been done.");
  form.replaceWith(said);
  guard();
}

htmx.createEventSource = connect;
document.addEventListener("DOMContentLoaded", () => settle(document));
document.addEventListener("visibilitychange", rest);
document.addEventListener("htmx:load", (event) => {
  settle(event.target);
  if (goesOn && event.target.querySelector("a")) {
    event.target.querySelector("a").focus();
    goesOn = false;
  }
});
document.addEventListener("htmx:sseBeforeMessage", keep);
document.addEventListener("htmx:sseMessage", (event) => {
  settle(event.target);
  restore(event.target);
  connection(false);
});
document.addEventListener("htmx:sseOpen", () => connection(false));
document.addEventListener("htmx:sseError", () => connection(true));
document.addEventListener("htmx:beforeSwap", refused);
document.addEventListener("htmx:afterSwap", guard);
document.addEventListener("htmx:sendError", failed);
document.addEventListener("htmx:responseError", failed);
document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful) connection(false);
  if (event.detail.successful && event.target.id === "letters") {
    for (const box of event.target.querySelectorAll("input[type=checkbox]")) box.checked = false;
    counted(event.target);
  }
});
document.addEventListener("htmx:configRequest", (event) => {
  if (event.target.hasAttribute("data-with-zone")) event.detail.parameters.zone = shownZone();
  const pressed = event.detail.triggeringEvent && event.detail.triggeringEvent.submitter;
  if (pressed && pressed.hasAttribute("data-clears-choice")) delete event.detail.parameters.id;
});
document.addEventListener("click", (event) => {
  const asked = event.target.closest("[data-confirm]");
  if (asked && !window.confirm(asked.dataset.confirm)) event.preventDefault();
  const stopped = event.target.closest("[data-stop]");
  if (stopped) stop(stopped.closest("form"));
  if (event.target.closest("[data-zone-switch]")) {
    localStorage.setItem("timeline-utc", inUtc() ? "no" : "yes");
    settle(document);
    for (const figure of charts.keys()) load(figure, figure.querySelector("[aria-pressed=true]").dataset.window);
  }
}, true);
// A form that is on its way is not sent twice.
document.addEventListener("submit", (event) => {
  const pressed = event.submitter;
  if (pressed && !event.defaultPrevented) setTimeout(() => { pressed.disabled = true; });
});
window.addEventListener("pageshow", (event) => {
  if (event.persisted) window.location.reload();
});
document.addEventListener("change", (event) => {
  const form = event.target.closest("#letters");
  if (!form) return;
  if (event.target.matches("[data-choose-all]")) {
    for (const box of form.querySelectorAll("input[name=id]")) box.checked = event.target.checked;
  }
  counted(form);
});
