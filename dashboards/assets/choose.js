// Choose: looks up the ranking that the form asks for. Nothing is ranked here.
"use strict";

const UNITS = { MiB: 2 ** 20, GiB: 2 ** 30 };
const LINK_OF_ONE_NODE = "within the node";

function mebibytes(bytes) {
  const mib = bytes / 2 ** 20;
  return mib >= 10000 ? `${shown(mib / 1024)} GiB` : `${shown(mib)} MiB`;
}

function choosePage(study) {
  const data = study.choose;
  const page = element("div");
  const field = (name, control) => element("label", {}, element("span", {}, name), control);
  const devices = element("select", { id: "devices" });
  const memory = element("input", { id: "memory", type: "number", min: "0", step: "any", inputmode: "decimal" });
  const unit = element("select", { id: "memory-unit", "aria-label": "Unit of memory" }, element("option", {}, "MiB"), element("option", {}, "GiB"));
  const nodes = element("select", { id: "nodes" });
  const link = element("select", { id: "link" });
  page.append(
    element(
      "div",
      { class: "form" },
      field("Devices", devices),
      field("Memory of each", element("div", { class: "memory" }, memory, unit)),
      field("Nodes", nodes),
      field("Link between nodes", link),
    ),
  );
  const result = element("div", { id: "choices" });
  page.append(result);
  const large = data.memory_mib >= 10240;
  unit.value = large ? "GiB" : "MiB";
  memory.value = large ? Math.ceil(data.memory_mib / 1024) : data.memory_mib;

  const options = (select, values) => {
    const before = select.value;
    select.replaceChildren(...values.map((value) => element("option", {}, String(value))));
    if (values.map(String).includes(before)) select.value = before;
    select.disabled = values.length < 2;
  };
  const unique = (values) => [...new Set(values)];
  const update = (changed) => {
    const ofDevices = data.places.filter((place) => String(place.devices) === devices.value);
    if (changed === "devices") options(nodes, unique(ofDevices.map((place) => place.nodes)));
    const ofNodes = ofDevices.filter((place) => String(place.nodes) === nodes.value);
    if (changed !== "link") options(link, unique(ofNodes.map((place) => place.link || LINK_OF_ONE_NODE)));
    const place = ofNodes.find((one) => (one.link || LINK_OF_ONE_NODE) === link.value);
    const bytes = (Number(memory.value) || 0) * UNITS[unit.value];
    if (place) showRanking(result, data, place, bytes);
  };
  options(devices, unique(data.places.map((place) => place.devices)));
  const measured = data.places.filter((place) => place.candidates.some((one) => one.speed !== null));
  const counts = (measured.length ? measured : data.places).map((place) => place.devices);
  devices.value = String(counts.find((count) => count > 1) || counts[0] || "");
  for (const select of [devices, nodes, link]) select.addEventListener("change", () => { update(select.id); drawFigures(); });
  memory.addEventListener("input", () => { update("link"); drawFigures(); });
  unit.addEventListener("change", () => { update("link"); drawFigures(); });
  update("devices");
  return page;
}

function showRanking(result, data, place, bytes) {
  let interval = 0;
  while (interval < place.thresholds.length && place.thresholds[interval] <= bytes) interval += 1;
  const fits = (index) => place.candidates[index].state === "too large" && place.candidates[index].peak <= bytes;
  const fitting = place.bySpeed.filter(fits);
  const ranking = [...fitting, ...place.bySize.filter((index) => !fits(index))].map((index, position) => {
    const one = place.candidates[index];
    const isRanked = position < fitting.length && one.speed !== null; // what has no time stands behind the others
    const [, why] = one.whys.findLast(([from]) => from <= interval);
    return { ...one, state: position < fitting.length ? "fits" : one.state, rank: isRanked ? position + 1 : null, why: place.reasons[why] };
  });
  result.replaceChildren(answerElement(ranking, data.unit), ...scatter(ranking, bytes, data.unit), rankingElement(ranking, data.unit));
}

function parityBadge(one) {
  if (one.same === null) return element("span", { class: "badge" }, one.basis === "measured" ? "not held" : one.basis);
  if (one.same && one.otherWork !== null) return element("span", { class: "badge" }, "same model, other work");
  return element("span", { class: `badge ${one.same ? "ok" : "bad"}` }, one.same ? "same model" : "another model");
}

function answerElement(ranking, unit) {
  const best = ranking.find((one) => one.state === "fits");
  if (!best) {
    return element(
      "div",
      { class: "answer" },
      element("div", { class: "best" }, "Nothing fits"),
      element("p", { class: "quiet" }, nearest(ranking)),
    );
  }
  const facts = element("div", { class: "facts" });
  const fact = (value, words) => facts.append(element("span", {}, element("b", {}, value), ` ${words}`));
  if (best.speed !== null) fact(shown(best.speed), `${unit}/s`);
  fact(mebibytes(best.peak), best.memoryBasis === "predicted" ? "a device, predicted" : "a device");
  if (best.exposed !== null) fact(`${Math.round(100 * best.exposed)} %`, "exposed communication");
  if (best.sent !== null) fact(mebibytes(best.sent), "sent a step");
  facts.append(parityBadge(best));
  return element(
    "div",
    { class: "answer" },
    element("div", { class: "best" }, mark(best.mark, best.colour), best.label),
    facts,
    element("p", { class: "why" }, best.why),
  );
}

function nearest(ranking) {
  const smallest = ranking.find((one) => one.state === "too large");
  return smallest ? `The smallest, ${smallest.label}, needs ${mebibytes(smallest.peak)} on a device.` : "Nothing was measured or foreseen here.";
}

/** Memory against speed: the Pareto front as a line, a device's memory as another. */
function scatter(ranking, bytes, unit) {
  const timed = ranking.filter((one) => one.speed !== null && one.peak !== null);
  if (timed.length < 2) return [];
  const fits = (one) => one.state === "fits";
  const most = Math.max(...timed.map((one) => one.peak / 2 ** 20));
  const front = timed.filter((one) => one.front).sort((a, b) => a.peak - b.peak);
  const limit = bytes / 2 ** 20;
  const least = Math.min(...timed.map((one) => one.peak / 2 ** 20));
  const right = Math.max(most * 1.04, Math.min(limit * 1.04, most * 1.3));
  // From zero, unless all of it would lie in a corner.
  const left = least > 0.6 * most ? Math.max(0, Math.min(least, limit) - 0.25 * (right - least)) : 0;
  const speeds = timed.map((one) => one.speed);
  const bottom = Math.min(...speeds) > 0.6 * Math.max(...speeds) ? Math.min(...speeds) * 0.93 : 0;
  const trace = {
    type: "scatter",
    mode: "markers",
    x: timed.map((one) => one.peak / 2 ** 20),
    y: timed.map((one) => one.speed),
    marker: {
      size: timed.map((one) => (one.front ? 12 : 9)),
      symbol: timed.map((one) => (fits(one) ? one.mark : `${one.mark}-open`)),
      color: timed.map((one) => (fits(one) ? one.colour : "@faint")),
      opacity: 1,
    },
    text: timed.map((one) => escaped(`${one.label}\n${one.why}`).replace(/(.{1,60})(\s|$)/g, "$1<br>")),
    hovertemplate: `%{text}%{x:.4~g} MiB, %{y:.4~g} ${unit}/s<extra></extra>`,
  };
  const line = {
    type: "scatter",
    mode: "lines",
    x: front.map((one) => one.peak / 2 ** 20),
    y: front.map((one) => one.speed),
    line: { color: "@faint", width: 1.5, shape: "hv", dash: "dot" },
    hoverinfo: "skip",
  };
  // The fastest that fit come first: where there is no room for all names, it is theirs.
  const named = [...front].sort((a, b) => fits(b) - fits(a) || b.speed - a.speed);
  const names = named.map((one) => ({ x: one.peak / 2 ** 20, y: one.speed, text: one.label, colour: fits(one) ? one.colour : "@faint" }));
  const annotations = [];
  const shapes = [];
  if (limit >= left && limit <= right) {
    shapes.push({ type: "line", x0: limit, x1: limit, yref: "paper", y0: 0, y1: 1, line: { color: "@bad", width: 1.5 } });
    const side = limit - left < 0.4 * (right - left) ? "left" : "right";
    annotations.push({ x: limit, yref: "paper", y: 1, text: "memory of a device", showarrow: false, xanchor: side, yanchor: "bottom", font: { color: "@bad", size: 12 } });
  }
  const block = {
    kind: "figure",
    title: "Memory and speed",
    note: "Up and to the left is better. On the dotted front nothing else is both faster and smaller; hollow marks do not fit, do other work, or train another model.",
    traces: [line, trace],
    names,
    layout: {
      xaxis: { title: "peak memory of a device, MiB", range: [left, right] },
      yaxis: { title: `${unit}/s`, range: [bottom, bottom + 1.12 * (Math.max(...speeds) - bottom)], tickformat: "~s" },
      shapes,
      annotations,
    },
    height: 380,
  };
  const made = figureElement({ ...block });
  made.querySelector(".legend").replaceWith(strategyLegend(timed));
  return [made];
}

function strategyLegend(candidates) {
  const legend = element("div", { class: "legend" });
  const colours = new Map(candidates.map((one) => [one.strategy, one.colour]));
  for (const [strategy, colour] of colours) legend.append(element("span", {}, mark("circle", colour), strategy.replaceAll("_", " ")));
  const marks = new Map(candidates.map((one) => [one.label.split(".")[0], one.mark]));
  for (const [family, shape] of marks) legend.append(element("span", {}, mark(shape, "@quiet"), family));
  return legend;
}

const RANKING_COLUMNS = [
  { key: "rank", title: "", numeric: true, value: (one, position) => position },
  { key: "label", title: "strategy, and why", numeric: false, value: (one) => one.label },
  { key: "speed", title: "speed", numeric: true, value: (one) => one.speed },
  { key: "peak", title: "peak", unit: "MiB", numeric: true, value: (one) => one.peak },
  { key: "exposed", title: "exposed", unit: "%", numeric: true, value: (one) => one.exposed },
  { key: "sent", title: "sent", unit: "MiB a step", numeric: true, value: (one) => one.sent },
  { key: "parity", title: "parity", numeric: false, value: (one) => (one.same === null ? null : Number(one.same)) },
];

function rankingElement(ranking, unit) {
  const fastest = Math.max(0, ...ranking.filter((one) => one.state === "fits").map((one) => one.speed || 0));
  const head = element("tr");
  const body = element("tbody");
  const rows = ranking.map((one, position) => {
    const tr = element("tr", { class: one.state !== "fits" ? "greyed" : one.rank === 1 ? "first" : null, "data-state": one.state });
    const basis = one.basis === "measured" ? null : element("span", { class: "badge" }, one.basis === "predicted" ? "predicted" : "time not measured here");
    const name = element("td", { class: "words" }, mark(one.mark, one.colour), element("span", { class: "name" }, one.label), " ", basis, element("div", { class: "why" }, one.why));
    const number = (key, title, text, bar, under) => cellElement({ text, under, value: one[key], ...(bar === undefined ? {} : { bar, colour: one.colour }) }, { numeric: true }, title);
    tr.append(
      element("td", { class: "rank" }, one.rank === null ? "" : String(one.rank)),
      name,
      number("speed", `${unit}/s`, one.speed === null ? "-" : shown(one.speed), one.speed === null || one.state !== "fits" ? undefined : one.speed / fastest),
      number("peak", "peak MiB", one.peak === null ? "-" : shown(one.peak / 2 ** 20), undefined, one.peak === null || one.memoryBasis === "measured" ? "" : one.memoryBasis),
      number("exposed", "exposed %", one.exposed === null ? "-" : String(Math.round(100 * one.exposed))),
      number("sent", "sent MiB", one.sent === null ? "-" : shown(one.sent / 2 ** 20)),
      element("td", { class: "words", "data-label": "parity" }, parityBadge(one)),
    );
    return { tr, row: { cells: RANKING_COLUMNS.map((column) => ({ value: column.value(one, position) })) } };
  });
  RANKING_COLUMNS.forEach((column, index) => {
    const title = column.key === "speed" ? `${unit}/s` : column.title;
    const th = element("th", { scope: "col", tabindex: "0", class: column.key === "rank" ? "rank" : column.numeric ? null : "words" }, title, column.unit ? element("span", { class: "unit" }, column.unit) : null);
    sortable(th, head, () => sortRows(rows, body, index, th));
    head.append(th);
  });
  body.append(...rows.map(({ tr }) => tr));
  return element("div", { class: "table ranking" }, element("table", { id: "ranking" }, element("thead", {}, head), body));
}
