"""What this hospital allows, whatever a run asks for: `policy.toml`, beside `allowed-apps`.

    max-local-epochs = 5
    peers = false

A file may hold any of the rules of :class:`Policy`; the others keep their default. `SILOFL_POLICY` names the file (or
the node config's `policy`, for silos that share a process); without one the defaults hold. The word `public` in its
place stands for data that are nobody's secret, such as a demo's: nothing is held back.

A message is checked twice by the same function: in the site's own process, before the app is unpacked or imported, on
the settings that came with it (`check_message`), and again in the app, which also holds back what only it can see:
sums, metrics, the size of what is sent. The stricter of site and run holds; a refusal is one line that names rule and
setting. What the app does in memory is the app's: only `allowed-apps` says which app that is.

Standard library only, and neighbours by relative imports: this runs in a process that must not know the name `client`.
"""

import fcntl
import math
import os
import re
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from .methods import METHODS

PUBLIC = "public"  # in place of a file: the data are public
NO_LIMIT = 2**31
METRICS = (  # of all tasks; models/tasks.py has the same
    *("loss", "accuracy", "balanced_accuracy", "macro_f1", "weighted_f1", "auc", "mae", "kappa"),
    *("score_low", "score_high", "r2", "rmse", "c_index", "dice"),
)
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
APP_NETWORKS = "models."  # what comes from the app, that `allowed-apps` lists, whatever else is installed here
RUNS = "runs-by-day"  # in the state directory: a line per run, with its day


class PolicyRefusedError(ValueError):
    """A run asks for what this site does not allow."""


def rule(default: Any, public: Any, help: str, least: int = 0) -> Any:
    """A rule: its default, its value for public data, what it says, and the lowest value of a number."""
    return field(default=default, metadata={"public": public, "help": help, "least": least})


@dataclass(frozen=True)
class Policy:
    """The rules, and where they stand."""

    methods: tuple[str, ...] = rule(("all",), ("all",), "methods that may run here; all: those the other rules allow")
    whole_model: bool = rule(True, True, "whether all layers of a model trained here may leave; false: some stay")
    networks: tuple[str, ...] = rule(
        ("app",),
        ("all",),
        "modules of which a run may name a network of its own; app: those in the app's models; all: any",
    )
    peers: bool = rule(False, True, "whether the server may hand this silo's own model on to other hospitals by name")
    class_means: bool = rule(False, True, "whether means per class and how many samples each class has may leave")
    sums: bool = rule(True, True, "whether the sums of a table's columns may leave, rounded, once per version of it")
    min_sum_samples: int = rule(50, 1, "fewest samples behind such sums, and behind the difference of two of them", 1)
    metrics: tuple[str, ...] = rule(METRICS, METRICS, "metrics that may leave")
    min_metric_samples: int = rule(10, 1, "fewest samples behind a metric; those over fewer stay", 1)
    min_batch_size: int = rule(8, 1, "smallest mini-batch that a run may train with", 1)
    max_local_epochs: int = rule(20, NO_LIMIT, "most epochs of local training per round")
    min_silos: int = rule(3, 1, "fewest silos that train in a round in which this one does", 1)
    runs_per_day: int = rule(20, 0, "most runs on one day (UTC); 0: any number")
    floor: int = rule(10, 1, "fewest training samples behind anything that leaves and has no rule of its own", 1)
    where: str = "no policy.toml, so the defaults"

    @property
    def public(self) -> bool:
        return self.where == PUBLIC

    def says(self, name: str) -> str:
        """A rule as it stands in the file: `peers = false`."""
        return f"{key_of(name)} = {toml(getattr(self, name))}"


def rules() -> dict[str, Field[Any]]:
    """Key in the file to field."""
    return {key_of(f.name): f for f in fields(Policy) if f.metadata}


def key_of(name: str) -> str:
    return name.replace("_", "-")


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ", ".join(f'"{v}"' for v in value) + "]" if isinstance(value, tuple) else str(value)


# --- reading ----------------------------------------------------------------------------------------------------------


def policy_of(node_config: Mapping[str, Any]) -> Policy:
    """The policy of the silo with this node config, in this process."""
    return read_policy(str(node_config.get("policy") or os.environ.get("SILOFL_POLICY", "")))


def read_policy(where: str) -> Policy:
    """The policy of a file, or of `public`, or the defaults. Raises ValueError, one line, where it is none."""
    if not where:
        return Policy()
    if where == PUBLIC:
        return Policy(**{f.name: f.metadata["public"] for f in rules().values()}, where=PUBLIC)
    path = Path(where).expanduser()
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; write the policy there: without it nothing leaves") from None
    return parse_policy(text, str(path))


def parse_policy(text: str, path: str) -> Policy:
    """The policy of a file's text. Raises ValueError, one line, where it is none."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number of thousands of digits
        raise ValueError(f"{path} is no TOML ({error}); a rule is a line such as peers = false") from None
    known = rules()
    for key in content:
        if key not in known:
            raise ValueError(f"{path}: {shown(key)} is no rule; the rules are {', '.join(known)}")
    values = {known[key].name: _value(path, key, value, known[key]) for key, value in content.items()}
    return Policy(**values, where=path)


def _value(path: str, key: str, value: Any, f: Field[Any]) -> Any:
    if isinstance(f.default, bool):
        if isinstance(value, bool):
            return value
        raise ValueError(f"{path}: {key} = {shown(value)}: true or false is wanted here")
    if isinstance(f.default, tuple):
        if key == "networks":
            if isinstance(value, list) and all(isinstance(word, str) and MODULE.fullmatch(word) for word in value):
                return tuple(value)
            raise ValueError(f'{path}: {key} = {shown(value)}: a list of modules, "app" or "all" is wanted here')
        allowed = METRICS if key == "metrics" else ("all", *METHODS)
        if not isinstance(value, list) or any(word not in allowed for word in value):
            raise ValueError(f"{path}: {key} = {shown(value)}: a list of these is wanted here: {', '.join(allowed)}")
        return tuple(value)
    least = f.metadata["least"]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= NO_LIMIT:
        raise ValueError(
            f"{path}: {key} = {shown(value)}: a whole number of at least {least} is wanted here, and at most {NO_LIMIT}"
        )
    return value


def shown(value: Any) -> str:
    """A value in a message: its beginning; of a number of thousands of digits Python makes no text."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "..."


def default_file() -> str:
    """A `policy.toml` that says every default, for a bundle."""
    lines = ["# What this hospital allows, whatever a run asks for. `silofl policy` prints what it comes to."]
    for key, f in rules().items():
        lines += ["", f"# {f.metadata['help']}", f"{key} = {toml(f.default)}"]
    return "\n".join(lines) + "\n"


# --- checking ---------------------------------------------------------------------------------------------------------


def check_message(message: Any, context: Any) -> None:
    """Raise PolicyRefusedError, with one line, where this silo's policy does not allow what a message asks for.

    ValueError where the policy cannot be read: then nothing is allowed. A simulation's silos, which have no data file
    of their own, have no policy. `message` and `context` are Flower's.
    """
    node = context.node_config
    if "data" not in node:
        return
    policy, silo = policy_of(node), str(node.get("name", "this silo"))
    if policy.public:
        return
    kind = message.metadata.message_type.partition(".")[0]
    sent = dict(message.content["config"]) if "config" in message.content else {}
    for fault in (*run_faults(policy, context.run_config), *round_faults(policy, context.run_config, kind, sent)):
        raise PolicyRefusedError(f"{silo} refuses: {fault}")
    if policy.runs_per_day and (fault := count_run(policy, node.get("state-dir"), str(context.run_id))):
        raise PolicyRefusedError(f"{silo} refuses: {fault}")


def run_faults(policy: Policy, run: Mapping[str, Any]) -> list[str]:
    """What a run's settings ask for beyond the policy, rule and setting each."""
    faults = method_faults(policy, str(run.get("strategy")), run)
    faults += filter(None, [network_fault(policy, run)])
    for name, key, sign in (("min_batch_size", "batch-size", 1), ("max_local_epochs", "local-epochs", -1)):
        given = number(run.get(key))
        if given is None or sign * given < sign * getattr(policy, name):
            faults.append(f"its policy has {policy.says(name)}, the run {key} = {run.get(key)}")
    return faults


def network_fault(policy: Policy, run: Mapping[str, Any]) -> str:
    """Why the network of its own that a run names may not be made here; empty: it may, or there is none."""
    name = str(run.get("model", ""))
    module, colon, _ = name.partition(":")
    words = {"all", "app"} if module.startswith(APP_NETWORKS) else {"all"}
    if not colon or words & set(policy.networks) or module in set(policy.networks) - {"all", "app"}:
        return ""
    return f"its policy has {policy.says('networks')}, the run model = {name[:80]}, which is not among them"


def method_faults(policy: Policy, method: str, run: Mapping[str, Any]) -> list[str]:
    """Why a method may not run here with these settings; the rules in their order."""
    if method not in METHODS and not policy.public:
        return [f"its policy knows no method {method[:80]!r}: a newer silofl at this site may"]
    facts, faults = METHODS.get(method, {}), []
    if "all" not in policy.methods and method not in policy.methods:
        faults.append(f"its policy has {policy.says('methods')}, the run strategy = {method}")
    if not policy.whole_model and (reason := sends_whole(method, run)):
        faults.append(f"its policy has {policy.says('whole_model')}, {reason}")
    if not policy.peers and facts.get("peers"):
        faults.append(
            f"its policy has {policy.says('peers')}, the run strategy = {method}, which hands a silo's model to others"
        )
    if not policy.class_means and facts.get("per_class"):
        faults.append(f"its policy has {policy.says('class_means')}, the run strategy = {method}, which sends them")
    return faults


def sends_whole(method: str, run: Mapping[str, Any]) -> str:
    """The setting by which a method may send all layers of a model; empty: it keeps some."""
    whole = METHODS[method].get("whole", False)
    if isinstance(whole, bool):
        return f"the run strategy = {method}, which sends all layers" if whole else ""
    for name, values in whole.items():
        key = f"{method}.{name}"
        given = run.get(key)
        if given is None or plain(given) in map(plain, values):
            return f"the run strategy = {method} with {key} = {given}, which sends all layers"
    return ""


def plain(value: Any) -> Any:
    """A setting as the app takes it: a number also where it is text, a list of names without its commas."""
    found = number(value)
    return " ".join(str(value).replace(",", " ").split()) if found is None else found


def number(value: Any) -> float | None:
    """A setting that is a number, as the app reads it, text too; None: it is none."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def round_faults(policy: Policy, run: Mapping[str, Any], kind: str, sent: Mapping[str, Any]) -> list[str]:
    """What a round asks for beyond the policy: ``sent`` is the config of its message."""
    facts = METHODS.get(str(run.get("strategy")), {"uploads": True})
    given = number(sent.get("participants")) or 0
    if kind == "train" and facts.get("uploads") and given < policy.min_silos:
        return [f"its policy has {policy.says('min_silos')}, the round {given:g} that train"]
    return []


def count_run(policy: Policy, state: Any, run: str) -> str:
    """Note this run as one of today's; why it may not be one more, or nothing. A run counts once."""
    if not state:
        return f"its policy has {policy.says('runs_per_day')}, and this silo no state-dir to count them in"
    today = time.strftime("%Y-%m-%d", time.gmtime())
    try:
        Path(state).mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(Path(state) / RUNS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            runs = todays(file, today)
            if run in runs:
                return ""
            if len(runs) >= policy.runs_per_day:
                return f"its policy has {policy.says('runs_per_day')}, and this is run {len(runs) + 1} of {today}"
            file.write(f"{today} {run}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"its policy has {policy.says('runs_per_day')}, which cannot be counted: {error.strerror}"
    return ""


def todays(lines: Iterable[str], today: str) -> set[str]:
    """The runs of this day."""
    words = (line.split() for line in lines)
    return {found[1] for found in words if len(found) == 2 and found[0] == today}
