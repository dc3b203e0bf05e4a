// The page's behavior beyond links and forms: tables that sort and filter, ages that move, and views that stay current.
const POLL_MS = 5000;
const REREAD_POLLS = 12; // an attempt that ends is recorded beside `latest`, so a live view is also read every minute
const AGES_MS = 5000;
const UNITS = [["d", 86400], ["h", 3600], ["min", 60]];

// Tables. What the reader chose is kept by the table's id, so that it outlives an update of the view.
const chosen = {};

const valueOf = (row, column) => {
  const cell = row.cells[column];
  const text = cell?.dataset.value ?? cell?.textContent.trim() ?? "";
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
};

const inOrder = (a, b) => {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
};

function arrange(table) {
  const { column, isDescending, filter = "" } = chosen[table.id] ?? {};
  const body = table.tBodies[0];
  for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(filter.toLowerCase());
  if (column === undefined) return;
  const known = [...body.rows].map((row) => [valueOf(row, column), row]);
  const [full, empty] = [known.filter(([value]) => value !== ""), known.filter(([value]) => value === "")];
  full.sort(([a], [b]) => (isDescending ? -inOrder(a, b) : inOrder(a, b)));
  body.append(...[...full, ...empty].map(([, row]) => row));
  [...table.tHead.rows[0].cells].forEach((cell, place) => {
    if (place === column) cell.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

function sortable(table) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    if (!cell.textContent.trim() || cell.querySelector("button")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => {
      const before = chosen[table.id] ?? {};
      const isNumber = cell.classList.contains("number"); // numbers begin with the largest
      chosen[table.id] = {
        ...before, column, isDescending: before.column === column ? !before.isDescending : isNumber,
      };
      arrange(table);
    });
  });
}

document.addEventListener("input", ({ target }) => {
  const table = document.getElementById(target.dataset?.filter);
  if (!table) return;
  chosen[table.id] = { ...chosen[table.id], filter: target.value };
  arrange(table);
});

// Ages. The server says how old something is; from then on this clock counts.
function age(seconds) {
  for (const [unit, length] of UNITS) if (seconds >= 2 * length) return `${Math.round(seconds / length)} ${unit}`;
  return `${Math.max(0, Math.round(seconds))} s`;
}

function moveAges() {
  for (const item of document.querySelectorAll("time[data-age]")) {
    item.since ??= performance.now();
    const seconds = Number(item.dataset.age) + (performance.now() - item.since) / 1000;
    if (Number.isFinite(seconds) && seconds >= 0) item.textContent = age(seconds);
  }
}
setInterval(moveAges, AGES_MS);

// Charts. One crosshair for all of them: the values nearest to the step under the pointer.
const SVG = "http://www.w3.org/2000/svg";
const nearest = (steps, step) => {
  let [low, high] = [0, steps.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
};

function cross(step) {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const chart = (figure.read ??= JSON.parse(figure.dataset.chart));
    const share = (step - chart.first) / Math.max(1, chart.last - chart.first);
    const x = chart.left + Math.min(1, Math.max(0, share)) * (chart.right - chart.left);
    const svg = figure.querySelector("svg");
    const line = svg.querySelector(".cross") ?? svg.appendChild(document.createElementNS(SVG, "line"));
    for (const [name, value] of Object.entries({ class: "cross", x1: x, x2: x, y1: 5, y2: svg.viewBox.baseVal.height - 25 })) line.setAttribute(name, value);
    const found = chart.lines.filter(({ steps }) => step >= steps[0] && step <= steps.at(-1));
    const told = found.map(({ label, steps, values }) => {
      const at = nearest(steps, step);
      return `${label ? `${label}: ` : ""}${values[at]} at step ${steps[at]}`;
    });
    figure.querySelector(".values").textContent = told.join("; ");
  }
}

document.addEventListener("pointermove", ({ target, clientX }) => {
  const svg = target.closest?.("figure[data-chart] svg");
  if (!svg) return;
  const figure = svg.closest("figure");
  const chart = (figure.read ??= JSON.parse(figure.dataset.chart));
  const x = new DOMPoint(clientX, 0).matrixTransform(svg.getScreenCTM().inverse()).x;
  const share = Math.min(1, Math.max(0, (x - chart.left) / (chart.right - chart.left)));
  cross(Math.round(chart.first + share * (chart.last - chart.first)));
});

document.addEventListener("change", async ({ target }) => {
  const form = target.closest("#options");
  if (!form) return;
  history.replaceState(null, "", `${form.getAttribute("action")}?${new URLSearchParams(new FormData(form))}`);
  await update();
});

// Makes a view work that has just been shown or updated.
function enhance() {
  for (const table of document.querySelectorAll("table[id]")) {
    sortable(table);
    if (chosen[table.id]) arrange(table);
  }
  for (const input of document.querySelectorAll("input[data-filter]")) {
    input.value = chosen[input.dataset.filter]?.filter ?? input.value;
  }
  moveAges();
}
enhance();

// Finds elements that also exist in an older version of the page, so that the focus can be restored.
const FOCUSABLE = ["a[href]", "button", "input", "select", "summary", "[tabindex]"].map((kind) => `main ${kind}`).join();
const equalTo = (element) => {
  const told = (item) => item.tagName + (item.getAttribute("href") ?? item.getAttribute("aria-label") ?? item.textContent);
  return [...document.querySelectorAll(FOCUSABLE)].filter((item) => told(item) === told(element));
};

async function update() {
  const address = new URL(location.href);
  address.searchParams.set("newest", "1"); // a list that takes long to read is first shown as it was
  const page = await fetch(address).catch(() => null);
  const older = document.getElementById("older");
  if (older && !page?.ok) older.append(" That has failed; reload the page.");
  if (!page || (!page.ok && page.status !== 404)) return; // a store that fails for a moment changes nothing
  if (page.redirected) return location.replace(page.url); // the only run, where there was none yet
  const fresh = new DOMParser().parseFromString(await page.text(), "text/html").getElementById("main");
  if (!fresh) return;
  const focused = document.activeElement?.closest("main *");
  const number = focused ? equalTo(focused).indexOf(focused) : -1;
  const place = window.scrollY;
  const ticked = new Set([...document.querySelectorAll("main input:checked")].map(({ value }) => value));
  document.getElementById("main").replaceChildren(...fresh.childNodes);
  for (const box of document.querySelectorAll("main input[type=checkbox][form]")) box.checked ||= ticked.has(box.value);
  enhance();
  if (number >= 0) equalTo(focused)[number]?.focus({ preventScroll: true });
  window.scrollTo(0, place);
}

if (document.getElementById("older")) void update();

// A live view is updated when `latest` was written again. A view that waits for a first run has no version.
let polls = 0;
setInterval(async () => {
  const live = document.getElementById("live");
  if (!live || document.hidden) return;
  polls += 1;
  if (live.dataset.name !== undefined) {
    const answer = await fetch(`live?${new URLSearchParams({ name: live.dataset.name })}`).catch(() => null);
    if (!answer || !answer.ok) return;
    const { version } = await answer.json();
    const isOld = live.dataset.ends !== undefined && polls % REREAD_POLLS === 0;
    if (String(version) === live.dataset.version && !isOld) return;
  }
  await update();
}, POLL_MS);

// An action: the page asks for confirmation, and its button sends it once. The header proves that it comes from this page.
const outcome = document.getElementById("outcome");
for (const form of document.querySelectorAll("form[data-act]")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    outcome.textContent = "...";
    const say = (found) => {
      outcome.textContent = found.error ?? found.text;
      outcome.className = found.error || found.has_failed ? "error" : "";
    };
    const ask = async (path, more) => {
      const answer = await fetch(path, more).catch(() => null);
      if (answer === null) return { error: "no answer; check the run to see whether it was done" };
      return answer.json().catch(() => ({ error: `the page refused it (${answer.status}); reload its address` }));
    };
    let found = await ask("act", {
      method: "POST", headers: { "X-Raycheck-Act": "1" }, body: new URLSearchParams(new FormData(form)),
    });
    const { id } = found;
    while (id && !found.is_done && !found.error) {
      found = await ask(`progress?${new URLSearchParams({ id })}`);
      say(found);
      if (!found.is_done) await new Promise((go) => setTimeout(go, 500));
    }
    say(found);
    if (found.error) button.disabled = false;
    else if (!found.has_failed) {
      const after = document.getElementById("after");
      [form.hidden, after.hidden] = [true, false];
      after.querySelector("a").focus(); // the button that had it is gone
    }
  });
}
