from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from respec.report.dash.find import DEPTH, find

Run = Callable[..., Path]


def test_runs_are_called_by_their_path_below_the_folder_given(make_run: Run, tmp_path: Path) -> None:
    paths = {key: make_run(key) for key in ("a", "sweep/one", "sweep/two")}
    assert find([tmp_path / "runs"]) == paths
    assert find([paths["a"]]) == {"a": paths["a"]}
    both = find([tmp_path / "runs", tmp_path / "runs" / "sweep"])
    assert both["runs/sweep/one"] == both["sweep/one"] == paths["sweep/one"]


def test_two_of_one_name_are_both_there(make_run: Run, tmp_path: Path) -> None:
    one, two = make_run("x/run"), make_run("y/run")
    assert find([one, two]) == {"run": one, "run~": two}


def test_no_link_leads_out_of_the_folder(make_run: Run, tmp_path: Path) -> None:
    outside, inside = make_run("outside/secret"), tmp_path / "given"
    (inside / "sly").mkdir(parents=True)
    (inside / "link").symlink_to(outside)
    (inside / "sly" / "config.toml").symlink_to(outside / "config.toml")
    assert find([inside]) == {}


def test_the_search_is_bounded(make_run: Run, tmp_path: Path) -> None:
    make_run("/".join("abcdefgh"[: DEPTH + 1]))
    assert find([tmp_path / "runs"]) == {}
