"""A task of an environment: rows are seeds apart, what is answered depends on the episode alone, faults name themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from respec.config import Config, TaskConfig
from respec.errors import ConfigError, TaskError
from respec.tasks.task import Task, load_task
from respec.tasks.wording import Wording
from respec.types import Ask, Shown, Stream


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A character a token."""
    words = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "\n", *map(chr, range(32, 127))]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"<eos>|<\|im_start\|>|[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def load(tokenizer, **settings) -> Task:
    asked = {"kind": "env", "env": "frozen_lake", "train_size": 12, "eval_size": 6, "template": "{prompt}\n"}
    asked["params"] = {"rules": False, "holes": 0.3}
    return load_task(TaskConfig.model_validate({**asked, **settings}), tokenizer, 512, 300)


def play(task: Task, prompt, moves, sample=0, draw=0):
    assert task.episodes is not None
    partner = task.episodes()
    ask = Ask(prompt, Stream.TRAIN, draw, 2)
    return [partner.answer(ask, sample, move, "eos") for move in moves]


def test_rows_are_seeds_apart_and_the_same_again(tokenizer):
    task = load(tokenizer)
    texts = [prompt.text for prompt in (*task.train, *task.held_out)]
    assert len(set(texts)) == 18 and [p.row for p in (*task.train, *task.held_out)] == list(range(18))
    assert load(tokenizer).train == task.train
    assert load(tokenizer, seed=1).train != task.train
    worked = {prompt.text for prompt, _ in task.worked(10)}
    assert len(worked) == 10 and not worked & set(texts)
    assert task.worked(10) == task.worked(10)


def test_the_environment_of_the_page_can_be_played(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (tmp_path / "guess.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    task = load(tokenizer, env="guess:Guess", params={})
    assert len(task.train) == 12 and len(task.held_out) == 6
    assert [answer.reward for answer in play(task, task.train[0], ["?"])] == [-0.1]
    firsts = [play(task, task.train[0], [str(digit)], sample=digit)[0] for digit in range(10)]
    assert sorted((first.solved, first.done) for first in firsts)[-2:] == [(False, False), (True, True)]


def test_too_few_problems_are_refused_unless_their_text_hides_them(tokenizer):
    with pytest.raises(TaskError, match=r"task.eval_size asks for 6 .* none after \d.*`hidden = True`"):
        load(tokenizer, params={"size": 2, "rules": False})
    assert len(load(tokenizer, env="bandit", params={}, train_size=100).train) == 100


def test_what_is_answered_depends_on_the_episode_alone(tokenizer):
    task = load(tokenizer, params={"slippery": True, "rules": False, "holes": 0.0}, train_size=1, eval_size=0)
    prompt, moves = task.train[0], ["Down", "Right"] * 3
    assert play(task, prompt, moves) == play(task, prompt, moves)
    answers = {
        tuple(a.token_ids for a in play(task, prompt, moves, sample, draw)) for sample in (0, 1, 2) for draw in (0, 1)
    }
    assert len(answers) > 3, "samples and draws have dice of their own"


def test_the_turn_limit_ends_an_episode(tokenizer):
    task = load(tokenizer, max_turns=3)
    answers = play(task, task.train[0], ["Up"] * 3)
    assert [a.done for a in answers] == [False, False, True] and answers[-1].token_ids == ()
    assert not any(a.solved for a in answers)
    assert answers[0].token_ids == tuple(tokenizer(f"\n{task.train[0].text}")["input_ids"])


def turns_of(tokenizer, shown: str | Shown) -> list[str]:
    """What the solver wrote, turn after turn."""
    assert isinstance(shown, Shown)
    own = [token for token, mine in zip(shown.token_ids, shown.own, strict=True) if mine]
    return tokenizer.decode(own).split("<eos>")[:-1]


def test_a_shown_episode_is_what_was_said_and_heard_and_ends_solved(tokenizer):
    task = load(tokenizer, max_turns=20)
    pairs = task.worked(5)
    assert [prompt.row for prompt, _ in pairs] == list(range(18, 23))
    for prompt, shown in pairs:
        assert isinstance(shown, Shown)
        said = turns_of(tokenizer, shown)
        answers = play(task, prompt, said)
        assert answers[-1].solved and answers[-1].reward == 1
        tokens, own = [], []
        for turn, answer in zip(said, answers, strict=True):
            mine = tokenizer(turn + "<eos>")["input_ids"]
            tokens += [*mine, *answer.token_ids]
            own += [True] * len(mine) + [False] * len(answer.token_ids)
        assert (shown.token_ids, shown.own) == (tuple(tokens), tuple(own))


def test_a_noisy_solver_strays(tokenizer):
    def back(noise: float) -> float:
        said = [t for _, shown in load(tokenizer, solver_noise=noise).worked(10) for t in turns_of(tokenizer, shown)]
        assert set(said) <= {"Down", "Right", "Left", "Up"}
        return sum(turn in ("Left", "Up") for turn in said) / len(said)

    assert back(1.0) > 0.25 > back(0.0)


class Broken:
    """Fails in the way that its parameter says."""

    def __init__(self, how: str) -> None:
        self.how = how

    def reset(self, seed: int):
        return 3 if self.how == "reset" else str(seed)

    def step(self, text: str):
        if self.how == "raise":
            raise KeyError("moves")
        return {"none": None, "nan": ("a", float("nan"), False), "short": ("a", 1.0)}[self.how]


class NoStep:
    def reset(self, seed: int) -> str:
        return ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("reset", "reset gave a int"),
        ("raise", "step on 'hi' raised KeyError: 'moves'"),
        ("none", r"gave None; it must give \(text, reward, done\)"),
        ("short", "it must give"),
        ("nan", "the reward nan; it must be finite"),
    ],
)
def test_an_environment_that_fails_is_named(tokenizer, how, said):
    sys.modules["test_episodes_broken"] = sys.modules[__name__]
    with pytest.raises(TaskError, match=said):
        task = load(tokenizer, env="test_episodes_broken:Broken", params={"how": how}, train_size=1, eval_size=0)
        play(task, task.train[0], ["hi"])


def test_a_name_or_parameters_that_do_not_fit_are_refused(tokenizer):
    sys.modules["test_episodes_broken"] = sys.modules[__name__]
    with pytest.raises(ConfigError, match="there is no environment 'frozen'; it is one of bandit, frozen_lake"):
        load(tokenizer, env="frozen")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'sise'; it takes size, holes"):
        load(tokenizer, params={"sise": 4})
    with pytest.raises(ConfigError, match="it has no method 'step'"):
        load(tokenizer, env="test_episodes_broken:NoStep", params={})
    with pytest.raises(TaskError, match="no scripted solver"):
        load(tokenizer, env="test_episodes_broken:Silent", params={}, train_size=1, eval_size=0).worked(1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": {"kind": "env"}}, "task.env is empty"),
        ({"task": {"kind": "env", "env": "bandit", "reward": [{"fn": "math"}]}}, "gives its rewards itself"),
        (
            {"task": {"kind": "env", "env": "bandit", "turn_template": "x"}},
            r"turn_template has no \{observation\}, got 'x'",
        ),
        ({"speculation": {"drafter": "previous", "mode": "lossy"}}, "got task.kind 'env'"),
        (
            {"speculation": {"drafter": "eagle", "drafter_path": "head"}, "drafter": {"learn": True}},
            "got task.kind 'env'",
        ),
    ],
)
def test_settings_that_do_not_go_with_episodes_are_refused(settings, said):
    whole = {"model": {"path": "builtin:demo"}, "task": {"kind": "env", "env": "bandit"}, **settings}
    with pytest.raises(ValueError, match=said):
        Config.model_validate(whole)


class Silent:
    """Nothing but the two methods: solved by a return of 1."""

    def reset(self, seed: int) -> str:
        return str(seed)

    def step(self, text: str) -> tuple[str, float, bool]:
        return "", 0.5, False


def test_the_two_methods_are_enough(tokenizer):
    sys.modules["test_episodes_broken"] = sys.modules[__name__]
    task = load(
        tokenizer,
        env="test_episodes_broken:Silent",
        params={},
        train_size=1,
        eval_size=0,
        turn_template="{observation}",
    )
    answers = play(task, task.train[0], ["a", "b"])
    assert [a.solved for a in answers] == [False, True]
    assert all(a.token_ids for a in answers), "the next turn needs a token to follow"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_in_a_chat_what_is_heard_is_a_user_s_turn(tokenizer):
    chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>", unk_token="<unk>")
    chat.chat_template = CHATML
    config = TaskConfig.model_validate({"kind": "env", "env": "bandit"})
    wording = Wording(config, chat, True)
    rest = "\n<|im_start|>user\nfine<eos>\n<|im_start|>assistant\n"
    assert chat.decode(list(wording.heard("fine", "eos"))) == rest
    assert chat.decode(list(wording.heard("fine", "length"))) == "<eos>" + rest
    whole = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "fine"},
    ]
    text = chat.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    first = chat.apply_chat_template(whole[:1], tokenize=False, add_generation_prompt=True)
    assert text == str(first) + str(chat.decode([*wording.said("yes"), *wording.heard("fine", "eos")]))
    chat.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(TaskError, match="does not end an assistant's turn"):
        Wording(config, chat, True)
