"""The command line: what it says to a person who asks, errs, or presses Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from respec import cli
from respec.errors import ModelError
from respec.weights.checkpoint import latest_checkpoint

ROOT = Path(__file__).parents[1]
DEMO = str(ROOT / "examples" / "demo.toml")
COMMANDS = (
    "train", "warmup", "eval", "generate", "bench rollout", "bench speculation", "bench step",
    "report", "explain", "profile", "doctor", "fetch smollm2", "entropy", "dash", "metrics",
    "serve", "certify", "export", "drafter train",
)  # fmt: skip
# The demo, so small that a step takes about a second.
SMALL = {
    "task.train_size": 16,
    "task.eval_size": 8,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 24,
    "run.compare_plain_every": 1,
    "run.threads": 1,
    "eval.every": 0,
    "tracking.to": "[]",
}
SUMMARY = {
    "steps": 7, "finished": True, "accuracy_before_rl": 0.42, "accuracy_after_rl": 0.57, "accuracy_se": 0.016,
    "accuracy_items": 1000, "reward_first": 0.41, "reward_last": 0.63, "rollout_speedup": 1.83, "tokens_identical": True,
    "policy_entropy": 0.21, "accepted_length": 2.9, "tokens": 9000.0, "wall_s": 200.0, "run_dir": "runs/demo",
    "report": "runs/demo/report.html",
    "time_split": {"generation_s": 60.0, "reward_s": 4.0, "training_s": 32.0, "other_s": 4.0},
}  # fmt: skip

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Runs the entry point in this process; gives exit code, standard output and standard error."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["respec", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def sets(**more: Any) -> list[str]:
    return [word for key, value in {**SMALL, **more}.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_shows_an_example(call: Call, command: str) -> None:
    code, out, _ = call(*command.split(), "--help")
    assert code == 0
    example = re.search(r"Example: (respec .*?)\n\n", out, re.DOTALL)
    assert example and shlex.split(example[1])[1 : 1 + len(command.split())] == command.split()
    assert example[1].count("respec") == 1  # a second example stands on a line of its own


def test_commands_are_listed_as_they_come_to_be_needed(call: Call) -> None:
    _, out, _ = call("--help")
    listed = re.findall(r"^  (\w+)  +[A-Z]", out.partition("Commands:")[2], re.MULTILINE)
    assert listed[:6] == ["train", "warmup", "eval", "generate", "report", "dash"]
    assert {command.split()[0] for command in COMMANDS} <= {*listed}


def test_the_help_lists_every_command(call: Call) -> None:
    _, out, _ = call("--help")
    assert all(command.split()[0] in out for command in COMMANDS)


def test_help_does_not_wait_for_torch() -> None:
    heavy = "import sys, respec.cli; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", heavy], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "absent.toml"), "no configuration file at 'absent.toml'"),
        (("train", DEMO, "--set", "polcy.lr=1"), "did you mean 'policy'"),
        (("train", DEMO, "--set", "policy.lr"), "--set takes section.key=value"),
        (("warmup", DEMO, "--set", "warmup.steps=0"), "there is nothing to do"),
        (("eval", "absent"), "no configuration file at 'absent'"),
        (("generate", "/absent", "--prompt", "x"), "there is no folder '/absent'"),
        (
            ("generate", "builtin:demo", "--prompt", "x", "--drafter", "oracle"),
            "auto, off, ngram, suffix, self_quant, eagle, model, got 'oracle'",
        ),
        (("generate", "builtin:demo", "--prompt", "1 + 1\\n", "--max-new-tokens", "9999"), "leaves room for 0"),
        (("generate", "builtin:demo", "--prompt", "1", "--top-p", "0"), "top_p must be above 0"),
        (("generate", "builtin:demo", "--prompt", "1", "--stop", ""), "a stop string must not be empty"),
        (("report", "absent"), "'absent' is not a run folder"),
        (("serve", "builtin:demo", "--drafter", "oracle"), "(got 'oracle')"),
        (("serve", "builtin:demo", "--chat-template", "absent"), "'absent' cannot be read"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_a_paragraph_and_exit_code_2(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*arguments)
    assert code == 2
    assert err.startswith("respec: ") and said in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == [], "a mistake leaves nothing behind"


def test_an_error_of_the_loop_is_told_without_a_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ModelError("it is of another family")

    monkeypatch.setattr("respec.loop.train", fails)
    code, _, err = call("train", DEMO)
    assert code == 2 and err == "respec: it is of another family\n"


def test_a_bug_keeps_its_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr("respec.loop.train", fails)
    monkeypatch.setattr(sys, "argv", ["respec", "train", DEMO])
    with pytest.raises(AssertionError, match="ours"):
        cli.main()


def test_the_closing_table_says_what_was_reached(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("respec.loop.train", lambda *_: SUMMARY)
    code, out, _ = call("train", DEMO)
    assert code == 0
    for figure in (
        "0.410 -> 0.630",
        "42.0 % -> 57.0 %",
        "1000 items",
        "generation 60 %",
        "reward 4 %",
        "training 32 %",
    ):
        assert figure in out
    for figure in ("1.83x", "tokens identical", "yes", "0.210 nats/token", "200 s", "runs/demo/report.html"):
        assert figure in out
    assert "Go on with" not in out


def test_tokens_that_differ_are_not_hidden(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("respec.loop.train", lambda *_: {**SUMMARY, "tokens_identical": False})
    assert re.search(r"tokens identical.*NO", call("train", DEMO)[1])


def test_nothing_measured_is_not_a_figure(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {key: None for key in SUMMARY if key.startswith(("accuracy", "reward_", "rollout", "policy", "tokens_"))}
    monkeypatch.setattr("respec.loop.train", lambda *_: {**SUMMARY, **nothing})
    code, out, _ = call("train", DEMO)
    assert code == 0 and "None" not in out and "– -> –" in out


def test_ctrl_c_asks_the_loop_and_says_how_to_go_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_config: Any, _view: Any, stop: Callable[[], bool], fresh: bool) -> dict[str, Any]:
        assert fresh and not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        return {**SUMMARY, "finished": False}

    monkeypatch.setattr("respec.loop.train", run)
    code, out, _ = call("train", DEMO, "--fresh", "--set", "run.dir=runs/of mine")
    assert code == 0
    assert "stopping after this step" in out
    again = re.search(r"Stopped after step 7.*Go on with: (.*)", out)
    assert again and shlex.split(again[1]) == ["respec", "train", DEMO, "--set", "run.dir=runs/of mine"]


def test_a_second_ctrl_c_stops_at_once(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr("respec.loop.train", run)
    code, _, err = call("train", DEMO)
    assert code == 130 and f"respec train {DEMO}" in err and "Traceback" not in err


def test_speculation_changes_no_text(call: Call) -> None:
    asked = ("generate", "builtin:demo", "--prompt", "3 + 4 - 2\\n", "--samples", "3", "--max-new-tokens", "40")
    code, drafted, _ = call(*asked, "--drafter", "ngram")
    _, plain, _ = call(*asked, "--drafter", "off")
    assert code == 0 and drafted.count("--- prompt 0, sample") == 3
    assert drafted.split("tokens/s")[0].rsplit("---", 1)[0] == plain.split("tokens/s")[0].rsplit("---", 1)[0]


def test_doctor_speaks_to_programs_too(call: Call) -> None:
    code, out, _ = call("doctor", "--json")
    assert code == 0
    assert all({"what", "state", "found", "advice"} == set(finding) for finding in json.loads(out))
    code, out, _ = call("doctor")
    assert code == 0 and "processor" in out and "exactness" in out


def test_a_run_is_interrupted_gone_on_with_and_looked_at(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", DEMO, *sets(**{"run.dir": folder})]
    process = subprocess.Popen(
        [sys.executable, "-c", "from respec.cli import main; main()", *arguments, "--set", "run.steps=500"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if " step 2/500" in line:
                process.send_signal(signal.SIGINT)
                break
        lines += process.stdout.readlines()
        assert process.wait(timeout=60) == 0, "".join(lines)
    finally:
        process.kill()
    said = "".join(lines)
    assert "Go on with: respec train" in said and "Traceback" not in said
    reached = json.loads((folder / "summary.json").read_text())
    assert not reached["finished"] and reached["steps"] >= 2
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None and checkpoint.step == reached["steps"]

    # compared again at least once: every k steps
    began = time.time()
    code, out, _ = call(*arguments, "--set", f"run.steps={reached['steps'] + 1}")
    assert code == 0 and f"going on from step {reached['steps']}" in out
    assert f"step {reached['steps'] + 1}/" in out and f"step {reached['steps']}/" not in out, (
        "old steps are not told again"
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["finished"] and summary["tokens_identical"] is True and (folder / "report.html").exists()
    assert (folder / "summary.json").stat().st_mtime >= began - 1

    (folder / "report.html").unlink()
    assert call("report", str(folder))[0] == 0 and (folder / "report.html").exists()
    code, out, _ = call("eval", str(folder), "--set", "run.threads=1")
    assert code == 0 and "(8 items)" in out


def test_the_version_is_told_by_the_command_and_by_the_module(call):
    import respec

    assert call("--version")[1].strip() == f"respec {respec.__version__}"
    done = subprocess.run([sys.executable, "-m", "respec", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"respec {respec.__version__}"


@pytest.mark.parametrize(("drafter", "needs"), [("eagle", "--drafter-path"), ("model", "--draft-model")])
def test_generate_says_what_a_drafter_needs(call, drafter: str, needs: str):
    code, _, said = call("generate", "builtin:demo", "--prompt", "1 + 2", "--drafter", drafter)
    assert code == 2 and needs in said
