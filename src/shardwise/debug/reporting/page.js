"use strict";

/* Sorting: the button in a head sorts by its column; again, in the other direction. */
for (const button of document.querySelectorAll("table.data thead button")) {
  button.addEventListener("click", () => sortBy(button.closest("th")));
}

function sortBy(head) {
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const number = head.classList.contains("number");
  const first = number ? "descending" : "ascending", second = number ? "ascending" : "descending";
  const order = head.getAttribute("aria-sort") === first ? second : first;
  const value = (row) => {
    const cell = row.cells[column], given = cell.dataset.value ?? cell.textContent;
    return number ? Number(given) : given;
  };
  const compare = number ? (a, b) => a - b : (a, b) => a.localeCompare(b, "en", { numeric: true });
  const rows = Array.from(body.rows, (row) => [value(row), row]);
  rows.sort((a, b) => (order === "ascending" ? compare(a[0], b[0]) : compare(b[0], a[0])));
  body.append(...rows.map((pair) => pair[1]));
  for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
  head.setAttribute("aria-sort", order);
}

/* Filtering: rows and entries of a section that contain all the words. */
for (const box of document.querySelectorAll("input[data-filters]")) {
  box.addEventListener("input", () => filter(box));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { box.value = ""; filter(box); }
  });
}

function filter(box) {
  const section = document.getElementById(box.dataset.filters);
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const item of section.querySelectorAll("table.data tbody tr, details.entry")) {
    const text = item.textContent.toLowerCase();
    item.hidden = !words.every((word) => text.includes(word));
  }
  count(section);
}

function count(section) {
  const output = section.querySelector("output.count"), words = section.querySelector("input[data-filters]").value.trim();
  const shown = [], all = [];
  for (const item of section.querySelectorAll("table.data tbody tr, details.entry")) {
    if (item.closest("[data-group][hidden]")) continue;
    all.push(item);
    if (!item.hidden) shown.push(item);
  }
  output.textContent = words ? `${shown.length} of ${all.length}` : "";
}

/* Totals by line, module, axis...: one table at a time. */
const groups = Array.from(document.querySelectorAll("input[name=group]"));
function choose() {
  const chosen = groups.find((option) => option.checked);
  if (!chosen) return;
  for (const table of document.querySelectorAll("[data-group]")) table.hidden = table.dataset.group !== chosen.value;
  count(chosen.closest("section"));
}
for (const option of groups) option.addEventListener("change", choose);
choose();

/* A link to an explanation opens it. */
function openTarget() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (!target || !target.matches("details")) return;
  target.hidden = false;
  target.open = true;
  target.querySelector("summary").focus();
}
addEventListener("hashchange", openTarget);
openTarget();

/* The timeline: spans of each rank, in a lane for computing and one for each axis. */
const source = document.getElementById("timeline-data");
if (source) drawTimeline(JSON.parse(source.textContent));

function drawTimeline(data) {
  const NAMES = 118, LANE = 20, GAP = 9, TOP = 24, SPACE = "http://www.w3.org/2000/svg";
  const place = document.getElementById("timeline-drawing"), text = document.getElementById("timeline-text");
  const end = data.end || 1;
  let from = 0, to = end, selected = -1;
  const tops = [];
  let height = TOP;
  data.lanes.forEach((lane, i) => {
    if (i && data.lanes[i - 1].rank !== lane.rank) height += GAP;
    tops.push(height);
    height += LANE;
  });
  const svg = make("svg", { height: height + 6, tabindex: 0, role: "img" });
  svg.setAttribute("aria-label", `Timeline of ${data.lanes.length} lanes and ${data.spans.length} spans`);
  place.append(svg);

  function make(name, attributes, content) {
    const element = document.createElementNS(SPACE, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (content !== undefined) element.textContent = content;
    return element;
  }
  function time(value) {
    if (value >= 1e6) return `${+(value / 1e6).toPrecision(4)} s`;
    return value >= 1e3 ? `${+(value / 1e3).toPrecision(4)} ms` : `${+value.toPrecision(3)} µs`;
  }
  function step(width) {
    const rough = ((to - from) / width) * 110, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  }
  function draw() {
    const width = Math.max(place.clientWidth, 320) - NAMES - 10, scale = width / (to - from);
    const at = (value) => NAMES + (value - from) * scale;
    const parts = [];
    const every = step(width);
    for (let tick = Math.ceil(from / every) * every; tick <= to; tick += every) {
      parts.push(make("line", { x1: at(tick), x2: at(tick), y1: TOP - 5, y2: height, class: "grid" }));
      if (at(tick) + 50 < NAMES + width) parts.push(make("text", { x: at(tick) + 3, y: 14 }, time(tick)));
    }
    data.lanes.forEach((lane, i) => {
      parts.push(make("rect", { x: 0, y: tops[i], width: NAMES + width + 10, height: LANE, class: i % 2 ? "lane odd" : "lane" }));
      const first = !i || data.lanes[i - 1].rank !== lane.rank;
      if (first) parts.push(make("text", { x: 8, y: tops[i] + 14, class: "rank" }, `rank ${lane.rank}`));
      parts.push(make("text", { x: 62, y: tops[i] + 14 }, lane.name));
    });
    const drawn = data.lanes.map(() => -1);
    data.spans.forEach((span, i) => {
      const [lane, start, seconds, name] = span;
      if (start + seconds < from || start > to) return;
      const left = Math.max(at(start), NAMES), right = Math.min(at(start + seconds), NAMES + width);
      if (right - drawn[lane] < 0.4 && i !== selected) return;  // nothing of it would be seen
      drawn[lane] = right;
      const box = { x: left, y: tops[lane] + 3, width: Math.max(right - left, 0.8), height: LANE - 6, rx: 2 };
      const chosen = i === selected ? " selected" : "";
      parts.push(make("rect", { ...box, class: `span ${data.kinds[name]}${chosen}`, "data-span": i }));
    });
    svg.replaceChildren(...parts);
  }
  function tell(i) {
    const [lane, start, seconds, name, detail] = data.spans[i];
    const { rank, name: track } = data.lanes[lane], more = data.details[detail];
    const over = track === "compute" ? "" : ` over ${track}`;
    text.textContent = `Rank ${rank}: ${data.names[name]}${over}, ${time(seconds)} at ${time(start)}${more ? ` — ${more}` : ""}`;
  }
  function zoom(factor, middle = (from + to) / 2) {
    const width = Math.min(end, Math.max((to - from) * factor, end / 1e5));
    const share = (middle - from) / (to - from);
    move(middle - share * width, width);
  }
  function move(start, width = to - from) {
    from = Math.max(0, Math.min(start, end - width));
    to = from + width;
    draw();
  }
  /* For the keyboard: one collective of the first rank after the other. */
  const walk = data.spans.map((span, i) => i)
    .filter((i) => data.lanes[data.spans[i][0]].rank === data.lanes[0].rank && data.lanes[data.spans[i][0]].name !== "compute")
    .sort((a, b) => data.spans[a][1] - data.spans[b][1]);
  function select(by) {
    if (!walk.length) return;
    const next = selected < 0 && by < 0 ? walk.length - 1 : walk.indexOf(selected) + by;
    selected = walk[Math.max(0, Math.min(next, walk.length - 1))];
    const [, start, seconds] = data.spans[selected];
    if (start < from || start + seconds > to) move(start + seconds / 2 - (to - from) / 2);
    draw();
    tell(selected);
  }
  const actions = { in: () => zoom(0.5), out: () => zoom(2), all: () => move(0, end) };
  for (const button of document.querySelectorAll("[data-timeline]")) {
    button.addEventListener("click", actions[button.dataset.timeline]);
  }
  svg.addEventListener("keydown", (event) => {
    const by = (to - from) / 5;
    const keys = { "+": actions.in, "=": actions.in, "-": actions.out, "0": actions.all };
    keys.ArrowLeft = () => move(from - by);
    keys.ArrowRight = () => move(from + by);
    keys.ArrowUp = () => select(-1);
    keys.ArrowDown = () => select(1);
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) { keys[event.key](); event.preventDefault(); }
  });
  svg.addEventListener("pointerover", (event) => {
    if (event.target.dataset && event.target.dataset.span) tell(Number(event.target.dataset.span));
  });
  let grabbed = null;
  svg.addEventListener("pointerdown", (event) => { grabbed = [event.clientX, from]; });
  addEventListener("pointerup", () => { grabbed = null; });
  svg.addEventListener("pointermove", (event) => {
    if (grabbed) move(grabbed[1] - ((event.clientX - grabbed[0]) * (to - from)) / (place.clientWidth - NAMES - 10));
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;  // the wheel alone scrolls the page
    event.preventDefault();
    const share = (event.offsetX - NAMES) / (place.clientWidth - NAMES - 10);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, from + share * (to - from));
  }, { passive: false });
  addEventListener("resize", draw);
  draw();
}
