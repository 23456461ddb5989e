"""Clicking through the live page in a headless Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from respec.report.records import METRICS_FILE, StepMetrics, metrics_line

Run = Callable[..., Path]
Serve = Callable[..., Any]


def add(path: Path, step: int, reward: float) -> None:
    with (path / METRICS_FILE).open("a") as file:
        file.write(
            metrics_line(
                StepMetrics(step, 0.0, {"reward/mean": reward, "time/step_s": 1.0, "rollout/accepted_length": 2.0})
            )
        )


def test_runs_are_chosen_compared_opened_and_followed(
    make_run: Run, serve: Serve, browser: Any, tmp_path: Path
) -> None:
    make_run("plain", 6, 6, {"speculation": {"drafter": "off"}})
    auto = make_run("auto", 6, 9, **{"rollout/tokens_identical": 0.0})
    served = serve(tmp_path / "runs")

    browser.open(served.url)
    browser.until("document.querySelectorAll('#rows tr').length === 2")
    states = browser.js(
        "Object.fromEntries([...document.querySelectorAll('#rows tr')].map((row) => [row.querySelector('a').textContent, row.querySelector('.state').textContent]))"
    )
    assert states == {"plain": "finished", "auto": "stopped1 alarm"}

    # the filter
    browser.click("#filter")
    browser.type("pla")
    browser.until(
        "document.querySelectorAll('#rows tr').length === 1 && document.querySelector('#count').textContent === '1 of 2 runs'"
    )
    browser.js(
        "document.querySelector('#filter').value = ''; document.querySelector('#filter').dispatchEvent(new Event('input'))"
    )

    # two runs side by side; the page moves when the first is chosen
    browser.until("document.querySelectorAll('#rows tr').length === 2")
    browser.click("input[aria-label='compare plain']")
    browser.until("document.body.innerText.includes('One run is chosen')")
    browser.click("input[aria-label='compare auto']")
    browser.until("document.querySelector(\"[id='chart reward/mean']\").data.length === 2")
    browser.until("document.querySelector('#differing').innerText.includes('speculation.drafter')")
    names = browser.js("document.querySelector(\"[id='chart reward/mean']\").data.map((line) => line.name)")
    assert names == ["plain", "auto"]
    browser.js(
        "document.querySelector('#axis').value = 'hours'; document.querySelector('#axis').dispatchEvent(new Event('input'))"
    )
    assert browser.until("document.querySelector(\"[id='chart reward/mean']\").data[0].x[1]") == 2
    assert "#run=plain&run=auto" in browser.js("location.href")

    # a new step is drawn without a reload, and the choice stays
    add(auto, 7, 0.77)
    browser.until("document.querySelector(\"[id='chart reward/mean']\").data[1].y.at(-1) === 0.77")
    assert browser.js("document.querySelectorAll('#rows input:checked').length") == 2

    # the report of one: alarms, a zoom and a place that outlive new data
    browser.click("#rows a[href='/run/auto']")
    browser.until("document.querySelector('#status').textContent === 'stopped: 7 of 9 steps'")
    assert "other tokens than plain decoding" in browser.js("document.querySelector('#alarms').innerText")
    browser.until("document.querySelector('#reward').data.length > 0")
    browser.drag("#reward .nsewdrag", 0.3, 0.7)
    zoomed = browser.until(
        "document.querySelector('#reward').layout.xaxis.autorange === false && document.querySelector('#reward').layout.xaxis.range"
    )
    at = browser.js("scrollTo(0, 500); scrollY")
    add(auto, 8, 0.88)
    browser.until("document.querySelector('#status').textContent === 'stopped: 8 of 9 steps'")
    browser.until("document.querySelector('#reward').data[0].y.at(-1) === 0.88")
    assert browser.js("document.querySelector('#reward').layout.xaxis.range") == zoomed
    assert browser.js("scrollY") == at

    # back to the list, whose choice is in the address
    browser.click(".brand a")
    browser.until("document.querySelectorAll('#rows tr').length === 2")

    assert browser.complaints == []
    assert {
        address.split("/")[2] for address in browser.requests if not address.startswith(("data:", "blob:", "about:"))
    } == {f"127.0.0.1:{served.port}"}


def test_what_is_side_by_side_is_in_reach_below_many_runs(
    make_run: Run, serve: Serve, browser: Any, tmp_path: Path
) -> None:
    for number in range(60):
        make_run(f"run-{number}", 1, 1)
    served = serve(tmp_path / "runs")
    browser.open(served.url + "/#run=run-0&run=run-59")
    browser.until("document.querySelector(\"[id='chart reward/mean']\").data.length === 2")
    assert browser.js("document.querySelectorAll('#rows tr').length") == 60
    assert browser.js("document.querySelector('#comparison').getBoundingClientRect().top < 1.2 * innerHeight")


def test_it_can_be_read_on_a_phone(make_run: Run, serve: Serve, browser: Any, tmp_path: Path) -> None:
    for name in ("a", "a-run-with-quite-a-long-name-of-many-words-and-more"):
        make_run(name, sets={"speculation": {"drafter": "off"}} if name == "a" else None)
    served = serve(tmp_path / "runs")
    browser.open(served.url, 390, 800)
    browser.until("document.querySelectorAll('#rows tr').length === 2")
    browser.click("input[aria-label='compare a']")
    browser.click("#rows tr:not(:has(input:checked)) input")
    browser.until("document.querySelector(\"[id='chart reward/mean']\").data.length === 2")
    assert browser.js("document.documentElement.scrollWidth") <= 390
    browser.open(served.url + "/run/a", 390, 800)
    browser.until("document.querySelector('#reward').data.length > 0")
    assert browser.js("document.documentElement.scrollWidth") <= 390


def test_a_server_that_is_gone_is_said_and_what_was_known_stays(
    make_run: Run, serve: Serve, browser: Any, tmp_path: Path
) -> None:
    make_run("run")
    served = serve(tmp_path / "runs")
    browser.open(served.url + "/run/run")
    browser.until("document.querySelector('#status').textContent.startsWith('finished')")
    served.close()
    browser.until("document.querySelector('#fresh').textContent.includes('does not answer')")
    assert browser.js("document.querySelector('#reward').data.length") > 0


def test_the_critic_has_charts_where_there_is_one(make_run: Run, serve: Serve, browser: Any, tmp_path: Path) -> None:
    critic = {"critic/loss": 0.1, "critic/explained_variance": 0.6, "critic/value_mean": 0.4, "critic/return_mean": 0.5}
    make_run("ppo", **critic)
    make_run("grpo")
    served = serve(tmp_path / "runs")
    for name, shown in (("ppo", 3), ("grpo", 0)):
        browser.open(f"{served.url}/run/{name}")
        browser.until(
            "document.querySelector('#reward').data.length > 0 && document.title.startsWith(" + repr(name) + ")"
        )
        assert (
            browser.js("[...document.querySelectorAll('[data-needs]')].filter((card) => card.offsetHeight > 0).length")
            == shown
        )
        assert browser.js("[...document.querySelectorAll('[data-needs] .main-svg')].length > 0") == (shown > 0)
