"""Settings: what may be said, what is refused and how, and the table of defaults in pyproject.toml."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from failing import fails

from partitions.common.errors import UserError
from partitions.common.names import nearest
from partitions.common.settings import build_settings, convert, defaults_of, keys_of, toml_text
from server.results.run_directory import flatten, read_toml
from strategies import strategies
from strategies.base.run_settings import defaults, owners, parse_settings
from strategies.base.settings import Common, choose, setting

ROOT = Path(__file__).parents[3]


def parsed(**values):
    return parse_settings(
        {k.replace("__", ".").replace("_", "-"): v for k, v in values.items()}
    )


def complaint(values):
    """The one line that refuses these settings."""
    said = fails(UserError, None, parse_settings, values)
    text = said
    assert "\n" not in text
    return text


# ---- Defaults ------------------------------------------------------------------------------------------------------


def test_defaults_parse_to_themselves():
    """Every default passes its own check, alone and written as the command line would give it."""
    assert parse_settings(defaults()) == parse_settings({})
    assert parse_settings(
        {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in defaults().items()}
    ) == (parse_settings({}))


@pytest.mark.parametrize("name", sorted(strategies()))
def test_flat_settings_parse_to_the_same(name):
    """What a run writes down repeats it, through TOML too."""
    settings = parse_settings({"strategy": name, "seed": 3, "learning-rate": 0.25})
    assert parse_settings(settings.flat()) == settings
    assert parse_settings(flatten(tomllib.loads(toml_text(settings.flat())))) == settings


def test_pyproject_holds_the_defaults():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"][
        "config"
    ]
    written = flatten(table)
    assert written == defaults()
    # 0 == 0.0 and 1 == True: Flower needs the type as well
    for key, value in defaults().items():
        assert type(written[key]) is type(value), key


def test_the_contracts_defaults():
    """Design, section 9; scripts outside rely on these."""
    contract = {
        "strategy": "fedavg",
        "rounds": 20,
        "seed": 42,
        "threads": 0,
        "device": "auto",
        "model": "auto",
        "dataset": "digits",
        "data-dir": "",
        "partition": "dirichlet",
        "silos": 12,
        "local-epochs": 1,
        "batch-size": 64,
        "optimizer": "sgd",
        "learning-rate": 0.05,
        "momentum": 0.0,
        "weight-decay": 0.0,
        "amsgrad": False,
        "lr-decay": 1.0,
        "loss": "cross-entropy",
        "focal-gamma": 1.0,
        "buffers": "shared",
        "evaluate-every": 1,
        "participation": 1.0,
        "min-silos": 0,
        "round-timeout": 3600.0,
        "min-metric-samples": 0,
        "resume": False,
        "out": "",
    }
    assert contract.items() <= defaults().items()
    assert {
        "apple.mu",
        "apple.max-downloads",
        "fedala.eta",
        "mlp.hidden",
        "dirichlet.beta",
    } <= set(defaults())


def test_every_setting_has_a_type_a_help_and_an_owner():
    every: dict[str, type[Any]] = {"": Common, **owners()}
    for owner, cls in every.items():
        for key, f in keys_of(cls, owner).items():
            assert type(f.default) in (bool, int, float, str), key
            assert f.metadata.get("help"), key
            assert key == key.lower() and "_" not in key


# ---- What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key, hint",
    [
        ("learning-rat", "learning-rate"),
        ("rouns", "rounds"),
        ("apple.mju", "apple.mu"),
        ("fedala.layer", "fedala.layers"),
        ("learning_rate", "learning-rate"),
        ("fedprox.mue", "fedprox.mu"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, hint):
    assert complaint({key: 1}).startswith(f"unknown setting '{key}' (did you mean '{hint}'?)")


def test_a_share_below_0_is_none():
    assert complaint({"validation": -0.5}).startswith("validation = -0.5: a share, or -1")


def test_an_unknown_key_without_a_neighbour():
    text = complaint({"zzzzqqqq": 1})
    assert text.startswith("unknown setting 'zzzzqqqq'") and "did you mean" not in text


@pytest.mark.parametrize(
    "key, value, hint, kind",
    [
        ("strategy", "fedavgg", "fedavg", "strategy"),
        ("strategy", "aple", "apple", "strategy"),
        ("dataset", "diggits", "digits", "data set"),
        ("partition", "dirichle", "dirichlet", "partition"),
        ("model", "fedala-cn", "fedala-cnn", "model"),
    ],
)
def test_an_unknown_name_lists_what_there_is(key, value, hint, kind):
    text = complaint({key: value})
    assert text.startswith(f"unknown {kind} '{value}' (did you mean '{hint}'?); there are: ")
    assert hint in text.split("there are: ")[1]


@pytest.mark.parametrize(
    "key, value, wanted",
    [
        ("rounds", "ten", "a whole number"),
        ("rounds", 2.5, "a whole number"),
        ("rounds", "2.5", "a whole number"),
        ("rounds", True, "a whole number"),
        ("rounds", None, "a whole number"),
        ("rounds", "", "a whole number"),
        ("learning-rate", "fast", "a number"),
        ("learning-rate", False, "a number"),
        ("learning-rate", [1], "a number"),
        ("learning-rate", "nan", "a number"),
        ("learning-rate", float("inf"), "a number"),
        ("resume", "yes", "true or false"),
        ("resume", 1, "true or false"),
        ("resume", "", "true or false"),
        ("out", 5, "text"),
        ("model", True, "text"),
        ("apple.mu", "big", "a number"),
        ("apple.common-init", 0, "true or false"),
        ("apple.max-downloads", 1.5, "a whole number"),
    ],
)
def test_a_wrong_type_names_the_key(key, value, wanted):
    assert complaint({key: value}) == f"{key} = {value!r}: {wanted} is needed here"


@pytest.mark.parametrize(
    "key, value, limit",
    [
        ("rounds", 0, "at least 1"),
        ("rounds", -3, "at least 1"),
        ("seed", -1, "at least 0"),
        ("silos", 0, "at least 1"),
        ("local-epochs", -1, "at least 0"),
        ("batch-size", 0, "at least 1"),
        ("learning-rate", 0, "more than 0"),
        ("learning-rate", -0.1, "more than 0"),
        ("momentum", 1.1, "at most 1"),
        ("lr-decay", 0, "more than 0"),
        ("lr-decay", 1.5, "at most 1"),
        ("participation", 0, "more than 0"),
        ("participation", 1.01, "at most 1"),
        ("evaluate-every", -1, "at least 0"),
        ("min-silos", -1, "at least 0"),
        ("round-timeout", 0, "more than 0"),
        ("apple.mu", -1, "at least 0"),
        ("apple.prox-share", 1.5, "at most 1"),
        ("apple.max-downloads", -1, "at least 0"),
        ("fedala.sample-percent", 0, "more than 0"),
        ("fedala.sample-percent", 101, "at most 100"),
        ("fedala.window", 1, "at least 2"),
        ("fedavg-ft.epochs", -1, "at least 0"),
        ("fedprox.mu", -0.5, "at least 0"),
        ("threads", 10_000, "at most 256"),
        ("dirichlet.beta", 0.0, "more than 0"),
        ("dirichlet.min-test", -1, "at least 0"),
        ("diversifed-practical.dominant", 1.5, "at most 1"),
        ("mlp.dropout", 1, "less than 1"),
        ("validation", 1.0, "at most 0.9"),
    ],
)
def test_out_of_range_says_the_limit(key, value, limit):
    assert f"is out of range: {limit} is needed here" in complaint({key: value})


@pytest.mark.parametrize(
    "key, value",
    [
        ("momentum", 0),
        ("momentum", 1),
        ("lr-decay", 1),
        ("participation", 1),
        ("local-epochs", 0),
        ("evaluate-every", 0),
        ("fedala.sample-percent", 100),
        ("apple.prox-share", 0),
        ("min-metric-samples", 0),
    ],
)
def test_the_limits_themselves_are_allowed(key, value):
    parse_settings({key: value})


@pytest.mark.parametrize(
    "key, value, choices",
    [
        ("optimizer", "sdg", "sgd, adam, adamw"),
        ("loss", "mse", "cross-entropy, focal"),
        ("buffers", "share", "shared, local"),
        ("apple.scheduler", "cosine", "cos, exp"),
        ("resnet8.stem", "3*3", "7x7, 3x3"),
        ("player-cnn.layout", "cifar10", "auto, fmnist, cifar, isic"),
        ("apple.initial-dr", "one", "samples, uniform, own"),
    ],
)
def test_choices_are_listed(key, value, choices):
    assert complaint({key: value}).endswith(f"one of {choices} is needed here")
    assert f"'{value}'" in complaint({key: value})


# ---- What is understood --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [("true", True), ("True", True), ("false", False), ("FALSE", False), (True, True)],
)
def test_true_and_false(text, value):
    assert parsed(resume=text).common.resume is value


@pytest.mark.parametrize(
    "text, value", [("7", 7), (7, 7), (7.0, 7), ("7.0", 7), ("1e3", 1000), (" 7 ", 7)]
)
def test_whole_numbers(text, value):
    result = parsed(rounds=text).common.rounds
    assert result == value and type(result) is int


def test_large_whole_numbers_keep_their_digits():
    """2^53 + 1 is no float: a seed must not change on the way."""
    assert parsed(seed=2**53 + 1).common.seed == 2**53 + 1
    assert parsed(seed=str(2**53 + 1)).common.seed == 2**53 + 1


@pytest.mark.parametrize("text, value", [("0.25", 0.25), (1, 1.0), ("1", 1.0), ("5e-3", 0.005)])
def test_numbers(text, value):
    result = parsed(learning_rate=text).common.learning_rate
    assert result == value and type(result) is float


def test_settings_reach_their_owner():
    settings = parsed(
        strategy="apple",
        apple__mu=0.5,
        fedala__eta=3,
        partition="dirichlet",
        dirichlet__beta=0.1,
    )
    assert settings.method.mu == 0.5
    assert settings.partition.beta == 0.1
    assert settings.run_key == "apple-42"
    assert settings.strategy is strategies()["apple"]
    assert "fedala.eta" not in settings.flat()
    assert settings.flat()["apple.mu"] == 0.5


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parsed().common.rounds = 3


# ---- The small parts -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Example:
    one_half: float = setting(0.5, "a half", minimum=0, maximum=1)
    colour: str = setting("red", "one of two", choices=("red", "blue"))


def test_keys_and_defaults_of_a_dataclass():
    assert list(keys_of(Example)) == ["one-half", "colour"]
    assert defaults_of(Example, "x") == {"x.one-half": 0.5, "x.colour": "red"}
    assert build_settings(
        Example, {"x.one-half": "0.25", "one-half": 9, "colour": "green"}, "x"
    ) == Example(0.25)
    with pytest.raises(
        UserError, match=r"x\.colour = 'blu' \(did you mean 'blue'\?\): one of red, blue"
    ):
        build_settings(Example, {"x.colour": "blu"}, "x")
    assert convert("k", 1, keys_of(Example)["one-half"]) == 1.0


def test_nearest_and_choose():
    assert nearest("aple", ["apple", "pear"]) == " (did you mean 'apple'?)"
    assert nearest("x", ["apple", "pear"]) == ""
    assert choose("fruit", "pear", ["pear", "apple"]) == "pear"
    with pytest.raises(UserError, match="unknown fruit 'nut'; there are: apple, pear"):
        choose("fruit", "nut", ["pear", "apple"])


def test_toml_round_trip(tmp_path):
    """Quotes, backslashes, letters beyond ASCII, exact floats, keys with dots."""
    values: dict[str, Any] = {
        "out": 'a "b" \\ ü\n',
        "resume": True,
        "rounds": 3,
        "learning-rate": 0.1 + 0.2,
        "apple.mu": 1e-7,
        "mlp.hidden": "",
    }
    (tmp_path / "c.toml").write_text(toml_text(values))
    assert read_toml(tmp_path / "c.toml") == values
    fails(UserError, "there is no configuration file", read_toml, tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    fails(UserError, r"bad\.toml cannot be read", read_toml, tmp_path / "bad.toml")


def test_the_settings_of_privacy_are_beside_dp_in_a_file():
    """`dp` is a value, so TOML has no table `dp`: the keys below it are quoted."""
    values = {"dp": True, "dp.clip-norm": 0.5, "learning-rate": 0.1}
    assert flatten(tomllib.loads(toml_text(values))) == values


def test_a_method_without_a_declaration_is_not_private():
    with pytest.raises(UserError, match="dp = true: not with fedfomo: "):
        parse_settings({"strategy": "fedfomo", "dp": True})
