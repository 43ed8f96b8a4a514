// What pages need a script for: times in the reader's zone, charts, questions before what cannot be undone, and choices.
"use strict";

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
const pad = (number, length = 2) => String(number).padStart(length, "0");

function local(at, seconds = true) {
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}`;
  return seconds ? `${day} ${time}:${pad(at.getSeconds())}.${pad(at.getMilliseconds(), 3)}` : `${day} ${time}`;
}

function settle(part) {
  for (const time of part.querySelectorAll("time[datetime]")) time.textContent = local(new Date(time.dateTime));
  for (const field of part.querySelectorAll("[data-own-zone]")) {
    field.value = zone;
    field.removeAttribute("data-own-zone");
  }
  for (const word of part.querySelectorAll("[data-zone]")) word.textContent = zone;
  for (const chart of part.querySelectorAll("[data-chart]:not([data-drawn])")) drawn(chart);
}

function drawn(figure) {
  figure.dataset.drawn = "";
  for (const button of figure.querySelectorAll("[data-window]")) {
    button.addEventListener("click", () => load(figure, button.dataset.window));
  }
  load(figure, figure.querySelector("[data-window]").dataset.window);
}

async function load(figure, span) {
  for (const button of figure.querySelectorAll("[data-window]")) {
    button.setAttribute("aria-pressed", String(button.dataset.window === span));
  }
  const caption = figure.querySelector("figcaption");
  const query = new URLSearchParams({ window: span, topic: figure.dataset.topic });
  try {
    const answer = await fetch(`${figure.dataset.chart}?${query}`, { headers: { "HX-Request": "true" } });
    if (!answer.ok || !answer.headers.get("content-type").includes("json")) throw new Error("it cannot be counted now");
    draw(figure, span, await answer.json());
  } catch (error) {
    caption.textContent = `The load is not known: ${error.message}.`;
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
  figure.querySelector("figcaption").textContent = total
    ? `${about}${total.toLocaleString("en")} come due within ${span}, most from ${local(new Date(told.starts[at] * 1000), false)} on (${most.toLocaleString("en")}).`
      + (told.overdue ? ` ${told.overdue.toLocaleString("en")} are due now.` : "")
    : `Nothing comes due within ${span}.` + (told.overdue ? ` ${told.overdue.toLocaleString("en")} are due now.` : "");
  place.classList.remove("skeleton");
  place.replaceChildren();
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
  const size = () => ({ width: Math.max(240, place.clientWidth), height: 200 });
  const chart = new uPlot({
    ...size(),
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
    axes: [{ ...axis, values: (_, ticks, column, space, step) => ticks.map((at, place) => tick(at, place, step)) }, { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? tick.toLocaleString("en") : "") }],
    series: [{}, { stroke: fill, fill: `${fill}66`, width: 1, points: { show: false }, paths: uPlot.paths.bars({ size: [0.9, 60], align: 1 }) }],
  }, [told.starts, told.counts], place);
  new ResizeObserver(() => { if (place.clientWidth) chart.setSize(size()); }).observe(place);
}

function tick(at, place, step_s) {
  const [day, time] = local(new Date(at * 1000), false).split(" ");
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

htmx.createEventSource = connect;
document.addEventListener("DOMContentLoaded", () => settle(document));
document.addEventListener("visibilitychange", rest);
document.addEventListener("htmx:load", (event) => settle(event.target.parentElement || document));
document.addEventListener("htmx:sseMessage", (event) => {
  settle(event.target);
  document.getElementById("connection").hidden = true;
});
document.addEventListener("htmx:sseOpen", () => { document.getElementById("connection").hidden = true; });
document.addEventListener("htmx:sseError", () => { document.getElementById("connection").hidden = false; });
document.addEventListener("htmx:sendError", () => { document.getElementById("connection").hidden = false; });
document.addEventListener("htmx:configRequest", (event) => {
  if (event.target.hasAttribute("data-with-zone")) event.detail.parameters.zone = zone;
  const pressed = event.detail.triggeringEvent && event.detail.triggeringEvent.submitter;
  if (pressed && pressed.hasAttribute("data-clears-choice")) delete event.detail.parameters.id;
});
document.addEventListener("click", (event) => {
  const asked = event.target.closest("[data-confirm]");
  if (asked && !window.confirm(asked.dataset.confirm)) event.preventDefault();
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
