"use strict";
// All runs: a table that follows them, and charts of those that are chosen. What is chosen is in the address, so a link keeps it.
const EVERY_MS = 3000;
const METRICS = ["reward/mean", "eval/accuracy", "rollout/tokens_per_s", "rollout/speedup", "rollout/accepted_length", "policy/entropy"];
const TINTS = ["#2563b8", "#c2413b", "#1a7f4b", "#b7791f", "#8b46b5", "#0f8b8d", "#d0559c", "#6b7480", "#7a8f1e", "#3d4fd1", "#a1603a", "#2fa5d8"];
const drawn = new Map(); // key -> the row's element and its text, so that only what changed is touched
let rows = [], sort = { by: "changed", down: true }, most = 12, extra = "", compared = null, asked = 0;
const chosen = new Set(new URLSearchParams(location.hash.slice(1)).getAll("run"));
const tags = new Map();

/** JSON from `address`; null when it is what was answered before. Throws when there is no good answer. */
async function get(address) {
  const [path] = address.split("?"), known = tags.get(path), tag = known && known.address === address ? known.tag : null;
  const answer = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
  if (answer.status === 304) return null;
  if (!answer.ok) throw new Error((await answer.text()).trim());
  const data = await answer.json();
  tags.set(path, { address, tag: answer.headers.get("ETag") });
  return data;
}

function ago(seconds) {
  const past = Math.max(0, Date.now() / 1000 - seconds);
  if (past < 90) return "now";
  if (past < 5400) return `${Math.round(past / 60)} min ago`;
  return past < 129600 ? `${Math.round(past / 3600)} h ago` : `${Math.round(past / 86400)} days ago`;
}
const tintOf = (key) => TINTS[[...chosen].indexOf(key) % TINTS.length];

function cell(className, label, text) {
  const node = make("td", className, text);
  if (label) node.dataset.label = label;
  return node;
}
function rowNode(row) {
  const node = make("tr"), pick = make("input"), box = cell("choose"), name = cell("run"), state = cell("state");
  pick.type = "checkbox";
  pick.checked = chosen.has(row.key);
  pick.disabled = !pick.checked && chosen.size >= most;
  pick.setAttribute("aria-label", `compare ${row.key}`);
  pick.addEventListener("change", () => choose(row.key, pick.checked));
  box.append(pick);
  const link = make("a", "", row.key);
  link.href = "/run/" + row.key.split("/").map(encodeURIComponent).join("/");
  if (chosen.has(row.key)) { const swatch = make("span", "swatch"); swatch.style.background = tintOf(row.key); name.append(swatch); }
  name.append(link);
  if (row.detail) { const detail = make("span", "detail", row.detail); detail.title = row.detail; name.append(detail); } // whole on its own page
  state.append(make("span", "chip state-" + row.state, row.state));
  if (row.alarms) state.append(make("span", "chip alarm", row.alarms === 1 ? "1 alarm" : `${row.alarms} alarms`));
  const held = has(row.accuracy) ? (row.accuracy_first === row.accuracy ? "" : `${(100 * row.accuracy_first).toFixed(1)} → `) + percent(row.accuracy) : "–";
  node.append(box, name, state, cell("", "step", `${row.step} / ${row.steps}`), cell("", "reward", has(row.reward) ? row.reward.toFixed(3) : "–"),
    cell("", "held-out", held), cell("", "speedup", has(row.speedup) ? row.speedup.toFixed(2) + "×" : "–"),
    cell("", "tokens/s", has(row.tokens_per_s) ? Math.round(row.tokens_per_s).toLocaleString("en") : "–"), cell("", "last step", row.changed ? ago(row.changed) : "–"));
  return node;
}
function drawRows() {
  const wanted = $("filter").value.toLowerCase(), state = $("state").value;
  const value = (row) => row[sort.by] ?? (typeof rows[0]?.[sort.by] === "string" ? "" : -Infinity);
  const shown = rows.filter((row) => row.key.toLowerCase().includes(wanted) && (!state || (state === "alarmed" ? row.alarms > 0 : row.state === state)));
  shown.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.key.localeCompare(b.key)) * (sort.down ? -1 : 1));
  const body = $("rows"), full = chosen.size >= most;
  shown.forEach((row, i) => {
    const text = JSON.stringify([row, chosen.has(row.key) && tintOf(row.key), full, row.changed && ago(row.changed)]), before = drawn.get(row.key);
    let node = before?.node;
    if (!before || before.text !== text) {
      node = rowNode(row);
      if (before) before.node.replaceWith(node);
      drawn.set(row.key, { node, text });
    }
    if (body.children[i] !== node) body.insertBefore(node, body.children[i] || null);
  });
  while (body.children.length > shown.length) body.lastChild.remove();
  $("count").textContent = rows.length === shown.length ? `${rows.length} runs` : `${shown.length} of ${rows.length} runs`;
  $("none").hidden = shown.length > 0;
  $("none").textContent = rows.length ? "No run is called so, in that state." : "There are no runs here yet. They appear when they begin.";
  $("clear").hidden = !chosen.size;
  for (const head of document.querySelectorAll("th[data-sort]")) head.className = head.dataset.sort === sort.by ? (sort.down ? "down" : "up") : "";
}

function choose(key, on) {
  if (on) chosen.add(key); else chosen.delete(key);
  history.replaceState(null, "", chosen.size ? "#" + new URLSearchParams([...chosen].map((run) => ["run", run])) : location.pathname);
  drawRows();
  compare();
}
async function compare() {
  $("comparison").hidden = !chosen.size;
  if (!chosen.size) { compared = null; return; }
  const names = extra ? [...METRICS, extra] : METRICS;
  const query = new URLSearchParams([...[...chosen].map((key) => ["run", key]), ...names.map((name) => ["metric", name])]);
  const mine = ++asked, data = await get("/api/compare?" + query);
  if (data && mine === asked) { compared = data; drawComparison(names); } // an answer that was overtaken is of another choice
}
function drawComparison(names) {
  const axis = $("axis").value, box = $("charts"), failed = compared.runs.filter((run) => run.error);
  $("chosen").textContent = compared.runs.length === 1 ? "One run is chosen; choose more to compare." : `${compared.runs.length} runs` + (failed.length ? `; ${failed[0].error}` : "");
  const there = names.filter((name) => compared.runs.some((run) => run.lines[name]?.step.length));
  for (const name of there) {
    let node = document.getElementById("chart " + name);
    if (!node) {
      const part = make("div", "part");
      part.append(make("h3", "", name), make("p", "caption", compared.meaning[name]));
      node = make("div", "chart");
      node.id = "chart " + name;
      part.append(node);
      box.append(part);
    }
    const traces = compared.runs.filter((run) => run.lines[name]?.step.length).map((run) => {
      const line = run.lines[name], few = line.step.length < 30;
      return { x: line[axis], y: line.value, name: run.key, mode: few ? "lines+markers" : "lines", line: { color: tintOf(run.key), width: 2 },
        marker: { size: 6, color: tintOf(run.key) }, hovertemplate: "%{y:.4g}" };
    });
    const title = axis === "step" ? "step" : "hours of training, measuring left out";
    Plotly.react(node, traces, layout({ showlegend: true, uirevision: axis, xaxis: { title: { text: title, standoff: 6 } } }), { responsive: true, displayModeBar: false });
  }
  for (const part of [...box.children]) if (!there.includes(part.lastChild.id.slice(6))) part.remove();
  const more = $("more"), known = Object.keys(compared.meaning).filter((name) => !METRICS.includes(name));
  if (more.options.length !== known.length + 1) {
    more.replaceChildren(more.options[0], ...known.map((name) => new Option(name, name)));
    more.value = known.includes(extra) ? extra : "";
  }
  differing();
}
function differing() {
  const table = $("differing"), runs = compared.runs.filter((run) => !run.error), head = make("tr");
  if (runs.length < 2 || !compared.differing.length) {
    table.replaceChildren(make("caption", "caption", runs.length < 2 ? "Two runs or more are needed." : "None: they differ in nothing but their folder."));
    return;
  }
  head.append(make("th", "", "setting"), ...runs.map((run) => { const node = make("th", "", run.key); node.style.color = tintOf(run.key); return node; }));
  table.replaceChildren(head, ...compared.differing.map((row) => {
    const node = make("tr");
    node.append(make("th", "", row.setting), ...row.value.map((value) => make("td", "", value)));
    return node;
  }));
}

let asking = false;
async function ask() {
  if (asking || document.hidden) return;
  asking = true;
  try {
    const data = await get("/api/runs");
    if (data) {
      rows = data.rows;
      most = data.compared;
      $("about").textContent = data.roots.join(" · ");
    }
    drawRows();
    await compare();
    $("fresh").className = "";
    $("fresh").textContent = "";
  } catch (error) {
    $("fresh").className = "bad";
    $("fresh").textContent = error instanceof TypeError ? "· the server does not answer; this is what was known last" : "· " + error.message;
  } finally {
    asking = false;
  }
}
for (const id of ["filter", "state"]) $(id).addEventListener("input", drawRows);
for (const head of document.querySelectorAll("th[data-sort]")) head.addEventListener("click", () => {
  const by = head.dataset.sort;
  sort = { by, down: sort.by === by ? !sort.down : by !== "key" && by !== "state" };
  drawRows();
});
const again = () => { if (compared) drawComparison(extra ? [...METRICS, extra] : METRICS); };
$("axis").addEventListener("input", again);
$("more").addEventListener("input", () => { extra = $("more").value; compare().catch(ask); });
$("clear").addEventListener("click", () => { chosen.clear(); choose("", false); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
document.addEventListener("visibilitychange", ask);
setInterval(ask, EVERY_MS);
ask();
