"use strict";
// What the report and the live page share: small helpers, and how a chart looks.
const $ = (id) => document.getElementById(id);
const has = (value) => value !== null && value !== undefined;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

/** An element with a class and text; text is never parsed as HTML. */
function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (has(text)) node.textContent = text;
  return node;
}

function percent(value, digits = 1) { return (100 * value).toFixed(digits) + " %"; }
function duration(seconds) {
  if (seconds < 100) return seconds.toFixed(1) + " s";
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  return minutes < 100 ? `${minutes} min ${whole % 60} s` : (seconds / 3600).toFixed(1) + " h";
}
function alpha(hex, opacity) {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${opacity})`;
}
/** Centred moving mean; the window is a tenth of the run. */
function smooth(values) {
  const half = Math.max(1, Math.round(values.length / 20));
  return values.map((_, i) => {
    const near = values.slice(Math.max(0, i - half), i + half + 1);
    return near.reduce((a, b) => a + b, 0) / near.length;
  });
}

function layout(more = {}) {
  const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: true, tickfont: { size: 12 } };
  const { xaxis, yaxis, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 44, r: 10, t: 8, b: 36 },
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif", size: 12, color: colour("soft") },
    hovermode: "x unified", hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
    legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
    xaxis: { title: { text: "step", standoff: 6 }, showgrid: false, ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
    uirevision: rest.uirevision ?? "kept", // a zoom outlives new data
  };
}
