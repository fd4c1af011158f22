"use strict";
// Draws the samples of the cell that is chosen, for each section that has some. The file holds them; nothing is fetched.
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const BINS = 150;
// Rows of our variants that are drawn unasked: the panel stays over the map, which needs the room.
const LEADERS = 3;

function unpacked(step, text) {
  // As report/panels.py packs them: pairs of (steps from the value before, how often it comes again).
  const numbers = [];
  let value = 0, shift = 0;
  for (const letter of text) {
    const digit = DIGITS.indexOf(letter);
    value += (digit & 31) * 2 ** shift;
    shift += 5;
    if (!(digit & 32)) { numbers.push(value); value = shift = 0; }
  }
  const samples = [];
  let at = 0;
  for (let i = 0; i < numbers.length; i += 2) {
    at += numbers[i];
    for (let n = 0; n <= numbers[i + 1]; n++) samples.push(at * step / 1000);
  }
  return samples;
}

function quantile(sorted, share) {
  const place = share * (sorted.length - 1), below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}

const shown = (us) => us < 100 ? us.toFixed(3) : us < 1000 ? us.toFixed(2) : us.toFixed(1);

function element(parent, name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function drawing(parent, name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function rowsOf(data, key) {
  return data.cells[key].map(([name, role, marks, verified, step, text]) => {
    const us = unpacked(step, text);
    const [q1, median, q3] = [0.25, 0.5, 0.75].map((share) => quantile(us, share));
    const mean = us.reduce((sum, x) => sum + x, 0) / us.length;
    return { name: data.names[name], role, marks, verified, us, q1, median, q3, mean };
  });
}

function scaleOf(rows) {
  // Far outliers are counted at the edge instead of squeezing all others.
  const low = Math.min(...rows.map((r) => r.us[0]));
  const reach = (r) => Math.min(r.us[r.us.length - 1], r.q3 + 4 * (r.q3 - r.q1) + 0.01 * r.median);
  const high = Math.max(...rows.map(reach), low * 1.001);
  const log = high > 4 * low;
  const scale = log ? Math.log : (x) => x;
  return {
    words: `${shown(low)} to ${shown(high)} us${log ? ", log" : ""}`,
    place: (us) => (scale(us) - scale(low)) / (scale(high) - scale(low)),
  };
}

function draw(plot, data, key, own, all) {
  const every = rowsOf(data, key);
  const rows = all ? every : every.filter((r, i) => i < LEADERS || r.role !== "decode" || r.marks.length);
  const common = scaleOf(every);
  plot.replaceChildren();
  const table = element(element(plot, "div", "", { class: "scroll" }), "table");
  const head = element(element(table, "thead"), "tr");
  element(head, "th", "implementation");
  element(head, "th", own ? "us" : common.words);
  for (const title of ["median", "mean", "quartiles", "samples", "beyond"]) element(head, "th", title, { class: "n" });
  const body = element(table, "tbody");
  for (const r of rows) {
    const line = element(body, "tr", "", { class: r.role });
    const name = element(line, "td");
    element(name, "code", r.name);
    for (const mark of [...(r.role === "decode" ? [] : [r.role]), ...r.marks]) {
      name.append(" ");
      element(name, "span", mark, { class: "mark" });
    }
    if (r.role !== "floor") {
      name.append(" ");
      element(name, "span", r.verified === "ok" ? "verified" : `check: ${r.verified}`, { class: "mark" });
    }
    const { words, place } = own ? scaleOf([r]) : common;
    const counts = new Array(BINS).fill(0);
    let beyond = 0;
    for (const us of r.us) {
      const at = place(us);
      if (at > 1) beyond++;
      else counts[Math.min(BINS - 1, Math.floor(at * BINS))]++;
    }
    const most = Math.max(...counts);
    const cell = element(line, "td", "", { class: "plotted" });
    const svg = drawing(cell, "svg",
      { viewBox: `0 0 ${BINS} 30`, preserveAspectRatio: "none", role: "img", "aria-label": `samples of ${r.name}` });
    counts.forEach((n, i) => {
      if (n) drawing(svg, "rect", { x: i, width: 0.9, y: 30 - 29 * n / most, height: 29 * n / most });
    });
    if (own) element(cell, "small", words);
    const middle = place(r.median) * BINS;
    drawing(svg, "line", { x1: middle, x2: middle, y1: 0, y2: 30 });
    for (const text of [shown(r.median), shown(r.mean), `${shown(r.q1)} to ${shown(r.q3)}`, r.us.length, beyond || "-"]) {
      element(line, "td", String(text), { class: "n" });
    }
  }
}

function sizeOf(key) {
  const [, B, HV, H] = key.split(":");
  return `${B} x ${HV}, H=${H}`;
}

// One cell of a map is reached by Tab, its neighbours by the arrow keys, as in any grid.
function reach(cell) {
  for (const other of cell.closest("table").querySelectorAll("[tabindex]")) other.removeAttribute("tabindex");
  cell.tabIndex = 0;
}

function neighbour(cell, key) {
  if (!cell.matches(".pick")) return null;
  if (key === "Enter" || key === " ") return cell;
  const shift = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
  if (!shift) return null;
  const rows = [...cell.closest("tbody").rows].filter((row) => row.offsetParent);
  let row = rows.indexOf(cell.parentElement), column = cell.cellIndex;
  // Over holes to the next cell that was measured.
  for (;;) {
    row += shift[0];
    column += shift[1];
    const to = rows[row] && rows[row].cells[column];
    if (!to) return null;
    if (to.matches(".pick")) return to;
  }
}

function start(section, data) {
  const box = section.querySelector(".samples");
  if (!box || !data.first) return;
  const [tokens, units] = box.querySelectorAll("select");
  const [own, all] = box.querySelectorAll("input");
  const keys = Object.keys(data.cells);
  const numbers = (list) => [...new Set(list)].sort((a, b) => a - b);
  for (const t of numbers(keys.map((key) => Number(key.split(":")[0])))) element(tokens, "option", String(t));
  function choose(key) {
    const [t, B, HV, H] = key.split(":");
    tokens.value = t;
    units.replaceChildren();
    const here = keys.filter((other) => other.split(":")[0] === t).sort((a, b) => data.units[a] - data.units[b]);
    for (const other of here) element(units, "option", `${data.units[other]} (${sizeOf(other)})`, { value: other });
    units.value = key;
    box.querySelector("output").textContent = `T=${t}, B=${B}, HV=${HV}, H=${H}; a line marks each median`;
    for (const cell of section.querySelectorAll(".picked")) cell.classList.remove("picked");
    for (const cell of section.querySelectorAll(`[data-key="${key}"]`)) cell.classList.add("picked");
    draw(box.querySelector(".plot"), data, key, own.checked, all.checked);
  }
  tokens.addEventListener("change", () => {
    const same = keys.filter((key) => key.split(":")[0] === tokens.value);
    const at = units.value;
    choose(same.find((key) => sizeOf(key) === sizeOf(at)) || same.find((key) => data.units[key] === data.units[at]) || same[0]);
  });
  units.addEventListener("change", () => choose(units.value));
  for (const box of [own, all]) box.addEventListener("change", () => choose(units.value));
  const titles = {};
  for (const cell of section.querySelectorAll("[data-key][title]")) titles[cell.dataset.key] = cell.title;
  for (const cell of section.querySelectorAll("[data-key]")) {
    if (!cell.title) cell.title = titles[cell.dataset.key] || "";
    if (!(cell.dataset.key in data.cells)) continue;
    cell.classList.add("pick");
    cell.addEventListener("click", () => { choose(cell.dataset.key); reach(cell); });
  }
  for (const map of section.querySelectorAll(".map")) {
    const first = map.querySelector("tr:not(.between) .pick") || map.querySelector(".pick");
    if (first) first.tabIndex = 0;
    map.addEventListener("keydown", (event) => {
      const to = neighbour(event.target, event.key);
      if (!to) return;
      event.preventDefault();
      choose(to.dataset.key);
      reach(to);
      to.focus();
    });
  }
  box.hidden = false;
  choose(data.first);
}

for (const [id, data] of Object.entries(JSON.parse(document.getElementById("samples").textContent))) {
  start(document.getElementById(id), data);
}
