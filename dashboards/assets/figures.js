// Figures: Plotly's, in the page's own type and colours, drawn when they are first seen and again when those change.
"use strict";

const MOST_LETTERS = 36; // of a name at the end of a line
const LETTER = 6.6; // as wide as one is, and as high as a line, in pixels at the size of names
const LINE = 15;
const figures = new Set(); // every one on the page: its element, its block and whether it is drawn

function colourOf(name) {
  const key = name.slice(1).replaceAll(" ", "-");
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(`--${key}`).trim() || style.getPropertyValue("--quiet").trim();
}

/** The value with every colour's name looked up. */
function coloured(value) {
  if (typeof value === "string") return /^@[\w -]+$/.test(value) ? colourOf(value) : value;
  if (Array.isArray(value)) return value.map(coloured);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item)]));
  }
  return value;
}

function axis(own, narrow) {
  return {
    gridcolor: colourOf("@line"),
    zerolinecolor: colourOf("@line"),
    linecolor: colourOf("@line"),
    tickfont: { color: colourOf("@soft"), size: narrow ? 11 : 12 },
    automargin: true,
    fixedrange: true,
    ...own,
    title: { text: (own && own.title) || "", font: { color: colourOf("@soft"), size: 12 }, standoff: 8 },
  };
}

function layoutOf(block, width) {
  const own = coloured(block.layout);
  const narrow = width < 560;
  const ends = block.traces.some((trace) => trace.label_last) && !narrow;
  const longest = Math.max(0, ...block.traces.map((trace) => (trace.label_last || "").length));
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colourOf("@ink") },
    hoverlabel: { bgcolor: colourOf("@ink"), bordercolor: colourOf("@ink"), font: { color: colourOf("@ground"), size: 12 }, align: "left", namelength: -1 },
    hovermode: "closest",
    showlegend: false,
    margin: { l: 48, r: ends ? 14 + Math.min(MOST_LETTERS, longest) * LETTER : 16, t: 22, b: 40 },
    height: block.height,
    width,
    ...own,
  };
  for (const key of Object.keys(own)) if (/^[xy]axis\d*$/.test(key)) layout[key] = axis(own[key], narrow);
  layout.xaxis = layout.xaxis || axis({}, narrow);
  layout.yaxis = layout.yaxis || axis({}, narrow);
  layout.annotations = [...(own.annotations || []).map((one) => ({ font: { color: colourOf("@soft"), size: 12 }, ...one }))];
  if (ends) layout.annotations.push(...lastLabels(block, layout, block.height));
  if (block.names) layout.annotations.push(...pointNames(block, layout));
  return layout;
}

/** Names beside their points, each where it covers neither a point nor another name; left out where it cannot. */
function pointNames(block, layout) {
  const { l, r, t, b } = layout.margin;
  const [width, height] = [layout.width - l - r, block.height - t - b];
  const [x0, x1] = layout.xaxis.range;
  const [y0, y1] = layout.yaxis.range;
  const place = (x, y) => [((x - x0) / (x1 - x0)) * width, height - ((y - y0) / (y1 - y0)) * height];
  const points = block.traces.filter((trace) => trace.mode === "markers").flatMap((trace) => trace.x.map((x, index) => place(x, trace.y[index])));
  const taken = points.map(([x, y]) => ({ left: x - 6, right: x + 6, top: y - 6, bottom: y + 6 }));
  const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const letters = Math.min(MOST_LETTERS + 8, Math.floor((0.7 * width) / LETTER));
  const made = [];
  for (const name of block.names) {
    const text = name.text.length > letters ? `${name.text.slice(0, letters - 1)}…` : name.text;
    const [x, y] = place(name.x, name.y);
    const ways = [6, -6, 0].flatMap((up) => ["left", "right"].map((side) => ({ up, side })));
    for (const { up, side } of ways) {
      const shift = (side === "left" ? 1 : -1) * (up ? 4 : 11);
      const begin = x + shift - (side === "left" ? 0 : LETTER * text.length);
      const above = up > 0 ? y - up - LINE : up < 0 ? y - up : y - LINE / 2;
      const box = { left: begin, right: begin + LETTER * text.length, top: above, bottom: above + LINE };
      if (box.left < 0 || box.right > width + r || box.top < 0 || box.bottom > height || taken.some((other) => meets(box, other))) continue;
      taken.push(box);
      const yanchor = up > 0 ? "bottom" : up < 0 ? "top" : "middle";
      made.push({ x: name.x, y: name.y, text: escaped(text), showarrow: false, xanchor: side, yanchor, xshift: shift, yshift: up, borderpad: 0, font: { color: coloured(name.colour), size: 12 } });
      break;
    }
  }
  return made;
}

/** The lines' names at their ends, pushed apart where they would lie on each other. */
function lastLabels(block, layout, height) {
  const ends = [];
  for (const trace of block.traces) {
    const last = trace.y.length - 1;
    if (trace.label_last && trace.y[last] !== null) {
      const colour = (trace.line && trace.line.color) || "@ink";
      ends.push({ x: trace.x[last], y: trace.y[last], text: trace.label_last, colour });
    }
  }
  if (!ends.length) return [];
  const top = Math.max(...block.traces.flatMap((trace) => trace.y.filter((y) => y !== null)));
  const gap = (LINE * top * 1.06) / (height - 62);
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, index) => {
    end.at = index ? Math.max(end.y, ends[index - 1].at + gap) : end.y;
  });
  const over = ends[ends.length - 1].at - top * 1.06;
  if (over > 0) for (const end of ends) end.at -= over;
  for (let index = 1; index < ends.length; index++) ends[index].at = Math.max(ends[index].at, ends[index - 1].at + gap);
  return ends.map((end) => ({
    x: 1,
    xref: "paper",
    y: end.at,
    text: escaped(end.text.length > MOST_LETTERS ? `${end.text.slice(0, MOST_LETTERS - 1)}…` : end.text),
    showarrow: false,
    xanchor: "left",
    xshift: 8,
    font: { color: coloured(end.colour), size: 12 },
  }));
}

function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function legendElement(block) {
  const legend = element("div", { class: block.traces.some((trace) => trace.label_last) ? "legend at-ends" : "legend" });
  const seen = new Set();
  for (const trace of block.traces) {
    if (trace.showlegend === false || !trace.name || seen.has(trace.name)) continue;
    seen.add(trace.name);
    const colour = (trace.line && trace.line.color) || (trace.marker && trace.marker.color) || "@quiet";
    let sign;
    if (trace.type === "bar") {
      sign = element("span", { class: "box" });
      sign.style.background = cssColour(colour);
    } else if (trace.marker && trace.marker.symbol) {
      sign = mark(trace.marker.symbol, colour);
    } else {
      sign = element("span", { class: "line" });
      sign.style.borderColor = cssColour(colour);
    }
    legend.append(element("span", {}, sign, trace.name));
  }
  return legend;
}

function figureElement(block) {
  const plot = element("div", { class: "plot" });
  plot.style.height = `${block.height}px`;
  figures.add({ plot, block, drawn: false });
  return element(
    "div",
    { class: "figure" },
    element("div", { class: "title" }, block.title),
    block.note ? element("p", { class: "note" }, block.note) : null,
    block.traces.length > 1 ? legendElement(block) : null,
    plot,
  );
}

/** Draws what can be seen; `width` for all alike, where nothing is laid out yet. */
function drawFigures({ again = false, width = null } = {}) {
  for (const figure of figures) {
    if (!figure.plot.isConnected) {
      figures.delete(figure);
      continue;
    }
    const room = width || figure.plot.clientWidth;
    if (!room || (figure.drawn === room && !again)) continue;
    const traces = coloured(figure.block.traces).map(({ label_last, ...trace }) => trace);
    Plotly.react(figure.plot, traces, layoutOf(figure.block, room), { displayModeBar: false, responsive: false, staticPlot: false });
    figure.drawn = room;
  }
}
