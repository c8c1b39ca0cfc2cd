// Blocks of a page, built as elements whose text is text.
"use strict";

const SHAPES = {
  circle: "M6 1a5 5 0 1 0 0 10a5 5 0 1 0 0-10z",
  square: "M1.5 1.5h9v9h-9z",
  diamond: "M6 0.5l5.5 5.5l-5.5 5.5l-5.5-5.5z",
  x: "M1 3.5l2.5-2.5 2.5 2.5 2.5-2.5 2.5 2.5-2.5 2.5 2.5 2.5-2.5 2.5-2.5-2.5-2.5 2.5-2.5-2.5 2.5-2.5z",
  "triangle-up": "M6 1l5.4 9.6h-10.8z",
};

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** "@zero_1" as the custom property of that name; a name that has none is quiet. */
function cssColour(name) {
  return `var(--${name.slice(1).replaceAll(" ", "-").replace(/[^\w-]/g, "")}, var(--quiet))`;
}

function mark(shape, colour) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 12 12");
  svg.setAttribute("class", "mark");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", SHAPES[shape] || SHAPES.circle);
  path.style.fill = cssColour(colour);
  svg.append(path);
  return svg;
}

const BUILDERS = {
  text: (block) => element("p", { class: block.quiet ? "quiet" : null }, block.text),
  heading: (block) =>
    element("div", {}, element("h3", {}, block.text), block.note ? element("p", { class: "note" }, block.note) : null),
  missing: (block) => element("div", { class: "missing" }, block.text, element("code", {}, block.command)),
  figure: (block) => figureElement(block),
  table: (block) => tableElement(block),
  bars: (block) => barsElement(block),
  more: (block) => moreElement(block),
};

function buildBlock(block) {
  return BUILDERS[block.kind](block);
}

/** What is there for those who ask for it. */
function moreElement(block) {
  const details = element("details", {}, element("summary", {}, block.text), ...block.blocks.map(buildBlock));
  details.addEventListener("toggle", () => drawFigures());
  return details;
}

function cellElement(cell, column, label) {
  const td = element("td", {
    class: [column.numeric ? null : "words", column.secondary ? "secondary" : null].filter(Boolean).join(" ") || null,
    "data-label": label,
    "data-tip": cell.tip || null,
  });
  const words = [
    cell.badge ? element("span", { class: `badge ${cell.badge}` }, cell.text) : cell.text,
    cell.under ? element("div", { class: "under" }, cell.under) : null,
  ].filter(Boolean);
  const isMarked = cell.mark || (cell.colour && !("bar" in cell));
  if (isMarked) td.append(element("div", { class: "marked" }, mark(cell.mark, cell.colour || "@quiet"), element("div", {}, ...words)));
  else td.append(...words);
  if (typeof cell.bar === "number") {
    const bar = element("div", { class: "inbar" });
    const fill = element("i");
    fill.style.width = `${100 * Math.min(1, cell.bar)}%`;
    fill.style.background = cssColour(cell.colour);
    bar.append(fill);
    if (typeof cell.tick === "number") {
      const tick = element("u");
      tick.style.left = `calc(${100 * Math.min(1, cell.tick)}% - 1px)`;
      bar.append(tick);
    }
    td.append(bar);
  }
  return td;
}

function tableElement(block) {
  const head = element("tr");
  const body = element("tbody");
  const rows = block.rows.map((row) => {
    const tr = element("tr", { class: row.greyed ? "greyed" : null });
    row.cells.forEach((cell, index) => {
      const { title, unit } = block.columns[index];
      tr.append(cellElement(cell, block.columns[index], unit ? `${title}, ${unit}` : title));
    });
    return { row, tr };
  });
  block.columns.forEach((column, index) => {
    const th = element(
      "th",
      {
        scope: "col",
        tabindex: "0",
        class: [column.numeric ? null : "words", column.secondary ? "secondary" : null].filter(Boolean).join(" ") || null,
        "data-tip": column.help || null,
      },
      column.title,
      column.unit ? element("span", { class: "unit" }, column.unit) : null,
    );
    sortable(th, head, () => sortRows(rows, body, index, th));
    head.append(th);
  });
  body.append(...rows.map(({ tr }) => tr));
  const table = element("div", { class: "table" }, element("table", {}, element("thead", {}, head), body));
  return block.title ? element("div", {}, element("h3", {}, block.title), table) : table;
}

function sortable(th, head, sort) {
  const act = () => {
    const before = th.getAttribute("aria-sort");
    for (const other of head.children) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", before === "ascending" ? "descending" : "ascending");
    sort();
  };
  th.addEventListener("click", act);
  th.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      act();
    }
  });
}

/** By value; what is not known stays last either way. */
function sortRows(rows, body, index, th) {
  const sign = th.getAttribute("aria-sort") === "descending" ? -1 : 1;
  const value = (item) => item.row.cells[index].value;
  const sorted = [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
  });
  body.append(...sorted.map(({ tr }) => tr));
}

function shown(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 100) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(size)))));
}

function niceStep(most) {
  const rough = most / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function barsElement(block) {
  const total = (stack) => stack.values.reduce((sum, value) => sum + (value || 0), 0);
  const most = Math.max(1e-9, ...block.rows.flatMap((row) => row.stacks.map((stack) => Math.max(total(stack), stack.peak || 0))));
  const legend = element("div", { class: "legend" });
  for (const part of block.parts) {
    const box = element("span", { class: "box" });
    box.style.background = cssColour(`@${part}`);
    legend.append(element("span", {}, box, part));
  }
  const made = element("div", { class: "bars" }, element("div", { class: "title" }, block.title), legend);
  for (const row of block.rows) {
    const stacks = row.stacks.map((stack) => stackElement(block, row, stack, most));
    const name = element("div", { class: "name" }, mark(row.mark, row.colour), element("span", {}, row.label));
    made.append(element("div", { class: row.greyed ? "row greyed" : "row" }, name, element("div", {}, ...stacks)));
  }
  const ticks = element("div", { class: "ticks" });
  const step = niceStep(most);
  for (let value = 0; value <= most; value += step) {
    const tick = element("span", {}, value === 0 ? `0 ${block.unit}` : shown(value));
    tick.style.left = `${(100 * value) / most}%`;
    ticks.append(tick);
  }
  made.append(element("div", { class: "axis" }, element("span"), ticks));
  return made;
}

function stackElement(block, row, stack, most) {
  const track = element("div", { class: "track" });
  stack.values.forEach((value, index) => {
    if (!value) return;
    const part = element("div", { class: "part", "data-tip": `${row.label}\n${block.parts[index]}, ${stack.name}: ${shown(value)} ${block.unit}` });
    part.style.width = `${(100 * value) / most}%`;
    part.style.background = cssColour(`@${block.parts[index]}`);
    track.append(part);
  });
  if (stack.peak !== null) {
    const tick = element("div", { class: "peak", "data-tip": `${row.label}\npeak, ${stack.name}: ${shown(stack.peak)} ${block.unit}` });
    tick.style.left = `calc(${(100 * stack.peak) / most}% - 1px)`;
    track.append(tick);
  }
  const label = stack.peak === null ? "" : shown(stack.peak);
  return element("div", { class: stack.foreseen ? "stack foreseen" : "stack" }, track, element("span", { class: "total" }, label));
}
