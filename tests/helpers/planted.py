"""Faults of one line, planted in every room one after the other: does the test file that should catch each still do so?

    python tests/helpers/planted.py [WORD]      those whose line or test file holds the word; all without one

The working tree is copied; the line is found by its text, wherever a module has moved to. Exit code 1 where a fault
is not caught, or where its line is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("models", "partitions", "strategies", "client", "server")
# The test file (and what of it), a part of one line, and what it becomes.
FAULTS: tuple[tuple[str, str, str], ...] = (
    ("models/test_metrics.py", "-(missing**gamma * log_p)", "-(missing * log_p)"),
    ("models/test_training.py", "BYTE_MEAN = BYTE_STD = 127.5", "BYTE_MEAN = BYTE_STD = 128.0"),
    (
        "models/test_trainable.py",
        "if fnmatchcase(name, pattern)}",
        "if not fnmatchcase(name, pattern)}",
    ),
    (
        "strategies/base/test_weights.py",
        "_spread(square - total * total,",
        "_spread(square + total * total,",
    ),
    ("partitions/test_labels.py", "(len(t) and t.min() < 0)", "(len(t) and t.min() < -9)"),
    (
        "partitions/test_picture_sets.py",
        "*x.shape[1:-1]) if x.ndim > 2",
        "*x.shape[1:-1]) if x.ndim > 9",
    ),
    (
        "partitions/test_nifti.py",
        "np.float32(high - low if high > low",
        "np.float32(high + low if high > low",
    ),
    (
        "strategies/test_apple.py",
        "(math.cos(math.pi * r / last) + 1)",
        "(math.cos(math.pi * r / last) - 1)",
    ),
    ("strategies/test_fedfomo.py", "            if gain > 0:", "            if gain < 0:"),
    (
        "strategies/test_fedamp.py",
        "pull + torch.diag(1 - pull.sum(1))",
        "pull + torch.diag(pull.sum(1))",
    ),
    (
        "strategies/test_scaffold.py",
        'self.models["control"].vector - own',
        'self.models["control"].vector + own',
    ),
    ("strategies/test_feddyn.py", "self.state.h - alpha * len", "self.state.h + alpha * len"),
    (
        "strategies/test_fedamp.py",
        "self.settings.lambda_ / self.settings.step",
        "self.settings.lambda_",
    ),
    ("strategies/base/test_screening.py", "return n // 4", "return n // 2"),
    ("strategies/base/test_coding.py", "return vector.half()", "return vector.half() * 2"),
    ("strategies/base/test_robust.py -k hand", "SMALLEST = 1e-6", "SMALLEST = 1e6"),
    (
        "client/test_states.py",
        'if state.numbers["round"] < server_round:',
        'if state.numbers["round"] <= server_round:',
    ),
    (
        "strategies/base/test_base.py",
        "if name not in client.info.sends_numbers:",
        "if name in client.info.sends_numbers:",
    ),
    (
        "client/test_export.py",
        'if round is not None and which != "reported":',
        'if round is None and which != "best":',
    ),
    ("client/site/test_audit.py", 'head = {"line": number + 1', 'head = {"line": number + 2'),
    (
        "client/site/test_policy.py",
        "len(runs) >= policy.runs_per_day:",
        "len(runs) > policy.runs_per_day:",
    ),
    (
        "client/site/test_signing.py",
        "return fields, verify(prefixed(kind, text), outer)",
        'return fields, fingerprint(outer["public-key"])',
    ),
    (
        "client/site/test_answering.py -k pins",
        "if not any(one in allowed for",
        "if any(one in allowed for",
    ),
    (
        "client/site/test_answering.py -k waited",
        "return 60 * max(0.0, float(text))",
        "return 0.0",
    ),
    (
        "server/run/test_names.py",
        "if registered and registered != name:",
        "if registered and registered == name:",
    ),
    ("server/run/test_exchange.py", "self.factor * median(took)", "self.factor + median(took)"),
    ("server/run/test_withdraw.py", "        if own.is_dir():", "        if not own.is_dir():"),
    (
        "server/run/test_silos_text.py",
        'return f"\'{cell}" if FORMULA',
        'return f"{cell}" if FORMULA',
    ),
    (
        "server/deploy/test_credentials.py",
        "if _now() >= ca.not_valid_after_utc:",
        "if _now() <= ca.not_valid_after_utc:",
    ),
    (
        "server/deploy/test_federation_file.py",
        "if names.count(name) > 1]",
        "if names.count(name) > 2]",
    ),
    (
        "server/deploy/test_compose.py",
        "sorted({*THIS_MACHINE, *named})",
        "sorted({*THIS_MACHINE})",
    ),
    ("server/report/test_report.py", "if m not in chosen]", "if m in chosen]"),
    (
        "server/report/test_answer.py",
        "return 1 if low > 0 else -1 if high < 0 else 0",
        "return 1 if low < 0 else -1 if high > 0 else 0",
    ),
    ("client/test_temperature.py", "(card, net, data.val)", "(card, net, data.test)"),
    (
        "server/test_tune.py",
        "ranked[: max(1, len(going) // ETA)]",
        "ranked[-max(1, len(going) // ETA) :]",
    ),
    ("strategies/base/test_private.py", "* self.uses**0.5", "* 1.0"),
    (
        "strategies/base/test_private.py",
        "sampling.rate, steps * common.rounds, delta",
        "sampling.rate, steps, delta",
    ),
    ("server/cli/test_cli.py -k interrupted", "code, text = 130,", "code, text = 1,"),
    ("server/cli/test_cli.py -k any_error", 'return 2, ": ".join', 'return 1, ": ".join'),
)


def plant(copy: Path, old: str, new: str) -> str:
    """The module in which it was planted; empty where the line stands nowhere, or in several places."""
    found = [
        path
        for room in ROOMS
        for path in sorted((copy / room).rglob("*.py"))
        if old in path.read_text()
    ]
    if len(found) != 1 or (text := found[0].read_text()).count(old) != 1:
        return ""
    found[0].write_text(text.replace(old, new))
    return str(found[0].relative_to(copy))


def outcome(source: Path, fault: tuple[str, str, str]) -> tuple[bool, str]:
    """Whether it was caught, and a line about it."""
    tests, old, new = fault
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "silofl"
        shutil.copytree(source, copy)
        if not (module := plant(copy, old, new)):
            return False, f"GONE    {old}"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--timeout=120",
            *f"tests/{tests}".split(),
        ]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    caught = done.returncode == 1  # a test failed; other codes are no tests, or a usage error
    last = done.stdout.splitlines()[-1] if done.stdout else done.stderr[-200:]
    return (
        caught,
        f"{'caught ' if caught else 'MISSED '} {module}: {new.strip()} ({tests}: {last.strip(' =')})",
    )


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    faults = [fault for fault in FAULTS if any(word in part for part in fault)]
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        source = Path(folder) / "silofl"
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, source / name)
        missed = 0
        for caught, line in pool.map(lambda fault: outcome(source, fault), faults):
            missed += not caught
            print(line, flush=True)
    print(f"{len(faults) - missed} of {len(faults)} planted faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
