// The page: tabs, which work is shown, light and dark, tooltips, print.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const tabs = document.getElementById("tabs");
const pages = document.getElementById("pages");
const studies = document.getElementById("study");
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  root.dataset.theme = theme;
  root.style.colorScheme = theme;
}

function slug(title) {
  return title.toLowerCase();
}

function show(name) {
  for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab.dataset.page === name));
  for (const page of pages.children) page.hidden = page.id !== `page-${name}`;
  tabs.querySelector('[aria-selected="true"]').scrollIntoView({ block: "nearest", inline: "center" });
  drawFigures();
}

function showStudy(index) {
  const study = data.studies[index];
  const current = [...tabs.children].find((tab) => tab.getAttribute("aria-selected") === "true");
  pages.replaceChildren(
    ...data.pages.map((title, number) => {
      const content = number === 0 ? [choosePage(study)] : study.pages[number - 1].map(buildBlock);
      return element("section", { id: `page-${slug(title)}`, role: "tabpanel", "aria-label": title }, element("h2", {}, title), ...content);
    }),
  );
  show(current ? current.dataset.page : slug(data.pages[0]));
}

function start() {
  setTheme(systemIsDark.matches ? "dark" : "light");
  systemIsDark.addEventListener("change", () => {
    setTheme(systemIsDark.matches ? "dark" : "light");
    drawFigures({ again: true });
  });
  document.getElementById("theme").addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    drawFigures({ again: true });
  });
  for (const title of data.pages) {
    const tab = element("button", { type: "button", role: "tab", "data-page": slug(title), "aria-controls": `page-${slug(title)}` }, title);
    tab.addEventListener("click", () => {
      show(slug(title));
      try {
        history.replaceState(null, "", `#${slug(title)}`);
      } catch {
        // A frame that keeps pages from naming themselves.
      }
    });
    tabs.append(tab);
  }
  const machines = new Set(data.studies.map((study) => study.machine));
  data.studies.forEach((study, index) => {
    const where = machines.size > 1 ? ` (machine ${study.machine})` : "";
    studies.append(element("option", { value: index }, study.title + where));
  });
  studies.addEventListener("change", () => showStudy(Number(studies.value)));
  document.getElementById("source").append(...data.source.map((line) => element("div", {}, line)));
  const asked = location.hash.slice(1);
  if (data.studies.length) showStudy(0);
  if (data.pages.map(slug).includes(asked)) show(asked);
}

/** Tooltips that work for a finger, too. */
function tips() {
  const tip = document.getElementById("tip");
  const place = (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    tip.hidden = !target;
    if (!target) return;
    tip.textContent = target.dataset.tip;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(innerWidth - width - 8, event.clientX + 12))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
  };
  document.addEventListener("pointermove", place);
  document.addEventListener("pointerdown", place);
}

/** On paper everything is there, in light colours, as wide as a page. */
function printing() {
  let theme = null;
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme;
    setTheme("light");
    for (const details of document.querySelectorAll("details")) details.open = true;
    drawFigures({ again: true, width: 680 });
  });
  addEventListener("afterprint", () => {
    setTheme(theme || "light");
    drawFigures({ again: true });
  });
}

let resized = null;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => drawFigures(), 80);
});
tips();
printing();
start();
