"use strict";
// Keeps a run's report up to date: asks for its data every few seconds, and draws when there is something new.
const EVERY_MS = 3000;
const address = document.querySelector('meta[name="respec-data"]').content;
let tag = null, asking = false;

async function ask() {
  if (asking || document.hidden) return;
  asking = true;
  const fresh = $("fresh");
  try {
    const answer = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      show(await answer.json());
    }
    const problem = answer.status === 200 || answer.status === 304 ? "" : (await answer.text()).trim();
    fresh.className = problem ? "bad" : "";
    fresh.textContent = problem || (DATA && DATA.state === "running" ? "· live" : "");
  } catch (error) {
    fresh.className = "bad";
    fresh.textContent = "· the server does not answer; this is what was known last";
  } finally {
    asking = false;
  }
}
document.addEventListener("visibilitychange", ask);
setInterval(ask, EVERY_MS);
ask();
