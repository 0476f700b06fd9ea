"""Which variables workers get: the same for the first worker and for the tenth replacement (F25)."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_executor import environment
from resilient_executor.config import ExecutorConfig
from resilient_executor.environment import EnvironmentRule
from resilient_executor.errors import ConfigError
from resilient_executor.protocol import WorkerSpec

NAMES = st.text("ABC_", min_size=1, max_size=4)
ENVIRONMENTS = st.dictionaries(NAMES, st.text("xyz", max_size=3), max_size=8)
RULES = st.builds(
    EnvironmentRule,
    prefixes=st.lists(NAMES, max_size=3).map(tuple),
    names=st.lists(NAMES, max_size=3).map(tuple),
    extra=ENVIRONMENTS,
    exclude=st.lists(NAMES, max_size=3).map(tuple),
)


@given(RULES, ENVIRONMENTS)
def test_every_variable_is_there_for_a_reason_and_none_is_missing(
    rule: EnvironmentRule, environ: dict[str, str]
) -> None:
    selected = rule.select(environ)
    for name, value in selected.items():
        assert value == rule.extra.get(name, environ.get(name))
    for name in {*environ, *rule.extra}:
        carried = name not in rule.exclude and (name in rule.names or any(name.startswith(p) for p in rule.prefixes))
        assert (name in selected) == (name in rule.extra or (name in environ and carried))


@given(RULES, ENVIRONMENTS)
def test_selecting_and_applying_twice_changes_nothing(rule: EnvironmentRule, environ: dict[str, str]) -> None:
    selected = rule.select(environ)
    assert rule.select(selected) == selected
    target = {"KEPT": "by the worker"}
    environment.apply(selected, target)
    once = dict(target)
    environment.apply(selected, target)
    assert target == once == {"KEPT": "by the worker", **selected}


def test_defaults_carry_settings_and_leave_what_belongs_to_one_process() -> None:
    rule = EnvironmentRule.from_config(ExecutorConfig(worker=WorkerSpec(cls="m:W"), env_extra={"RANK": "wanted"}))
    selected = rule.select(
        {
            "RESILIENT_EXECUTOR_NAME": "a",
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": "3",
            "HF_TOKEN": "secret",
            "HF_HOME": "h",
            "RANK": "9",
            "PATH": "p",
        }
    )
    assert selected == {
        "RESILIENT_EXECUTOR_NAME": "a",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "HF_HOME": "h",
        "RANK": "wanted",
    }


def test_apply_reaches_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESILIENT_EXECUTOR_TEST_VARIABLE", "old")
    environment.apply({"RESILIENT_EXECUTOR_TEST_VARIABLE": "new"})
    assert os.environ["RESILIENT_EXECUTOR_TEST_VARIABLE"] == "new"


def test_a_rule_keeps_its_own_copy_and_shows_no_value() -> None:
    extra = {"A": "secret"}
    rule = EnvironmentRule(extra=extra)
    extra["A"] = "changed"
    assert rule.select({}) == {"A": "secret"}
    assert "secret" not in repr(rule)
    assert hash(rule) == hash(EnvironmentRule(extra={"A": "secret"}))


@pytest.mark.parametrize(
    "settings",
    [{"extra": {"": "x"}}, {"extra": {"A=B": "x"}}, {"extra": {"A": "\0"}}, {"extra": {"A": 1}}, {"prefixes": ("",)}],
)
def test_what_no_environment_can_hold_is_refused_at_once(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="env_"):
        EnvironmentRule(**settings)  # type: ignore[arg-type]  # wrong on purpose
