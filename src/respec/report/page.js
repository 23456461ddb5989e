"use strict";
// The report. `show` draws it from what page_data.py gathered, and may be called again with newer data: zoom, choices and scrolling stay.
let DATA = null;
const charts = [];
function series(name) { return DATA.series[name] || { step: [], value: [] }; }

// ---- header and headline ----
function header() {
  $("name").textContent = DATA.name;
  $("about").textContent = DATA.about.join(" · ");
  $("config").textContent = DATA.config;
  const node = $("status"), at = `${DATA.last_step} of ${DATA.steps} steps`;
  node.className = DATA.finished ? "" : "open";
  if (DATA.state) {
    node.className = "state-" + DATA.state;
    node.textContent = `${DATA.state}: ${at}` + (DATA.detail ? ` · ${DATA.detail}` : "");
  } else if (DATA.finished) node.textContent = `finished: ${at}`;
  else node.textContent = DATA.last_step ? `not finished when this was written: ${at}` : "no step was finished when this was written";
}
function entries(id, items, row) {
  $(id).closest(".card").hidden = !items.length;
  $(id).replaceChildren(...items.map(row));
}
function messages() {
  entries("alarms", DATA.alarms, (alarm) => {
    const steps = alarm.first === alarm.last ? `step ${alarm.first}` : `steps ${alarm.first} to ${alarm.last}, ${alarm.count} times`;
    const node = make("li", "", alarm.line + " ");
    node.append(make("span", "when", steps));
    return node;
  });
  entries("said", DATA.said.filter((entry) => entry.kind !== "started").reverse(), (entry) => {
    const node = make("li", entry.kind === "failed" ? "bad" : "", entry.line + " ");
    node.append(make("time", "when", new Date(1000 * entry.time).toLocaleString()));
    return node;
  });
}

function tile(what, figure, more, kind) {
  const node = make("div", "tile");
  node.append(make("div", "what", what), make("div", "figure " + (kind || ""), figure), make("div", "more", more));
  $("headline").append(node);
  return node;
}
function headline() {
  const h = DATA.headline;
  $("headline").replaceChildren();
  if (has(h.accuracy_before_rl) && has(h.accuracy_after_rl)) {
    const gain = 100 * (h.accuracy_after_rl - h.accuracy_before_rl);
    const error = has(h.accuracy_se) ? `, one standard error ${(100 * h.accuracy_se).toFixed(1)}` : "";
    tile("held-out accuracy", `${(100 * h.accuracy_before_rl).toFixed(1)} → ${percent(h.accuracy_after_rl)}`,
      `${gain >= 0 ? "+" : "−"}${Math.abs(gain).toFixed(1)} points${error}`, gain > 0 ? "good" : "");
  } else if (has(h.accuracy_before_rl)) tile("held-out accuracy", percent(h.accuracy_before_rl), "before reinforcement learning");
  if (has(h.reward_first)) tile("reward", `${h.reward_first.toFixed(3)} → ${h.reward_last.toFixed(3)}`, "mean of the first and the last step");
  if (has(h.rollout_speedup)) tile("rollout speedup", h.rollout_speedup.toFixed(2) + "×", "against plain decoding");
  if (has(h.tokens_identical)) tile("tokens identical", h.tokens_identical ? "yes" : "no",
    h.tokens_identical ? "speculation changed none" : "speculation changed some", h.tokens_identical ? "good" : "bad");
  if (has(h.policy_entropy)) tile("policy entropy", h.policy_entropy.toFixed(3), "nats per token");
  const parts = [["generation", "blue"], ["reward", "amber"], ["training", "purple"], ["other", "grey"]];
  const split = h.time_split || {}, whole = parts.reduce((sum, [name]) => sum + (split[name + "_s"] || 0), 0);
  if (has(h.wall_s)) {
    const node = tile("wall time", duration(h.wall_s), "");
    if (whole > 0) {
      const bar = make("div", "splitbar");
      for (const [name, tint] of parts) {
        const piece = make("div");
        piece.style.width = 100 * (split[name + "_s"] || 0) / whole + "%";
        piece.style.background = `var(--${tint})`;
        piece.title = `${name} ${percent((split[name + "_s"] || 0) / whole, 0)}`;
        bar.append(piece);
      }
      node.insertBefore(bar, node.lastChild);
      node.lastChild.textContent = `generation ${percent((split.generation_s || 0) / whole, 0)} of the steps`;
    }
  }
}

// ---- charts ----
/** To be drawn with the data, and again when the colour scheme changes; `build` gives {traces, layout} or null when there is nothing to show. */
function chart(id, empty, build) {
  const draw = () => {
    const built = build(), node = $(id);
    if (!built) {
      Plotly.purge(node);
      node.classList.add("empty");
      node.textContent = DATA.last_step ? empty : "No step was finished yet.";
      return;
    }
    if (node.classList.contains("empty")) { node.classList.remove("empty"); node.textContent = ""; }
    Plotly.react(node, built.traces, layout(built.layout), { responsive: true, displayModeBar: false });
  };
  charts.push(draw);
  return draw;
}
function line(name, label, tint, more = {}) {
  const s = series(name);
  return { x: s.step, y: s.value, name: label, mode: s.step.length > 1 ? "lines" : "markers",
    line: { color: colour(tint), width: 2 }, marker: { color: colour(tint), size: 7 }, ...more };
}
function simple(id, name, label, tint, form, more = {}) {
  chart(id, "Not recorded in this run.", () => series(name).step.length ? {
    traces: [line(name, label, tint, { hovertemplate: `%{y:${form}}<extra>${label}</extra>` })], layout: { showlegend: false, ...more },
  } : null);
}

chart("reward", "No reward was recorded.", () => {
  const reward = series("reward/mean"), held = series("eval/accuracy"), error = series("eval/se"), traces = [];
  if (!reward.step.length && !held.step.length) return null;
  const enough = reward.step.length >= 8, green = colour("green");
  if (reward.step.length) {
    traces.push({ x: reward.step, y: reward.value, name: "reward", mode: reward.step.length > 1 ? "lines" : "markers",
      line: { color: alpha(green, enough ? 0.4 : 1), width: enough ? 1.2 : 2 }, marker: { color: green }, hovertemplate: "%{y:.3f}" });
    if (enough) traces.push({ x: reward.step, y: smooth(reward.value), name: "reward, smoothed", mode: "lines",
      line: { color: green, width: 3 }, hovertemplate: "%{y:.3f}" });
  }
  if (held.step.length) {
    const by = Object.fromEntries(error.step.map((step, i) => [step, error.value[i]]));
    traces.push({ x: held.step, y: held.value, name: "held-out accuracy", mode: "lines+markers",
      line: { color: colour("blue"), width: 1.5, dash: "dot" }, marker: { color: colour("blue"), size: 9 },
      error_y: { type: "data", array: held.step.map((step) => by[step] || 0), color: colour("blue"), thickness: 1.5, width: 4 },
      hovertemplate: "%{y:.3f}" });
  }
  return { traces, layout: {} };
});

chart("length", "No rollouts were recorded.", () => {
  if (DATA.lengths.length) {
    const x = DATA.lengths.map((row) => row.step), of = (key) => DATA.lengths.map((row) => row[key]), blue = colour("blue");
    const mode = x.length > 1 ? "lines" : "markers", hovertemplate = "%{y:.0f}";
    return { traces: [
      { x, y: of("max"), name: "longest", mode, line: { color: colour("grey"), width: 1.2, dash: "dot" }, marker: { color: colour("grey") }, hovertemplate },
      { x, y: of("p90"), name: "90 %", mode, line: { width: 0, color: blue }, showlegend: false, hovertemplate },
      { x, y: of("p10"), name: "10 %", mode, line: { width: 0, color: blue }, fill: "tonexty", fillcolor: alpha(blue, 0.18), showlegend: false, hovertemplate },
      { x, y: of("median"), name: "median", mode, line: { color: blue, width: 2.5 }, marker: { color: blue }, hovertemplate },
    ], layout: { yaxis: { rangemode: "tozero" } } };
  }
  if (!series("length/mean").step.length) return null;
  return { traces: [line("length/max", "longest", "grey"), line("length/mean", "mean", "blue")], layout: { yaxis: { rangemode: "tozero" } } };
});

chart("histogram", "Rollouts of two steps or more are needed.", () => {
  if (!DATA.histogram.length) return null;
  const size = Math.max(1, Math.ceil(Math.max(...DATA.histogram.flatMap((end) => end.length)) / 24));
  return { traces: DATA.histogram.map((end, i) => {
    const tint = colour(i ? "blue" : "grey");
    return { type: "histogram", x: end.length, name: end.label, histnorm: "probability", autobinx: false, xbins: { start: 0, size },
      marker: { color: tint }, hovertemplate: "%{y:.1%}" };
  }), layout: { barmode: "group", bargap: 0.15, bargroupgap: 0.05, xaxis: { title: { text: "tokens", standoff: 6 } }, yaxis: { tickformat: ".0%" } } };
});

chart("split", "No times were recorded.", () => DATA.split.length ? {
  traces: [["generation", "blue"], ["reward", "amber"], ["training", "purple"], ["other", "grey"]].map(([name, tint]) => ({
    type: "bar", x: DATA.split.map((row) => row.step), y: DATA.split.map((row) => row[name]), name,
    marker: { color: colour(tint), line: { width: 0 } }, hovertemplate: "%{y:.2f} s" })),
  layout: { barmode: "stack", bargap: 0.12, yaxis: { ticksuffix: " s" } },
} : null);

/** Fills a choice of steps. A step that was chosen stays chosen, or the nearest to it; while the last one is, it stays the last. */
function steps(id, items) {
  const node = $(id), before = node.options.length ? Number(node.value) : NaN, last = node.selectedIndex === node.options.length - 1;
  node.replaceChildren(...items.map((item) => new Option(item.step, item.step)));
  node.parentNode.hidden = items.length < 2;
  const far = items.map((item) => Math.abs(item.step - before));
  node.selectedIndex = last ? items.length - 1 : far.indexOf(Math.min(...far));
}
let PLANS = [];
function plans() {
  PLANS = [...new Set(DATA.rounds.flatMap((step) => step.plan))].sort((a, b) => (a === "plain") - (b === "plain") || a.localeCompare(b));
}
const drawRounds = chart("rounds", "No decode rounds were recorded.", () => {
  const step = DATA.rounds[Math.max(0, $("rounds-step").selectedIndex)];
  if (!step || !step.start.length) return null;
  const x = [...step.start, step.end], tints = ["teal", "amber", "purple", "blue", "red"], present = new Set(step.plan);
  const traces = PLANS.filter((plan) => present.has(plan)).map((plan) => {
    const tint = plan === "plain" ? colour("grey") : colour(tints[PLANS.indexOf(plan) % tints.length]);
    // Each round reaches to the start of the next one, so that neighbours of different plans join.
    const xs = [], ys = [], text = [];
    step.plan.forEach((its, i) => {
      if (its !== plan) return;
      const about = `round ${i * step.every}: ${step.active[i]} active, ${step.emitted[i]} tokens, ${step.accepted[i]} of ${step.drafted[i]} drafted accepted`;
      xs.push(x[i], x[i + 1]); ys.push(step.active[i], step.active[i]); text.push(about, about);
      if (step.plan[i + 1] !== plan) { xs.push(null); ys.push(null); text.push(""); }
    });
    return { x: xs, y: ys, text, name: plan, mode: "lines", line: { color: tint, width: 2 }, fill: "tozeroy", fillcolor: alpha(tint, 0.25), hovertemplate: "%{text}" };
  });
  if (step.waiting.some((n) => n > 0)) traces.push({ x: step.start, y: step.waiting, name: "waiting", mode: "lines",
    line: { color: colour("soft"), width: 1.2, dash: "dot", shape: "hv" }, hovertemplate: "%{y} waiting" });
  const rates = step.predicted.some((rate) => rate > 0);
  if (rates) traces.push(
    { x: step.start, y: step.rate, name: "measured tokens/s", yaxis: "y2", mode: "lines", line: { color: colour("ink"), width: 1.4 }, hovertemplate: "%{y:,.0f} tokens/s" },
    { x: step.start, y: step.predicted, name: "predicted tokens/s", yaxis: "y2", mode: "lines", line: { color: colour("red"), width: 1.2, dash: "dash" }, hovertemplate: "%{y:,.0f} predicted" });
  return { traces, layout: { showlegend: true, hovermode: "closest", uirevision: `step ${step.step}`, xaxis: { title: { text: "seconds of decoding", standoff: 6 }, range: [0, step.end], ticksuffix: " s" },
    yaxis: { range: [0, 1.06 * Math.max(...step.active, ...step.waiting)], title: { text: "active" } },
    ...(rates ? { yaxis2: { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, title: { text: "tokens/s" } } } : {}) } };
});
$("rounds-step").addEventListener("change", drawRounds);

const unity = () => ({ shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: colour("grey"), width: 1, dash: "dash" } }] });
simple("accepted", "rollout/accepted_length", "accepted length", "teal", ".2f", { yaxis: { rangemode: "tozero" }, ...unity() });
chart("speedup", "Not measured: run.compare_plain_every is 0, or no such step was reached.", () => {
  if (!series("rollout/speedup").step.length) return null;
  const trace = line("rollout/speedup", "speedup", "green", { mode: "lines+markers", hovertemplate: "%{y:.2f}×<extra></extra>" });
  return { traces: [trace], layout: { showlegend: false, yaxis: { rangemode: "tozero", ticksuffix: "×" }, ...unity() } };
});
simple("entropy", "policy/entropy", "entropy", "blue", ".3f", { yaxis: { rangemode: "tozero" } });
simple("grad", "policy/grad_norm", "gradient norm", "purple", ".3g", { yaxis: { rangemode: "tozero" } });
chart("mismatch", "Not recorded in this run.", () => series("policy/mismatch_mean").step.length ? {
  traces: [line("policy/mismatch_max", "largest", "grey", { hovertemplate: "%{y:.2g}" }), line("policy/mismatch_mean", "mean", "amber", { hovertemplate: "%{y:.2g}" })],
  layout: { yaxis: { type: "log", exponentformat: "power", dtick: 1 } } } : null);

chart("critic-variance", "Not recorded in this run.", () => series("critic/explained_variance").step.length ? {
  traces: [line("critic/explained_variance", "explained variance", "teal", { hovertemplate: "%{y:.3f}<extra></extra>" })],
  layout: { showlegend: false, shapes: [{ ...unity().shapes[0], y0: 0, y1: 0 }] } } : null);
chart("critic-values", "Not recorded in this run.", () => series("critic/value_mean").step.length ? {
  traces: [line("critic/return_mean", "returns", "grey", { hovertemplate: "%{y:.3f}" }), line("critic/value_mean", "values", "blue", { hovertemplate: "%{y:.3f}" })],
  layout: {} } : null);
simple("critic-loss", "critic/loss", "loss", "purple", ".3g", { yaxis: { rangemode: "tozero" } });

// ---- rollouts ----
const WHO = { target: "the policy itself", ngram: "n-gram drafter", suffix: "suffix drafter", previous: "last epoch's answer",
  model: "small model", self_quant: "quantized policy", eagle: "EAGLE-3 head" };
function legend() { $("legend").replaceChildren(...DATA.proposers.map((name) => make("span", "p-" + name, WHO[name] || name))); }

function tokens(rollout) {
  const box = make("div", "tokens");
  rollout.pieces.forEach((piece, i) => {
    const node = make("i", "p-" + DATA.proposers[rollout.proposer[i]]);
    if (piece === "") node.append(make("u", "", "◦"));
    for (const part of piece.split(/(\n)/)) {
      if (part === "\n") node.append(make("u", "", "⏎"), "\n");
      else node.append(part);
    }
    node.dataset.tip = `${JSON.stringify(piece)}\nproposed by ${WHO[DATA.proposers[rollout.proposer[i]]]}\n` +
      `probability ${percent(Math.exp(rollout.logprob[i]))} (log ${rollout.logprob[i]})\nentropy ${rollout.entropy[i]} nats\ntoken ${i}, round ${rollout.round[i]}`;
    box.append(node);
  });
  return box;
}
let rolloutsDrawn = null;
function drawRollouts() {
  const step = DATA.rollouts[Math.max(0, $("rollouts-step").selectedIndex)], box = $("rollouts"), drawn = JSON.stringify(step);
  if (drawn === rolloutsDrawn) return; // what stands there may be scrolled, or being read
  rolloutsDrawn = drawn;
  box.replaceChildren();
  if (!step || !step.shown.length) { box.append(make("p", "empty", "No rollouts were recorded.")); return; }
  const rewards = step.shown.map((r) => r.reward), best = Math.max(...rewards);
  for (const rollout of step.shown) {
    const node = make("div", "rollout"), head = make("div", "head"), drafted = rollout.proposer.filter((p) => p > 0).length;
    const reward = make("b", rollout.reward === best ? "good" : rollout.reward <= 0 ? "bad" : "", has(rollout.reward) ? `reward ${rollout.reward.toFixed(2)}` : "no reward");
    reward.title = Object.entries(rollout.part).map(([name, value]) => `${name}: ${has(value) ? value : "not applicable"}`).join("\n");
    head.append(reward, make("span", "", `row ${rollout.row}, sample ${rollout.sample}`), make("span", "", `${rollout.tokens} tokens` + (rollout.tokens > rollout.proposer.length ? `, the first ${rollout.proposer.length} shown` : "")),
      make("span", "", `${percent(drafted / Math.max(1, rollout.proposer.length), 0)} drafted`),
      make("span", "", { eos: "ended by itself", stop: "ended at a stop string", length: "cut at the length limit" }[rollout.finish]));
    if (rollout.fell_back.length) head.append(make("span", "bad", "fallback reward: " + rollout.fell_back.join(", ")));
    node.append(head, make("pre", "prompt", rollout.prompt));
    node.append(rollout.pieces.length ? tokens(rollout) : make("pre", "", rollout.text));
    box.append(node);
  }
  box.append(make("p", "caption", `${step.shown.length} of the ${step.of} rollouts recorded for step ${step.step}.`));
}
$("rollouts-step").addEventListener("change", drawRollouts);

function tip(event) {
  const token = event.target.closest && event.target.closest("[data-tip]"), node = $("tip");
  node.hidden = !token;
  if (!token) return;
  node.textContent = token.dataset.tip;
  const at = token.getClientRects()[0];
  node.style.left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - node.offsetWidth - 8)) + window.scrollX + "px";
  const above = at.top - node.offsetHeight - 6;
  node.style.top = (above > 0 ? above : at.bottom + 6) + window.scrollY + "px";
}
document.addEventListener("pointerover", tip);
document.addEventListener("click", tip);

// ---- provenance ----
function provenance() {
  $("provenance").replaceChildren();
  const last = DATA.starts[DATA.starts.length - 1];
  if (!last) { $("provenance").append(make("p", "caption", "No provenance was recorded.")); return; }
  const table = make("table");
  const add = (what, value) => {
    if (!has(value) || value === "") return;
    const row = make("tr");
    row.append(make("th", "", what), make("td", "", value));
    table.append(row);
  };
  add("started", DATA.starts.map((start) => start.time).join(", "));
  add("versions", Object.entries(last.versions || {}).map(([name, version]) => `${name} ${version}`).join(", "));
  add("commit", last.commit); add("python", last.python); add("system", last.system); add("processor", last.processor);
  add("cores", `${last.cores}, ${last.threads} threads used`); add("memory", last.memory_gib + " GiB"); add("GPU", last.gpu); add("host", last.host);
  $("provenance").append(table);
}

/** Draws everything from `data`. */
function show(data) {
  DATA = data;
  header();
  messages();
  headline();
  plans();
  steps("rounds-step", DATA.rounds);
  steps("rollouts-step", DATA.rollouts);
  for (const card of document.querySelectorAll("[data-needs]")) card.hidden = !series(card.dataset.needs).step.length;
  charts.forEach((draw) => draw());
  legend();
  drawRollouts();
  provenance();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (DATA) charts.forEach((draw) => draw()); });
if ($("data")) show(JSON.parse($("data").textContent));
