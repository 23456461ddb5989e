"""Bandit: what is drawn by the seed, what by luck, and that the best machine pays best."""

from __future__ import annotations

from respec.envs.bandit import Bandit


def test_the_seed_names_the_machines_and_luck_pays():
    env, again = Bandit(3, 6), Bandit(3, 6)
    assert env.reset(1, 5) == again.reset(1, 5) == env.reset(1, 6)
    assert len({env.reset(seed) for seed in range(30)}) > 20
    pays = set()
    for luck in range(8):
        env.reset(1, luck)
        pays.add(tuple(env.step(env.solve())[1] for _ in range(6)))
    assert len(pays) > 1


def test_the_best_machine_pays_eight_times_in_ten_and_solves_it():
    """1000 pulls each: shares 0.8 and 0.2 within 0.065, five standard deviations."""
    env = Bandit(2, 1000)
    env.reset(0)
    best = env.solve()
    for machine, share in ((best, 0.8), (next(a for a in env.actions if a != best), 0.2)):
        env.reset(0)
        steps = [env.step(machine) for _ in range(1000)]
        assert abs(sum(reward for _, reward, _ in steps) - share) < 0.065
        assert [done for *_, done in steps] == [False] * 999 + [True]
        assert env.solved == (machine == best)


def test_what_names_no_machine_costs_and_takes_no_pull():
    env = Bandit(2, 2)
    env.reset(0)
    assert env.step("Minotaur")[1:] == (-0.1, False)
    assert not env.step(env.actions[0])[2] and env.step(env.actions[1])[2]
